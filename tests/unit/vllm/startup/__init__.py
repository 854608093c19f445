"""Tests of ``cachesvc_vllm.startup``."""
