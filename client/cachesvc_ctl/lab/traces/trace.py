"""Reads request traces in the Mooncake format, one JSON object a line, plain or zstd-compressed, as a stream.

A line holds `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids` (root to leaf). An
id stands for its whole prefix, so every id has one parent. The last block of a prompt may be unfilled and is
then dropped. Further fields are ignored. Requests come in file order; timestamps need not ascend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cachesvc_ctl.core.extras import MissingExtraError

DEFAULT_BLOCK_TOKENS = 512
"""Tokens a block of the published Mooncake traces."""

SECONDS_A_TOKEN = 0.02
"""A trace tells how long an output was and not when it ended: at fifty tokens a second."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""A request of a million blocks stays below this; a longer line means that the file is no trace."""

MAX_NUMBER = 2**63 - 1
"""Numbers of a trace fit a signed 64-bit integer, so that a program that packs them needs no check of its own."""

_FILE_CHUNK_BYTES = 256 * 1024
_ZSTD_CHUNK_BYTES = 16 * 1024  # compressed bytes fed at once: bounds what a highly compressible file unfolds to
_ROOT = -1
_FORMAT = "Each line must be a JSON object with timestamp, input_length, output_length and hash_ids"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came, how long it is, and the ids of its filled blocks, root to leaf."""

    index: int
    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


class TraceError(Exception):
    """A trace cannot be read. `line_number` is 1-based, None for the whole file; `remedy` says what to do."""

    def __init__(self, path: Path, line_number: int | None, reason: str, remedy: str) -> None:
        super().__init__(path, line_number, reason, remedy)
        self.path = path
        self.line_number = line_number
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        place = str(self.path) if self.line_number is None else f"{self.path}, line {self.line_number}"
        return f"{place}: {self.reason}. {self.remedy}."


class _Fault(Exception):
    """Fault and remedy, raised where the place in the file is not known. Stays in this module."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy


def read_trace(
    path: Path | str,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    limit: int | None = None,
    check_parents: bool = True,
) -> Iterator[TraceRequest]:
    """The requests of a `.jsonl` or `.jsonl.zst` file, at most `limit` of them, read as they are asked for.

    `block_tokens` is the block size that the trace was written with. `check_parents` keeps one dict entry for
    each distinct block. At once it raises TraceError (missing file, unknown suffix), MissingExtraError and
    ValueError (block_tokens or limit below 1); while iterated, TraceError for the line that is broken.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.zst")):
        raise TraceError(path, None, "the suffix is unknown", "Name a file that ends in .jsonl or .jsonl.zst")
    if not path.is_file():
        raise TraceError(path, None, "there is no such file", "Check the path")
    if path.suffix == ".zst":
        _require_zstandard()
    return _requests(path, block_tokens, limit, check_parents)


def _requests(path: Path, block_tokens: int, limit: int | None, check_parents: bool) -> Iterator[TraceRequest]:
    parents: dict[int, int] = {}
    line_number = 0
    index = 0
    try:
        for line in _lines(path):
            line_number += 1
            if line.isspace() or not line:
                continue
            try:
                request = _parse_request(line, index, block_tokens)
                if check_parents:
                    _check_parents(request.block_ids, parents)
            except _Fault as fault:
                raise TraceError(path, line_number, fault.reason, fault.remedy) from fault.__cause__
            yield request
            index += 1
            if index == limit:
                return
    except _Fault as fault:  # the stream itself broke, in the line after the last one that came whole
        raise TraceError(path, line_number + 1, fault.reason, fault.remedy) from fault.__cause__
    if index == 0:
        raise TraceError(path, None, "the file holds no request", "Check that it was written or copied in full")


def _parse_request(line: bytes, index: int, block_tokens: int) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # also broken UTF-8, endless numbers, deep nesting
        raise _Fault(f"this is no JSON ({error})", "Repair or remove the line") from error
    if not isinstance(fields, dict):
        raise _Fault(f"this is a JSON {type(fields).__name__}, not an object", _FORMAT)
    timestamp_ms = _number(fields, "timestamp")
    input_tokens = _number(fields, "input_length")
    output_tokens = _number(fields, "output_length")
    block_ids = _filled_block_ids(fields, input_tokens, block_tokens)
    return TraceRequest(index, timestamp_ms, input_tokens, output_tokens, block_ids)


def _field(fields: dict[str, object], name: str) -> object:
    if name not in fields:
        raise _Fault(f"the field {name} is missing", _FORMAT)
    return fields[name]


def _number(fields: dict[str, object], name: str) -> int:
    return _checked_number(_field(fields, name), name)


def _checked_number(value: object, name: str) -> int:
    if type(value) is not int:  # an exact type: True is an int to isinstance
        raise _Fault(f"{name} is {value!r:.60}, not an integer", "Write it as an integer (timestamps in ms)")
    if not 0 <= value <= MAX_NUMBER:
        raise _Fault(f"{name} is {value}, outside of 0 to {MAX_NUMBER}", "Write a number of that range")
    return value


def _filled_block_ids(fields: dict[str, object], input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The ids of the filled blocks. More than one id beyond them means another block size: not misread."""
    ids = _field(fields, "hash_ids")
    if not isinstance(ids, list):
        raise _Fault(f"hash_ids is a {type(ids).__name__}, not a list", _FORMAT)
    filled = input_tokens // block_tokens
    if not filled <= len(ids) <= filled + 1:
        raise _Fault(
            f"it has {len(ids)} hash_ids, but {input_tokens} tokens fill {filled} blocks of {block_tokens}",
            "Give the block_tokens that the trace was written with, or repair the line",
        )
    return tuple(_checked_number(block_id, "an id of hash_ids") for block_id in ids[:filled])


