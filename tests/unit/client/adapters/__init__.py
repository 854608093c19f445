"""Tests of ``cachesvc_client.adapters``."""
