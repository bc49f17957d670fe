"""The data sets that are known by name: where their files lie, and how they are read or made."""
