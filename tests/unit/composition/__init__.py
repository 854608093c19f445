"""Tests of the daemon's composition root."""
