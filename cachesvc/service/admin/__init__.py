"""Operators' calls and what they read."""
