"""Tests of ``cachesvc.service.rpc``."""
