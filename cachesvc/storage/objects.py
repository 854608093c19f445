"""Calls to a storage engine with headers, verification and deadlines: results are verified.

A deadline ends the wait for a call: its items that have not come back are LATE, and the caller keeps their memory in
quarantine until ``back`` reports that no more bytes will land there. An item ends once: by its outcome, or by LATE and
later by ``back``.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from cachesvc.model.errors import Unavailable
from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.seam import (
    CAME,
    Check,
    Checked,
    Each,
    Item,
    ObjectName,
    Outcome,
    Step,
    StorageBackend,
    no_step,
)

LAST_ITEMS = 1024
"""Items whose latencies are kept, for each verb."""
FADING = 0.9
"""Weight of older calls in the measured bandwidth, at the end of each."""

Back = Callable[[int], None]
"""``(index)``: the item was LATE, and is back: its memory is free again."""


class Verb(Enum):
    """Operation that a call asks of the engine."""

    GET = "get"
    PUT = "put"

    __hash__ = object.__hash__  # an Enum's own is written in Python


@dataclass(slots=True)
class ObjectCounts:
    """Since the start. ``size_bytes`` of what came; ``lately``: seconds that the last items took that ended well."""

    items: Counter[tuple[Verb, Outcome]] = field(default_factory=Counter)
    size_bytes: Counter[Verb] = field(default_factory=Counter)
    lately: dict[Verb, deque[float]] = field(default_factory=lambda: {verb: deque(maxlen=LAST_ITEMS) for verb in Verb})

    def latency(self, verb: Verb, share: float) -> float:
        """Seconds within which ``share`` of the last items have ended well; 0 before any has."""
        seconds = sorted(self.lately[verb].copy())
        return seconds[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else 0.0


@dataclass(slots=True)
class Traffic:
    """Calls of a verb under way, the bytes that have come ``since`` there were any, and the bytes and seconds of the
    times before, the older ones with less weight: their ratio is the bandwidth that was seen."""

    calls: int = 0
    since: float = 0.0
    moved: int = 0
    recent_bytes: float = 0.0
    recent_seconds: float = 0.0

    def begin(self, now: float) -> None:
        if not self.calls:
            self.since, self.moved = now, 0
        self.calls += 1

    def end(self, now: float) -> None:
        self.calls -= 1
        if not self.calls and self.moved:
            self.recent_bytes = (self.recent_bytes + self.moved) * FADING
            self.recent_seconds = (self.recent_seconds + now - self.since) * FADING


@dataclass(eq=False, slots=True)
class Call:
    """One call under way. ``items``: None for those that are back; ``late``: indexes of those whose wait has ended."""

    verb: Verb
    items: list[Item | None]
    began: float
    deadline: float
    each: Each
    back: Back
    out: int
    late: set[int] = field(default_factory=set)


class ObjectStore:
    """An engine whose objects are verified. ``clock``: monotonic seconds."""

    def __init__(self, backend: StorageBackend, clock: Callable[[], float]) -> None:
        self.backend = backend
        self.counts = ObjectCounts()
        self.heads = Heads(backend.caps.head_bytes)
        self._clock = clock
        self._digest: Digest
        self._check: Check
        self._lock = threading.Lock()
        self._calls: dict[Call, None] = {}
        self._traffic = {verb: Traffic() for verb in Verb}

    def start(self) -> None:
        """Begin. Raises a CacheError that says what is missing."""
        self._digest = require_digest()
        self._check = partial(check_content, self._digest, self.heads.slot_bytes)
        self.backend.start()

    def prepare(
        self,
        verb: Verb,
        names: Sequence[ObjectName],
        pages: Sequence[tuple[memoryview, ...]],
        deadline: float,
        each: Each,
        back: Back,
        parents: Sequence[bytes] | None = None,
    ) -> Callable[[], None]:
        """Prepare a ``get`` or ``put``; the returned callable begins it, and is called once. Where this raises, no item
        is reported; once it has returned, all are: items that the engine gets and does not answer are LATE."""
        above = [b""] * len(names) if parents is None else parents
        items = [Item(*each_of) for each_of in zip(names, self.heads.take(len(names)), pages, above, strict=True)]
        if verb is Verb.PUT:
            for item in items:
                write_header(self._digest, item)
        call = Call(verb, list(items), self._clock(), deadline, each, back, len(items))
        if items:
            with self._lock:
                self._calls[call] = None
                self._traffic[verb].begin(call.began)
        begin = self.backend.get if verb is Verb.GET else self.backend.put
        return partial(begin, items, deadline, partial(self._ended, call))

    def check_all(self, step: Step = no_step) -> Checked:
        """Read and verify every object that is known, as the engine's ``check_all``."""
        return self.backend.check_all(self._check, step)

    def expire(self) -> int:
        """End the waits whose deadlines have passed; how many items are late in all now."""
        now = self._clock()
        with self._lock:
            over = [call for call in self._calls if call.deadline <= now]
        for call in over:
            self._end_waits(call, range(len(call.items)))
        return sum(call.out for call in over)

    def bandwidth(self, verb: Verb) -> float:
        """Bytes a second that were seen lately while something was under way; 0 before anything was."""
        seen = self._traffic[verb]
        return seen.recent_bytes / seen.recent_seconds if seen.recent_seconds > 0 else 0.0

    def out(self) -> int:
        with self._lock:
            return sum(call.out for call in self._calls)

    def _ended(self, call: Call, index: int, outcome: Outcome) -> None:
        """The engine is through with an item; from any thread."""
        item = call.items[index]
        if item is None:
            return  # an engine that answers twice: the first answer stands
        if outcome is Outcome.LATE:  # it has given the item up, and answers later whether its memory is free
            self._end_waits(call, (index,))
            return
        is_doubtful = outcome is Outcome.WRONG
        if outcome in CAME and call.verb is Verb.GET:
            verdict = check(self._digest, item, item.parent)
            # What lies below another block than its reader says stays: the reader may be the one who is wrong.
            is_doubtful = verdict in (Outcome.WRONG, Outcome.MISS)
            outcome = outcome if verdict is Outcome.OK else verdict
        if is_doubtful:  # the engine looks at it again, or removes it
            self.backend.doubt([item.name], self._check)
        with self._lock:
            if call.items[index] is None:
                return
            call.items[index] = None
            was_late = index in call.late
            self._count(call, item, outcome, was_late=was_late)
        self.heads.give_back(item.head)
        if was_late:
            call.back(index)
        else:
            call.each(index, outcome)

    def _end_waits(self, call: Call, indexes: Iterable[int]) -> None:
        """End the waits for items that are still out: they are late from now on."""
        with self._lock:
            late = [at for at in indexes if call.items[at] is not None and at not in call.late]
            call.late.update(late)
            self.counts.items[call.verb, Outcome.LATE] += len(late)
        for index in late:
            call.each(index, Outcome.LATE)

    def _count(self, call: Call, item: Item, outcome: Outcome, *, was_late: bool) -> None:
        """Under the lock: an item's memory is the caller's again."""
        counts, verb, now = self.counts, call.verb, self._clock()
        call.out -= 1
        if not was_late:
            counts.items[verb, outcome] += 1
        if outcome in CAME:
            counts.size_bytes[verb] += item.payload_bytes
            counts.lately[verb].append(now - call.began)
            self._traffic[verb].moved += item.payload_bytes
        if not call.out:
            del self._calls[call]
            self._traffic[verb].end(now)


