"""Tests of ``cachesvc_vllm.daemon``."""
