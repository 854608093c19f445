"""Tests of ``cachesvc_vllm.pages``."""
