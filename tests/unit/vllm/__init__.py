"""Tests of ``cachesvc_vllm``."""
