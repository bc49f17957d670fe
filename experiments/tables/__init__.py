"""The shipped tables, a file each with a ``TABLE``."""
