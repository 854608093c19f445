"""Cases that CI leaves out."""

from __future__ import annotations

import os

import pytest
from _pytest.mark.structures import ParameterSet

IS_LONG = "CACHESVC_LONG" in os.environ
"""True where the whole of what CI takes a part of is to run."""


def long(*values: str | int) -> ParameterSet:
    """Make a case that only runs where ``CACHESVC_LONG`` is set: others are nearly as good."""
    is_left_out = pytest.mark.skipif(not IS_LONG, reason="CACHESVC_LONG=1 runs it")
    return pytest.param(*values, marks=is_left_out)
