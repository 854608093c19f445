"""The seam between the daemon and a storage engine. It moves host pages, never device memory.

An object is what one block leaves in a group on one host rank, with a header that names it whole (``objects.py``). No
engine's "stored", "exists" or "healthy" is trusted: the reader of an object verifies it (``objects.py``).

A deadline ends the wait for a call, not the call: an engine may write into an item's memory until it has answered for
that item, and never after. So ``each`` is the item's end, and memory of an item without one is not used for anything.
An engine that has given an item up, and cannot say whether bytes of it still move, answers LATE first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES
from cachesvc.telemetry import events

FORMAT = "cs2"
LAYOUT_ID_BYTES = 8


class Outcome(Enum):
    """Outcome of one item of a call."""

    OK = "ok"
    LENT = "lent"  # as good as OK, but it came from another node: what we store ourselves may not have it
    MISS = "miss"  # there is no such object
    WRONG = "wrong"  # there was something under its name, but not it: of another block, torn, or changed
    MISPLACED = "misplaced"  # it is whole, and lies below another block than the one that was asked for
    BUSY = "busy"  # not begun: no place, no room, or its deadline had passed
    FAILED = "failed"  # the engine answered with an error
    LATE = "late"  # the wait has ended, the call has not: its memory is in quarantine

    __hash__ = object.__hash__  # an Enum's own is written in Python


CAME = frozenset((Outcome.OK, Outcome.LENT))
"""The item is what it was asked for."""


Rank = Callable[[int, int, int], int]
"""``(last use in ms, uses, depth)``: an eviction policy; the lowest rank goes first. It never falls with further uses.
"""


def oldest_first(used: int, uses: int, depth: int) -> int:  # noqa: ARG001 - as of any rank
    return used


class Chooser(Protocol):
    """Eviction policy that knows classes of blocks. Called from threads of an engine; it only reads."""

    def choose(self, queues: Sequence[int], ages: Sequence[float]) -> int:
        """Index of the class whose oldest block goes next. ``ages``: of the oldest block of each class, seconds."""


class Use(NamedTuple):
    """A use of a block in memory: the copy below is as recently used. ``queue``: its class in the eviction policy; 0:
    none. ``hits``: how many of the uses were hits."""

    key: bytes
    queue: int = 0
    hits: int = 0


class Part(NamedTuple):
    """Part of a block in an object: the bytes of ``group`` on host rank ``rank`` of ``ranks``."""

    group: int
    rank: int
    ranks: int


WHOLE = 0xFFFF
"""Group number of all groups without a window, on all host ranks, one after another."""


class Scope(NamedTuple):
    """Scope of keys: 32 bytes of namespace and 8 of the layout's fingerprint."""

    namespace: bytes
    layout: bytes

    @property
    def text(self) -> str:
        return f"{self.namespace.hex()}/{self.layout.hex()}"


class ObjectName(NamedTuple):
    """Name of an object. Equal names stand for equal bytes."""

    scope: Scope
    key: bytes
    part: Part

    @property
    def text(self) -> str:
        """Text of the name, for engines that know objects by texts."""
        group = "w" if self.part.group == WHOLE else self.part.group
        return f"{FORMAT}/{self.scope.text}/{self.key.hex()}/{group}.{self.part.rank}of{self.part.ranks}"


class Item(NamedTuple):
    """An object on its way: ``head`` takes or gives its header, ``pages`` its payload, one piece after another.
    ``parent``: the key of the block above its own; empty for none.

    All of it is the caller's memory, of the engine from the call on until ``each`` was told of the item. ``head`` has
    ``Caps.head_bytes``; ``pages`` lie within registered chunks.
    """

    name: ObjectName
    head: memoryview
    pages: tuple[memoryview, ...]
    parent: bytes = b""

    @property
    def payload_bytes(self) -> int:
        return sum(map(len, self.pages))


Each = Callable[[int, Outcome], None]
"""``(index, outcome)``: called once for each item, from any thread: no byte moves to or from its memory any more. LATE
alone is no end: another outcome follows it."""
Found = Callable[[Sequence[bool] | None], None]
"""Told once which of some objects an engine believes to have; None: it could not find out."""


