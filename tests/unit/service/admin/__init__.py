"""Tests of ``cachesvc.service.admin``."""
