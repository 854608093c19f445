"""A daemon's last requests as a trace: what ``cachesvc simulate`` and ``cachesvc replay`` read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvcache.v1 import inspect_pb2

from cachesvc_ctl.lab.traces.synthetic_trace import TraceLine
from cachesvc_ctl.offline.index_file import writing

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
            for line in _lines(part.requests, block_tokens, numbers):
                file.write(json.dumps(line) + "\n")
                requests += 1
    return Written(requests, block_tokens)


def _lines(columns: inspect_pb2.RecentRequests, block_tokens: int, numbers: dict[bytes, int]) -> Iterator[TraceLine]:
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
