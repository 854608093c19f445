"""A dumped index as a file: JSON lines, the head first, then a block a line; ``.zst`` compresses it.

    {"format": 1, "model": ..., "groups": [...], "places": ["host", "replica 0"], "states": [...], "blocks": 12, ...}
    {"n": 0, "key": "9f...", "parent": -1, "position": 0, "children": 2, "hits": 3, "stamp": 71, "transfers": 0,
     "pins": 0, "copies": [[1, 0, 2, 17]]}

``parent`` is the parent's ``n`` (-1: none) and comes before its children. A copy is ``[place, group, state, page]``,
the first three as positions in the head's lists. There are keys and counts, never tokens or bytes of the cache.
"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from cachesvc_ctl.core.command import MissingExtraError
from kvcache.v1 import inspect_pb2

from cachesvc.model.words import CopyState
from cachesvc_lab.traces import TraceLine

FORMAT = 1
KEY_BYTES = 32
MOST_LINE_BYTES = 1 << 20


class IndexFileError(Exception):
    """A dump cannot be read. The message names the file, the line (0: the whole file) and what is wrong."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path, self.line, self.reason = path, line, reason

    def __str__(self) -> str:
        where = f"{self.path}, line {self.line}" if self.line else str(self.path)
        return f"{where}: {self.reason}; write it anew with cachesvc dump"


