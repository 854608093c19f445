"""Arithmetic without a subject of its own."""
