"""Match of a request: the keys that it asks for, and how far a hit may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc_client import Expected, Retention


class Tail(NamedTuple):
    """Last block of a prompt, of ``tokens`` tokens, which are fewer than a block's. It is sealed under ``key``, and the
    full block under another one."""

    key: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Wish:
    """Match of a request: at most ``most_blocks`` blocks of ``hashes``. ``first_blocks``: as many as are taken first,
    hits included. ``salt``: what the hashes are mixed with (``Adapters.salt``). ``expected``: what another node
    computes of it. ``retention``: the client's hint on its blocks. ``whole_blocks``: length of a request of which a hit
    may have all; 0: the last block is computed anyway. ``tail``: the last of these blocks, where it is not full; it has
    room for ``free_tokens`` tokens more. ``seals_tail``: the request ends with it, and seals it. ``follows_layers``:
    each layer of the engine waits for its part of a load. ``takes_all``: no hit exceeds ``first_blocks``, and the
    engine takes all of them at once. A request that is alone is then matched and given its pages in one message."""

    hashes: Sequence[bytes]
    most_blocks: int
    first_blocks: int
    salt: bytes = b""
    expected: Expected | None = None
    retention: Retention = Retention.DEFAULT
    whole_blocks: int = 0
    tail: Tail | None = None
    free_tokens: int = 0
    seals_tail: bool = False
    follows_layers: bool = False
    takes_all: bool = False

    @property
    def may_be_whole(self) -> bool:
        """True where the hit may be all of the request."""
        return 0 < self.whole_blocks == self.most_blocks

    @property
    def goes_on(self) -> bool:
        """True where the hit may have the tail, and the request fills that block: its full block has another key."""
        return self.may_be_whole and self.tail is not None and not self.seals_tail

    @property
    def matched_hashes(self) -> Sequence[bytes]:
        """Hashes of the blocks that it is matched for."""
        if not self.most_blocks:
            return ()
        if self.tail is None or not self.may_be_whole:
            return self.hashes
        return [*self.hashes[: self.whole_blocks - 1], self.tail.key]
