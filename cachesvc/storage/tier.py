"""The storage tier of a daemon: one engine, the breaker before it, the budget of writes, and news for the ledger.

The ledger thread asks here and goes on; what takes time is done by two workers and the engine's own threads. News
comes back in batches, by ``post``, in the order in which it arose.
"""

from __future__ import annotations

import mmap
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import groupby
from typing import NamedTuple

from cachesvc.model.errors import CacheError
from cachesvc.model.numbers import Bucket
from cachesvc.model.text import one_line
from cachesvc.model.words import KEY_BYTES, NO_PAGE
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import (
    FIRST_PAUSE_SECONDS,
    LAYOUT_ID_BYTES,
    BackOff,
    Chooser,
    ModelFacts,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Shape,
    Shapes,
    StorageBackend,
    Use,
    key_at,
    shapes_of,
)
from cachesvc.storage.spec import TierOptions, WriteWhen
from cachesvc.storage.workers import Job, Workers, nothing
from cachesvc.telemetry import events

ANY_BLOCK_BYTES = 1 << 40
"""However large a block is, it may go when nothing else does."""
UNDER_WAY_BYTES = 64 << 20
"""Host blocks that are pinned for writing at a time."""
TRY_ANYWAY = 64
"""Number of look-ups of which one is fetched although loading is slower than computing: the store may have got
faster."""
BAD = {Outcome.OK: 0.0, Outcome.LENT: 0.0, Outcome.BUSY: 0.0, Outcome.MISPLACED: 0.0, Outcome.MISS: 0.25}
"""Weight of an outcome against the engine; all others are 1. A miss of an expected object is bad, a little; to have no
room is no fault, and neither is a reader's other parent of a block."""

MOST_GONE = 1 << 16
"""Blocks of which it is yet to be told that they have gone; more are passed over."""
LOST_SECONDS = 1.0
"""A canary that has said nothing so long after its deadline is lost."""

View = Callable[[int, int, int, int], memoryview]
"""``(model, group, host rank, page)``: a host page's bytes. Raises a CacheError for one that is gone."""
Post = Callable[[Callable[[], None]], None]
"""Has something called on the ledger thread."""


def one_thread(name: str) -> Workers[None]:
    return Workers(name, 1, nothing)


