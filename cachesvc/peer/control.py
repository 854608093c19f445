"""Questions of a borrower to another daemon, apart from the bytes themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cachesvc.model.errors import Unavailable
from cachesvc.storage.seam import Part, Scope


class HandshakeFailed(Unavailable):
    """The two nodes do not trust each other's certificates."""


class Loan(NamedTuple):
    """Loan of another daemon. ``lent``: for each key and part (parts of a key together) whether it is there. ``host``,
    ``port``: where its bytes are. ``epoch``: of the daemon's life. ``seconds``: without a heartbeat."""

    lease: int
    epoch: int
    secret: bytes
    host: str
    port: int
    seconds: float
    lent: tuple[bool, ...]


class PeerControl(Protocol):
    """One other daemon. Calls block, end by their deadlines, and raise a CacheError where they fail."""

    @property
    def address(self) -> str:
        """Address of the peer, HOST:PORT."""

    def borrow(self, scope: Scope, keys: bytes, parts: Sequence[Part], seconds: float) -> Loan | None:
        """Have what is there of packed ``keys`` kept; None where nothing is. ``seconds``: for the answer."""

    def beat(self, leases: Sequence[int], seconds: float) -> None:
        """Keep loans with a heartbeat."""

    def give_back(self, lease: int, seconds: float) -> None:
        """Give back a loan."""

    def close(self) -> None:
        """Close the connection. Idempotent."""