Gone = Callable[[Sequence[ObjectName]], None]
"""Told of objects that an engine has let go of by itself, from any thread; it returns at once."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Properties of an engine. ``is_shared``: other nodes see its objects. ``survives``: ``daemon`` or ``node``.

    ``head_bytes``: of an item's header, which lies on a border of as many bytes, rounded up to 256. ``max_bytes``: of
    an object with its header; 0: any. ``evicts_itself``: objects may go without our doing. ``needs_registration``:
    pages must lie in chunks that were registered. ``follows_use``: it evicts by the uses that ``used`` reports.
    ``keeps_health``: it has sources of its own, knows how each of them does, and is never given up as a whole.
    """

    is_shared: bool
    survives: str
    head_bytes: int = 256
    max_bytes: int = 0
    evicts_itself: bool = False
    needs_registration: bool = False
    follows_use: bool = False
    keeps_health: bool = False


@dataclass(slots=True)
class Kept:
    """Objects kept of one scope: ``label`` is what it was described as. Ages in seconds; None where unknown."""

    label: str
    objects: int = 0
    size_bytes: int = 0
    oldest_seconds: float | None = None
    newest_seconds: float | None = None


@dataclass(slots=True)
class StoreStatus:
    """Status that an engine reports; it is never trusted where bytes are at stake. ``capacity_bytes``: 0 where it has
    none of its own. ``is_complete``: what was there at the start has been counted. ``stuck_objects``: files that cannot
    be removed; they count. ``errors``: since the start."""

    objects: int = 0
    size_bytes: int = 0
    capacity_bytes: int = 0
    evicted_objects: int = 0
    is_complete: bool = True
    scopes: dict[Scope, Kept] = field(default_factory=dict)
    stuck_objects: int = 0
    stuck_bytes: int = 0
    problem: str = ""
    errors: int = 0
    last_error: str = ""


Step = Callable[[], None]
"""Called now and then while something long gets on; what it raises ends that."""


def no_step() -> None:
    """Do nothing: the work has no watcher."""


Check = Callable[[ObjectName, memoryview], Outcome]
"""``(name, content)``: OK where content, header and all, is the object of that name, MISS where it is of another
format, else WRONG."""


@dataclass(slots=True)
class Checked:
    objects: int = 0
    size_bytes: int = 0
    wrong: int = 0
    missing: int = 0
    unreadable: int = 0

    def note(self, verdict: Outcome, size_bytes: int) -> bool:
        """Count an object that was read; True where it is what its name says."""
        is_one, is_good = verdict is not Outcome.MISS, verdict is Outcome.OK
        self.missing += not is_one
        self.objects += is_one
        self.size_bytes += size_bytes * is_one
        self.wrong += is_one and not is_good
        return is_good


class Totals(NamedTuple):
    """Size of an engine's contents, without looking; ``capacity_bytes`` 0: none of its own.

    ``problem``: what keeps it from writing, or (not ``is_usable``) from anything; empty where nothing does. ``losses``:
    how often all that it had was lost to it. ``stuck_objects``: files that cannot be removed. ``has_answered``: what it
    keeps things in has answered since the start.
    """

    objects: int
    size_bytes: int
    capacity_bytes: int
    evicted_objects: int
    problem: str = ""
    is_usable: bool = True
    losses: int = 0
    stuck_objects: int = 0
    has_answered: bool = True


class StorageBackend(Protocol):
    """A storage engine. Nothing runs before ``start``; every method but ``start`` and ``close`` returns at once and is
    called on any thread. Methods with a body are of engines that have nothing to do for them."""

    kind: str
    caps: Caps

    def start(self) -> None:
        """Begin. Raises a CacheError that says what is missing. Finding what is there already goes on behind it."""

    def register(self, chunk: memoryview) -> None:
        del chunk

    def describe(self, scope: Scope, label: str) -> None:
        del scope, label

    def watch(self, gone: Gone) -> None:
        del gone

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        del scope, uses, chooser

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        del scope, keys, parts
        return None

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        """Find the objects that it expects to have: a hint, never a hit. ``deadline``: monotonic seconds. Reports once,
        or never where it hangs: no memory waits for it."""

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Bring objects into their items. OK says that bytes have come, and nothing of what they are. Items that are
        not begun by ``deadline`` (monotonic seconds) are BUSY."""

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        """Keep objects. One that is there under its name already may stay."""

    def remove(self, names: Sequence[ObjectName]) -> None:
        """Forget objects: best effort. What is being read may still be read to its end."""

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        """Expect objects no more that were not what their names say, and remove them. Where the way to them may have
        changed them, they are read once more before. What is of a newer format stays, and counts."""

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        del scope, step
        return 0

    def status(self) -> StoreStatus:
        return StoreStatus()

    def totals(self) -> Totals:
        return Totals(0, 0, 0, 0)

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        del check, step
        return Checked()

    def close(self) -> None:
        """Take nothing more; what has not begun is BUSY. Returns within seconds even where calls hang: those have no
        end, and their memory stays mapped as long as they do. Idempotent."""


def key_at(keys: bytes, at: int) -> bytes:
    return keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]


SMALL_PAGE_BYTES = 256 << 10
"""Below it an object of its own costs more than its bytes: a file of 256 KiB takes three times the processor time for
each byte that one of 1 MiB does (ext4, direct I/O, 2026-11)."""


class ModelFacts(Protocol):
    """Facts of a model that a tier needs."""

    @property
    def id(self) -> int:
        """Number of the model in this daemon."""

    @property
    def name(self) -> str:
        """Operators' name of the model."""

    @property
    def namespace(self) -> bytes:
        """Namespace of its keys."""

    @property
    def layout(self) -> Layout:
        """Groups and pages of the model."""


