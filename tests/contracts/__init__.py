"""One suite for each seam that every implementation behind it must pass."""
