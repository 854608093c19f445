"""Gains of recycling behind windows."""
