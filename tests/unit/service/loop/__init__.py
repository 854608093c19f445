"""Tests of ``cachesvc.service.loop``."""
