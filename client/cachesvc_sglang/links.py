"""Links between the ranks of an engine: the first one decides, and the others do what it has decided.

SGLang runs a whole scheduler in each rank, and all of them make the same calls to their caches in the same order. The
first rank answers a call from the daemon, and sends call and answer to the others. These make the call, and read:

    rank 0     match r1  ->  daemon  ->  hit of 5 blocks  --+
    rank 1     match r1  ->  --------  a record's wait  <---+    the same call?  ->  hit of 5 blocks

A rank waits no longer for a record than for SGLang's collectives, which have the same end: SGLang's watchdog, or the
end of a process. No rank waits for a follower but for its part of a load, and for its move to another lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

Call = tuple[object, ...]
"""Name of a call, and what it is about."""


class RanksDiverged(RuntimeError):
    """Ranks of an engine do not make the same calls: their page ids may differ, so the engine ends."""


class RankLost(RuntimeError):
    """The process of another rank has ended, and so does this one."""


class NewPages(NamedTuple):
    """Pages of a request from block ``first`` on, and those in the pool of windows, where there is one."""

    first: int
    pages: list[int]
    windows: list[int]


class Record(NamedTuple):
    """A call of the first rank, and its ``answer``. ``free_tokens`` and ``reserved_tokens``: of each pool, once it was
    made. ``pages``: new ones by request."""

    call: Call
    answer: Any
    free_tokens: tuple[int, ...]
    reserved_tokens: tuple[int, ...]
    pages: Mapping[str, NewPages]


class LoadEnd(NamedTuple):
    """End of a load on a follower. ``number``: that the first rank gave it."""

    number: int
    has_come: bool


class Word(NamedTuple):
    """Answer of a follower to the first rank. ``about``: the subject."""

    about: str
    value: Any


class FollowerLinks:
    """The first rank's links to the others, in the order of their ranks. Used from its scheduler thread."""

    def __init__(self, links: Sequence[Connection]) -> None:
        self._links = tuple(links)
        self._words: dict[Connection, deque[Word]] = {link: deque() for link in links}
        self._loads: dict[int, list[bool]] = {}

    @property
    def count(self) -> int:
        return len(self._links)

    def tell(self, record: Record) -> None:
        """Send a record to all followers. Raises RankLost."""
        text = ForkingPickler.dumps(record)
        for rank, link in enumerate(self._links, 1):
            try:
                link.send_bytes(text)
            except OSError as error:
                raise RankLost(f"rank {rank} of this engine has ended ({error})") from error

    def expect(self, number: int) -> None:
        self._loads.setdefault(number, [])

    def forget(self, number: int) -> None:
        """Nothing looks at this load any more."""
        self._loads.pop(number, None)

    def has_come(self, number: int, timeout_s: float) -> bool | None:
        """True for a load that has come on each follower; None while it may run on one, after ``timeout_s`` at most.
        Raises RankLost."""
        self._read(0.0)
        if len(self._loads[number]) < len(self._links):
            self._read(timeout_s)
        if len(self._loads[number]) < len(self._links):
            return None
        return all(self._loads.pop(number))

    def gather(self, about: str) -> list[Any]:
        """Wait for the answer of each follower. Raises RankLost, RanksDiverged."""
        values = []
        for rank, link in enumerate(self._links, 1):
            while not self._words[link]:
                self._take(rank, link)
            word = self._words[link].popleft()
            if word.about != about:
                raise RanksDiverged(f"rank {rank} answered about {word.about}, and rank 0 asked about {about}")
            values.append(word.value)
        return values

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _read(self, timeout_s: float) -> None:
        for link in wait(self._links, timeout_s):
            assert isinstance(link, Connection)
            self._take(self._links.index(link) + 1, link)

    def _take(self, rank: int, link: Connection) -> None:
        message = _receive(link, rank)
        if not isinstance(message, LoadEnd):
            self._words[link].append(message)
        elif message.number in self._loads:
            self._loads[message.number].append(message.has_come)


class LeaderLink:
    """The link of rank ``rank`` to the first one. Used from its scheduler thread."""

    def __init__(self, link: Connection, rank: int) -> None:
        self._link = link
        self._rank = rank

    def hear(self, call: Call) -> Record:
        """Wait for the record of a call that this rank makes. Raises RanksDiverged, RankLost."""
        record = _receive(self._link, 0)
        assert isinstance(record, Record)
        if record.call != call:
            raise RanksDiverged(
                f"rank {self._rank} of this engine called {_shown(call)} where rank 0 called {_shown(record.call)}: "
                "their schedulers do not decide alike, so this engine ends. Start it again, and report it"
            )
        return record

    def end_load(self, number: int, *, has_come: bool) -> None:
        """Report how a load has ended here. Raises RankLost."""
        self._send(LoadEnd(number, has_come))

    def answer(self, about: str, value: object) -> None:
        """Answer what the first rank gathers. Raises RankLost."""
        self._send(Word(about, value))

    def close(self) -> None:
        self._link.close()

    def _send(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError as error:
            raise RankLost(f"rank 0 of this engine has ended ({error})") from error


def _receive(link: Connection, rank: int) -> Any:
    try:
        return link.recv()
    except (EOFError, OSError) as error:
        raise RankLost(f"rank {rank} of this engine has ended ({type(error).__name__})") from error


def _shown(call: Call) -> str:
    name, *about = call
    return f"{name}({', '.join(map(repr, about))})"
