"""Order in which blocks may be evicted."""
