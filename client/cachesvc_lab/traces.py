"""Reads request traces in the Mooncake format, one JSON object a line, plain or zstd-compressed, as a stream.

A line holds `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids` (root to leaf). An
id stands for its whole prefix, so every id has one parent. The last block of a prompt may be unfilled and is
then dropped. Further fields are ignored. Requests come in file order; timestamps need not ascend.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_ctl.core.command import MissingExtraError, part_file

from cachesvc.model.words import KEY_BYTES

DEFAULT_BLOCK_TOKENS = 512
"""Tokens a block of the published Mooncake traces."""

SECONDS_A_TOKEN = 0.02
"""A trace tells how long an output was and not when it ended: at fifty tokens a second."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""A request of a million blocks stays below this; a longer line means that the file is no trace."""

MAX_NUMBER = 2**63 - 1
"""Numbers of a trace fit a signed 64-bit integer, so a program that packs them needs no further check."""

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
        try:
            import zstandard  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("zstandard", "replay", "reading a .jsonl.zst trace") from error
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
    for name in TraceLine.__annotations__:
        if name not in fields:
            raise _Fault(f"the field {name} is missing", _FORMAT)
    numbers = [_checked_number(fields[name], name) for name in ("timestamp", "input_length", "output_length")]
    timestamp_ms, input_tokens, output_tokens = numbers
    block_ids = _filled_block_ids(fields, input_tokens, block_tokens)
    return TraceRequest(index, timestamp_ms, input_tokens, output_tokens, block_ids)


def _checked_number(value: object, name: str) -> int:
    if type(value) is not int:  # an exact type: True is an int to isinstance
        raise _Fault(f"{name} is {value!r:.60}, not an integer", "Write it as an integer (timestamps in ms)")
    if not 0 <= value <= MAX_NUMBER:
        raise _Fault(f"{name} is {value}, outside of 0 to {MAX_NUMBER}", "Write a number of that range")
    return value


