"""Calls of a daemon."""
