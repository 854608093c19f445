"""Tests of ``cachesvc_client.layouts``."""
