"""Tests of ``cachesvc_client.wire``."""
