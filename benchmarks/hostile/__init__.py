"""Odd files, command lines, calls and requests, and killed runs: what benchmarks/campaign.py tries."""
