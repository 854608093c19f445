"""Tests of ``cachesvc_vllm.steps``."""
