"""Blocks that are being written: one waits for the block above it, and no thread is held for good."""

from __future__ import annotations

import threading

from cachesvc.storage.seam import Scope
from cachesvc.storage.workers import UnderWay

SCOPE, OTHER = Scope(b"n" * 32, b"l" * 8), Scope(b"o" * 32, b"l" * 8)
KEY, BELOW = b"k" * 32, b"b" * 32


def test_a_block_of_another_scope_is_another_block() -> None:
    blocks = UnderWay[tuple[Scope, bytes]]()
    with blocks.noted((SCOPE, KEY)):
        assert blocks.wait_for([(OTHER, KEY)], seconds=60.0)


def test_two_blocks_that_name_each_other_as_the_one_above_end() -> None:
    blocks = UnderWay[tuple[Scope, bytes]]()
    with blocks.noted((SCOPE, KEY)), blocks.noted((SCOPE, BELOW)):
        for above in (KEY, BELOW):
            assert not blocks.wait_for([(SCOPE, above)], seconds=0.0)
    assert blocks.wait_for([(SCOPE, KEY)], seconds=0.0)


def test_a_name_is_under_way_as_often_as_it_was_begun() -> None:
    names = UnderWay[str]()
    names.begin(["a", "a"])
    names.end(["a", "b"])
    assert "a" in names
    names.end(["a"])
    names.end(["a"])
    assert names.wait_for(["a", "b"], seconds=0.0)


def test_waits_end_with_what_they_wait_for_and_at_the_close() -> None:
    names, told = UnderWay[str](), list[bool]()
    names.begin(["a", "b"])
    first = threading.Thread(target=lambda: told.append(names.wait_for(["a"], seconds=60.0)))
    first.start()
    names.end(["a"])
    first.join()
    second = threading.Thread(target=lambda: told.append(names.wait_for(["b"], seconds=60.0)))
    second.start()
    names.close()
    second.join()
    assert told == [True, False]
