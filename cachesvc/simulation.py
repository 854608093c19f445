"""Simulation of prompts through a daemon's ledger, flows and policies alone, on the trace's clock: no bytes, no waits.

What moves bytes is replaced by something that is done at once, so a simulation decides exactly as a daemon does whose
engine serves one request after another and whose copies take no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import (
    Call,
    Core,
    Limits,
    Turns,
    tidy_all,
)
from cachesvc.flows.fetch import fetched
from cachesvc.flows.leases import open_lease, process_arrived
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.flows.storage_writes import begin_flush, begin_soon, go_on, kept, pump_all
from cachesvc.flows.stored import forget, spread_all
from cachesvc.flows.transfers import land
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.ledger import Ledger, Model, Replica
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.shared_pool import group_pools
from cachesvc.model.answers import Ended, GroupCells, Wait
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import DONE, KEY_BYTES, TimelineSlot, Transfer, WritePolicy
from cachesvc.policy.eviction import EVICTION_POLICIES, RequestHint, WriteRule, eviction_policy
from cachesvc.storage.file.catalogue import Catalogue
from cachesvc.storage.seam import LAYOUT_ID_BYTES, ObjectName, Outcome, Part, Rank, Scope, Shape, Use
from cachesvc.storage.tier import News

EVICTIONS = tuple(sorted(EVICTION_POLICIES))
"""Eviction policies that can be simulated: those of a daemon."""

WRITE_POLICIES = tuple(policy.value for policy in WritePolicy)

AT_ONCE = 1 << 40
PROCESS = b"simulation"
"""Flows are never cut: no call waits for its turn here."""

STEP_BLOCKS = 16
"""Blocks that an engine of a hybrid model computes in one step, as with chunked prefill."""
POOL = "kv"

EVENTS_KEPT = 64
"""Short history: no operator asks for it."""

Answer = TypeVar("Answer")


class Copies(NamedTuple):
    """Copies that a hybrid model keeps in the pools of its blocks: ``state_pages`` pages at the end of every
    ``state_blocks`` blocks, and ``window_pages`` pages for each block, of which the last ``window_blocks`` are needed.
    A page has the size of a block."""

    state_pages: int = 0
    state_blocks: int = 1
    window_pages: int = 0
    window_blocks: int = 1


class SimulatedPools(NamedTuple):
    """Parameters of a simulation: one device and one host pool, in blocks, and the policies by their names.
    ``disk_blocks``: of a disk below them; 0: none. ``restart_every``: requests after which the daemon is started anew;
    0: never. ``copies``: what else lies in the pools."""

    eviction: str
    write_policy: str
    device_blocks: int
    host_blocks: int
    disk_blocks: int = 0
    restart_every: int = 0
    copies: Copies = Copies()


class Hits(NamedTuple):
    """Blocks of a prompt that were in place, and that came from the host, or from the disk."""

    device: int
    host: int
    disk: int = 0


class Simulation:
    """One model on one replica, and one engine. Raises InvalidRequest for a policy that there is not, ValueError for a
    write policy or a size that cannot be. ``ledger``: what is true by now, for audits. ``disk``: that of a
    daemon that has ended."""

    def __init__(self, pools: SimulatedPools, block_tokens: int, disk: SimulatedDisk | None = None) -> None:
        if pools.device_blocks < 1 or pools.host_blocks < 0:
            raise ValueError(f"there are no pools of {pools.device_blocks} and {pools.host_blocks} blocks")
        self._pools, self._block_tokens = pools, block_tokens
        self._mover = _Instantly()
        self._rank = eviction_policy(pools.eviction).rank
        self._disk = disk or (SimulatedDisk(pools.disk_blocks, self._rank) if pools.disk_blocks else None)
        limits = Limits(blocks_per_sequence=AT_ONCE, recent_blocks=0)
        rule = WriteRule(WritePolicy(pools.write_policy))
        turns = Turns(*(AT_ONCE for _ in Turns._fields))
        self.ledger = Ledger()
        self._core = Core(self.ledger, self._mover, eviction_policy(pools.eviction), rule, limits, turns)
        if self._disk is not None:
            self._disk.connect(self._core)
        self._copies = pools.copies
        self._most_blocks = _most_blocks(pools)
        model = _model(self._core, pools, block_tokens)
        process_arrived(self._core, PROCESS, 0, 0)
        lease = open_lease(self._core, model.id, 0, "", PROCESS, 0, 0.0)
        self._call = Call(lease, model, model.replicas[0], 0.0)
        self._sequence = 0

    def restarted(self) -> Simulation:
        """The daemon after an orderly stop and a start: only what is on its disk is left."""
        if self._disk is None:
            return Simulation(self._pools, self._block_tokens)
        self._disk.flush(self._settle)
        disk = SimulatedDisk(self._pools.disk_blocks, self._rank, self._disk)
        return Simulation(self._pools, self._block_tokens, disk)

    def serve(self, keys: bytes, now: float, ended: Ended | None = None, retention: int = 0) -> Hits:
        """A request for the prompt of packed ``keys`` at ``now`` (seconds, which do not go back).

        What is missing is computed and published; of a prompt longer than the device pool only as much as fits it. The
        request holds nothing when this returns; ``ended``: when it is over, which may lie ahead, and its output.
        ``retention``: its engine's hint.
        """
        self._sequence += 1
        sequence = self._sequence
        core, call = self._core, self._call._replace(now=now)
        self.ledger.mark_time(now)
        self.ledger.moment.seconds = now
        blocks = min(len(keys) // KEY_BYTES, self._most_blocks)
        if self._disk is not None:
            self._disk.seconds = now
        sharing, before = Sharing(), self._core.ledger.models[1].hit_blocks.copy()
        hit = self._run(match, core, call, sequence, keys, blocks, sharing, retention=RequestHint(retention))
        first = hit.device_blocks + hit.host_blocks
        step = STEP_BLOCKS if call.model.layout.window_groups else AT_ONCE
        for at in range(first, blocks, step) if first < blocks else (blocks,):
            self._compute(call, keys, at, min(blocks, at + step))
        self._run(release, core, call, sequence, ended)
        if self._disk is not None:
            self._disk.tick()
        self._settle()
        hits = self._core.ledger.models[1].hit_blocks
        return Hits(*(hits[tier] - before[tier] for tier in ("device", "host", "storage")))

    def _settle(self) -> None:
        self._mover.land_all(self._core)
        while self._disk is not None and (self._disk.run() or self._mover.is_busy):
            self._mover.land_all(self._core)

    def _compute(self, call: Call, keys: bytes, first: int, blocks: int) -> None:
        """One step of an engine: it computes the blocks from ``first`` on, publishes them with their states, and lets
        go of what no later block of its sequence needs."""
        core, sequence, layout = self._core, self._sequence, call.model.layout
        ends = [at for at in range(first, blocks) if (at + 1) % self._copies.state_blocks == 0]
        self._run(allocate, core, call, sequence, blocks, positions=dict.fromkeys(layout.state_groups, ends))
        self._settle()
        if first == blocks:
            return
        tables = call.sequence(sequence).tables
        states = tuple(GroupCells(group, at, (tables[group][at],)) for group in layout.state_groups for at in ends)
        sealed = keys[first * KEY_BYTES : blocks * KEY_BYTES]
        answer = self._run(publish, core, call, sequence, first, sealed, blocks - first, states=states)
        if layout.window_groups:
            dead = tuple(ends[-1] + 1 if ends and group in layout.state_groups else 0 for group in layout.window_groups)
            idle = (*answer.kept, *answer.spares)
            self._run(recycle, core, call, sequence, blocks * layout.block_tokens, idle, dead_blocks=dead)

    def _run(self, flow: Callable[..., Answer | Wait], *arguments: object, **named: object) -> Answer:
        while isinstance(answer := flow(*arguments, **named), Wait):
            self._settle()
        return answer


class _Instantly:
    """A mover whose transfers have ended by the next look."""

    def __init__(self) -> None:
        self._landing: deque[int] = deque()

    def submit(self, transfer: Transfer) -> TimelineSlot:
        self._landing.append(transfer.ticket)
        return TimelineSlot(0, 0, 0, 0)

    def free_slots(self, model_id: int, replica_id: int) -> int:
        return AT_ONCE

    def expedite(self, ticket: int) -> None:
        """No-op: transfers end at once."""

    def can_reach(self, model: int, source_replica: int, target_replica: int) -> bool:
        return False

    def peer_rate(self, model: int, source_replica: int, target_replica: int) -> float:
        return 0.0

    def pause_write_backs(self, devices: Sequence[str], seconds: float) -> None:
        """No-op: transfers take no time."""

    @property
    def is_busy(self) -> bool:
        """True while a transfer has not ended."""
        return bool(self._landing)

    def land_all(self, core: Core) -> None:
        """End all transfers, and do what is due at their end."""
        while self._landing:
            land(core, self._landing.popleft(), DONE)
        tidy_all(core)


def _most_blocks(pools: SimulatedPools) -> int:
    """Blocks of a prompt that fit the device while it runs, with the copies of a step and those held since the last."""
    states = pools.copies.state_pages * (STEP_BLOCKS // pools.copies.state_blocks + 3)
    windows = pools.copies.window_pages * (STEP_BLOCKS + pools.copies.window_blocks)
    most = pools.device_blocks - states - windows
    if most < 1:
        raise ValueError(f"a device of {pools.device_blocks} blocks holds no prompt beside {states + windows} copies")
    return most


def _layout(copies: Copies, block_tokens: int) -> Layout:
    """A page a block in each group. How many bytes that is decides nothing."""
    states = [PlaneGroup(f"state{n}", pool=POOL, is_state=True) for n in range(copies.state_pages)]
    window = copies.window_blocks * block_tokens
    windows = [PlaneGroup(f"window{n}", window, pool=POOL) for n in range(copies.window_pages)]
    groups = (PlaneGroup("full", pool=POOL if states or windows else ""), *states, *windows)
    planes = tuple(Plane("bytes", layer, group.name, (1,), "uint8") for layer, group in enumerate(groups))
    return Layout(block_tokens, 1, groups, planes)


def _pools(layout: Layout, where: str, blocks: int) -> tuple[PagePool, ...]:
    pools = group_pools(where, [group.name for group in layout.groups], blocks)
    if blocks:
        pools[0].add(0, blocks)
    return pools


def _model(core: Core, pools: SimulatedPools, block_tokens: int) -> Model:
    """The model with its pools, as a registration leaves it."""
    layout = _layout(pools.copies, block_tokens)
    host, device = _pools(layout, "host", pools.host_blocks), _pools(layout, "device", pools.device_blocks)
    ledger, policy = core.ledger, core.eviction
    history = policy.new_history(block_tokens)
    blocks = BlockLedger(
        layout, host, policy.rank, ledger.ages, ledger.moment, EVENTS_KEPT, history, policy.new_positions
    )
    on_host, on_device = (tuple(pool.capacity for pool in each) for each in (host, device))
    model = Model(1, "simulated", layout, b"", blocks, Evictor(blocks), on_host)
    ledger.models[model.id] = model
    place = blocks.add_replica("replica 0", device)
    model.replicas.append(Replica(0, ("device",) * len(device), place, on_device))
    return model


SCOPE = Scope(bytes(32), bytes(LAYOUT_ID_BYTES))
PART = Part(0, 0, 1)
SHAPE = Shape(PART, ((0, 0),), (0,))
ANY_BYTES = 1 << 60
BLOCK_BYTES = 1
"""Bytes of a block in the layout of simulations."""


class SimulatedDisk:
    """Storage of the flows, for ``blocks`` blocks of one model. What is asked of it is done by ``run``. ``before``: the
    disk of a daemon that has ended: what lies there was used as long ago as then, and no more is known of it."""

    wait_seconds = float("inf")
    keeps_all = False
    keeps_used = True

    def __init__(self, blocks: int, rank: Rank, before: SimulatedDisk | None = None) -> None:
        self.seconds: float = 0.0 if before is None else before.seconds
        self._blocks = blocks
        self._catalogue = Catalogue(rank, self._now_ms)
        self._core: Core | None = None
        self._due: deque[Callable[[], object]] = deque()
        if before is not None:
            self._catalogue.add_all(before._catalogue.entries())  # noqa: SLF001 - of the same class

    def connect(self, core: Core) -> None:
        self._core = core
        core.storage = self
        core.on_wanted = partial(begin_soon, core)

    def run(self) -> bool:
        """Do what was asked; False where there was nothing."""
        had = bool(self._due)
        while self._due:
            self._due.popleft()()
        return had

    def tick(self) -> None:
        """Do the periodic work of a daemon's tier."""
        spread_all(self._of_daemon())
        pump_all(self._of_daemon())

    def flush(self, settle: Callable[[], None]) -> None:
        """Flush, as at an orderly stop that has enough time. ``settle``: ends what is under way."""
        self.tick()
        settle()
        left = begin_flush(self._of_daemon(), self._blocks * BLOCK_BYTES)
        while left:
            settle()
            before, left = left, go_on(self._of_daemon())
            if left == before:
                return

    # -- the seam of the flows ---------------------------------------------------------------------------------------

    def expects(self, model: Model, keys: bytes) -> int:
        return self._catalogue.expects(SCOPE, keys, (PART,))

    def has(self, model: Model, key: bytes) -> bool:
        return bool(self._catalogue.expects(SCOPE, key, (PART,)))

    def used(self, model: Model, uses: Sequence[Use]) -> None:
        self._catalogue.use_blocks(SCOPE, uses, model.blocks.chooser, self._now_ms())

    def lagged(self) -> None:
        """It never lags."""

    def room(self) -> int:
        return ANY_BYTES

    def fetch(self, model: Model, ticket: int, keys: bytes, pages: Sequence[Sequence[int]], parent: bytes) -> list[int]:
        """All of it comes: it was expected."""
        blocks = len(pages[0])
        found = [News(model.id, ticket, b"", block, SHAPE, Outcome.OK) for block in range(blocks)]
        last = ObjectName(SCOPE, keys[-32:], PART)
        self._due.append(lambda: self._catalogue.use(last, self._now_ms()))
        self._due.append(partial(fetched, self._of_daemon(), model.id, ticket, found))
        return [1] * blocks

    def keep(self, model: Model, key: bytes, pages: Sequence[int], parent: bytes) -> int:
        """Make room by the policy, and keep the block."""
        name = ObjectName(SCOPE, key, PART)
        if self._catalogue.use(name, self._now_ms()) is None:
            gone = self._catalogue.take_oldest(1, self._blocks - 1)
            if gone:
                forget(self._of_daemon(), model.id, [entry.name.key for entry in gone])
            self._catalogue.add(name, 1, self._now_ms(), parent)
        self._due.append(partial(kept, self._of_daemon(), model.id, key, [Outcome.OK]))
        return 1

    def forget(self, model_id: int) -> None:
        """No model leaves a simulation."""

    def _of_daemon(self) -> Core:
        assert self._core is not None, "it was connected"
        return self._core

    def _now_ms(self) -> int:
        return int(self.seconds * 1000)
