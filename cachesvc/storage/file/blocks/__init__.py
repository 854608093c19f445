"""The blocks that are on disk: their tree, and the order in which they go."""
