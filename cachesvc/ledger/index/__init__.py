"""Blocks by key: their copies in each tier, and what keeps them there."""
