"""Routing algorithms, a file for each: its derivation, its function, and its module, from votes to output capsules."""
