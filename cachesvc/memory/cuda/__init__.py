"""Device memory of a GPU."""
