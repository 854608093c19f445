"""Several storage tiers as one, the fastest first: each has an engine, a breaker, a budget and a write policy.

A block is read from the first tier that is expected to have it; what a tier does not bring after all is asked of those
below. What comes from below is owed to the tiers above: it is written there once there is time. A tier that is given up
is passed over by reads and writes, so a dead one slows no other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.seam import CAME, Chooser, ModelFacts, Outcome, Shape, Use, key_at
from cachesvc.storage.spec import WriteWhen
from cachesvc.storage.tier import Blocks, News, Tell, TellGone, Tier, objects_of
from cachesvc.storage.workers import nothing

MOST_TIERS = 4
MOST_OWED = 1 << 16
"""Blocks that are owed to a tier; more are passed over."""
OWED_AT_ONCE = 256
ELSEWHERE = frozenset((Outcome.MISS, Outcome.WRONG, Outcome.BUSY, Outcome.FAILED))
"""Outcomes after which a tier below is asked for the object: no byte of the engine's moves any more."""

Owed = Callable[[int, list[bytes]], None]
"""``(model, keys)``: blocks that are to be written to a tier, if they are on the host still. On the ledger thread."""


@dataclass(slots=True)
class Route:
    """A fetch under way. ``out``: objects that have not come back, by tier."""

    blocks: Blocks
    since: float
    out: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Writing:
    """A block that is being written. ``first``: the tier whose outcome counts; ``out``: objects by tier."""

    model: ModelFacts
    first: int
    out: dict[int, int]


