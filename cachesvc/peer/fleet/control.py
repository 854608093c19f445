"""Questions of a borrower to another daemon, apart from the bytes themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.peer.fleet.digest import DigestNews
from cachesvc.storage.seam import Part, Scope


class HandshakeFailed(Unavailable):
    """The two nodes do not trust each other's certificates."""


class PeerAbsent(Unavailable):
    """No daemon takes calls there: they fail at once, and no request waits for it."""


class PeerRefused(Unavailable):
    """The peer has answered, and refuses the call. ``is_full``: it has reached a limit, and may serve it later."""

    is_full = False


class PeerPaused(Unavailable):
    """The peer was not asked: it failed a moment ago. ``seconds``: after which it will be."""

    seconds = 0.0


class Loan(NamedTuple):
    """Loan of another daemon. ``lent``: for each key and part (parts of a key together) whether it is there. ``host``,
    ``port``: where its bytes are. ``epoch``: of the daemon's life. ``seconds``: without a heartbeat. ``streams``: that
    may read it."""

    lease: int
    epoch: int
    secret: bytes
    host: str
    port: int
    seconds: float
    lent: tuple[bool, ...]
    streams: int = 1


class Borrowed(NamedTuple):
    """Answer of another daemon, of the life ``epoch``. ``loan``: None where nothing is there; ``computing``: blocks
    behind what is lent that an engine computes there; ``is_given_up``: it had begun to compute the first, and its
    request has ended."""

    loan: Loan | None = None
    epoch: int = 0
    computing: int = 0
    is_given_up: bool = False


Answered = Callable[[Borrowed | CacheError], None]
"""Called once with the answer to a question, or with what it failed by, from any thread."""
Done = Callable[[CacheError | None], None]
"""Called once when a call has ended, with what it failed by or None, from any thread."""


class PeerControl(Protocol):
    """One other daemon. Calls return at once and end by their deadlines; they raise a CacheError where nothing is
    asked."""

    @property
    def address(self) -> str:
        """Address of the peer, HOST:PORT."""

    def borrow_later(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, seconds: float, answered: Answered
    ) -> None:
        """Have what is there of packed ``keys`` kept, once the first block is there, or ``patience`` seconds later.
        ``seconds``: for the answer."""

    def beat_later(self, loans: Sequence[Loan], seconds: float, done: Done) -> None:
        """Keep loans, the newest last, with a heartbeat; without any it finds out whether the peer answers."""

    def give_back_later(self, loan: Loan, seconds: float, done: Done) -> None:
        """Give back a loan."""

    def news_later(
        self, epoch: int, version: int, patience: float, answered: Callable[[DigestNews | CacheError], None]
    ) -> None:
        """Ask what the peer has, beyond a version that is known, and have it wait for a change."""

    def close(self) -> None:
        """Close the connection. Idempotent."""
