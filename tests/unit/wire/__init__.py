"""Tests of ``cachesvc.wire``."""
