"""Tests of ``cachesvc.storage``."""
