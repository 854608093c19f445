"""Tests of ``cachesvc_client.plugins.steps``."""
