"""Rigs that tests of several packages share."""
