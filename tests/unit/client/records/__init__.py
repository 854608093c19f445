"""Tests of ``cachesvc_client.records``."""
