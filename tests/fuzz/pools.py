"""Values that a fuzzer has learnt from the daemon's answers: ids, keys and pages that get messages deep into the
handlers."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from kvcache.v1 import common_pb2

KEY_BYTES = 32
KEPT = 64
PROMPTS = 12
PROMPT_BLOCKS = 24


@dataclass(slots=True)
class Held:
    """One sequence as its engine would know it: blocks in its table, sealed blocks, the prompt it is on, and pages of
    states by position."""

    blocks: int = 0
    sealed: int = 0
    hit: int = 0
    keys: bytes = b""
    states: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Lease:
    """One lease: the model that it is for, its process, its sequences and its stock by group."""

    id: str
    model_id: int
    token: bytes
    groups: int
    keys: list[bytes]
    sequences: dict[int, Held] = field(default_factory=dict)
    stock: list[list[tuple[int, int]]] = field(default_factory=list)
    next_sequence: int = 1
    next_request: int = 1

    def __post_init__(self) -> None:
        self.stock = [[] for _ in range(self.groups)]

    def request(self) -> int:
        """A request_id that was not used yet."""
        self.next_request += 1
        return self.next_request


class Pools:
    """Shared by the generators; what ended stays for a while, because late callers are part of the game."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.leases: list[Lease] = []
        self.ended: deque[str] = deque(["0" * 32], maxlen=KEPT)
        self.tokens: list[bytes] = []
        self.models: dict[int, bytes] = {}
        self.layouts: list[common_pb2.Layout] = []
        self.devices: tuple[str, ...] = ()
        self.tickets: deque[int] = deque([1], maxlen=KEPT)
        self.handles: deque[bytes] = deque([b"\0" * 16], maxlen=KEPT)

    def lease_id(self) -> str:
        """Id of a live lease mostly, else of one that has ended."""
        if self.leases and self.rng.random() < 0.85:
            return self.rng.choice(self.leases).id
        return self.rng.choice(self.ended)

    def sequence_id(self) -> int:
        """Id of an open sequence mostly."""
        lease = self.rng.choice(self.leases) if self.leases else None
        if lease is not None and lease.sequences and self.rng.random() < 0.8:
            return self.rng.choice(list(lease.sequences))
        return self.rng.choice((0, 1, 2, 3, 2**63, 2**64 - 1))

    def keys(self) -> bytes:
        """Packed keys of a prompt that others use too, cut anywhere; or random ones."""
        lease = self.rng.choice(self.leases) if self.leases else None
        if lease is None or self.rng.random() < 0.1:
            return self.rng.randbytes(KEY_BYTES * self.rng.randrange(5))
        keys = self.rng.choice(lease.keys)
        return keys[: KEY_BYTES * self.rng.randrange(len(keys) // KEY_BYTES + 1)]