SLAB_SLOTS = 64


class Heads:
    """Slots of ``slot_bytes``. Any thread. Memory is kept: as many slots as were ever out at a time."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = -(-max(slot_bytes, HEADER_BYTES) // HEADER_BYTES) * HEADER_BYTES
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> list[memoryview]:
        """``count`` slots; what is in them is left of others."""
        with self._lock:
            while len(self._free) < count:
                slab = memoryview(mmap.mmap(-1, self.slot_bytes * SLAB_SLOTS))
                self._free += [slab[at : at + self.slot_bytes] for at in range(0, len(slab), self.slot_bytes)]
            taken = self._free[-count:] if count else []
            del self._free[len(self._free) - count :]
        return taken

    def give_back(self, slot: memoryview) -> None:
        """Take back a slot that is written no more."""
        with self._lock:
            self._free.append(slot)


# An object's header: 256 bytes that name it whole, and that distinguish it from anything else.
#
#     0    magic "cskvobj" and format    8     56   block key            32    144  xxh3_128 of the payload   16
#     8    group, rank, ranks, 0      2 each   88   parent's key         32    160  xxh3_128 of all before    16
#     16   namespace                    32     120  payload bytes         8    176  zero
#     48   layout id                     8     128  zero                 16
#
# A key stands for all blocks before it, and its parent is a part of what it names: an object that lies below another
# block than the reader says is not the one that was asked for. A root block's parent is zero. Format 1 had no parent:
# what is left of it counts as missing. So does what a newer release has written, which is not removed: that release may
# be in use beside this one, or come back.
#
# The checksums catch accidents: torn writes, late ones into memory that is others' by now, decay. They catch no forger:
# a process that may write there is trusted (SECURITY.md).

HEADER_BYTES = 256
MAGIC = b"cskvobj\x02"
_FIELDS = struct.Struct("<8s4H32s8s32s32sQ16x")
_KEY, _PARENT = slice(56, 88), slice(88, 120)
_DIGEST_AT, _END = _FIELDS.size + 16, _FIELDS.size + 32
LAST_FORMAT = 15
"""Highest number of a format that is taken for one."""
ANY_PARENT = None
"""Parent of a reader that knows of none: any will do."""

Digest = Callable[[Sequence[memoryview | bytes]], bytes]


def require_digest() -> Digest:
    """xxh3_128 of some pieces one after another, outside of the GIL. Raises Unavailable where it is not installed."""
    try:
        import xxhash
    except ImportError as missing:
        raise Unavailable(
            "storage needs the package xxhash; install cachesvc[server] or cachesvc[storage]"
        ) from missing

    def digest(pieces: Sequence[memoryview | bytes]) -> bytes:
        if len(pieces) == 1:
            whole: bytes = xxhash.xxh3_128_digest(pieces[0])
            return whole
        state = xxhash.xxh3_128()
        for piece in pieces:
            state.update(piece)
        parts: bytes = state.digest()
        return parts

    return digest


def identity(name: ObjectName, parent: bytes, payload_bytes: int) -> bytes:
    group, rank, ranks = name.part
    scope = name.scope
    return _FIELDS.pack(MAGIC, group, rank, ranks, 0, scope.namespace, scope.layout, name.key, parent, payload_bytes)


def write_header(digest: Digest, item: Item) -> None:
    """Fill the head of an item: what is behind the header is zeroed. Reads the payload."""
    first = identity(item.name, item.parent, item.payload_bytes) + digest(item.pages)
    item.head[:_END] = first + digest((first,))
    item.head[_END:] = bytes(len(item.head) - _END)


def parent_in(header: bytes, key: bytes) -> bytes | None:
    """The parent that the header of the block ``key`` names, empty for none; None where it is no header of that block.
    A hint: no checksum is compared."""
    if header[:8] != MAGIC or header[_KEY] != key or len(header) < _PARENT.stop:
        return None
    parent = header[_PARENT]
    return b"" if parent == bytes(KEY_BYTES) else parent


def is_newer(content: bytes | memoryview) -> bool:
    """True where an object, or its first 8 bytes, is of a format that a newer release writes."""
    return _is_of_another_format(content) and content[7] > MAGIC[7]


def _is_of_another_format(content: bytes | memoryview) -> bool:
    """True for a format that some release has written, or will; other bytes there are damage."""
    if len(content) < len(MAGIC) or content[:7] != MAGIC[:7]:
        return False
    return content[7] != MAGIC[7] and 0 < content[7] <= LAST_FORMAT


def check_content(digest: Digest, head_bytes: int, name: ObjectName, content: memoryview) -> Outcome:
    """OK where ``content`` is the object of that name, below whatever block: a header in its first ``head_bytes``,
    then the payload, and whatever behind it. MISS where it is of another format, else WRONG."""
    if _is_of_another_format(content):
        return Outcome.MISS
    if len(content) < head_bytes:
        return Outcome.WRONG
    payload_bytes: int = _FIELDS.unpack_from(content)[-1]
    payload = content[head_bytes : head_bytes + payload_bytes]
    if len(payload) != payload_bytes:
        return Outcome.WRONG
    return check(digest, Item(name, content, (payload,)), ANY_PARENT)


def check(digest: Digest, item: Item, parent: bytes | None) -> Outcome:
    """OK where an item holds the very object that was asked for, below ``parent``; MISPLACED where it is below another
    block, MISS where it is of another format, else WRONG. Reads the payload only where the header is right."""
    header = bytes(item.head[:_END])
    if _is_of_another_format(header):
        return Outcome.MISS
    theirs = header[_PARENT]
    if header[: _FIELDS.size] != identity(item.name, theirs, item.payload_bytes):
        return Outcome.WRONG
    if digest((header[:_DIGEST_AT],)) != header[_DIGEST_AT:]:
        return Outcome.WRONG
    if parent is not ANY_PARENT and theirs != parent.ljust(KEY_BYTES, b"\0"):
        return Outcome.MISPLACED
    return Outcome.OK if digest(item.pages) == header[_FIELDS.size : _DIGEST_AT] else Outcome.WRONG
