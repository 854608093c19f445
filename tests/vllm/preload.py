"""Imports of each process with vLLM."""

from importlib import import_module

MODULES = ("entrypoints.llm", "v1.engine.core", "v1.engine.llm_engine", "v1.worker.cpu_worker")

for module in MODULES:
    import_module(f"vllm.{module}")
