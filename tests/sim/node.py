"""The daemon without sockets, threads and clock: its own parts, driven by hand."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from cachesvc.flows.core import Core, Limits, Turns, tidy
from cachesvc.flows.leases import lose_device
from cachesvc.flows.registration import host_pages_arrived
from cachesvc.flows.transfers import land
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.extents import populate
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.numa import Placement
from cachesvc.model.answers import Wait
from cachesvc.model.errors import KeyReused, Unavailable
from cachesvc.model.layout import Layout, device_geometry
from cachesvc.model.words import DONE, KEY_BYTES, READY, CopiesHang, Failed, Run, TimelineSlot, Transfer
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.swap.engine import SwapEngine
from cachesvc.swap.movers import InProcessMovers
from cachesvc.swap.vault import Vault
from tests.sim.biases import Bias
from tests.sim.meetings import Meetings
from tests.sim.stepped_backend import SteppedBackend

Answer = TypeVar("Answer")
HOST_CHUNK_BYTES = 4096


class SteppedHostPool(HostPool):
    """The host pool whose two kinds of threads are two methods."""

    def start(self) -> None:
        """No thread; every chunk is still to come."""

    def fill_one(self) -> bool:
        """Bring the next chunk; False when all are there."""
        work = self._next_slice()
        if work is None:
            return False
        index, start, size_bytes = work
        view = self._chunks[index].view
        assert view is not None
        populate(view, start, size_bytes)
        self._announce(index, self._backend.register_host(view))
        return True

    def clean_one(self) -> bool:
        """Zero the next extent that was used before; False when none waits."""
        if not self._dirty:
            return False
        slab, extent = self._dirty.popleft()
        if self._zero(slab, extent):
            extent.is_ready = not slab.is_released
            slab.refresh()
            self._tell([(tell, extent.run) for tell in slab.watchers])
        return True


class Refusing:
    """The way to the swap engine, which refuses when told to."""

    def __init__(self, engine: Callable[[], SwapEngine], ledger: Ledger, faults: Counter[str]) -> None:
        self._engine = engine
        self._ledger = ledger
        self._faults = faults
        self.refuse = 0

    def _require_present(self, model_id: int, *replicas: int | None) -> None:
        present = {replica.id for replica in self._ledger.models[model_id].replicas}
        assert present.issuperset(each for each in replicas if each is not None), "a flow sees a replica that is lost"

    def submit(self, transfer: Transfer) -> TimelineSlot:
        self._require_present(transfer.model, transfer.replica, transfer.source_replica)
        if self.refuse:
            self.refuse -= 1
            self._faults["mover_refused"] += 1
            raise Unavailable("the simulator refuses this transfer")
        return self._engine().submit(transfer)

    def free_slots(self, model_id: int, replica_id: int) -> int:
        self._require_present(model_id, replica_id)
        return self._engine().free_slots(model_id, replica_id)

    def expedite(self, ticket: int) -> None:
        self._faults["ticket_expedited"] += 1
        self._engine().expedite(ticket)

    def can_reach(self, model: int, source_replica: int, target_replica: int) -> bool:
        self._require_present(model, source_replica, target_replica)
        return self._engine().can_reach(model, source_replica, target_replica)

    def peer_rate(self, model: int, source_replica: int, target_replica: int) -> float:
        self._require_present(model, source_replica, target_replica)
        return self._engine().peer_rate(model, source_replica, target_replica)

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        self._faults["write_backs_paused"] += 1
        self._engine().pause_write_backs(devices, seconds)


class SimNode:
    """Core, Vault and SwapEngine. What threads would bring waits in ``inbox`` until it is delivered."""

    def __init__(self, rng: random.Random, faults: Counter[str], bias: Bias) -> None:
        self.bias = bias
        self.now = 1000.0
        self.faults = faults
        self.events: Counter[str] = Counter()
        self.inbox: deque[Callable[[], object]] = deque()
        self.backend = SteppedBackend(
            2,
            1 << 16,
            timeline_words=rng.choice((16, 64, 256)),
            rules=CopyRules(slice_bytes=rng.choice((16, 100, 1 << 20))),
            are_near=rng.random() < 0.6,
        )
        self.backend.start()
        self.engine = SwapEngine(
            InProcessMovers(self.backend),
            lambda ticket, error: self.inbox.append(lambda: self._land(ticket, error)),
            layers_per_step=rng.choice((0, 1, 2)),
            clock=lambda: self.backend.now,
        )
        self.engine.start()
        self.host_pool = SteppedHostPool(
            rng.choice((4, 12, 24)) * HOST_CHUNK_BYTES,
            HOST_CHUNK_BYTES,
            1,
            {"step-0": 0, "step-1": 1},
            self.backend,
            bind=lambda *_: Placement.PLACED,
        )
        self.vault = Vault(self.backend, self.host_pool, self.engine, self._on_host_pages, landing_seconds=0.0)
        ledger = Ledger(keep_tickets=64)
        self.mover = Refusing(lambda: self.engine, ledger, faults)
        policy = rng.choice(bias.policies)
        self.core = Core(
            ledger,
            self.mover,
            eviction_policy(rng.choice(("hazard", "hazard", "hazard", "lru", "lfu", "deepest_first"))),
            WriteRule(policy, rng.choice((1, 2)), remember=8),
            Limits(
                sequences_per_lease=16,
                stock_pages_per_lease=8,
                leases=12,
                events_per_model=12,
                ahead_pages=bias.ahead_pages,
                ahead_part=2,
            ),
            turns=rng.choice((Turns(), Turns(1, 1, 1, 1, 1, 1, loaded=1), Turns(2, 3, 2, 1, 3, 2, loaded=3))),
        )
        self.meetings = Meetings(self.core)
        self._parents: dict[bytes, bytes] = {}
        self._repeats: dict[tuple[str, int], tuple[object, object]] = {}

    def _on_host_pages(self, model: int, group: int, run: Run) -> None:
        self.faults["host_pages_late"] += 1
        self.inbox.append(lambda: host_pages_arrived(self.core, model, group, run))

    def _land(self, ticket: int, error: Exception | None) -> None:
        landed = DONE if error is None else Failed(str(error), may_write=isinstance(error, CopiesHang))
        self.meetings.landing(ticket, landed, lambda: land(self.core, ticket, landed))

    def kill_mover(self, device: str) -> None:
        """Kill a mover: its jobs end as failed, and then the daemon learns that its memory is lost."""
        self.backend.break_device(device)
        self.inbox.append(lambda: self._lose(device))

    def _lose(self, device: str) -> None:
        self.vault.lose(device)
        if self.run(lambda: lose_device(self.core, device, "the simulator has killed its mover")):
            self.events["leases_lost_with_a_device"] += 1

    def deliver(self) -> None:
        """One message of another thread arrives on the loop."""
        if self.inbox:
            self.inbox.popleft()()

    def tidy(self) -> None:
        """A turn of what is left to do."""
        if self.core.chores:
            self.events["chores"] += 1
            tidy(self.core.chores)

    def run(self, flow: Callable[[], Answer]) -> Answer:
        """Run a flow like the node does."""
        return flow()

    def call(self, lease: str, request_id: int, contents: object, flow: Callable[[], Answer]) -> Answer:
        """A call with its key: the second time it is answered from memory; a failed one is forgotten."""
        known = self._repeats.get((lease, request_id))
        if known is not None:
            if known[0] != contents:
                raise KeyReused(request_id)
            return known[1]  # type: ignore[return-value]
        answer = self.meetings.call(lease, contents, lambda: self.run(flow))
        if not isinstance(answer, Wait):
            self._repeats[lease, request_id] = (contents, answer)
        return answer

    # -- bytes -------------------------------------------------------------------------------------------------

    def write_page(self, model: Model, replica: int, group: int, page: int, content: list[bytes]) -> None:
        """Write a device page on every rank, plane by plane, as kernels of an engine would; what is lost is no page."""
        if all(each.id != replica for each in model.replicas):
            return
        geometry = device_geometry(model.layout, group, model.any_replica(replica).device_pages[group])
        for rank, mine in enumerate(content):
            slab = self.vault.slabs(model.id, replica, rank)[group]
            at = 0
            for span in geometry.spans:
                part = mine[at : at + span.width]
                if part:
                    self.backend.write(slab.region, span.offset + page * span.page_stride, part)
                at += span.width

    def page(self, model: Model, replica: int | None, group: int, page: int) -> list[bytes]:
        """A page's bytes on every rank."""
        return [self.engine.page_bytes(model.id, replica, rank, group, page) for rank in range(model.layout.ranks)]

    def note_chain(self, keys: bytes) -> None:
        """An engine has made packed keys, each from the one before."""
        chained = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        self._parents.update(zip(chained, [b"", *chained], strict=False))

    def misplaced(self) -> list[str]:
        """Blocks that the index has below others than they were made from."""
        return [
            f"model {model.id} row {row}: below another block than its key says"
            for model in self.core.ledger.models.values()
            for key, row in model.blocks.index.rows.items()
            if model.blocks.index.key_of(model.blocks.index.parent[row]) != self._parents[key]
        ]

    def corrupt(self) -> list[str]:
        """Sealed copies, on any tier, whose bytes are not what their key stands for."""
        out: list[str] = []
        for model in self.core.ledger.models.values():
            for place in model.blocks.index.places:
                replica = place.number - 1 if place.number else None
                for key, row in model.blocks.index.rows.items():
                    for group, states in enumerate(place.states):
                        if states[row] >= READY:
                            page = place.pages[group][row]
                            if self.page(model, replica, group, page) != content_of(model.layout, group, key):
                                out.append(f"model {model.id} {place.name} group {group} page {page} (row {row})")
        return out


_CONTENT: dict[tuple[bytes, int, bytes], list[bytes]] = {}


def content_of(layout: Layout, group: int, key: bytes) -> list[bytes]:
    """Bytes of a block's page on each rank: a function of its key; where ranks hold the same, the same."""
    known = _CONTENT.get((layout.fingerprint, group, key))
    if known is None:
        size = layout.page_bytes(group)
        ranks = range(layout.ranks)
        salts = [b"" if layout.groups[group].replicated else bytes([rank]) for rank in ranks]
        known = [hashlib.shake_128(key + bytes([group]) + salt).digest(size) for salt in salts]
        _CONTENT[layout.fingerprint, group, key] = known
    return known
