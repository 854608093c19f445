"""A trace as columns: what simulations read again and again, and what is handed to other processes in one go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachesvc.model.keys import KEY_BYTES
from cachesvc_ctl.lab.traces.trace import TraceRequest


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
        """The blocks of one prompt."""
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
