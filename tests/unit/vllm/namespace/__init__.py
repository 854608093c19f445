"""Tests of ``cachesvc_vllm.namespace``."""
