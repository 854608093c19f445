"""Checks and memory of a worker that starts."""
