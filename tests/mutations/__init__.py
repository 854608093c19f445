"""Defects put in on purpose, one at a time: what notices them, the quick tests or the simulation, and what does not."""
