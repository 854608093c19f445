"""Engines on a daemon."""
