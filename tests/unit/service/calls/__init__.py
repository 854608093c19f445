"""Tests of ``cachesvc.service.calls``."""