class Tiers:
    """One tier or more. ``stores``: those that are configured as storage, all but the other nodes; ``are_several``:
    there is more than one of these. ``tell`` gets the news of each request, ``owed`` what is to be written once more.
    For the ledger thread. ``clock``: monotonic seconds."""

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float]) -> None:
        self.all = tuple(tiers)
        self.stores = tuple(tier for tier in tiers if not tier.backend.caps.keeps_health)
        self.are_several = len(self.stores) > 1
        self.wait_seconds = max(tier.options.wait for tier in tiers)
        self.keeps_all = any(tier.keeps_all for tier in tiers)
        self.keeps_used = any(tier.keeps_used for tier in tiers)
        self.tell: Tell = nothing
        self.tell_gone: TellGone = nothing
        self.tell_lost: Callable[[], None] = nothing
        self.owed: Owed = nothing
        self._clock = clock
        self._routes: dict[int, Route] = {}
        self._writing: dict[tuple[int, bytes], Writing] = {}
        self._waiting = [OrderedDict[tuple[int, bytes], None]() for _ in tiers]
        self._due = [OrderedDict[tuple[int, bytes], None]() for _ in tiers]
        for number, tier in enumerate(tiers):
            tier.tell = partial(self._told, number)
            tier.tell_gone = partial(self._gone, number)
            tier.tell_lost = lambda: self.tell_lost()  # noqa: PLW0108 - it is set later

    @property
    def is_idle(self) -> bool:
        """True where nothing is read or written."""
        return not self._routes and not self._writing

    def start(self) -> None:
        """Begin. Raises a CacheError that says what is missing."""
        for tier in self.all:
            tier.start()

    def close(self) -> None:
        for tier in self.all:
            tier.close()

    def register(self, chunk: memoryview) -> None:
        for tier in self.all:
            tier.backend.register(chunk)

    def forget(self, model_id: int) -> None:
        """A model is gone: numbers are not used again."""
        for tier in self.all:
            tier.forget(model_id)

    def tick(self) -> None:
        """Do periodic work of each tier, give up those that bring nothing, and announce what is owed."""
        for tier in self.all:
            tier.tick()
        if len(self.all) > 1:
            self._give_up_silent()
        if self.are_several:
            for number in range(len(self.all)):
                self._announce(number)

    # -- reading -------------------------------------------------------------------------------------------------

    def expects(self, model: ModelFacts, keys: bytes) -> int | None:
        """Number of leading packed ``keys`` that some tier or other is expected to have; None where one must be asked
        for the first."""
        known, total = 0, len(keys) // KEY_BYTES
        while known < total:
            _, count = self._first_with(model, keys[known * KEY_BYTES :])
            if not count:
                return known or count
            known += count
        return known

    def _first_with(self, model: ModelFacts, keys: bytes) -> tuple[int, int | None]:
        """The first tier that is expected to have some of packed ``keys``, and how many of the first; None where it
        must be asked for them, 0 where no tier has any."""
        answers = [tier.expects(model, keys) for tier in self.all]
        at = next((at for at, answer in enumerate(answers) if answer), -1)
        if at < 0:
            at = answers.index(None) if None in answers else 0
        return at, answers[at]

    def has(self, model: ModelFacts, key: bytes) -> bool:
        """True where a tier believes to have all of a block."""
        return any(tier.has(tier.shapes(model), key) for tier in self.all)

    def fetch(
        self, model: ModelFacts, ticket: int, keys: bytes, pages: Sequence[Sequence[int]], parent: bytes = b""
    ) -> list[int]:
        """Bring blocks to host pages, the first of them below the block ``parent``; returns of each block how many
        objects come."""
        blocks, total = Blocks(model, ticket, keys, pages, parent), len(keys) // KEY_BYTES
        objects = objects_of(self.all[0].shapes(model), blocks)
        if objects:
            self._routes[ticket] = route = Route(blocks, self._clock())
            plan: list[int] = []
            while len(plan) < total:
                number, count = self._first_with(model, keys[len(plan) * KEY_BYTES :])
                plan += [number] * (count or total - len(plan))
            shares: dict[int, list[tuple[int, Shape]]] = {}
            for block, shape in objects:
                shares.setdefault(plan[block], []).append((block, shape))
            for number, some in shares.items():
                self._ask(route, number, some)
        counts = Counter(block for block, _ in objects)
        return [counts[block] for block in range(total)]

    def _ask(self, route: Route, number: int, some: list[tuple[int, Shape]]) -> None:
        route.out[number] += len(some)
        self.all[number].fetch(route.blocks, some)

    def lagged(self) -> None:
        for number in {at for route in self._routes.values() for at, out in route.out.items() if out}:
            self.all[number].lagged()

    def _give_up_silent(self) -> None:
        """Give up tiers that have brought nothing for as long as a call waits: blocks that came from others hide it."""
        now = self._clock()
        for number, tier in enumerate(self.all):
            since = [route.since for route in self._routes.values() if route.out[number]]
            if since and now - min(since) >= tier.options.wait:
                tier.lagged()

    # -- writing -------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Bytes that may be written now, to the first tier that is used and written."""
        return next((tier.room() for tier in self._written()), 0)

    def _written(self) -> list[Tier]:
        used = [tier for tier in self.all if tier.keeps_used and tier.breaker.is_closed]
        return used or [tier for tier in self.all if tier.keeps_used][:1]

    def keep(self, model: ModelFacts, key: bytes, pages: Sequence[int], parent: bytes = b"") -> int:
        """Write a block to the tiers that want it, as ``Tier.keep``."""
        at = model.id, key
        out: dict[int, int] = {}
        for number, tier in enumerate(self.all):
            if tier.backend.caps.keeps_health:
                continue
            is_due = at in self._due[number]
            self._due[number].pop(at, None)
            if self.are_several and not self._takes(number, model, key, is_due=is_due):
                continue
            if out and tier.room() < tier.shapes(model).block_bytes:
                self._owe(number, at)  # a slow tier holds up no other
            elif count := tier.keep(model, key, pages, parent):
                out[number] = count
        if out:
            self._writing[at] = Writing(model, min(out), out)
        return sum(out.values())

    def _takes(self, number: int, model: ModelFacts, key: bytes, *, is_due: bool) -> bool:
        tier = self.all[number]
        if not tier.keeps_used or not tier.breaker.is_closed:
            return False
        is_wanted = is_due or not self.keeps_all or tier.options.write is WriteWhen.THROUGH
        return is_wanted and not tier.has(tier.shapes(model), key)

    def used(self, model: ModelFacts, uses: Sequence[Use], chooser: Chooser | None) -> None:
        """Blocks were used in memory: their copies are as recently used."""
        for tier in self.all:
            tier.used(model, uses, chooser)

    def owe(self, model: ModelFacts, length: int, key_of: Callable[[int], bytes]) -> None:
        """A path of blocks was used, whose key at each depth ``key_of`` tells: tiers that lack its end are owed it."""
        for number, tier in enumerate(self.all):
            if tier.keeps_used and tier.breaker.is_closed:
                shapes = tier.shapes(model)
                low = bisect_left(range(length), True, key=lambda at: not tier.has(shapes, key_of(at)))
                for depth in range(low, min(length, low + OWED_AT_ONCE)):
                    self._owe(number, (model.id, key_of(depth)))

    def _owe(self, number: int, at: tuple[int, bytes]) -> None:
        if len(self._waiting[number]) < MOST_OWED:
            self._waiting[number][at] = None

    def _announce(self, number: int) -> None:
        """Announce what is owed to a tier, while it has room."""
        waiting, due, tier = self._waiting[number], self._due[number], self.all[number]
        if not waiting or not tier.breaker.is_closed or not tier.room():
            return
        some = list(islice(waiting, OWED_AT_ONCE))
        by_model: dict[int, list[bytes]] = {}
        for at in some:
            del waiting[at]
            due[at] = None
            by_model.setdefault(at[0], []).append(at[1])
        while len(due) > MOST_OWED:
            due.popitem(last=False)
        for model, keys in by_model.items():
            self.owed(model, keys)

    # -- news ----------------------------------------------------------------------------------------------------

    def _told(self, number: int, model: int, ticket: int, key: bytes, news: list[News]) -> None:
        passed = self._fetched(number, ticket, news) if ticket else self._kept(number, (model, key), news)
        if passed:
            self.tell(model, ticket, key, passed)

    def _fetched(self, number: int, ticket: int, news: list[News]) -> list[News]:
        route = self._routes[ticket]
        model, _, keys, _, _ = route.blocks
        passed: list[News] = []
        again: dict[int, list[tuple[int, Shape]]] = {}
        for each in news:
            route.out[number] -= each.outcome is not Outcome.LATE
            key = key_at(keys, each.block)
            below = self._below(number, model, key) if each.outcome in ELSEWHERE else None
            if below is not None:
                again.setdefault(below, []).append((each.block, each.shape))
                continue
            passed.append(each)
            if each.outcome in CAME:
                for above in range(number):
                    if self.all[above].keeps_used:
                        self._owe(above, (model.id, key))
        for below, some in again.items():
            self._ask(route, below, sorted(some, key=lambda each: each[0]))
        if not any(route.out.values()):
            del self._routes[ticket]
        return passed

    def _below(self, number: int, model: ModelFacts, key: bytes) -> int | None:
        """The next tier below that may have a block."""
        below = range(number + 1, len(self.all))
        return next((at for at in below if self.all[at].expects(model, key) != 0), None)

    def _kept(self, number: int, at: tuple[int, bytes], news: list[News]) -> list[News]:
        writing = self._writing[at]
        writing.out[number] -= sum(each.outcome is not Outcome.LATE for each in news)
        if not writing.out[number]:
            self.all[number].kept(writing.model)
        if not any(writing.out.values()):
            del self._writing[at]
        if number == writing.first:
            return news
        return [each._replace(outcome=Outcome.OK) for each in news if each.outcome is not Outcome.LATE]

    def _gone(self, number: int, model_id: int, keys: list[bytes]) -> None:
        """A tier has let go of blocks: of those that no other has."""
        shapes = self.all[number].known_shapes[model_id]
        others = [tier for at, tier in enumerate(self.all) if at != number]
        gone = [key for key in keys if not any(tier.has(shapes, key) for tier in others)]
        if gone:
            self.tell_gone(model_id, gone)
