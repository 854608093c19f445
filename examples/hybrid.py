"""A hybrid model's engine: full attention, head-wise windows and a recurrent layer, all in one pool of pages.

What is new beside `examples/fifty_lines.py`: three groups draw from one free list, a state is published at the ends of
chunks alone, and a hit continues from the state at its end. The model is a toy whose every operation is per token, so
an answer has the same bits whatever was cached.

    python -m examples.hybrid /tmp/kv.sock     # twice: the second process starts from a full cache
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cachesvc_client import (
    KEY_BYTES,
    NO_PAGE,
    AttachedPool,
    CacheClient,
    Layout,
    Lease,
    Plane,
    PlaneGroup,
    block_keys,
)
from cachesvc_client import Sequence as OpenSequence

BLOCK_TOKENS = 4
WINDOW_TOKENS = 10
HEAD_DIM = 8
WIDTH = 2 * HEAD_DIM
VOCAB = 97
CHUNK_BLOCKS = 3  # a state is kept at the end of each chunk of a prefill
WAIT_SECONDS = 30.0
FULL, WINDOW, STATE = range(3)

Array = npt.NDArray[np.float32]


def hybrid_layout() -> Layout:
    """Head 0 of layer 0 attends to all, head 1 to a window, layer 1 is recurrent. Their pages have different planes."""
    groups = (
        PlaneGroup("full", pool="kv"),
        PlaneGroup("window", WINDOW_TOKENS, pool="kv"),
        PlaneGroup("state", pool="kv", is_state=True),
    )
    rows = (1, BLOCK_TOKENS, HEAD_DIM)
    heads = [Plane(name, 0, group, rows, "float32") for group in ("full", "window") for name in ("k", "v")]
    return Layout(BLOCK_TOKENS, 1, groups, (*heads, Plane("memory", 1, "state", (HEAD_DIM, HEAD_DIM), "float32")))


@dataclass(frozen=True)
class ToyHybrid:
    """Weights of the toy model. ``step`` computes one token."""

    embedding: Array
    projections: Array  # [query, key, value] of both layers
    output: Array

    def step(self, token: int, cells: Cells, position: int, memory: Array) -> tuple[Array, Array]:
        """Logits after ``token`` at ``position`` and the new ``memory``. Writes its rows through ``cells``."""
        hidden = self.embedding[token]
        query, key, value = (weights @ hidden for weights in self.projections[:3])
        heads = []
        for head, group in enumerate((FULL, WINDOW)):
            part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            cells.write(group, position, key[part], value[part])
            first = 0 if group == FULL else max(0, position - WINDOW_TOKENS + 1)
            keys, values = cells.read(group, first, position + 1)
            scores = np.exp((keys * query[part]).sum(axis=1) / np.float32(HEAD_DIM))
            heads.append((values * (scores / scores.sum())[:, None]).sum(axis=0))
        hidden = np.tanh(hidden + np.concatenate(heads))
        ask, keep, add = ((weights @ hidden)[:HEAD_DIM] for weights in self.projections[3:])
        memory = np.float32(0.9) * memory + np.outer(keep, add)
        hidden[:HEAD_DIM] += memory @ ask
        logits: Array = self.output @ np.tanh(hidden)
        return logits, memory


def toy_model(seed: int = 0) -> ToyHybrid:
    """Random weights."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> Array:
        made: Array = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return made

    return ToyHybrid(weights(VOCAB, WIDTH) * np.float32(3), weights(6, WIDTH, WIDTH), weights(VOCAB, WIDTH))


