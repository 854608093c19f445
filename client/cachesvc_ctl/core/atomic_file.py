"""A file that is written whole or not at all: a failure half way, such as a full disk, leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path``, with the same suffix; it replaces ``path`` at the end.

    A pipe or a device is written directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
