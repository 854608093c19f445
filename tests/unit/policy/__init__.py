"""Tests of ``cachesvc.policy``."""
