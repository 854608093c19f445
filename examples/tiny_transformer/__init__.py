"""A small real transformer whose keys and values live in cache pages: the engine of the demo."""