class Cells:
    """Rows of one sequence in the pool's pages, found by its block tables."""

    def __init__(self, pool: AttachedPool, sequence: OpenSequence) -> None:
        self._sequence = sequence
        self._heads = [(planes[0, "k"], planes[0, "v"]) for planes in map(pool.group_planes, ("full", "window"))]
        self._memory = pool.group_planes("state")[1, "memory"]

    def write(self, group: int, position: int, key: Array, value: Array) -> None:
        """Keep a token's key and value."""
        block, row = divmod(position, BLOCK_TOKENS)
        page = self._sequence.tables[group][block]
        for plane, mine in zip(self._heads[group], (key, value), strict=True):
            plane[page, 0, row] = mine

    def read(self, group: int, first: int, last: int) -> tuple[Array, Array]:
        """Keys and values of tokens ``[first, last)``."""
        blocks, rows = np.divmod(np.arange(first, last), BLOCK_TOKENS)
        pages = self._sequence.tables[group][blocks]
        assert NO_PAGE not in pages
        keys, values = (plane[pages, 0, rows] for plane in self._heads[group])
        return keys, values

    def load_memory(self, block: int) -> Array:
        """The state at the end of a block."""
        memory: Array = self._memory[self._sequence.tables[STATE][block]].copy()
        return memory

    def store_memory(self, block: int, memory: Array) -> int:
        """Write the state at the end of a block; returns its page."""
        page = int(self._sequence.tables[STATE][block])
        self._memory[page] = memory
        return page


class Answer(NamedTuple):
    """Generated tokens, tokens of the prompt that were cached, and those that groups without a window had."""

    tokens: list[int]
    cached_tokens: int
    full_tokens: int


class HybridEngine:
    """One request at a time over one lease."""

    def __init__(self, lease: Lease, model: ToyHybrid) -> None:
        self._lease = lease
        self._pool = lease.attach(0)
        self._model = model

    def answer(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """Continue a prompt greedily."""
        keys = block_keys(self._lease.registration.namespace, prompt, BLOCK_TOKENS)
        with self._lease.match(keys, max_blocks=(len(prompt) - 1) // BLOCK_TOKENS) as sequence:
            hit = sequence.hit_blocks
            sequence.allocate(hit)
            sequence.wait_loaded(WAIT_SECONDS)
            cells = Cells(self._pool, sequence)
            memory = cells.load_memory(hit - 1) if hit else np.zeros((HEAD_DIM, HEAD_DIM), np.float32)
            memory, logits = self._prefill(sequence, cells, prompt, keys, memory)
            tokens: list[int] = []
            for position in range(len(prompt), len(prompt) + new_tokens):
                tokens.append(int(np.argmax(logits)))
                if position // BLOCK_TOKENS >= sequence.blocks:
                    sequence.allocate(position // BLOCK_TOKENS + 1, positions={STATE: []})
                logits, memory = self._model.step(tokens[-1], cells, position, memory)
            return Answer(tokens, hit * BLOCK_TOKENS, sequence.full_blocks * BLOCK_TOKENS)

    def _prefill(
        self, sequence: OpenSequence, cells: Cells, prompt: Sequence[int], keys: bytes, memory: Array
    ) -> tuple[Array, Array]:
        """Compute the prompt behind its hit, chunk by chunk, and publish what is whole of it."""
        logits = np.empty(0, np.float32)
        whole = len(keys) // KEY_BYTES
        while (first := sequence.blocks) < whole:
            last = min(whole, first + CHUNK_BLOCKS)
            sequence.allocate(last)  # a state page for its last block
            for position in range(first * BLOCK_TOKENS, last * BLOCK_TOKENS):
                logits, memory = self._model.step(prompt[position], cells, position, memory)
            page = cells.store_memory(last - 1, memory)
            sequence.publish(last, states={STATE: {last - 1: page}})
            sequence.recycle(last * BLOCK_TOKENS)
        if rest := prompt[whole * BLOCK_TOKENS :]:
            sequence.allocate(whole + 1, positions={STATE: []})
            for position, token in enumerate(rest, start=whole * BLOCK_TOKENS):
                logits, memory = self._model.step(token, cells, position, memory)
        return memory, logits


def main() -> int:
    """Answer two prompts with a common beginning, and say what was cached."""
    rng = np.random.default_rng(7)
    start = rng.integers(0, VOCAB, 60).tolist()
    with CacheClient(sys.argv[1], engine="hybrid") as client:
        registration = client.register("toy-hybrid@1", hybrid_layout(), device_pages=[64] * 3, host_pages=[64] * 3)
        with client.open_lease(registration) as lease:
            engine = HybridEngine(lease, toy_model())
            for end in ((1, 2, 3), (4, 5, 6)):
                answer = engine.answer([*start, *end], 8)
                print(f"{answer.cached_tokens} of {len(start) + len(end)} tokens were cached: {answer.tokens}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
