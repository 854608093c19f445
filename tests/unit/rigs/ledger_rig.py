"""Flows over a mover that records transfers: tests land them, well or not, in any order."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Core, resolve, tidy
from cachesvc.flows.leases import open_lease, process_arrived
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.flows.transfers import land
from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.tier_copies import Place
from cachesvc.memory.host_pool import ByteRange, FreeRanges, columns_of
from cachesvc.model.answers import Wait
from cachesvc.model.errors import NotFound, Unavailable
from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_bytes
from cachesvc.model.words import DONE, KEY_BYTES, Failed, Run, TimelineSlot, Transfer, WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from cachesvc.questions.audit import verify_at_once
from cachesvc.swap.movers import Headroom, PoolSizes
from cachesvc.swap.vault import Vault
from tests.conservation import audit

Answer = TypeVar("Answer")
BLOCK_TOKENS = 4
TOKEN = b"process-"


def one_group() -> Layout:
    """A page of 8 bytes in one full group."""
    return Layout(BLOCK_TOKENS, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (8,), "uint8"),))


def windowed(window_tokens: int = 8, sink_tokens: int = 0, pool: str = "") -> Layout:
    """A full group, and one that looks back ``window_tokens``; of one ``pool``, if it has a name."""
    planes = (Plane("k", 0, "full", (8,), "uint8"), Plane("k", 1, "window", (8,), "uint8"))
    groups = (PlaneGroup("full", pool=pool), PlaneGroup("window", window_tokens, sink_tokens, pool=pool))
    return Layout(BLOCK_TOKENS, 1, groups, planes)


def hybrid(window_tokens: int = 8) -> Layout:
    """A full group, a window, and states, of one pool."""
    names = ("full", "window", "state")
    planes = tuple(Plane("k", layer, name, (8,), "uint8") for layer, name in enumerate(names))
    groups = (
        PlaneGroup("full", pool="kv"),
        PlaneGroup("window", window_tokens, pool="kv"),
        PlaneGroup("state", pool="kv", is_state=True),
    )
    return Layout(BLOCK_TOKENS, 1, groups, planes)


def chain(*names: object, namespace: bytes = b"") -> bytes:
    """Packed keys of a prompt whose blocks are called so; each stands for its whole prefix."""
    keys = bytearray()
    parent = namespace
    for name in names:
        parent = hashlib.blake2b(parent + repr(name).encode(), digest_size=32).digest()
        keys += parent
    return bytes(keys)


class RecordingMover:
    """Keeps transfers in order, ``slots`` at a time; breaks its word and refuses them while ``refusing`` is set.
    ``detached``: replicas that it knows nothing of any more."""

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}
        self.all: list[Transfer] = []
        self.expedited: list[int] = []
        self.pauses: list[tuple[tuple[str, ...], float]] = []
        self.refusing = False
        self.slots = 1 << 20
        self.reachable = True
        self.rate = 7.0
        self.detached: set[int] = set()

    def submit(self, transfer: Transfer) -> TimelineSlot:
        if self.refusing:
            raise Unavailable("the mover refuses by order")
        self.transfers[transfer.ticket] = transfer
        self.all.append(transfer)
        return TimelineSlot(0, 1, 0, 1)

    def free_slots(self, model_id: int, replica_id: int) -> int:
        if replica_id in self.detached:
            raise NotFound("replica", replica_id)
        return self.slots - len(self.transfers)

    def expedite(self, ticket: int) -> None:
        self.expedited.append(ticket)

    def can_reach(self, model: int, source_replica: int, target_replica: int) -> bool:
        return self.reachable

    def peer_rate(self, model: int, source_replica: int, target_replica: int) -> float:
        return self.rate if self.reachable else 0.0

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        self.pauses.append((tuple(devices), seconds))


class CountedVault(Vault):
    """A vault that only counts bytes; of host pages only the first ``arrived`` of a group are usable at once.

    ``calls``: what was opened and closed, in order. ``breaks``: what making a replica ends with.
    """

    def __init__(self, device_bytes: dict[str, int], host_bytes: int = 1 << 30, arrived: int = 1 << 20) -> None:
        self.device_bytes = device_bytes
        self.host = FreeRanges([host_bytes])
        self.arrived = arrived
        self.calls: list[tuple[str, int]] = []
        self.breaks: Exception | None = None
        self._capacity = max(device_bytes.values()), host_bytes
        self._held: dict[int, list[tuple[str, int]]] = {}
        self._on_host: dict[int, list[ByteRange]] = {}
        self._news: dict[int, list[tuple[int, Run]]] = {}
        self._going: list[int] = []

    def devices(self) -> tuple[str, ...]:
        return tuple(self.device_bytes)

    def headroom(self, without: Collection[int] = ()) -> Headroom:
        device_bytes, host = Counter(self.device_bytes), self.host.copy()
        for model in without:
            for device, size in self._held.get(model, ()):
                device_bytes[device] += size
            host.give_back(columns_of(self._on_host.get(model, ())))
        return Headroom(device_bytes, host, *self._capacity)

    def open_host(self, model: int, layout: Layout, pages: tuple[int, ...], devices: tuple[str, ...]) -> None:
        self.calls.append(("open host", model))
        places: list[ByteRange] = []
        for group, _, page_bytes in PoolSizes(layout).host_slabs:
            pieces = self.host.take(page_bytes, pages[group])
            assert pieces is not None, "what was planned fits"
            places += [place for _, place in pieces]
        self._on_host[model] = places
        leads = [(groups[0], pages[groups[0]]) for groups in layout.host_pools]
        self._news[model] = [(group, Run(0, min(count, self.arrived))) for group, count in leads if count]

    def open_replica(
        self, model: int, replica: int, layout: Layout, devices: tuple[str, ...], pages: tuple[int, ...]
    ) -> None:
        if self.breaks is not None:
            raise self.breaks
        self.calls.append(("open replica", model))
        size = device_bytes(layout, pages)
        assert all(self.device_bytes[device] >= size for device in devices), "what was planned fits"
        for device in devices:
            self.device_bytes[device] -= size
            self._held.setdefault(model, []).append((device, size))

    def has_replica(self, model: int, replica: int) -> bool:
        return True

    def take_news(self, model: int) -> list[tuple[int, Run]]:
        news, self._news[model] = self._news[model], []
        return news

    def news(self, model: int, run: Run) -> None:
        """More pages of the first group arrive."""
        self._news[model].append((0, run))

    def announce(self, model: int) -> list[tuple[int, Run]]:
        return self.take_news(model)

    def retire(self, model: int) -> None:
        self._going.append(model)

    def free_retired(self) -> None:
        for model in self._going:
            self.host.give_back(columns_of(self._on_host.pop(model, ())))

    def close_retired(self, devices: Collection[str] | None = None) -> None:
        self.free_retired()
        for model in list(self._going):
            held = self._held.pop(model, [])
            self._held[model] = [each for each in held if devices is not None and each[0] not in devices]
            for device, size in held:
                self.device_bytes[device] += size if devices is None or device in devices else 0
            if not self._held[model]:
                self.calls.append(("close", model))
                self._going.remove(model)


@dataclass
class Rig:
    """A core with one model. ``now``: time that flows get. ``is_audited``: every flow is followed by an audit."""

    core: Core
    mover: RecordingMover
    vault: CountedVault
    model: Model
    now: float = 0.0
    is_audited: bool = True

    @contextmanager
    def unaudited(self) -> Iterator[None]:
        """Audit once behind many flows, such as those that fill a pool: an audit walks everything."""
        self.is_audited = False
        yield
        self.is_audited = True
        self.check()

    def lease(self, name: str = "a", replica: int = 0) -> str:
        token = TOKEN + name.encode()
        if token not in self.core.ledger.processes:
            process_arrived(self.core, token, 1, 1)
        return open_lease(self.core, self.model.id, replica, name, token, 0, self.now).id

    def run(self, flow: Callable[..., Answer | Wait], *arguments: object) -> Answer:
        """Run a flow as the node does, landing what it waits for; audits afterwards."""
        while True:
            answer = self.once(flow, *arguments)
            if not isinstance(answer, Wait):
                return answer
            moving = next((ticket for ticket in answer.tickets if ticket in self.mover.transfers), None)
            if moving is not None:
                self.land(moving)
            elif self.core.chores:  # its own turn, or what has landed is taken in by turns
                tidy(self.core.chores)

    def once(self, flow: Callable[..., Answer | Wait], *arguments: object) -> Answer | Wait:
        try:
            wanted = inspect.signature(flow).parameters
            if "call" in wanted:  # a lease is named where the flow takes a call
                lease, *rest = arguments
                return flow(self.core, resolve(self.core.ledger, str(lease), self.now), *rest)
            return flow(self.core, *arguments, self.now) if "now" in wanted else flow(self.core, *arguments)
        finally:
            self.check()

    def land(self, ticket: int, error: str = "", *, may_write: bool = False) -> list[int]:
        del self.mover.transfers[ticket]
        ended = land(self.core, ticket, Failed(error, may_write=may_write) if error else DONE)
        self.check()
        return ended

    def land_unchecked(self, ticket: int) -> list[int]:
        return land(self.core, ticket, DONE)

    def settle(self) -> None:
        for ticket in list(self.mover.transfers):
            self.land(ticket)

    def check(self) -> None:
        if not self.is_audited:
            return
        problems = audit(self.core.ledger).problems
        assert problems == [], problems
        assert verify_at_once(self.core) == [], "in pieces it must add up too"

    def place(self, replica: int = 0) -> Place:
        return self.model.any_replica(replica).place

    @property
    def host(self) -> Place:
        return self.model.blocks.host

    def device_keys(self, replica: int = 0) -> set[bytes]:
        index = self.model.blocks.index
        places = [place for place in index.places if place.number == replica + 1]
        return {key for key, row in index.rows.items() for place in places if place.is_hittable(row)}

    def host_keys(self) -> set[bytes]:
        index = self.model.blocks.index
        return {key for key, row in index.rows.items() if self.host.is_hittable(row)}

    def free(self, replica: int = 0) -> list[int]:
        return [pool.free for pool in self.place(replica).pools]


def rig_of(
    layout: Layout,
    *,
    device: Sequence[int],
    host: Sequence[int] | None = None,
    policy: WritePolicy = WritePolicy.WRITE_BACK,
    threshold: int = 2,
    remember: int = 64,
    replicas: int = 1,
    eviction: str = "lru",
    reserved_pages: int = 0,
) -> Rig:
    mover = RecordingMover()
    core = Core(Ledger(), mover, eviction_policy(eviction), WriteRule(policy, threshold, remember))
    devices = tuple(f"gpu-{i}" for i in range(replicas * layout.ranks))
    vault = CountedVault(dict.fromkeys(devices, 1 << 20))
    on_host = PoolRequest(tuple(host) if host is not None else (0,) * len(layout.groups))
    for i in range(replicas):
        on_device = PoolRequest(tuple(pages + reserved_pages for pages in device))
        mine = devices[i * layout.ranks : (i + 1) * layout.ranks]
        request = RegisterRequest("m", layout, b"", mine, on_device, on_host, reserved_pages=reserved_pages)
        register(core, vault, request, 0.0)
    for replica in core.ledger.models[1].replicas:
        replica.place.pieces.piece_blocks = 2  # so that short prompts have some
    return Rig(core, mover, vault, core.ledger.models[1])


def prefill(rig: Rig, lease: str, sequence: int, prompt: Sequence[object]) -> None:
    """Match, allocate, land the loads, publish the rest: a request whose prompt is computed."""
    keys = chain(*prompt)
    rig.run(match, lease, sequence, keys, 0)
    rig.run(allocate, lease, sequence, len(prompt))
    held = rig.core.ledger.leases[lease].sequences[sequence]
    for ticket in list(held.loads):
        rig.land(ticket)
    first = held.sealed
    rig.run(publish, lease, sequence, first, keys[first * KEY_BYTES :], 0)


def serve(rig: Rig, lease: str, sequence: int, prompt: Sequence[object]) -> None:
    """``prefill`` and release."""
    prefill(rig, lease, sequence, prompt)
    rig.run(release, lease, sequence)
