"""Tests of ``cachesvc_client.memory``."""
