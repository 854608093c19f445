"""Tests of ``cachesvc.service.lane``."""
