"""Recounts of all that is accounted for."""
