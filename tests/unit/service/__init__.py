"""Tests of ``cachesvc.service``."""
