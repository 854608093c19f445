"""Reads of whole objects: one that comes in parts is whole all the same."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cachesvc.storage.file.disk import ALIGN_BYTES, Mover


@pytest.mark.parametrize("sizes", [(3 * ALIGN_BYTES, ALIGN_BYTES), (5000, 3000, 100)], ids=["as they lie", "copied"])
@pytest.mark.parametrize("part", [1000, ALIGN_BYTES, 2 * ALIGN_BYTES, 4 * ALIGN_BYTES])
def test_a_read_of_which_the_kernel_gives_a_part_at_a_time_is_whole(
    sizes: tuple[int, ...], part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(sum(sizes))
    path = tmp_path / "object"
    path.write_bytes(content)
    read = os.preadv

    def in_parts(fd: int, pieces: Sequence[memoryview], at: int) -> int:
        return read(fd, [pieces[0][:part]], at)

    monkeypatch.setattr(os, "preadv", in_parts)
    pieces = [memoryview(mmap.mmap(-1, size)) for size in sizes]
    fd = os.open(path, os.O_RDONLY)
    try:
        assert Mover().read(fd, pieces)
        assert b"".join(pieces) == content
        os.truncate(path, len(content) - 1)
        assert not Mover().read(fd, pieces)
    finally:
        os.close(fd)
