"""Plans pool sizes and idle-model evictions. No side effects."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from cachesvc.flows.core import Core
from cachesvc.ledger.ledger import Model, PendingReplica, Replica
from cachesvc.model.errors import CacheError, LimitExceeded, PoolExhausted, QuotaExceeded
from cachesvc.model.layout import Layout, device_bytes, host_bytes
from cachesvc.model.numbers import BACKGROUND, Party, most_of
from cachesvc.model.text import describe_bytes
from cachesvc.swap.movers import Headroom, PoolSizes

MAX_POOL_PAGES = 1 << 22
"""Pages of one group of a pool: 256 GiB in pages of 64 KiB. The daemon keeps six bytes for each, and more once it holds
something, so a pool of pages of one byte would be larger in the daemon than on its device."""

STARVED = 64
"""Divisor below which a share counts as none: less than this part of what it would be without idle models."""


Refusal = Callable[[], CacheError]
"""Says why, with the numbers."""


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Requested pool: pages for each group, or (where there are none) a share of what is left."""

    pages: tuple[int, ...] = ()
    share: float = 1.0


class HasHeadroom(Protocol):
    """Source of the pools' headroom."""

    def headroom(self, without: Sequence[int] = ()) -> Headroom:
        """Headroom, or what it would be without the models of these numbers."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A replica to be made, of a ``model`` that is there or of a new one. Page counts are of all groups, and of
    reserved pages too. ``models_limit``: models that there may be with it."""

    layout: Layout
    devices: tuple[str, ...]
    device_pool: PoolRequest
    host_pool: PoolRequest
    budget: Budget
    model: Model | None
    models_limit: int
    reserved_pages: int = 0

    @property
    def pages_least(self) -> int:
        """Least pages of each group on a device: one that can be granted."""
        return self.reserved_pages + 1


class Pools(NamedTuple):
    """Pages of each group on every device, and on the host (none for a model that is there)."""

    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...] = ()


class Plan(NamedTuple):
    """Pools, once the ``evicted`` models are gone."""

    pools: Pools
    evicted: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class Others:
    """The models that are there, at one moment. ``idle``: the longest idle first; ``own``: of the newcomer's tenant,
    where it has a budget."""

    models: int
    models_limit: int
    idle: tuple[Model, ...]
    own: tuple[Model, ...]


def survey(core: Core, newcomer: Newcomer) -> Others:
    models = (*core.ledger.models.values(), *core.ledger.coming.values())
    tenant = newcomer.budget.tenant if newcomer.budget.is_limited else None
    return Others(
        len(models),
        newcomer.models_limit,
        tuple(model for model in idle_models(core) if model is not newcomer.model),
        tuple(model for model in models if model.tenant == tenant),
    )


def plan_pools(others: Others, vault: HasHeadroom, newcomer: Newcomer) -> Plan:
    """Size a newcomer's pools, with as few idle models evicted as it takes: each for its device memory, its host
    memory, its place among the models or its tenant's quota. Any thread: nothing is changed.

    Raises LimitExceeded, QuotaExceeded and PoolExhausted with the numbers, where it does not fit without any of them.
    """
    idle = others.idle
    sizing = _Sizing(others, vault, newcomer)
    best = sizing.offer(idle)
    if not isinstance(best, Pools):
        raise best()

    def fits(gone: Sequence[Model]) -> bool:
        pools = sizing.offer(gone)
        return isinstance(pools, Pools) and _is_worth(pools, best)

    evicted = fewest(idle, fits)
    pools = best if len(evicted) == len(idle) else sizing.offer(evicted)
    assert isinstance(pools, Pools)
    return Plan(pools, tuple(evicted))


def _is_worth(pools: Pools, best: Pools) -> bool:
    """Shares that come to something; pages that were asked for by number are equal."""
    pairs = zip((*pools.device_pages, *pools.host_pages), (*best.device_pages, *best.host_pages), strict=True)
    return all(pages * STARVED >= most for pages, most in pairs)


