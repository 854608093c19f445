"""Tests of ``cachesvc.service.access``."""
