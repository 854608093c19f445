"""Follow one model's blocks: a snapshot that is exact although the ledger goes on changing, then every change.

The snapshot goes through the rows piece by piece. Before each piece it sends the changes since the last one, though
only those of rows that were passed already: rows ahead are read later, in their state at that time. So at every answer
the follower has exactly the truth of that moment for the rows passed, and at the last piece for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from cachesvc.ledger.change_log import STORAGE, Cause, Event, Kind
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.errors import EventsForgotten, InvalidRequest, NotFound, NotOwned, SubscriberTooSlow
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.words import READY
from cachesvc.questions.view import View

ROWS_AT_ONCE = 1024
CHANGES_AT_ONCE = 1024
"""Most changes of one answer: a millisecond or two of the ledger thread."""


class Position(IntEnum):
    """Position of an answer in a snapshot. Values of the API."""

    NONE = 0
    FIRST = 1
    MORE = 2
    LAST = 3


class BlockRun(NamedTuple):
    """Changes that follow one another. ``parent``: of the first key; each further key's parent is the one before."""

    kind: Kind
    cause: Cause | None
    present: bool
    group: int
    place: int
    parent: bytes
    keys: bytearray


class Changes(NamedTuple):
    """One answer: changes ``first`` to ``last``, or a piece of a snapshot as of change ``last``."""

    part: Position
    first: int
    last: int
    runs: list[BlockRun]


def find_model(view: View, model_id: int, namespace: bytes) -> Model:
    """The model that a follower names. Raises NotOwned where it does not prove that it may, NotFound, InvalidRequest.

    To know the namespace is to know the model, its layout and the tenant's salt, so only a caller that may see all
    models anyway can do without. Models outside of the view are not there, whatever else is wrong.
    """
    if not namespace:
        if not view.sight.is_of_all:
            raise NotOwned("name the namespace that Register answered; a model's number alone opens nothing")
        return view.model(model_id)
    if len(namespace) != KEY_BYTES:
        raise InvalidRequest(f"a namespace has {KEY_BYTES} bytes, got {len(namespace)}")
    for model in view.models():
        if model.namespace == namespace:
            if model_id not in (0, model.id):
                raise InvalidRequest(f"the namespace is not that of model {model_id}; name the one that belongs to it")
            return model
    raise NotFound("namespace", namespace.hex(), "register the model first")


class Feed:
    """One follower's cursor. Nothing is kept for it but that: the journal is the queue."""

    def __init__(
        self,
        model: Model,
        *,
        snapshot: bool,
        after: int | None = None,
        storage: bool = False,
        rows_at_once: int = ROWS_AT_ONCE,
        changes_at_once: int = CHANGES_AT_ONCE,
    ) -> None:
        """Begin with a snapshot, behind change ``after``, or now. ``storage``: tell of what changes there too. Raises
        EventsForgotten, InvalidRequest."""
        journal = model.blocks.journal
        if after is not None and after > journal.last:
            raise InvalidRequest(f"change {after} has not happened yet, the last one is {journal.last}")
        if after is not None and after + 1 < journal.first:
            raise EventsForgotten(after + 1, journal.first)
        self.model = model
        self._journal = journal
        self._storage = storage
        self._rows_at_once = rows_at_once
        self._changes_at_once = changes_at_once
        self._next = journal.last + 1 if after is None else after + 1
        self._row = 0 if snapshot else NO_ROW
        self._part = Position.FIRST if snapshot else Position.NONE
        self._has_begun = snapshot

    @property
    def behind(self) -> int:
        """Changes that the follower has not been given."""
        return self._journal.last + 1 - self._next

    @property
    def is_in_snapshot(self) -> bool:
        """True until the last piece of a snapshot was given."""
        return self._row != NO_ROW

    @property
    def is_overrun(self) -> bool:
        """True once the next change that it needs is no longer known."""
        return self._next < self._journal.first

    def next(self) -> Changes | None:
        """The next answer; None while there is nothing to tell. Raises SubscriberTooSlow."""
        if self.is_overrun:
            raise SubscriberTooSlow(self.behind, self._journal.keep)
        if self._row != NO_ROW:
            return self._piece()
        if not self._has_begun:  # so that a follower knows where it stands before anything happens
            self._has_begun = True
            return Changes(Position.NONE, self._next, self._next - 1, [])
        if not self.behind:
            return None
        first = self._next
        runs = runs_of(self._take())
        return Changes(Position.NONE, first, self._next - 1, runs)

    def _take(self) -> list[Event]:
        events = self._journal.read(self._next, self._changes_at_once)
        self._next += len(events)
        return events if self._storage else [event for event in events if event.place != STORAGE]

    def _piece(self) -> Changes:
        passed = self._row
        runs = runs_of(event for event in self._take() if event.row < passed)
        part, self._part = self._part, Position.MORE
        if not self.behind:
            rows = len(self.model.blocks.index.keys)
            if passed < rows:
                self._row = min(rows, passed + self._rows_at_once)
                runs += self._read(passed, self._row)
            elif part is not Position.FIRST:
                self._row = NO_ROW
                part = Position.LAST
        return Changes(part, 0, self._next - 1, runs)

    def _read(self, start: int, stop: int) -> list[BlockRun]:
        """Runs of blocks in rows ``start`` to ``stop`` now, as far as the journal has reported them."""
        index = self.model.blocks.index
        runs: list[BlockRun] = []
        for place in index.told:
            for group, states in enumerate(place.states):
                above = -2  # no row's parent
                for row in range(start, stop):
                    if states[row] < READY:
                        continue
                    key, parent = index.keys[row] or b"", index.parent[row]
                    if parent != above or parent == NO_ROW:
                        root = b"" if parent == NO_ROW else index.keys[parent] or b""
                        runs.append(BlockRun(Kind.STORED, None, True, group, place.number, root, bytearray()))
                    runs[-1].keys.extend(key)
                    above = row
        return runs + self._read_stored(start, stop) if self._storage else runs

    def _read_stored(self, start: int, stop: int) -> list[BlockRun]:
        """Blocks of rows ``start`` to ``stop`` that are known to be in storage. What lies there alone has no row."""
        index, written = self.model.blocks.index, self.model.stored.written
        runs: list[BlockRun] = []
        for row in range(start, stop):
            key = index.keys[row]
            if key is not None and key in written:
                above = index.parent[row]
                parent = b"" if above == NO_ROW else index.keys[above] or b""
                runs += [
                    BlockRun(Kind.TIER_CHANGED, None, True, group, STORAGE, parent, bytearray(key))
                    for group in self.model.layout.full_groups
                ]
        return runs


def runs_of(events: Iterable[Event]) -> list[BlockRun]:
    """Events as runs. Only changes of different groups may change places with one another."""
    out: list[BlockRun] = []
    open_runs: dict[int, tuple[BlockRun, bytes]] = {}
    alike: tuple[Kind, Cause, bool, int] | None = None
    for event in events:
        now = (event.kind, event.cause, event.present, event.place)
        if now != alike:
            alike = now
            open_runs.clear()
        run, last = open_runs.get(event.group, (None, b""))
        if run is None or (event.present and event.parent != last):
            run = BlockRun(event.kind, event.cause, event.present, event.group, event.place, event.parent, bytearray())
            out.append(run)
        run.keys.extend(event.key)
        open_runs[event.group] = (run, event.key)
    return out