class _Sizing:
    """Pools of a newcomer, by the idle models that are evicted."""

    def __init__(self, others: Others, vault: HasHeadroom, newcomer: Newcomer) -> None:
        self._others = others
        self._vault = vault
        self._new = newcomer
        self._sizes = PoolSizes(newcomer.layout)
        self._least = self._memory_at_least()
        self._own = {model.id: memory_of((model,)) for model in others.own}

    def offer(self, gone: Sequence[Model]) -> Pools | Refusal:
        """The pools, or what refuses them. Many are asked for, so the reason is put into words only once."""
        new, sizes = self._new, self._sizes
        models = self._others.models - len(gone) + 1
        if new.model is None and models > self._others.models_limit:
            return partial(LimitExceeded, "models in use", models, self._others.models_limit)
        used = self._used(gone)
        if (refusal := new.budget.refusal(used, self._least)) is not None:
            return lambda: refusal
        left = self._vault.headroom([model.id for model in gone])
        pages = self._device_pages(left, used)
        if min(pages) < new.pages_least or sizes.device_bytes(pages) > left.left_on(new.devices):
            return self._no_device_memory
        if max(pages) > MAX_POOL_PAGES:
            return partial(_too_many, "device", max(pages), sizes.device_block_bytes)
        if new.model is not None:
            return Pools(pages)
        host_pages = new.host_pool.pages or self._host_share(left, used, pages)
        if new.host_pool.pages and not left.holds(sizes, new.devices, host_pages):
            return self._no_host_memory
        if max(host_pages) > MAX_POOL_PAGES:
            return partial(_too_many, "host", max(host_pages), sizes.host_block_bytes)
        return Pools(pages, host_pages)

    def _used(self, gone: Sequence[Model]) -> Memory:
        """Memory of the tenant's models that stay."""
        left = {model.id for model in gone}
        stay = [held for model, held in self._own.items() if model not in left]
        return Memory(*(sum(column) for column in zip(*stay, strict=True))) if stay else Memory(0, 0, 0, 0)

    def _memory_at_least(self) -> Memory:
        """Least memory of the newcomer: of a share, one block on the devices."""
        new = self._new
        is_new, pages = new.model is None, new.device_pool.pages or (new.pages_least,) * len(new.layout.groups)
        on_host = self._sizes.host_bytes(new.host_pool.pages) if is_new and new.host_pool.pages else 0
        host_pages = new.layout.host_page_total(new.host_pool.pages) if is_new and new.host_pool.pages else 0
        on_device = new.layout.device_page_total(pages)
        return Memory(self._sizes.device_bytes(pages) * new.layout.ranks, on_host, int(is_new), on_device + host_pages)

    def _device_pages(self, left: Headroom, used: Memory) -> tuple[int, ...]:
        new = self._new
        if new.device_pool.pages:
            return new.device_pool.pages
        size_bytes = int(left.left_on(new.devices) * new.device_pool.share)
        if new.budget.device_bytes:
            size_bytes = min(size_bytes, (new.budget.device_bytes - used.device_bytes) // new.layout.ranks)
        pages = self._sizes.device_pages(size_bytes)
        if new.budget.pages:
            pages = self._within(pages, used)
        return pages

    def _within(self, pages: tuple[int, ...], used: Memory) -> tuple[int, ...]:
        """Largest number of pages, in their proportion, that the tenant may have: half of them where the host takes a
        share too."""
        new, units = self._new, self._new.layout.unit_pages
        on_host = new.layout.host_page_total(new.host_pool.pages) if new.host_pool.pages else 0
        left = new.budget.pages - used.pages - on_host
        if new.model is None and not new.host_pool.pages and new.host_pool.share:
            left //= 2
        blocks = min(pages[0] // units[0], max(0, left) // new.layout.device_page_total(units))
        return tuple(blocks * unit for unit in units)

    def _host_share(self, headroom: Headroom, used: Memory, pages: tuple[int, ...]) -> tuple[int, ...]:
        new, most = self._new, None
        if new.budget.host_bytes:
            most = (new.budget.host_bytes - used.host_bytes) // self._sizes.host_block_bytes
        if new.budget.pages:
            layout = new.layout
            left = new.budget.pages - used.pages - layout.device_page_total(pages)
            left //= layout.host_page_total(layout.host_unit_pages)
            most = left if most is None else min(most, left)
        blocks = headroom.host_blocks(self._sizes, new.devices, new.host_pool.share, most)
        return self._sizes.host_pages(blocks)

    def _without_idle(self) -> Headroom:
        return self._vault.headroom([model.id for model in self._others.idle])

    def _no_device_memory(self) -> PoolExhausted:
        new, now, then = self._new, self._vault.headroom(), self._without_idle()
        block_bytes = self._sizes.device_block_bytes
        left = now.left_on(new.devices)
        return _exhausted(
            f"device pool of {', '.join(new.devices)} ({left} bytes left, {block_bytes} bytes a block)",
            new.device_pool.pages or (new.pages_least,),
            left // block_bytes,
            then.left_on(new.devices) // block_bytes,
            now.device_capacity // block_bytes,
            self._remedy(block_bytes, left, now.device_capacity),
        )

    def _remedy(self, block_bytes: int, left_bytes: int, capacity_bytes: int) -> str:
        """Remedy for a device pool that cannot hold a block, or that other models hold. Names no model: the caller may
        be of another tenant than theirs."""
        if block_bytes * self._new.pages_least > capacity_bytes:
            return (
                f"one block takes {describe_bytes(block_bytes)}, the pool has {describe_bytes(capacity_bytes)}: have "
                "the operator give the daemon a larger --device-pool, or register smaller blocks"
            )
        if self._new.device_pool.pages or not self._others.models:
            return ""
        if block_bytes * self._new.pages_least <= left_bytes:
            return "the share that it asks for holds no block: give it a larger device_share"
        return (
            "other models have the rest of the pool: register each with its part (device_share=0.5), or have an "
            "operator evict one (cachesvc models, cachesvc evict --model NAME)"
        )

    def _no_host_memory(self) -> PoolExhausted:
        new, now, then = self._new, self._vault.headroom(), self._without_idle()
        block_bytes = self._sizes.host_block_bytes
        return _exhausted(
            f"host pool ({now.host.free_bytes} bytes left, {block_bytes} bytes a block on all ranks)",
            new.host_pool.pages,
            now.host_blocks(self._sizes, new.devices),
            then.host_blocks(self._sizes, new.devices),
            now.host_capacity // block_bytes,
        )


def _too_many(pool: str, pages: int, block_bytes: int) -> LimitExceeded:
    what = f"pages of one group of the {pool} pool, at {block_bytes} bytes a block (ask for fewer or use larger blocks)"
    return LimitExceeded(what, pages, MAX_POOL_PAGES)


def _exhausted(
    pool: str, pages: tuple[int, ...], free: int, free_without_idle: int, capacity: int, remedy: str = ""
) -> PoolExhausted:
    return PoolExhausted(
        pool=pool,
        wanted=max(pages, default=1),
        free=free,
        evictable=free_without_idle - free,
        pinned=capacity - free_without_idle,
        quarantined=0,
        capacity=capacity,
        remedy=remedy,
    )


class Memory(NamedTuple):
    """Bytes of pools, over all replicas and ranks, of how many models, and pages of all groups: the daemon keeps some
    bytes for each, whatever its size."""

    device_bytes: int
    host_bytes: int
    models: int
    pages: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of pools, models, and pages that a tenant may have; 0: no limit."""

    tenant: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    models: int = 0
    pages: int = 0

    @property
    def is_limited(self) -> bool:
        return bool(self.device_bytes or self.host_bytes or self.models or self.pages)

    def refusal(self, used: Memory, more: Memory) -> QuotaExceeded | None:
        """Reason why a tenant that uses ``used`` may not have ``more``, or None."""
        for what, has, wants in zip(Memory._fields, used, more, strict=True):
            limit = getattr(self, what)
            if limit and has + wants > limit:
                return QuotaExceeded(self.tenant, what, has + wants, limit, "ask for fewer pages or a share")
        return None


def memory_of(models: Iterable[Model]) -> Memory:
    each = list(models)
    return Memory(
        sum(map(pool_device_bytes, each)), sum(map(pool_host_bytes, each)), len(each), sum(map(pool_pages, each))
    )


def pool_device_bytes(model: Model) -> int:
    """Bytes of a model's device pools, over replicas and ranks, of those that are being made too."""
    every: list[Replica | PendingReplica] = [*model.replicas, *model.coming.values()]
    return sum(device_bytes(model.layout, each.device_pages) * len(each.devices) for each in every)


def pool_host_bytes(model: Model) -> int:
    """Bytes of a model's host pools, over ranks."""
    return host_bytes(model.layout, model.host_pages)


def pool_pages(model: Model) -> int:
    """Pages of a model's pools, over replicas, groups and the host."""
    layout = model.layout
    every: list[Replica | PendingReplica] = [*model.replicas, *model.coming.values()]
    on_devices = sum(layout.device_page_total(each.device_pages) for each in every)
    return on_devices + layout.host_page_total(model.host_pages)


# Idle models: evict as few as possible for a new model that needs their memory, the longest idle first.
#
# An engine registers before it opens its lease. Until each that has registered has opened one, or
# ``Limits.open_seconds`` have passed, the model is not idle: engines that start together would evict each other's pools
# in turns.

MOST_EXPECTED = 64
"""Engines of a model that have registered and not opened a lease yet; more are not counted."""


def expect_open(core: Core, model: Model) -> None:
    """An engine has registered the model: it will open a lease."""
    model.expected = min(model.expected + 1, MOST_EXPECTED)
    model.expected_until = core.ledger.moment.seconds + core.limits.open_seconds


def has_opened(model: Model) -> None:
    model.expected = max(model.expected - 1, 0)


def idle_models(core: Core) -> list[Model]:
    """Models that no lease, no transfer, no other node and no engine that has just registered needs, the longest idle
    first."""
    busy = {lease.model for lease in core.ledger.leases.values()}
    busy |= {ticket.model for ticket in core.ledger.tickets.running.values()}
    busy |= {model.id for model in core.ledger.models.values() if model.lent or not model.stored.is_idle}
    busy |= {model.id for model in core.ledger.models.values() if model.coming}
    now = core.ledger.moment.seconds
    busy |= {model.id for model in core.ledger.models.values() if model.expected and now < model.expected_until}
    idle = [model for model in core.ledger.models.values() if model.id not in busy]
    return sorted(idle, key=lambda model: (model.last_used, model.id))


def models_for(core: Core, party: Party) -> int:
    """Models that there may be with one more of a process. It has its share of all while other processes are connected
    or use some; a process without any gets its first one beyond the limit, up to a quarter more.

    A model counts to the process that registered it and has all its leases. Raises LimitExceeded.
    """
    ledger, limit = core.ledger, core.limits.models
    if party == BACKGROUND:  # a caller that the daemon cannot tell from others
        return limit
    users = {model.id: {model.party} for model in (*ledger.models.values(), *ledger.coming.values())}
    for lease in ledger.leases.values():
        users[lease.model].add(lease.party)
    idle = {model.id for model in idle_models(core)}
    held = Counter(next(iter(users[each])) for each in users if each not in idle and len(users[each]) == 1)
    own = held[party]
    is_alone = all(each.party == party for each in ledger.processes.values()) and held.total() == own
    if not is_alone and own >= (share := most_of(party, held, limit)):
        raise LimitExceeded("models of this process", own + 1, share)
    return limit if own else limit + max(1, limit // 4)


def fewest(idle: Sequence[Model], fits: Callable[[Sequence[Model]], bool]) -> Sequence[Model]:
    """Choose from ``idle``, in that order, the models to evict so that ``fits(gone)``, which holds with all of them
    gone.

    It takes the longest idle models until they fit; then it spares each one that did not help.
    """
    if fits(()):
        return ()
    going = list(idle[: bisect_left(range(len(idle)), True, key=lambda count: fits(idle[:count]))])
    for model in reversed(going):
        spared = [other for other in going if other is not model]
        if spared and fits(spared):
            going = spared
    return going
