"""Tests of ``cachesvc_client``."""
