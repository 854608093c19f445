"""A tier over an engine that acts on command, in a time of the test's."""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.model.layout import Layout
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.seam import Outcome
from cachesvc.storage.spec import TierOptions
from cachesvc.storage.tier import Blocks, News, Tier, objects_of
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


class Bench:
    """Engines that act on command, in a time of the test's, with host pages by (group, rank, page)."""

    def __init__(self, engines: Sequence[SimStorage], layout: Layout) -> None:
        self.now = 50.0
        self.engines = engines
        self.inbox: deque[Callable[[], object]] = deque()
        self.memory: dict[tuple[int, int, int], memoryview] = {}
        self.told: list[News] = []
        self.layout = layout
        self.model = Facts(layout)

    def view(self, model: int, group: int, rank: int, page: int) -> memoryview:
        at = (group, rank, page)
        if at not in self.memory:
            self.memory[at] = memoryview(mmap.mmap(-1, 4096))[: self.layout.page_bytes(group)]
        return self.memory[at]

    def tier_over(
        self,
        engine: SimStorage,
        options: TierOptions,
        workers: Callable[[deque[Callable[[], object]]], Workers[None]] = InboxWorkers,
    ) -> Tier:
        store = ObjectStore(engine, lambda: self.now)
        return Tier(store, options, self.view, self.inbox.append, lambda: self.now, lambda _: workers(self.inbox))

    def settle(self) -> None:
        while self.inbox or any(engine.waiting and not engine.frozen for engine in self.engines):
            while self.inbox:
                self.inbox.popleft()()
            for engine in self.engines:
                engine.crank(self.now)

    def outcomes(self) -> list[Outcome | None]:
        """Outcomes that were told, in the order of their blocks."""
        told, self.told = sorted(self.told, key=lambda each: each.block), []
        return [each.outcome for each in told]


class TierRig(Bench):
    """One tier."""

    def __init__(
        self,
        options: TierOptions = TierOptions(),  # noqa: B008 - immutable
        engine: SimStorage | None = None,
        layout: Layout | None = None,
        workers: Callable[[deque[Callable[[], object]]], Workers[None]] = InboxWorkers,
    ) -> None:
        self.engine = engine or SimStorage()
        super().__init__([self.engine], layout or one_group())
        self.options = options
        self.tier = self.tier_over(self.engine, options, workers)
        self.tier.tell = lambda _model, _ticket, _key, news: self.told.extend(news)
        self.tier.start()

    def is_used(self) -> bool:
        return self.tier.breaker.is_closed

    def fetch(self, ticket: int, keys: bytes, pages: Sequence[Sequence[int]], parent: bytes = b"") -> list[int]:
        """Begin a fetch; returns of each block how many objects come."""
        blocks = Blocks(self.model, ticket, keys, pages, parent)
        objects = objects_of(self.tier.shapes(self.model), blocks)
        self.tier.fetch(blocks, objects)
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
