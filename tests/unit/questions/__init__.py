"""Tests of ``cachesvc.questions``."""
