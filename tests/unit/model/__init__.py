"""Tests of ``cachesvc.model``."""
