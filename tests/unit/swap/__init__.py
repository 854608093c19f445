"""Tests of ``cachesvc.swap``."""