class Tier:
    """``name``: in the log, metrics and status; ``late``: objects that have not come back in time. ``tell`` gets the
    news of each request; ``tell_lost``: called when the engine has lost all that it had. ``under_way``: bytes of blocks
    that are being written. ``known_shapes``: by model. ``clock``: monotonic seconds."""

    def __init__(
        self,
        store: ObjectStore,
        options: TierOptions,
        view: View,
        post: Post,
        clock: Callable[[], float],
        workers: Callable[[str], Workers[None]] = one_thread,
        name: str = "",
    ) -> None:
        self.store = store
        self.name = name or store.backend.kind
        self.late = 0
        self.backend: StorageBackend = store.backend
        self.options = options
        self.keeps_all = options.write is WriteWhen.THROUGH
        self.keeps_used = options.write is not WriteWhen.NEVER
        self.breaker = Breaker()
        self.rate = Bucket(options.write_rate)
        self.under_way = 0
        self.tell: Tell = nothing
        self.tell_gone: TellGone = nothing
        self.tell_lost: Callable[[], None] = nothing
        self._view = view
        self._post = post
        self._clock = clock
        self._getting, self._putting = workers("storage-get"), workers("storage-put")
        self._canary = Canary(store)
        self._canary_until = 0.0
        self._requests: deque[StorageRequest] = deque()
        self.known_shapes: dict[int, Shapes] = {}
        self._passed_over = 0
        self._was_usable, self._losses = True, 0
        self._log = StateLog(self.name, self.breaker)
        self._last_news = float("-inf")
        self._news: deque[News] = deque()
        self._gone: dict[tuple[Scope, bytes], None] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin. Raises a CacheError that says what is missing."""
        self.backend.watch(self._let_go)
        self.store.start()
        self._getting.start()
        self._putting.start()

    def close(self) -> None:
        self._getting.close()
        self._putting.close()
        self.backend.close()

    # -- on the ledger thread ------------------------------------------------------------------------------------

    def shapes(self, model: ModelFacts) -> Shapes:
        known = self.known_shapes.get(model.id)
        if known is None:
            known = self.known_shapes[model.id] = shapes_of(model)
            self.backend.describe(known.scope, one_line(model.name))
        return known

    def forget(self, model_id: int) -> None:
        """A model is gone: numbers are not used again."""
        self.known_shapes.pop(model_id, None)

    def expects(self, model: ModelFacts, keys: bytes) -> int | None:
        """Number of leading packed ``keys`` worth fetching; None where the engine must be asked."""
        shapes = self.shapes(model)
        if not self.breaker.is_closed or not self._is_fast_enough(model, shapes):
            return 0
        return self.backend.expects(shapes.scope, keys, shapes.parts)

    def _is_fast_enough(self, model: ModelFacts, shapes: Shapes) -> bool:
        rate, seen = self.options.recompute, self.store.bandwidth(Verb.GET)
        if not rate or not seen or shapes.block_bytes / seen <= model.layout.block_tokens / rate:
            return True
        self._passed_over += 1
        return self._passed_over % TRY_ANYWAY == 0

    def used(self, model: ModelFacts, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """Blocks were used in memory: their objects are as recently used, as far as the engine evicts by that."""
        if self.backend.caps.follows_use:
            scope = self.shapes(model).scope
            self._getting.add([Job(lambda _: self.backend.used(scope, uses, chooser))])

    def has(self, shapes: Shapes, key: bytes) -> bool:
        """True where the engine believes to have all of a block, as far as it knows without asking."""
        return bool(self.backend.expects(shapes.scope, key, shapes.parts))

    def fetch(self, blocks: Blocks, objects: Sequence[tuple[int, Shape]]) -> None:
        """Read objects of some blocks, by block, to their host pages."""
        request = self._request(Verb.GET, blocks, objects)
        self._getting.add([Job(lambda _: self._ask(request), request.fail)])

    def keep(self, model: ModelFacts, key: bytes, pages: Sequence[int], parent: bytes = b"") -> int:
        """Write a block below the block ``parent`` from its host pages; returns how many objects are on their way."""
        shapes, block = self.shapes(model), Blocks(model, 0, key, [[page] for page in pages], parent)
        objects = objects_of(shapes, block)
        if objects:
            self.rate.tokens -= shapes.block_bytes
            self.under_way += shapes.block_bytes
            request = self._request(Verb.PUT, block, objects)
            self._putting.add([Job(lambda _: self._begin(request), request.fail)])
        return len(objects)

    def _request(self, verb: Verb, blocks: Blocks, objects: Sequence[tuple[int, Shape]]) -> StorageRequest:
        deadline = self._clock() + self.options.deadline
        self._requests.append(
            StorageRequest(verb, blocks, self.shapes(blocks.model), objects, deadline, self._tell_later)
        )
        return self._requests[-1]

    def kept(self, model: ModelFacts) -> None:
        """Note that all objects of a written block have ended."""
        self.under_way -= self.shapes(model).block_bytes

    def room(self) -> int:
        """Bytes that may be written now: of the rate's unused part of a second, and of a window."""
        if not self.breaker.is_closed:
            return 0
        self.rate.fill(self._clock())
        if not self.under_way and self.rate.tokens >= self.rate.burst:
            return ANY_BLOCK_BYTES
        return max(0, min(int(self.rate.tokens), UNDER_WAY_BYTES - self.under_way))

    def lift_rate(self) -> None:
        """Drop the rate's limit, and keep the window's: the daemon ends, and no engine competes."""
        self.rate.rate, self.rate.burst = ANY_BLOCK_BYTES, float(ANY_BLOCK_BYTES)

    def lagged(self) -> None:
        """Note that a call has waited for the longest time in vain. Where others got something meanwhile the engine is
        slow, and not frozen."""
        now, wait = self._clock(), self.options.wait
        if now - self._last_news >= wait and not self.backend.caps.keeps_health:
            self.breaker.open(f"nothing came within {wait} s", now)

    def tick(self) -> None:
        """Do periodic work: give up an engine that cannot work, and try it at once when it can again; end waits; and
        send a canary where one is due."""
        now, totals = self._clock(), self.backend.totals()
        if not totals.is_usable:
            self.breaker.open(totals.problem, now)
        elif not self._was_usable:
            self.breaker.hurry(now)
        is_lost = totals.losses != self._losses
        self._was_usable, self._losses = totals.is_usable, totals.losses
        if is_lost:
            self.tell_lost()
        while self._requests and (self._requests[0].is_settled or self._requests[0].deadline <= now):
            self._requests.popleft().expire()
        self.late = self.store.expire()
        if self.breaker.state is State.PROBING and now >= self._canary_until:
            self.breaker.probed(now, is_good=False)
        if self.breaker.wants_probe(now):
            deadline = now + max(self.options.wait, 0.05)
            self._canary_until = deadline + LOST_SECONDS
            fly = partial(self._canary.fly, deadline, self._flown)
            self._putting.add([Job(lambda _: fly(), partial(self._flown, False))])
        self._log.look(now, self.late, totals.problem)

    def _flown(self, is_good: bool) -> None:
        is_in_time = self._clock() <= self._canary_until - LOST_SECONDS  # else BUSY may be of one that waited too long
        self._post(lambda: self.breaker.probed(self._clock(), is_good=is_good and is_in_time))

    # -- on workers ----------------------------------------------------------------------------------------------

    def _ask(self, request: StorageRequest) -> None:
        """Ask an engine that does not know itself which of the objects it has, and read those before the first that is
        missing."""
        shapes, objects = request.shapes, request.objects
        if request.is_settled:
            return
        if self.backend.expects(shapes.scope, key_at(request.blocks.keys, objects[0][0]), shapes.parts) is not None:
            self._begin(request)
            return

        def found(there: Sequence[bool] | None) -> None:
            if there is None:
                request.fail()
                return
            missing = (
                block
                for (block, shape), is_there in zip(objects, there, strict=True)
                if not is_there and shape in shapes.full
            )
            end = next(missing, None)
            self._getting.add([Job(lambda _: self._begin(request, end), request.fail)])

        request.was_put = True
        self.backend.exists(request.names(), request.deadline, found)

    def _begin(self, request: StorageRequest, end: int | None = None) -> None:
        """Have the engine move the blocks before ``end``; the rest does not come."""
        if not request.claim():
            return
        news, (model, _, keys, pages, parent) = request.news(), request.blocks
        asked = news if end is None else [each for each in news if each.block < end]
        try:
            views = [
                tuple(self._view(model.id, group, rank, pages[group][block]) for group, rank in shape.pieces)
                for block, shape in request.objects[: len(asked)]
            ]
        except CacheError:  # the host pool is closed: the daemon ends
            request.begun()
            self._tell_later(request.news(Outcome.BUSY))
            return
        begin = self.store.prepare(
            request.verb,
            request.names()[: len(asked)],
            views,
            self._clock() + self.options.deadline,
            lambda index, outcome: self._tell_later([news[index]._replace(outcome=outcome)]),
            lambda index: self._tell_later([news[index]]),
            [key_at(keys, each.block - 1) if each.block else parent for each in asked],
        )
        request.begun()
        self._tell_later(request.news(Outcome.BUSY)[len(asked) :])  # never promised: nothing against the engine
        begin()

    # -- news ----------------------------------------------------------------------------------------------------

    def _tell_later(self, news: Sequence[News]) -> None:
        with self._lock:
            is_first = not self._news
            self._news.extend(news)
            is_due = is_first and bool(self._news)
        if is_due:
            self._post(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            news, self._news = self._news, deque()
        now = self._clock()
        for each in news:
            if each.outcome is not Outcome.LATE:
                self._last_news = now
            if each.outcome is not None and not self.backend.caps.keeps_health:
                verb = "get" if each.ticket else "put"
                self.breaker.note(BAD.get(each.outcome, 1.0), f"{verb}: {each.outcome.value}", now)
        for (model, ticket, key), some in groupby(news, key=lambda each: each[:3]):
            self.tell(model, ticket, key, list(some))

    def _let_go(self, names: Sequence[ObjectName]) -> None:
        """Note evicted objects, from any thread: an object less is a block less."""
        with self._lock:
            is_first = not self._gone
            room = MOST_GONE - len(self._gone)
            self._gone |= dict.fromkeys((name.scope, name.key) for name in names[: max(0, room)])
            is_due = is_first and bool(self._gone)
        if is_due:
            self._post(self._deliver_gone)

    def _deliver_gone(self) -> None:
        with self._lock:
            gone, self._gone = self._gone, {}
        models = {shapes.scope: model for model, shapes in self.known_shapes.items()}
        for scope, some in groupby(gone, key=lambda each: each[0]):
            if scope in models:
                self.tell_gone(models[scope], [key for _, key in some])


TELL_SECONDS = 60.0
"""Least time between two log lines that say that a tier was given up, or that its calls hang, seconds."""
HANG_SECONDS = 2.0
"""Time for which calls are late before they are said to hang, seconds."""


class StateLog:
    """Logs changes of a tier's state. What changes to and fro is a line a minute at most, and its end another."""

    def __init__(self, tier: str, breaker: Breaker) -> None:
        self._tier = tier
        self._breaker = breaker
        self._opened = 0
        self._unused_since: float | None = None
        self._late_since: float | None = None
        self._hangs = False
        self._tell_at = {"given up": float("-inf"), "hang": float("-inf")}

    def look(self, now: float, late: int, problem: str) -> None:
        """``late``: objects that have not come back in time; ``problem``: of the engine's ``totals``."""
        breaker = self._breaker
        if breaker.is_closed:
            if self._unused_since is not None:
                events.event("storage_used_again", tier=self._tier, seconds=round(now - self._unused_since, 1))
                self._unused_since = None
        elif self._unused_since is None and self._is_due("given up", now):
            times, self._opened = breaker.opened - self._opened, breaker.opened
            events.warning("storage_given_up", tier=self._tier, reason=problem or breaker.reason, times=times)
            self._unused_since = now
        if not late:
            if self._hangs:
                events.event("storage_calls_back", tier=self._tier)
            self._late_since, self._hangs = None, False
            return
        self._late_since = now if self._late_since is None else self._late_since
        if not self._hangs and now - self._late_since >= HANG_SECONDS and self._is_due("hang", now):
            events.warning("storage_calls_hang", tier=self._tier, objects=late)
            self._hangs = True

    def _is_due(self, line: str, now: float) -> bool:
        is_due = now >= self._tell_at[line]
        if is_due:
            self._tell_at[line] = now + TELL_SECONDS
        return is_due


# A request to the engine until it is begun: it ends, even if its carrier fails.
#
#     WAITING ── claim ──▶ CLAIMED ── begun ──▶ BEGUN     the store reports each item, or that it is LATE
#        └── expire, fail ────┴── fail ───────▶ OVER      all of it was refused: no byte moves for it
#
# What was begun has a deadline of its own, after which its memory is in quarantine until the engine answers after all.


class Stage(Enum):
    WAITING = "waiting"
    CLAIMED = "claimed"
    BEGUN = "begun"
    OVER = "over"


@dataclass(eq=False, slots=True)
class StorageRequest:
    """Objects of some blocks, by block. ``tell`` gets the news of all of them where they end before they are begun:
    BUSY, or FAILED where the engine was asked (``was_put``). ``deadline``: monotonic seconds. Any thread."""

    verb: Verb
    blocks: Blocks
    shapes: Shapes
    objects: Sequence[tuple[int, Shape]]
    deadline: float
    tell: Callable[[Sequence[News]], None]
    was_put: bool = False
    stage: Stage = Stage.WAITING
    lock: threading.Lock = field(default_factory=threading.Lock)

    def news(self, outcome: Outcome | None = None) -> list[News]:
        model, ticket, keys, _, _ = self.blocks
        key = b"" if ticket else keys
        return [News(model.id, ticket, key, block, shape, outcome) for block, shape in self.objects]

    def names(self) -> list[ObjectName]:
        scope, keys = self.shapes.scope, self.blocks.keys
        return [ObjectName(scope, key_at(keys, block), shape.part) for block, shape in self.objects]

    @property
    def is_settled(self) -> bool:
        """True where the request needs no further care."""
        return self.stage in (Stage.BEGUN, Stage.OVER)

    def claim(self) -> bool:
        """Claim the request: the claimer begins it, or fails it. False where it is over."""
        with self.lock:
            is_mine = self.stage is Stage.WAITING
            if is_mine:
                self.stage = Stage.CLAIMED
        return is_mine

    def begun(self) -> None:
        """Note that the store reports its items from now on."""
        with self.lock:
            assert self.stage is Stage.CLAIMED, "it was claimed before it begins"
            self.stage = Stage.BEGUN

    def expire(self) -> None:
        """End a request whose time has passed. No-op once it was begun."""
        self._end(Stage.WAITING)

    def fail(self) -> None:
        """Fail the request of a broken carrier. No-op where it was begun."""
        self.was_put = True
        self._end(Stage.WAITING, Stage.CLAIMED)

    def _end(self, *stages: Stage) -> None:
        with self.lock:
            if self.stage not in stages:
                return
            self.stage = Stage.OVER
        self.tell(self.news(Outcome.FAILED if self.was_put else Outcome.BUSY))


# Circuit breaker of a storage engine: decides whether it is used. It opens on errors and on latency, since what is
# frozen does not err, and closes when a canary came back: no engine's word is taken for its health.

LAST_OUTCOMES = 32
MOST_BAD = 8.0
"""Weighed sum of the last outcomes above which the breaker opens."""


class State(Enum):
    """CLOSED: the engine is used. OPEN: it is not. PROBING: a canary is on its way."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Breaker of one engine, for one thread. ``reason``: why it opened last; ``opened``: how often it has."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.reason = ""
        self.opened = 0
        self._back_off = BackOff()
        self._last: deque[float] = deque(maxlen=LAST_OUTCOMES)

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def note(self, bad: float, reason: str, now: float) -> None:
        """An outcome: 0 is good, 1 an error; what only does not help lies between. ``reason``: what it was."""
        self._last.append(bad)
        if bad and self.is_closed and sum(self._last) > MOST_BAD:
            self.open(reason, now)

    def open(self, reason: str, now: float) -> None:
        """Use the engine no more, until a canary comes back."""
        if self.is_closed:
            self.state, self.reason, self._back_off = State.OPEN, reason, BackOff()
            self.opened += 1
            self._back_off.failed(now)

    def hurry(self, now: float) -> None:
        """Send the next canary now: what kept the engine from working has passed."""
        self._back_off.pause, self._back_off.until = FIRST_PAUSE_SECONDS, now

    def wants_probe(self, now: float) -> bool:
        """True once a canary is due; it is on its way then."""
        if self.state is State.OPEN and now >= self._back_off.until:
            self.state = State.PROBING
            return True
        return False

    def probed(self, now: float, *, is_good: bool) -> None:
        """The canary came back whole and in time, or it did not: then a longer pause."""
        if self.state is not State.PROBING:
            return
        if is_good:
            self.state = State.CLOSED
            self._last.clear()
            return
        self.state = State.OPEN
        self._back_off.failed(now)


SCOPE = Scope(bytes(32), b"canary".ljust(LAYOUT_ID_BYTES, b"\0"))
CANARY_BYTES = 4096

Flown = Callable[[bool], None]


class Canary:
    """Flies once at a time, in registered memory; what a late one has is left to the engine, and new is taken."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._page: memoryview | None = None

    def fly(self, deadline: float, flown: Flown) -> None:
        """Write a canary and read it back: ``flown`` is called once, on any thread, with whether it came back by
        ``deadline`` (monotonic seconds)."""
        page = self._take_page()
        content = secrets.token_bytes(CANARY_BYTES)
        page[:] = content
        name = ObjectName(SCOPE, secrets.token_bytes(32), Part(0, 0, 1))

        def put(_: int, outcome: Outcome) -> None:
            if outcome is not Outcome.OK:  # an engine that is full, and says so at once, can still be read
                self._end(page, outcome, flown, is_good=outcome is Outcome.BUSY)
                return
            page[:] = bytes(CANARY_BYTES)
            self._store.prepare(Verb.GET, [name], [(page,)], deadline, got, nothing)()

        def got(_: int, outcome: Outcome) -> None:
            is_good = outcome is Outcome.OK and page == content
            self._store.backend.remove([name])
            self._end(page, outcome, flown, is_good=is_good)

        back = partial(self._store.backend.remove, [name])
        self._store.prepare(Verb.PUT, [name], [(page,)], deadline, put, lambda _: back())()

    def _take_page(self) -> memoryview:
        page, self._page = self._page, None
        if page is None:
            page = memoryview(mmap.mmap(-1, CANARY_BYTES))
            self._store.backend.register(page)
        return page

    def _end(self, page: memoryview, outcome: Outcome, flown: Flown, *, is_good: bool) -> None:
        if outcome is not Outcome.LATE:
            self._page = page
        flown(is_good)


class News(NamedTuple):
    """News of an object: of a fetch (``ticket``), or of a block that was written (``key``)."""

    model: int
    ticket: int
    key: bytes
    block: int
    shape: Shape
    outcome: Outcome | None  # None: it was LATE, and is back


class Blocks(NamedTuple):
    """Blocks of a fetch (``ticket``), or (0) one that is written. ``pages[g]`` has a host page for each of packed
    ``keys``, or NO_PAGE. ``parent``: the key of the block above the first; empty for none."""

    model: ModelFacts
    ticket: int
    keys: bytes
    pages: Sequence[Sequence[int]]
    parent: bytes


def objects_of(shapes: Shapes, blocks: Blocks) -> list[tuple[int, Shape]]:
    """Objects of blocks for which there are host pages, by block."""
    return [
        (block, shape)
        for block in range(len(blocks.keys) // KEY_BYTES)
        for shape in (*shapes.full, *shapes.windows)
        if all(blocks.pages[group][block] != NO_PAGE for group in shape.groups)
    ]


Tell = Callable[[int, int, bytes, list[News]], None]
"""``(model, ticket, key, news)``: of one fetch or one written block. On the ledger thread."""


TellGone = Callable[[int, list[bytes]], None]
"""``(model, keys)``: of blocks that the engine has let go of. On the ledger thread."""