class Shape(NamedTuple):
    """An object of each block. ``pieces``: the pages in it, as (group, host rank); ``groups``: theirs."""

    part: Part
    pieces: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]


class Shapes(NamedTuple):
    """A model's objects. ``full``: without which there is no block; ``windows``: of windowed groups."""

    scope: Scope
    full: tuple[Shape, ...]
    windows: tuple[Shape, ...]
    block_bytes: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(shape.part for shape in self.full)


def shapes_of(model: ModelFacts) -> Shapes:
    layout = model.layout
    full, windows = _alone(layout, layout.full_groups), _alone(layout, layout.window_groups)
    if len(full) > 1 and max(map(layout.page_bytes, layout.full_groups)) < SMALL_PAGE_BYTES:
        pieces = tuple(piece for shape in full for piece in shape.pieces)
        full = (Shape(Part(WHOLE, 0, layout.ranks), pieces, layout.full_groups),)
    block_bytes = sum(layout.page_bytes(group) for shape in full for group, _ in shape.pieces)
    return Shapes(Scope(model.namespace, layout.fingerprint[:LAYOUT_ID_BYTES]), full, windows, block_bytes)


def _alone(layout: Layout, groups: tuple[int, ...]) -> tuple[Shape, ...]:
    return tuple(
        Shape(Part(group, rank, layout.host_ranks(group)), ((group, rank),), (group,))
        for group in groups
        for rank in range(layout.host_ranks(group))
    )


FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0


class BackOff:
    """Pause after failures, twice as long each time, from ``first`` to ``longest`` seconds. Not thread-safe. ``pause``:
    the length of the last one, 0 from a success on; ``until``: its end, monotonic seconds."""

    def __init__(self, first: float = FIRST_PAUSE_SECONDS, longest: float = LONGEST_PAUSE_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self.pause = 0.0
        self.until = float("-inf")

    def failed(self, now: float, longest: float = float("inf")) -> None:
        """Begin a pause, of ``longest`` seconds at most."""
        self.pause = min(max(2 * self.pause, self._first), self._longest, longest)
        self.until = now + self.pause

    def succeeded(self, now: float) -> None:
        if self.pause:
            self.pause, self.until = 0.0, now


LINES = {
    "read": lambda **fields: events.event("storage_read_failed", **fields),
    "write": lambda **fields: events.event("storage_write_failed", **fields),
    "list": lambda **fields: events.event("storage_not_listed", **fields),
}
NOTE_SECONDS = 60.0
"""Interval between two log lines of a kind, seconds."""


class Troubles:
    """Errors of an engine. ``count``: since the start; ``last``: the text of the last one. Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.count = 0
        self.last = ""
        self._clock = clock
        self._lock = threading.Lock()
        self._unlogged: Counter[str] = Counter()
        self._note_at: dict[str, float] = {}

    def note(self, kind: str, error: Exception) -> None:
        """Note an error of a kind of ``LINES``, and log how many there were since the last line, where one is due."""
        with self._lock:
            self.count += 1
            self.last = str(error)
            self._unlogged[kind] += 1
            now = self._clock()
            if now < self._note_at.get(kind, now):
                return
            self._note_at[kind] = now + NOTE_SECONDS
            objects = self._unlogged.pop(kind)
        LINES[kind](reason=str(error), objects=objects)
