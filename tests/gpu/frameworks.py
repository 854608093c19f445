"""CuPy, where it is installed: without a GPU the tests are only collected; with one, the ``gpu`` fixture imports it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

cupy: Any = import_module("cupy") if find_spec("cupy") is not None else None