def _check_parents(block_ids: tuple[int, ...], parents: dict[int, int]) -> None:
    parent = _ROOT
    for block_id in block_ids:
        known = parents.setdefault(block_id, parent)
        if known != parent:
            raise _Fault(
                f"block {block_id} follows {_parent_name(parent)} here, but {_parent_name(known)} before",
                "An id must stand for one whole prefix: write the trace with chained ids, or read it without "
                "the check of parents",
            )
        parent = block_id


def _parent_name(parent: int) -> str:
    return "nothing (as first block)" if parent == _ROOT else f"block {parent}"


def _lines(path: Path) -> Iterator[bytes]:
    chunks = _zstd_chunks(path) if path.suffix == ".zst" else _file_chunks(path, _FILE_CHUNK_BYTES)
    tail = b""
    for chunk in chunks:
        *whole, tail = (tail + chunk).split(b"\n")
        yield from whole
        if len(tail) > MAX_LINE_BYTES:
            raise _Fault(f"the line is longer than {MAX_LINE_BYTES} bytes", _FORMAT)
    if tail:
        yield tail


def _file_chunks(path: Path, chunk_bytes: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(chunk_bytes):
                yield chunk
    except OSError as error:
        raise _Fault(f"the file cannot be read ({error.strerror})", "Check the file and its permissions") from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Decompressed frames. A frame without its end is a fault; zstandard's own reader is silent."""
    import zstandard  # an extra: read_trace has checked that it is there

    frame = zstandard.ZstdDecompressor().decompressobj()
    is_frame_open = False
    for chunk in _file_chunks(path, _ZSTD_CHUNK_BYTES):
        rest = chunk
        while rest:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                unfolded = frame.decompress(rest)
            except zstandard.ZstdError as error:
                raise _Fault(f"the zstd stream is broken ({error})", "Copy or compress the file again") from error
            rest = frame.unused_data if frame.eof else b""
            is_frame_open = not frame.eof
            yield unfolded
    if is_frame_open:
        raise _Fault("the zstd stream is truncated", "Copy the file again: its end is missing")


def _require_zstandard() -> None:
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("zstandard", "replay", "reading a .jsonl.zst trace") from error
