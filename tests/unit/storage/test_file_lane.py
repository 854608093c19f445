"""Blocks that are being written: one waits for the block above it, and no thread is held for good."""

from __future__ import annotations

import pytest

from cachesvc.storage.file.engine import UnderWay
from cachesvc.storage.seam import Scope

SCOPE, OTHER = Scope(b"n" * 32, b"l" * 8), Scope(b"o" * 32, b"l" * 8)
KEY, BELOW = b"k" * 32, b"b" * 32


def test_a_block_of_another_scope_is_another_block() -> None:
    blocks = UnderWay()
    with blocks.writing(SCOPE, KEY):
        blocks.wait_for(OTHER, KEY)


def test_two_blocks_that_name_each_other_as_the_one_above_end() -> None:
    blocks = UnderWay()
    with blocks.writing(SCOPE, KEY), blocks.writing(SCOPE, BELOW):
        for above in (KEY, BELOW):
            with pytest.raises(TimeoutError, match="is being written still"):
                blocks.wait_for(SCOPE, above, seconds=0.0)
    blocks.wait_for(SCOPE, KEY)
