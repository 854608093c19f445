"""Tests of ``cachesvc.memory``."""
