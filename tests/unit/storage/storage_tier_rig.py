"""A tier over an engine that acts on command, in a time of the test's."""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachesvc.model.layout import Layout
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import Outcome
from cachesvc.storage.spec import TierOptions
from cachesvc.storage.tier import News, Tier, objects_of
from cachesvc.storage.workers import Workers
from tests.sim.sim_storage import SimStorage
from tests.sim.storage_world import InboxWorkers
from tests.unit.rigs.ledger_rig import chain, one_group


@dataclass
class Facts:
    """A tier's facts of a model."""

    layout: Layout
    id: int = 1
    name: str = "m"
    namespace: bytes = b"n" * 32


@dataclass
class TierRig:
    """A tier in a time of the test's, with host pages by (group, rank, page)."""

    options: TierOptions = field(default_factory=TierOptions)
    engine: SimStorage = field(default_factory=SimStorage)
    layout: Layout = field(default_factory=one_group)
    workers: Callable[[deque[Callable[[], object]]], Workers[None]] = InboxWorkers

    def __post_init__(self) -> None:
        self.now = 50.0
        self.inbox: deque[Callable[[], object]] = deque()
        self.memory: dict[tuple[int, int, int], memoryview] = {}
        self.told: list[News] = []
        self.model = Facts(self.layout)
        store = ObjectStore(self.engine, lambda: self.now)
        self.tier = Tier(
            store, self.options, self.view, self.inbox.append, lambda: self.now, lambda _: self.workers(self.inbox)
        )
        self.tier.tell = lambda _model, _ticket, _key, news: self.told.extend(news)
        self.tier.start()

    def view(self, model: int, group: int, rank: int, page: int) -> memoryview:
        at = (group, rank, page)
        if at not in self.memory:
            self.memory[at] = memoryview(mmap.mmap(-1, 4096))[: self.layout.page_bytes(group)]
        return self.memory[at]

    def is_used(self) -> bool:
        return self.tier.breaker.is_closed

    def settle(self) -> None:
        while self.inbox or (self.engine.waiting and not self.engine.frozen):
            while self.inbox:
                self.inbox.popleft()()
            self.engine.crank(self.now)

    def outcomes(self) -> list[Outcome | None]:
        told, self.told = self.told, []
        return [news.outcome for news in told]

    def fetch(self, ticket: int, keys: bytes, pages: Sequence[Sequence[int]], parent: bytes = b"") -> list[int]:
        """Begin a fetch; returns of each block how many objects come."""
        objects = objects_of(self.tier.shapes(self.model), pages, len(keys) // 32)
        self.tier.fetch(self.model, ticket, keys, pages, parent, objects)
        counts = Counter(block for block, _ in objects)
        return [counts[block] for block in range(len(keys) // 32)]

    def keep(self, prompt: str, first_page: int = 0) -> None:
        """Write a prompt's blocks from pages that tell which they are."""
        keys = chain(*prompt)
        for at in range(len(prompt)):
            self.view(1, 0, 0, first_page + at)[:] = prompt[at].encode() * 8
            parent = keys[32 * at - 32 : 32 * at]
            self.tier.keep(self.model, keys[32 * at : 32 * at + 32], [first_page + at], parent)
        self.settle()
        assert set(self.outcomes()) == {Outcome.OK}
