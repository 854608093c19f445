"""Tests of ``cachesvc_client.aio``."""
