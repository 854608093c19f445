"""The simulated node with storage below it that delays, loses, lies, and writes after its waiters have gone.

The storage's objects survive a world: the next one of the same seed is the daemon after a restart.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.flows import pinning
from cachesvc.model.words import Inward, WritePolicy
from cachesvc.policy.eviction import WriteRule
from cachesvc.service.calls.telemetry import StorageFlows
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.spec import TierOptions, WriteWhen
from cachesvc.storage.tier import Tier
from cachesvc.storage.tiers import Tiers
from cachesvc.storage.workers import Job, Workers, nothing
from tests.sim.sim_storage import FAULTS, SimStorage
from tests.sim.world import LOOKS, World

STORAGE_SHARE = 0.5
"""Share of the events that are the storage's."""


class InboxWorkers(Workers[None]):
    """Runs jobs when the simulator delivers them."""

    def __init__(self, inbox: deque[Callable[[], object]]) -> None:
        super().__init__("inbox", 0, nothing)
        self._inbox = inbox

    def start(self) -> None:
        """Nothing runs by itself."""

    def add(self, jobs: Sequence[Job[None]]) -> None:
        self._inbox.extend(partial(job.run, None) for job in jobs)

    def close(self) -> bool:
        """Deliver what was added all the same."""
        return True


class StorageWorld(World):
    """``before``: the world of the daemon before, whose objects are there still. Of each third seed there are
    two tiers."""

    def __init__(self, seed: int, before: StorageWorld | None = None, looks: float = LOOKS) -> None:
        super().__init__(seed, looks)
        self._luck = random.Random(f"storage of {seed}")
        policies = (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)
        self.node.core.writing = WriteRule(self._luck.choice(policies))
        node = self.node
        self.stores = [self._engine(seed + number) for number in range(1 + (seed % 3 == 1))]
        for engine, old in zip(self.stores, before.stores if before else (), strict=False):
            engine.objects = old.objects
        self.tiers = Tiers([self._tier(engine) for engine in self.stores], lambda: node.now)
        self.flows = StorageFlows(self.tiers, node.core, lambda _, flow: node.run(flow))
        self.tiers.start()

    def _engine(self, seed: int) -> SimStorage:
        odds = {fault: self._luck.choice((0.0, 0.0, 0.0, 0.03, 0.15)) for fault in FAULTS}
        odds["invent"] = self._luck.choice((0.0, 0.0, 0.02))
        return SimStorage(seed, odds, knows=self._luck.random() < 0.6)

    def _tier(self, engine: SimStorage) -> Tier:
        node = self.node
        write = self._luck.choice((WriteWhen.THROUGH, WriteWhen.THROUGH, WriteWhen.SELECTIVE, WriteWhen.NEVER))
        options = TierOptions(write=write, write_rate=self._luck.choice((4096, 1 << 20)), deadline=8.0)
        return Tier(
            ObjectStore(engine, lambda: node.now),
            options,
            node.vault.host_view,
            node.inbox.append,
            lambda: node.now,
            workers=lambda _: InboxWorkers(node.inbox),
        )

    def step(self) -> None:
        """An event of the storage, or any other."""
        if self._luck.random() > STORAGE_SHARE:
            super().step()
            return
        self.steps += 1
        events: dict[str, tuple[float, Callable[[], object]]] = {
            "moves": (20, self._move),
            "delivers": (20, self.node.deliver),
            "tidies": (20, self.node.tidy),
            "ticks": (5, partial(self.node.run, self.flows.tick)),
            "freezes": (0.2, self._freeze),
            "thaws": (2, self._thaw),
            "evicts": (2, self._evict_all),
            "is lost": (0.2, self._lose),
            "is back": (2, self._return),
        }
        self._luck.choices([call for _, call in events.values()], [weight for weight, _ in events.values()])[0]()
        self.check()

    def _move(self) -> None:
        for store in self.stores:
            store.step(self.node.now)

    def _evict_all(self) -> None:
        """Nothing is left in memory that may go: what comes next is asked of storage."""
        for model in list(self.node.core.ledger.models.values()):
            for tier in ("device", "host", "device"):
                self.node.run(partial(pinning.evict, self.node.core, model.id, tier, 0))

    def _lose(self) -> None:
        """The storage is away, with all that it had."""
        store = self._luck.choice(self.stores)
        if not store.away:
            store.lose("its folder is gone")
            self.faults["storage_lost"] += 1

    def _return(self) -> None:
        for store in self.stores:
            store.away = ""

    def _freeze(self) -> None:
        self._luck.choice(self.stores).frozen = True
        self.faults["storage_frozen"] += 1

    def _thaw(self) -> None:
        for engine in self.stores:
            if engine.frozen:
                engine.frozen = False
                if self._luck.random() < 0.5:
                    engine.land_late()
                    self.faults["storage_landed_late"] += 1

    def _settle(self) -> None:
        """All that was begun ends, late as it may be."""
        for engine in self.stores:
            engine.frozen = False
        super()._settle()
        while any(engine.waiting for engine in self.stores):
            for engine in self.stores:
                engine.land_late()
            super()._settle()

    def finish(self) -> None:
        """Finish like any world; the storage holds no page either."""
        super().finish()
        counters = self.node.core.counters
        for name in ("storage_fetches", "storage_fetched_blocks", "storage_kept_blocks", "storage_not_kept_blocks"):
            self.node.events[name] += counters.get(name, 0)
        for model in self.node.core.ledger.models.values():
            assert model.stored.is_idle, "a storage call still reads or writes host pages"
            assert not model.stored.fetching
            self.node.events["storage_hits"] += model.hit_blocks["storage"]
        running = self.node.core.ledger.tickets.running.values()
        assert not [ticket for ticket in running if ticket.direction is Inward.FETCH]
        assert self.tiers.is_idle, "a fetch or a write has no end"
        for engine, tier in zip(self.stores, self.tiers.all, strict=True):
            assert not tier.under_way, "bytes of a write that ended are under way"
            self.faults.update(engine.faults)
            self.faults["breaker_opened"] += tier.breaker.opened
        if len(self.stores) > 1:
            self.node.events["blocks_promoted"] += self.flows.promoted_blocks


def run_twice(seed: int, steps: int, looks: float = LOOKS) -> tuple[StorageWorld, StorageWorld]:
    """A daemon's life, and the next one's on the same storage. An AssertionError names the seed and the step."""
    worlds: list[StorageWorld] = []
    for storage in range(2):
        world = StorageWorld(seed, worlds[0] if storage else None, looks)
        worlds.append(world)
        try:
            while world.steps < steps:
                world.step()
            world.finish()
        except Exception as error:
            error.add_note(f"replay: tests.sim.storage_world.run_twice({seed}, {steps}), life {storage}, {world.steps}")
            raise
    return worlds[0], worlds[1]
