"""Copies between tiers, and the room for them."""