class StoredIndex:
    """A dump in memory, by column; some 70 bytes a block. ``copies[place, group]``: states and pages."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.keys = bytearray()
        self.parent, self.position, self.children = array("i"), array("i"), array("i")
        self.hits, self.pins, self.transfers = array("i"), array("i"), array("i")
        self.stamp = array("q")
        self.copies = {
            (place, group): (bytearray(), array("i"))
            for place in range(len(head["places"]))
            for group in range(len(head["groups"]))
        }

    def __len__(self) -> int:
        return len(self.parent)

    def key(self, block: int) -> str:
        return self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES].hex()

    def add(self, line: dict[str, Any]) -> None:
        """Add one block. Raises KeyError, TypeError, ValueError, OverflowError for a line that is none."""
        key = bytes.fromhex(line["key"])
        number, parent = len(self), line["parent"]
        if len(key) != KEY_BYTES or line["n"] != number or not -1 <= parent < number:
            raise ValueError("its number, its key or its parent cannot be")
        self.keys += key
        self.parent.append(parent)
        for name, column in (("position", self.position), ("children", self.children), ("hits", self.hits)):
            column.append(line[name])
        self.pins.append(line["pins"])
        self.transfers.append(line["transfers"])
        self.stamp.append(line["stamp"])
        for states, pages in self.copies.values():
            states.append(0)
            pages.append(-1)
        for place, group, state, page in line["copies"]:
            states, pages = self.copies[place, group]
            states[number], pages[number] = CopyState(state), page


def write_index(path: Path, parts: Iterable[inspect_pb2.DumpIndexResponse]) -> int:
    """Write what DumpIndex streams, part by part; returns the number of blocks. Raises MissingExtraError, OSError."""
    number = 0
    with writing(path) as file:
        for part in parts:
            if part.WhichOneof("part") == "head":
                file.write(json.dumps(_head(part.head)) + "\n")
                continue
            for line in _lines(part.rows, number):
                file.write(line)
            number += len(part.rows.parents)
    return number


def _head(head: inspect_pb2.IndexHead) -> dict[str, Any]:
    plain = ["format", "version", "taken_unix_seconds", "model_id", "model", "block_tokens", "eviction", "blocks"]
    lists = ["groups", "full_groups", "places"]
    pool_fields = ["place", "group", "capacity", "free", "page_bytes"]
    return {
        **{name: getattr(head, name) for name in plain},
        **{name: list(getattr(head, name)) for name in lists},
        "namespace": head.namespace_hex,
        "states": [state.name for state in CopyState],
        "pools": [{name: getattr(pool, name) for name in pool_fields} for pool in head.pools],
    }


def _lines(rows: inspect_pb2.IndexRows, first: int) -> Iterator[str]:
    keys = rows.keys.hex()
    copies = [(c.place, c.group, c.states, list(c.pages)) for c in rows.copies]
    columns = zip(
        rows.parents, rows.positions, rows.children, rows.hits, rows.stamps, rows.transfers, rows.pins, strict=True
    )
    for i, (parent, position, children, hits, stamp, transfers, pins) in enumerate(columns):
        there = ", ".join(f"[{p}, {g}, {states[i]}, {pages[i]}]" for p, g, states, pages in copies if states[i])
        yield (
            f'{{"n": {first + i}, "key": "{keys[i * 2 * KEY_BYTES : (i + 1) * 2 * KEY_BYTES]}", "parent": {parent}, '
            f'"position": {position}, "children": {children}, "hits": {hits}, "stamp": {stamp}, '
            f'"transfers": {transfers}, "pins": {pins}, "copies": [{there}]}}\n'
        )


def read_index(path: Path) -> StoredIndex:
    """Read a dump. Raises IndexFileError, MissingExtraError."""
    if not path.is_file():
        raise IndexFileError(path, 0, "there is no such file")
    number = 0
    try:
        with _reading(path) as file:
            index = StoredIndex(_checked_head(file.readline(MOST_LINE_BYTES)))
            number = 1
            while line := file.readline(MOST_LINE_BYTES):
                number += 1
                index.add(json.loads(line))
    except (OSError, EOFError) as error:
        raise IndexFileError(path, 0, f"it cannot be read ({error})") from error
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise IndexFileError(path, number + (number == 0), f"this is no line of a dump ({error!r:.120})") from error
    if len(index) != index.head["blocks"]:
        raise IndexFileError(path, 0, f"it holds {len(index)} of {index.head['blocks']} blocks: it was cut off")
    return index


def _checked_head(line: str) -> dict[str, Any]:
    head = json.loads(line)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"not a dump of format {FORMAT}")
    for name, kind in (("places", list), ("groups", list), ("pools", list), ("blocks", int), ("eviction", str)):
        if not isinstance(head.get(name), kind):
            raise TypeError(f"{name} is missing")
    return head


@contextmanager
def writing(path: Path) -> Iterator[IO[str]]:
    """A file of lines, compressed where its name ends in ``.zst``. Raises MissingExtraError, OSError."""
    if path.suffix != ".zst":
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    with path.open("wb") as raw, _zstd().ZstdCompressor(level=3).stream_writer(raw) as packed:
        text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n", write_through=True)
        yield text
        text.flush()
        text.detach()


@contextmanager
def _reading(path: Path) -> Iterator[IO[str]]:
    if path.suffix != ".zst":
        with path.open(encoding="utf-8") as file:
            yield file
        return
    with path.open("rb") as raw, _zstd().ZstdDecompressor().stream_reader(raw, read_across_frames=True) as plain:
        yield io.TextIOWrapper(plain, encoding="utf-8")


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstandard", "replay", "a compressed dump") from error
    return zstandard


ID_BYTES = 8


class Written(NamedTuple):
    """Number of requests written, and tokens of the blocks that their prompts are cut into."""

    requests: int
    block_tokens: int


def write_requests(path: Path, parts: Iterable[inspect_pb2.DumpIndexResponse]) -> Written:
    """Write what DumpIndex streams of requests, part by part. Raises MissingExtraError, OSError."""
    requests = block_tokens = 0
    numbers: dict[bytes, int] = {}
    with writing(path) as file:
        for part in parts:
            if part.WhichOneof("part") == "head":
                block_tokens = part.head.block_tokens
                continue
            for line in _request_lines(part.requests, block_tokens, numbers):
                file.write(json.dumps(line) + "\n")
                requests += 1
    return Written(requests, block_tokens)


def _request_lines(
    columns: inspect_pb2.RecentRequests, block_tokens: int, numbers: dict[bytes, int]
) -> Iterator[TraceLine]:
    """Blocks get numbers in the order in which they are seen first."""
    ids, first = columns.block_ids, 0
    for seconds, output_tokens, blocks in zip(columns.seconds, columns.output_tokens, columns.blocks, strict=True):
        end = first + blocks * ID_BYTES
        each = (ids[at : at + ID_BYTES] for at in range(first, end, ID_BYTES))
        yield TraceLine(
            timestamp=round(seconds * 1000),
            input_length=blocks * block_tokens,
            output_length=output_tokens,
            hash_ids=[numbers.setdefault(block, len(numbers)) for block in each],
        )
        first = end
