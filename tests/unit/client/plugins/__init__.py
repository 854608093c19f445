"""Tests of ``cachesvc_client.plugins``."""
