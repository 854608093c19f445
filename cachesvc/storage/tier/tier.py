"""The storage tier of a daemon: one engine, the breaker before it, the budget of writes, and news for the ledger.

The ledger thread asks here and goes on; what takes time is done by two couriers and the engine's own threads. News
comes back in batches, by ``post``, in the order in which it arose.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from cachesvc.model.errors import CacheError
from cachesvc.model.keys import KEY_BYTES
from cachesvc.model.text.printable import one_line
from cachesvc.model.words import NO_PAGE
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import Chooser, ObjectName, Outcome, Scope, StorageBackend, Use, key_at
from cachesvc.storage.shapes import ModelFacts, Shape, Shapes, shapes_of
from cachesvc.storage.spec import TierOptions, WriteWhen
from cachesvc.storage.tier.breaker import Breaker, State
from cachesvc.storage.tier.budget import WriteBudget
from cachesvc.storage.tier.canary import Canary
from cachesvc.storage.tier.coming import Coming, News, Tell, TellGone
from cachesvc.storage.tier.courier import Carrier, Courier
from cachesvc.storage.tier.presence import Presence, StateLog
from cachesvc.storage.tier.request import StorageRequest

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


class Tier:
    """``name``: in the log, metrics and status; ``late``: objects that have not come back in time. ``tell`` gets the
    news of each request; ``tell_lost``: called when the engine has lost all that it had.
    ``clock``: monotonic seconds."""

    def __init__(
        self,
        store: ObjectStore,
        options: TierOptions,
        view: View,
        post: Post,
        clock: Callable[[], float],
        carriers: Callable[[str], Carrier] = Courier,
        name: str = "",
    ) -> None:
        self.store = store
        self.name = name or store.backend.kind
        self.late = 0
        self.backend: StorageBackend = store.backend
        self.options = options
        self.wait_seconds = options.wait
        self.keeps_all = options.write is WriteWhen.THROUGH
        self.keeps_used = options.write is not WriteWhen.NEVER
        self.breaker = Breaker()
        self.budget = WriteBudget(options.write_rate, UNDER_WAY_BYTES, clock())
        self.tell: Tell | None = None
        self.tell_gone: TellGone | None = None
        self.tell_lost: Callable[[], None] | None = None
        self._view = view
        self._post = post
        self._clock = clock
        self._getting, self._putting = carriers("storage-get"), carriers("storage-put")
        self._canary = Canary(store)
        self._canary_until = 0.0
        self._requests: deque[StorageRequest] = deque()
        self._shapes: dict[int, Shapes] = {}
        self._passed_over = 0
        self._presence = Presence(self.backend, self.breaker)
        self._log = StateLog(self.name, self.breaker)
        self._last_news = float("-inf")
        self._news: deque[News] = deque()
        self._gone: dict[tuple[Scope, bytes], None] = {}
        self._lock = threading.Lock()

    @property
    def problem(self) -> str:
        """The engine's own word for what is wrong with it; empty where it has none."""
        return self.backend.totals().problem

    def start(self) -> None:
        """Begin. Raises a CacheError that says what is missing."""
        self.backend.watch(self._let_go)
        self.store.start()
        self._getting.start()
        self._putting.start()

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        self._getting.close()
        self._putting.close()
        self.backend.close()

    # -- on the ledger thread ------------------------------------------------------------------------------------

    def shapes(self, model: ModelFacts) -> Shapes:
        """Shapes of the model's objects."""
        known = self._shapes.get(model.id)
        if known is None:
            known = self._shapes[model.id] = shapes_of(model)
            self.backend.describe(known.scope, one_line(model.name))
        return known

    def forget(self, model_id: int) -> None:
        """A model is gone: numbers are not used again."""
        self._shapes.pop(model_id, None)

    def expects(self, model: ModelFacts, keys: bytes) -> int | None:
        """Number of leading packed ``keys`` worth fetching; None where the engine must be asked."""
        if not self.breaker.is_closed:
            return 0
        shapes = self.shapes(model)
        if not self._is_fast_enough(model, shapes):
            return 0
        return self.store.expects(shapes.scope, keys, shapes.parts)

    def used(self, model: ModelFacts, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """Blocks were used in memory: their objects are as recently used, as far as the engine evicts by that."""
        if self.backend.caps.follows_use:
            scope = self.shapes(model).scope
            self._getting.add(partial(self.backend.used, scope, uses, chooser), lambda: None)

    def has(self, model: ModelFacts, key: bytes) -> bool:
        """True where the engine believes to have all of a block, as far as it knows without asking."""
        shapes = self.shapes(model)
        return bool(self.store.expects(shapes.scope, key, shapes.parts))

    def has_by_number(self, model_id: int, key: bytes) -> bool:
        """Answer as ``has``, of a model that was asked about before."""
        shapes = self._shapes.get(model_id)
        return shapes is not None and bool(self.store.expects(shapes.scope, key, shapes.parts))

    def _is_fast_enough(self, model: ModelFacts, shapes: Shapes) -> bool:
        rate, seen = self.options.recompute, self.store.bandwidth(Verb.GET)
        if not rate or not seen or shapes.block_bytes / seen <= model.layout.block_tokens / rate:
            return True
        self._passed_over += 1
        return self._passed_over % TRY_ANYWAY == 0

    def fetch(
        self,
        model: ModelFacts,
        ticket: int,
        keys: bytes,
        pages: Sequence[Sequence[int]],
        parent: bytes = b"",
        some: Sequence[tuple[int, Shape]] | None = None,
    ) -> list[int]:
        """Bring blocks to host pages, the first of them below the block ``parent``; returns of each block how many
        objects come. ``some``: objects to bring, by block; None: all that have pages."""
        coming = Coming(model.id, self.shapes(model), ticket, keys, pages, parent, some)
        request = self._ask(lambda outcome: self._refuse(coming.news(), outcome))
        self._getting.add(partial(self._fetch, request, coming), request.fail)
        counts = Counter(block for block, _ in coming.wanted())
        return [counts[block] for block in range(len(keys) // KEY_BYTES)]

    def keep(self, model: ModelFacts, key: bytes, pages: Sequence[int], parent: bytes = b"") -> int:
        """Write a block below the block ``parent`` from its host pages; returns how many objects are on their way."""
        shapes = self.shapes(model)
        objects = [
            shape for shape in (*shapes.full, *shapes.windows) if all(pages[group] != NO_PAGE for group in shape.groups)
        ]
        if objects:
            self.budget.begin(shapes.block_bytes)
            news = [News(model.id, 0, key, 0, shape.groups, None) for shape in objects]
            request = self._ask(partial(self._refuse, news))
            self._putting.add(partial(self._keep, request, news, shapes.scope, objects, pages, parent), request.fail)
        return len(objects)

    def _ask(self, refuse: Callable[[Outcome], None]) -> StorageRequest:
        request = StorageRequest(self._clock() + self.options.deadline, refuse)
        self._requests.append(request)
        return request

    def kept(self, model: ModelFacts) -> None:
        """Note that all objects of a written block have ended."""
        self.budget.end(self.shapes(model).block_bytes)

    def room(self) -> int:
        """Bytes that may be written now."""
        return self.budget.room(self._clock()) if self.breaker.is_closed else 0

    def lagged(self) -> None:
        """Note that a call has waited for the longest time in vain. Where others got something meanwhile the engine is
        slow, and not frozen."""
        now = self._clock()
        if now - self._last_news >= self.wait_seconds and not self.backend.caps.keeps_health:
            self.breaker.open(f"nothing came within {self.wait_seconds} s", now)

    def tick(self) -> None:
        """Do periodic work: end waits, and send a canary where one is due."""
        now = self._clock()
        if self._presence.look(now) and self.tell_lost is not None:
            self.tell_lost()
        while self._requests and (self._requests[0].is_settled or self._requests[0].deadline <= now):
            self._requests.popleft().expire()
        self.late = self.store.expire()
        if self.breaker.state is State.PROBING and now >= self._canary_until:
            self.breaker.probed(now, is_good=False)
        if self.breaker.wants_probe(now):
            deadline = now + max(self.wait_seconds, 0.05)
            self._canary_until = deadline + LOST_SECONDS
            self._putting.add(partial(self._canary.fly, deadline, self._flown), partial(self._flown, False))
        self._log.look(now, self.late, self.problem)

    def _flown(self, is_good: bool) -> None:
        is_in_time = self._clock() <= self._canary_until - LOST_SECONDS  # else BUSY may be of one that waited too long
        self._post(lambda: self.breaker.probed(self._clock(), is_good=is_good and is_in_time))

    # -- on couriers ---------------------------------------------------------------------------------------------

    def _fetch(self, request: StorageRequest, coming: Coming) -> None:
        shapes, keys = coming.shapes, coming.keys
        if request.is_settled:
            return
        wanted = coming.wanted()
        first = key_at(keys, wanted[0][0]) if wanted else b""
        if self.store.expects(shapes.scope, first, shapes.parts) is not None:
            self._get(request, coming)
            return
        names = [ObjectName(shapes.scope, key_at(keys, block), shape.part) for block, shape in wanted]

        def found(there: Sequence[bool] | None) -> None:
            if there is None:
                request.fail()
                return
            missing = (
                block
                for (block, shape), is_there in zip(wanted, there, strict=True)
                if not is_there and shape in shapes.full
            )
            self._getting.add(partial(self._get, request, coming, next(missing, None)), request.fail)

        request.put_to_engine()
        self.backend.exists(names, request.deadline, found)

    def _get(self, request: StorageRequest, coming: Coming, end: int | None = None) -> None:
        """Ask for the blocks before ``end``; the rest does not come."""
        if not request.claim():
            return
        news, shapes = coming.news(), coming.shapes
        wanted = [(block, shape) for block, shape in coming.wanted() if end is None or block < end]
        names = [ObjectName(shapes.scope, key_at(coming.keys, block), shape.part) for block, shape in wanted]
        try:
            views = [
                tuple(self._view(coming.model, group, rank, coming.pages[group][block]) for group, rank in shape.pieces)
                for block, shape in wanted
            ]
        except CacheError:  # the host pool is closed: the daemon ends
            request.begun()
            self._refuse(news, Outcome.BUSY)
            return
        begin = self._prepare(Verb.GET, names, views, news, [coming.parent_of(block) for block, _ in wanted])
        request.begun()
        self._refuse(news[len(wanted) :], Outcome.BUSY)  # never promised: nothing against the engine
        begin()

    def _keep(
        self,
        request: StorageRequest,
        news: list[News],
        scope: Scope,
        objects: list[Shape],
        pages: Sequence[int],
        parent: bytes,
    ) -> None:
        if not request.claim():
            return
        model = news[0].model
        names = [ObjectName(scope, news[0].key, shape.part) for shape in objects]
        try:
            views = [tuple(self._view(model, group, rank, pages[group]) for group, rank in s.pieces) for s in objects]
        except CacheError:  # as above
            request.begun()
            self._refuse(news, Outcome.BUSY)
            return
        begin = self._prepare(Verb.PUT, names, views, news, [parent] * len(names))
        request.begun()
        begin()

    def _prepare(
        self,
        verb: Verb,
        names: list[ObjectName],
        views: list[tuple[memoryview, ...]],
        news: list[News],
        parents: list[bytes],
    ) -> Callable[[], None]:
        return self.store.prepare(
            verb,
            names,
            views,
            self._clock() + self.options.deadline,
            lambda index, outcome: self._tell_later(news[index]._replace(outcome=outcome)),
            lambda index: self._tell_later(news[index]),
            parents,
        )

    # -- news ----------------------------------------------------------------------------------------------------

    def _refuse(self, news: Sequence[News], outcome: Outcome) -> None:
        """Objects have ended, and were never begun."""
        for each in news:
            self._tell_later(each._replace(outcome=outcome))

    def _tell_later(self, news: News) -> None:
        """Queue news, from any thread."""
        with self._lock:
            self._news.append(news)
            is_first = len(self._news) == 1
        if is_first:
            self._post(self._deliver)

    def _deliver(self) -> None:
        """Deliver news on the ledger thread."""
        with self._lock:
            news, self._news = self._news, deque()
        now = self._clock()
        for each in news:
            if each.outcome is not Outcome.LATE:
                self._last_news = now
            if each.outcome is not None and not self.backend.caps.keeps_health:
                verb = "get" if each.ticket else "put"
                self.breaker.note(BAD.get(each.outcome, 1.0), f"{verb}: {each.outcome.value}", now)
        if self.tell is not None:
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
        """Deliver evictions on the ledger thread."""
        with self._lock:
            gone, self._gone = self._gone, {}
        models = {shapes.scope: model for model, shapes in self._shapes.items()}
        for scope, some in groupby(gone, key=lambda each: each[0]):
            if scope in models and self.tell_gone is not None:
                self.tell_gone(models[scope], [key for _, key in some])

    @property
    def state(self) -> State:
        """State of the breaker."""
        return self.breaker.state
