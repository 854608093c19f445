"""The simulated node with storage below it that delays, loses, lies, and writes after its waiters have gone.

The storage's objects survive a world: the next one of the same seed is the daemon after a restart.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from cachesvc.flows.models import admin
from cachesvc.model.transfer import Inward
from cachesvc.model.words import WritePolicy
from cachesvc.policy.writing import WriteRule
from cachesvc.service.calls.storage_events import StorageFlows
from cachesvc.storage.objects import ObjectStore
from cachesvc.storage.spec import TierOptions, WriteWhen
from cachesvc.storage.tier.tier import Tier
from cachesvc.storage.tier.tiers import Tiers
from tests.sim.sim_storage import FAULTS, SimStorage
from tests.sim.world import LOOKS, World

STORAGE_SHARE = 0.5
"""Share of the events that are the storage's."""


class InboxCarrier:
    """Carries calls out when the simulator delivers them."""

    def __init__(self, inbox: deque[Callable[[], object]]) -> None:
        self._inbox = inbox

    def start(self) -> None:
        """Nothing runs by itself."""

    def add(self, call: Callable[[], None], fail: Callable[[], None]) -> None:
        self._inbox.append(call)

    def close(self) -> None:
        """Deliver what was added all the same."""


class StorageWorld(World):
    """``storage`` is what another world left, or new."""

    def __init__(self, seed: int, storage: SimStorage | None = None, looks: float = LOOKS) -> None:
        super().__init__(seed, looks)
        self._luck = random.Random(f"storage of {seed}")
        policies = (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)
        self.node.core.writing = WriteRule(self._luck.choice(policies))
        odds = {fault: self._luck.choice((0.0, 0.0, 0.0, 0.03, 0.15)) for fault in FAULTS}
        odds["invent"] = self._luck.choice((0.0, 0.0, 0.02))
        self.storage = SimStorage(seed, odds, knows=self._luck.random() < 0.6)
        if storage is not None:
            self.storage.objects = storage.objects
        node = self.node
        store = ObjectStore(self.storage, lambda: node.now)
        write = self._luck.choice((WriteWhen.THROUGH, WriteWhen.THROUGH, WriteWhen.SELECTIVE, WriteWhen.NEVER))
        options = TierOptions(write=write, write_rate=self._luck.choice((4096, 1 << 20)), deadline=8.0)
        self.tier = Tier(
            store,
            options,
            node.vault.host_view,
            node.inbox.append,
            lambda: node.now,
            carriers=lambda _: InboxCarrier(node.inbox),
        )
        self.flows = StorageFlows(Tiers([self.tier], lambda: node.now), node.core, lambda _, flow: node.run(flow))
        self.tier.start()

    def step(self) -> None:
        """An event of the storage, or any other."""
        if self._luck.random() > STORAGE_SHARE:
            super().step()
            return
        self.steps += 1
        events: dict[str, tuple[float, Callable[[], object]]] = {
            "moves": (20, partial(self.storage.step, self.node.now)),
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

    def _evict_all(self) -> None:
        """Nothing is left in memory that may go: what comes next is asked of storage."""
        for model in list(self.node.core.ledger.models.values()):
            for tier in ("device", "host", "device"):
                self.node.run(partial(admin.evict, self.node.core, model.id, tier, 0))

    def _lose(self) -> None:
        """The storage is away, with all that it had."""
        if not self.storage.away:
            self.storage.lose("its folder is gone")
            self.faults["storage_lost"] += 1

    def _return(self) -> None:
        self.storage.away = ""

    def _freeze(self) -> None:
        self.storage.frozen = True
        self.faults["storage_frozen"] += 1

    def _thaw(self) -> None:
        if self.storage.frozen:
            self.storage.frozen = False
            if self._luck.random() < 0.5:
                self.storage.land_late()
                self.faults["storage_landed_late"] += 1

    def _settle(self) -> None:
        """All that was begun ends, late as it may be."""
        self.storage.frozen = False
        super()._settle()
        while self.storage.waiting:
            self.storage.land_late()
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
        self.faults.update(self.storage.faults)
        self.faults["breaker_opened"] += self.tier.breaker.opened


def run_twice(seed: int, steps: int, looks: float = LOOKS) -> tuple[StorageWorld, StorageWorld]:
    """A daemon's life, and the next one's on the same storage. An AssertionError names the seed and the step."""
    worlds: list[StorageWorld] = []
    for storage in range(2):
        world = StorageWorld(seed, worlds[0].storage if storage else None, looks)
        worlds.append(world)
        try:
            while world.steps < steps:
                world.step()
            world.finish()
        except Exception as error:
            error.add_note(f"replay: tests.sim.storage_world.run_twice({seed}, {steps}), life {storage}, {world.steps}")
            raise
    return worlds[0], worlds[1]