def _filled_block_ids(fields: dict[str, object], input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The ids of the filled blocks. More than one id beyond them means another block size: not misread."""
    ids = fields["hash_ids"]
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


CHUNK_WORDS = 1 << 17
"""Bytes written or checked at a time: a megabyte."""
STRIDE = np.uint64(0x9E3779B97F4A7C15)


class PagePattern:
    """The pages of one attached pool of the opaque layout, whose ``layers`` planes share ``block_bytes``.

    Holds views of the pool: drop it before the pool is closed.
    """

    def __init__(self, pool: AttachedPool, *, block_bytes: int, layers: int) -> None:
        self._planes = [pool.planes[layer, "bytes"].view(np.uint64) for layer in range(layers)]
        self._arrays = _module_of(self._planes[0])
        words = block_bytes // layers // 8
        self._ramp = self._arrays.asarray(np.arange(words, dtype=np.uint64) * STRIDE)
        self._blocks_at_once = max(1, CHUNK_WORDS // words)

    def write(self, table: npt.NDArray[np.int32], keys: bytes, first: int, last: int) -> None:
        """Write the bytes of blocks ``[first, last)`` into their pages, done when this returns."""
        for plane, pages, seeds in self._parts(table, keys, first, last):
            plane[pages] = self._ramp + seeds
        if self._arrays is not np:  # what is published must have been written
            self._arrays.cuda.get_current_stream().synchronize()

    def count_wrong(self, table: npt.NDArray[np.int32], keys: bytes, first: int, last: int) -> int:
        """Blocks of ``[first, last)`` whose pages hold other bytes in any plane."""
        good = np.ones(last - first, bool)
        for at, (plane, pages, seeds) in enumerate(self._parts(table, keys, first, last)):
            start = at // len(self._planes) * self._blocks_at_once
            holds = (plane[pages] - seeds == self._ramp).all(axis=1)
            good[start : start + len(pages)] &= holds if self._arrays is np else holds.get()
        return int((~good).sum())

    def _parts(
        self, table: npt.NDArray[np.int32], keys: bytes, first: int, last: int
    ) -> Iterator[tuple[Any, Any, Any]]:
        """(plane, pages, seeds as a column) of each layer, for some blocks at a time."""
        words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[:, 0]
        for start in range(first, last, self._blocks_at_once):
            part = slice(start, min(start + self._blocks_at_once, last))
            pages = self._arrays.asarray(table[part])
            for layer, plane in enumerate(self._planes):
                yield plane, pages, self._arrays.asarray(words[part, None] ^ np.uint64(layer))


def _module_of(plane: Any) -> Any:
    """NumPy, or CuPy where the pool is on a GPU."""
    if isinstance(plane, np.ndarray):
        return np
    import cupy

    return cupy


@dataclass(frozen=True, slots=True)
class Prompts:
    """``path`` are the blocks of all prompts, one after another, numbered from 0 on; prompt i is
    ``path[starts[i]:starts[i + 1]]``, root to leaf. ``seconds``: when it came, never before the one above it."""

    trace: str
    block_tokens: int
    path: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    output_tokens: npt.NDArray[np.int64]
    distinct_blocks: int

    def __len__(self) -> int:
        return len(self.seconds)

    def blocks(self, prompt: int) -> npt.NDArray[np.int64]:
        return self.path[self.starts[prompt] : self.starts[prompt + 1]]

    def keys(self, prompt: int) -> bytes:
        """Packed keys that stand for its blocks, and for no others."""
        blocks = self.blocks(prompt)
        words = np.zeros((len(blocks), KEY_BYTES // 8), ">u8")  # the last byte tells most: indexes are parted by it
        words[:, -1] = blocks
        return words.tobytes()


def prompts_of(trace: str, requests: Iterable[TraceRequest], block_tokens: int) -> Prompts:
    """The columns of a trace. Timestamps that go back stand still."""
    requests = list(requests)
    lengths = [len(request.block_ids) for request in requests]
    ids = np.fromiter((block for request in requests for block in request.block_ids), np.int64, sum(lengths))
    distinct, path = np.unique(ids, return_inverse=True)
    return Prompts(
        trace=trace,
        block_tokens=block_tokens,
        path=path.astype(np.int64),
        starts=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        seconds=np.maximum.accumulate(np.array([request.timestamp_ms for request in requests], np.float64)) / 1000,
        output_tokens=np.array([request.output_tokens for request in requests], np.int64),
        distinct_blocks=len(distinct),
    )


# Generator of small seeded traces in the Mooncake format, for users without a trace of their own.
#
# The traffic is multi-turn chat over a few shared system prompts: conversations arrive as a Poisson process and choose
# a system prompt by Zipf; each sends a turn, waits while the user thinks, and sends the next one with its whole
# history.


@dataclass(frozen=True, slots=True)
class SyntheticTraceSpec:
    """Parameters of a trace. The same spec gives the same bytes.

    Lengths of messages are lognormal around their medians. A conversation has `turns_mean` turns (geometric),
    fewer where its history reaches `max_prompt_tokens` before. Raises ValueError for a value out of range.
    """

    requests: int = 1000
    seed: int = 0
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    system_prompts: int = 8
    system_tokens_min: int = 1024
    system_tokens_max: int = 6144
    zipf_exponent: float = 1.1
    conversations_per_second: float = 0.5
    turns_mean: float = 5.0
    think_seconds_mean: float = 30.0
    message_tokens_median: int = 400
    answer_tokens_median: int = 300
    max_prompt_tokens: int = 32768

    def __post_init__(self) -> None:
        for name in ["requests", "block_tokens", "system_prompts", "message_tokens_median", "answer_tokens_median"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("conversations_per_second", "think_seconds_mean"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if not 0 <= self.zipf_exponent < math.inf:
            raise ValueError(f"zipf_exponent must be 0 or more and finite, not {self.zipf_exponent}")
        if not 1 <= self.turns_mean < math.inf:
            raise ValueError(f"turns_mean must be at least 1 and finite, not {self.turns_mean}")
        if not 0 <= self.system_tokens_min <= self.system_tokens_max < self.max_prompt_tokens:
            raise ValueError("0 <= system_tokens_min <= system_tokens_max < max_prompt_tokens must hold")


class TraceLine(TypedDict):
    """One line: time in ms, lengths in tokens, ids root to leaf, the last of a block that may be unfilled."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(slots=True)
class _History:
    """Beginning of a prompt: its number of tokens, and the ids of the blocks that they fill."""

    tokens: int
    block_ids: list[int]

    def extend(self, tokens: int, block_tokens: int, new_ids: Iterator[int]) -> None:
        self.tokens += tokens
        missing = self.tokens // block_tokens - len(self.block_ids)
        self.block_ids.extend(itertools.islice(new_ids, missing))


def write_synthetic_trace(path: Path | str, spec: SyntheticTraceSpec) -> int:
    """Writes plain `.jsonl` over what was there, once it is whole, and returns its bytes. TraceError for another
    suffix, OSError."""
    path = Path(path)
    if path.suffix != ".jsonl":
        raise TraceError(path, None, "a synthetic trace is written as plain .jsonl", "Name a file that ends in .jsonl")
    with part_file(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        return sum(file.write(json.dumps(line) + "\n") for line in generate_trace(spec))


def generate_trace(spec: SyntheticTraceSpec) -> Iterator[TraceLine]:
    """The lines of the trace, in order of time."""
    dice = random.Random(spec.seed)
    new_ids = itertools.count()
    prompts = [_History(0, []) for _ in range(spec.system_prompts)]
    for prompt in prompts:
        prompt.extend(dice.randint(spec.system_tokens_min, spec.system_tokens_max), spec.block_tokens, new_ids)
    popularity = list(itertools.accumulate(rank**-spec.zipf_exponent for rank in range(1, spec.system_prompts + 1)))
    order = itertools.count()  # turns of the same instant go in the order in which they were planned
    # (seconds, order, whose turn it is: None is the arrival of a new conversation)
    turns: list[tuple[float, int, _History | None]] = [(0.0, next(order), None)]
    for _ in range(spec.requests):
        now_seconds, _, history = heapq.heappop(turns)
        if history is None:
            next_arrival = now_seconds + dice.expovariate(spec.conversations_per_second)
            heapq.heappush(turns, (next_arrival, next(order), None))
            prompt = dice.choices(prompts, cum_weights=popularity)[0]
            history = _History(prompt.tokens, list(prompt.block_ids))
        message_tokens = _lognormal_tokens(dice, spec.message_tokens_median)
        history.extend(min(message_tokens, spec.max_prompt_tokens - history.tokens), spec.block_tokens, new_ids)
        answer_tokens = _lognormal_tokens(dice, spec.answer_tokens_median)
        hash_ids = list(history.block_ids)
        if history.tokens % spec.block_tokens:
            hash_ids.append(next(new_ids))  # the unfilled block: no later prompt begins with just these tokens
        yield TraceLine(
            timestamp=round(now_seconds * 1000),
            input_length=history.tokens,
            output_length=answer_tokens,
            hash_ids=hash_ids,
        )
        history.extend(answer_tokens, spec.block_tokens, new_ids)
        if history.tokens < spec.max_prompt_tokens and dice.random() < 1 - 1 / spec.turns_mean:
            next_turn = now_seconds + dice.expovariate(1 / spec.think_seconds_mean)
            heapq.heappush(turns, (next_turn, next(order), history))


def _lognormal_tokens(dice: random.Random, median: int) -> int:
    return max(1, round(median * dice.lognormvariate(0.0, 0.8)))
