"""Slices of copies have a least size: below it choosing one costs more than copying it."""

from __future__ import annotations

import pytest

from cachesvc.config import MIN_SLICE_BYTES, Config
from cachesvc.model.errors import InvalidRequest


def test_slices_have_a_least_size() -> None:
    assert Config(slice_bytes=MIN_SLICE_BYTES).slice_bytes == 1 << 20
    for size_bytes in (MIN_SLICE_BYTES - 1, 1, 0, -1):
        with pytest.raises(InvalidRequest, match=f"slice_bytes must be at least 1048576 .*, got {size_bytes}"):
            Config(slice_bytes=size_bytes)
