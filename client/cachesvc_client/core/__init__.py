"""Errors, keys, and what a process registers."""
