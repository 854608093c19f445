"""Mapped pages and copies beside an engine."""
