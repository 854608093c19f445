"""Tests of ``cachesvc.peer``."""
