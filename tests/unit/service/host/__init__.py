"""Tests of ``cachesvc.service.host``."""
