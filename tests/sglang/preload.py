"""Imports of each process with SGLang."""

from importlib import import_module

from tests.sglang.stubs import install

MODULES = ("entrypoints.engine", "managers.scheduler", "models.registry")

install()
for module in MODULES:
    import_module(f"sglang.srt.{module}")
