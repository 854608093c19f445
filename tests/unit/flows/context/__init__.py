"""Flows in slices."""
