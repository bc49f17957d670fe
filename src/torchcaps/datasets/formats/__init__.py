"""File formats that images are read from, and a user's own folders and .npz files as data sets. Loads no torch."""
