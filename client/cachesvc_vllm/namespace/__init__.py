"""Identities: which engines share, and which blocks."""
