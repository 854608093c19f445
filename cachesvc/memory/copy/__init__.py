"""Copies: their queue, their slices, the thread that runs them."""
