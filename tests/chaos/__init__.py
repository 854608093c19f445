"""The daemon under what real nodes do to it: kills, hangs, broken connections, rude callers, broken devices."""
