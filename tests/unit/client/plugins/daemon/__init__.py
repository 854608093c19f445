"""Tests of ``cachesvc_client.plugins.daemon``."""
