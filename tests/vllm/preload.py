"""Imports of each process with vLLM, and how such a process starts others: forked, for an import takes ten seconds."""

import multiprocessing
from importlib import import_module
from typing import Any

MODULES = ("entrypoints.llm", "v1.engine.core", "v1.engine.llm_engine", "v1.worker.cpu_worker")

system_utils: Any = import_module("vllm.utils.system_utils")
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

for module in MODULES:
    import_module(f"vllm.{module}")
