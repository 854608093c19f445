"""Eviction by learned hazards: how soon blocks of a class are used again, by their age."""
