"""Registering models: a layout finds its pools, or gets new ones, for which idle models may be evicted.

Sizing pools takes a while and making them waits for drivers, so a registration (``registering``) is a generator: its
own code runs on the ledger thread, and what it yields on any thread:

    find the pools, or survey the other models          yield: size new ones, choose idle models to evict, or refuse
    evict them, unless one of them is in use by now     yield: free the host memory that they held, take a new model's
    claim: others count what comes and plan beside it   yield: make the device pools, all or none
    add the replica, and the model with its first one; or give up

Until it is ``claimed`` no device is asked for anything, and one registration goes at a time. Making waits for the
devices of its own replica alone, beside those of others: a device that hangs keeps only its own engines waiting. Two
replicas of a new model on different devices are one model, which the first that is made brings into the ledger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from cachesvc.flows.core import NO_MODEL, Core, Count
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.ledger import Model, PendingReplica, Replica
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.shared_pool import group_pools
from cachesvc.model.errors import (
    CacheError,
    Conflict,
    DaemonDraining,
    InvalidRequest,
    LimitExceeded,
    PoolExhausted,
    QuotaExceeded,
)
from cachesvc.model.layout import Layout, device_bytes, host_bytes
from cachesvc.model.numbers import BACKGROUND, Party, most_of
from cachesvc.model.text import describe_bytes
from cachesvc.model.words import Run, namespace_of
from cachesvc.swap.movers import Headroom, PoolSizes
from cachesvc.swap.vault import Vault

MAX_SALT_BYTES = 256
MAX_MODEL_NAME_BYTES = 512
MAX_DISPLAY_NAME_BYTES = 128
MAX_RESERVED_PAGES = 1024


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Requested pool: pages for each group, or (where there are none) a share of what is left."""

    pages: tuple[int, ...] = ()
    share: float = 1.0


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


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """Pools for a model's layout on a set of devices (none: the daemon's first), of the tenant of ``budget``. The first
    ``reserved_pages`` of every device pool are never granted. ``display_name``: for operators. ``party``: the process
    that asks, where it is known."""

    name: str
    layout: Layout
    salt: bytes = b""
    devices: tuple[str, ...] = ()
    device_pool: PoolRequest = field(default_factory=PoolRequest)
    host_pool: PoolRequest = field(default_factory=PoolRequest)
    budget: Budget = field(default_factory=Budget)
    reserved_pages: int = 0
    display_name: str = ""
    party: Party = BACKGROUND

    @property
    def namespace(self) -> bytes:
        """Namespace that separates its blocks from all others."""
        return namespace_of(self.name, self.layout.fingerprint, self.salt, self.budget.tenant)

    @property
    def pages_least(self) -> int:
        """Least pages of each group on a device: one that can be granted."""
        return self.reserved_pages + 1


class Registered(NamedTuple):
    """A model and one of its replicas, and whether they were there already."""

    model: Model
    replica: Replica
    existed: bool


Work = Callable[[], Any]


def claimed() -> None:
    """No work: from here on other registrations may plan beside this one."""


def registering(
    core: Core, vault: Vault, request: RegisterRequest, clock: Callable[[], float]
) -> Generator[Work, Any, Registered]:
    """Find the pools, or make them. Yields work for any thread, is sent its result, and thrown what it raises.

    Raises as ``find``, DaemonDraining, LimitExceeded (models of the process, models, pages), QuotaExceeded,
    PoolExhausted with the numbers, Unavailable; a refused registration has evicted no model.
    """
    found = find(core, vault, request)
    if found is not None:
        return found
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and registers nothing new")
    layout, model = request.layout, _known_model(core, request)
    new = replace(
        request,
        devices=devices_of(vault, request),
        device_pool=replace(request.device_pool, pages=layout.fill_pages(request.device_pool.pages)),
        host_pool=replace(request.host_pool, pages=layout.fill_host_pages(request.host_pool.pages)),
    )
    if min(new.device_pool.pages, default=new.pages_least) < new.pages_least:
        beside = f" beside {new.reserved_pages} reserved ones" if new.reserved_pages else ""
        raise InvalidRequest(
            f"a device pool needs at least one page in every group{beside}, got {new.device_pool.pages}"
        )
    most = core.limits.models if new.budget.models or model is not None else models_for(core, new.party)
    while True:
        others = survey(core, new, model, most)
        plan: Plan = yield partial(plan_pools, others, vault, new)
        idle = {each.id for each in idle_models(core)}
        if all(each.id in idle for each in plan.evicted):  # else an engine came back to one: plan again
            break
    for each in plan.evicted:
        evict_model(core, vault, each)
    number = next(core.model_numbers) if model is None else model.id
    on_host: tuple[PagePool, ...] = yield partial(_reserve, vault, new, number, None if model else plan.host_pages)
    if model is None:
        model = core.ledger.coming[new.namespace] = _new_model(core, new, number, plan.host_pages, on_host)
    place_number = model.blocks.next_place()
    replica = place_number - 1
    model.coming[place_number] = PendingReplica(new.devices, plan.device_pages)
    yield claimed
    try:
        on_device: tuple[PagePool, ...] = yield partial(_make, vault, new, number, replica, plan.device_pages)
    except BaseException:
        del model.coming[place_number]
        if not model.coming and core.ledger.coming.get(model.namespace) is model:  # no other registration makes it
            del core.ledger.coming[model.namespace]
            vault.retire(number)
        yield vault.free_retired
        raise
    if core.ledger.coming.get(model.namespace) is model:
        del core.ledger.coming[model.namespace]
        core.ledger.models[number] = model
        for group, run in vault.announce(number):
            host_pages_arrived(core, number, group, run)
    del model.coming[place_number]
    place = model.blocks.add_replica(f"replica {replica}", on_device, place_number)
    made = Replica(replica, new.devices, place, plan.device_pages)
    made.shadow = core.eviction.new_shadow(place.pools[place.lead].capacity)
    model.replicas.append(made)
    if not vault.has_replica(number, replica):
        model.lose(made, "a device lost its memory while the pools were made")
    model.last_used = clock()
    expect_open(core, model)
    return Registered(model, made, existed=False)


def _reserve(vault: Vault, new: RegisterRequest, number: int, pages: tuple[int, ...] | None) -> tuple[PagePool, ...]:
    """Free the host memory of evicted models, and take that of a new one (``pages``). Raises PoolExhausted and
    Unavailable, with nothing taken."""
    vault.free_retired()
    if pages is None:
        return ()
    pools = _pools_of(f"host pool of model {number}", new.layout, new.layout.host_pools, pages)
    vault.open_host(number, new.layout, pages, new.devices)
    for group, run in vault.take_news(number):
        pools[group].add(run.first, run.count)
    return pools


def _make(
    vault: Vault, new: RegisterRequest, number: int, replica: int, pages: tuple[int, ...]
) -> tuple[PagePool, ...]:
    """Free what evicted models held on these devices, and make the replica's pools there; the reserved pages are the
    first of each. Raises PoolExhausted and Unavailable, with nothing made."""
    where = f"device pool of model {number}, replica {replica}"
    pools = _pools_of(where, new.layout, new.layout.pools, pages, new.reserved_pages)
    for groups in new.layout.pools:
        pool = pools[groups[0]]
        pool.add(pool.first, pool.capacity)
    vault.close_retired(new.devices)
    vault.open_replica(number, replica, new.layout, new.devices, pages)
    return pools


def _new_model(
    core: Core, new: RegisterRequest, number: int, host_pages: tuple[int, ...], on_host: tuple[PagePool, ...]
) -> Model:
    ledger, keep = core.ledger, core.limits.events_per_model
    policy, layout = core.eviction, new.layout
    history, made = policy.new_history(layout.block_tokens), policy.new_positions
    blocks = BlockLedger(layout, on_host, policy.rank, ledger.ages, ledger.moment, keep, history, made)
    return Model(
        number,
        new.name,
        layout,
        new.namespace,
        blocks,
        Evictor(blocks),
        host_pages,
        tenant=new.budget.tenant,
        reserved_pages=new.reserved_pages,
        is_salted=bool(new.salt),
        display_name=new.display_name,
        party=new.party,
    )


def register(core: Core, vault: Vault, request: RegisterRequest, now: float) -> Registered:
    """Do all of a registration in one go, where a long call is acceptable. Raises as ``registering``."""
    flow = registering(core, vault, request, lambda: now)
    go_on: Callable[[], Work] = partial(next, flow)
    try:
        while True:
            work = go_on()
            try:
                go_on = partial(flow.send, work())
            except BaseException as broken:  # noqa: BLE001 - it raises it, or gives up first
                go_on = partial(flow.throw, broken)
    except StopIteration as ended:
        made: Registered = ended.value
        return made


def find(core: Core, vault: Vault, request: RegisterRequest) -> Registered | None:
    """The pools that are there for this model, layout, salt, tenant and devices, whatever size is asked for.

    Raises InvalidRequest (names, devices, counts, shares), LimitExceeded (salt, reserved pages), Conflict (another
    number of reserved pages), Unavailable (a model that is out of service).
    """
    _check(request)
    devices = devices_of(vault, request)
    model = _known_model(core, request)
    if model is None:
        return None
    model.require_trusted()
    model.display_name = model.display_name or request.display_name
    if model.reserved_pages != request.reserved_pages:
        raise Conflict(
            f"model {request.name} is there with {model.reserved_pages} reserved pages, not {request.reserved_pages}; "
            "ask for as many"
        )
    there = (made for made in model.replicas if made.devices == devices)
    found = next((Registered(model, made, existed=True) for made in there), None)
    if found is not None:
        expect_open(core, model)
    return found


def evict_model(core: Core, vault: Vault, model: Model) -> None:
    """Forget an idle model; its memory is freed with the next pools that are made, and its keys in turns."""
    vault.retire(model.id)
    del core.ledger.models[model.id]
    if core.storage is not None:
        core.storage.forget(model.id)
    core.later(NO_MODEL, partial(_forget_keys, model, core.turns.forgotten))
    core.count(Count.MODELS_DISMISSED)


def _forget_keys(model: Model, most: int) -> bool:
    """A turn of letting go of what a model that is gone has known: blocks, those that were dropped, and what storage
    has. True when nothing is left."""
    for known in (model.remembered, model.stored.written):
        for _ in range(min(most, len(known))):
            known.popitem()
            most -= 1
    return most > 0 and model.blocks.index.forget_keys(most)


def models_on_host(core: Core, but: Model) -> list[str]:
    """Names of the models, but one, that have a part of the host pool."""
    models = core.ledger.models.values()
    return [each.display_name for each in models if each is not but and max(each.host_pages, default=0) > 1]


def host_pages_arrived(core: Core, model_id: int, group: int, run: Run) -> None:
    """Use pages of a newly populated part of the host pool."""
    model = core.ledger.models.get(model_id)
    if model is not None:
        model.blocks.host.pools[group].add(run.first, run.count)


def _known_model(core: Core, request: RegisterRequest) -> Model | None:
    """The model of a namespace: one that is there, or whose first replica is being made."""
    namespace = request.namespace
    there = (model for model in core.ledger.models.values() if model.namespace == namespace)
    return next(there, core.ledger.coming.get(namespace))


def _check(request: RegisterRequest) -> None:
    layout = request.layout
    if not request.name or len(request.name.encode()) > MAX_MODEL_NAME_BYTES:
        raise InvalidRequest(f"model must be a name of 1 to {MAX_MODEL_NAME_BYTES} bytes")
    if len(request.display_name.encode()) > MAX_DISPLAY_NAME_BYTES or not request.display_name.isprintable():
        raise InvalidRequest(
            f"display_name must be at most {MAX_DISPLAY_NAME_BYTES} bytes of printable text, got "
            f"{request.display_name[:MAX_DISPLAY_NAME_BYTES]!r}"
        )
    if len(request.salt) > MAX_SALT_BYTES:
        raise LimitExceeded("tenant_salt bytes", len(request.salt), MAX_SALT_BYTES)
    if request.reserved_pages > MAX_RESERVED_PAGES:
        raise LimitExceeded("reserved pages", request.reserved_pages, MAX_RESERVED_PAGES)
    for pool in (request.device_pool, request.host_pool):
        if pool.pages and len(pool.pages) not in (len(layout.groups), len(layout.own_groups)):
            raise InvalidRequest(f"{len(pool.pages)} page counts for {len(layout.groups)} groups; give one for each")
        if min(pool.pages, default=1) < 0:
            raise InvalidRequest(f"page counts cannot be negative, got {pool.pages}")
        if not 0 <= pool.share <= 1:
            raise InvalidRequest(f"a pool share must be between 0 and 1, got {pool.share}")
    _check_shared(layout, layout.pools, request.device_pool.pages)
    _check_shared(layout, layout.host_pools, request.host_pool.pages)


def _check_shared(layout: Layout, pools: tuple[tuple[int, ...], ...], pages: tuple[int, ...]) -> None:
    """Raises InvalidRequest where groups of one pool are given other numbers of pages."""
    for groups in pools:
        given = [pages[group] for group in groups if group < len(pages)]
        if len(set(given)) > 1:
            raise InvalidRequest(
                f"groups {', '.join(layout.groups[group].name for group in groups)} share one pool, and each names the "
                f"pages of the whole pool: give the same number for all of them, got {given}"
            )


def devices_of(vault: Vault, request: RegisterRequest) -> tuple[str, ...]:
    """Devices of the replica that is asked for. Raises InvalidRequest."""
    known, ranks = vault.devices(), request.layout.ranks
    chosen = request.devices or known[:ranks]
    if len(chosen) != ranks or len(set(chosen)) != len(chosen):
        raise InvalidRequest(
            f"{ranks} ranks need as many distinct devices, got {len(chosen)}; this daemon has {', '.join(known)}"
        )
    unknown = [device for device in chosen if device not in known]
    if unknown:
        raise InvalidRequest(f"unknown device {unknown[0]!r}; this daemon has {', '.join(known)}")
    return chosen


def _pools_of(
    where: str, layout: Layout, pools: tuple[tuple[int, ...], ...], pages: tuple[int, ...], withheld: int = 0
) -> tuple[PagePool, ...]:
    """The page pool of each group, of counts for each."""
    found: dict[int, PagePool] = {}
    for groups in pools:
        names = [layout.groups[group].name for group in groups]
        made = group_pools(where, names, pages[groups[0]], withheld)
        found |= zip(groups, made, strict=True)
    return tuple(found[group] for group in range(len(layout.groups)))


# Plans pool sizes and idle-model evictions. No side effects.

MAX_POOL_PAGES = 1 << 22
"""Pages of one group of a pool: 256 GiB in pages of 64 KiB. The daemon keeps six bytes for each, and more once it holds
something, so a pool of pages of one byte would be larger in the daemon than on its device."""

STARVED = 64
"""Divisor below which a share counts as none: less than this part of what it would be without idle models."""


Refusal = Callable[[], CacheError]
"""Says why, with the numbers."""


class Plan(NamedTuple):
    """Pages of each group on every device, and on the host (none for a model that is there), once the ``evicted``
    models are gone."""

    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...] = ()
    evicted: tuple[Model, ...] = ()


@dataclass(frozen=True, slots=True)
class Others:
    """The models that are there, at one moment. ``model``: the one that gets a replica, if it is there; ``limit``: of
    models, with the new one. ``idle``: the longest idle first; ``own``: of the newcomer's tenant, where it has a
    budget."""

    model: Model | None
    models: int
    limit: int
    idle: tuple[Model, ...]
    own: tuple[Model, ...]


def survey(core: Core, new: RegisterRequest, model: Model | None, limit: int) -> Others:
    models = (*core.ledger.models.values(), *core.ledger.coming.values())
    tenant = new.budget.tenant if new.budget.is_limited else None
    idle = tuple(each for each in idle_models(core) if each is not model)
    return Others(model, len(models), limit, idle, tuple(each for each in models if each.tenant == tenant))


def plan_pools(others: Others, vault: Vault, new: RegisterRequest) -> Plan:
    """Size a newcomer's pools, with as few idle models evicted as it takes: each for its device memory, its host
    memory, its place among the models or its tenant's quota. Any thread: nothing is changed.

    Raises LimitExceeded, QuotaExceeded and PoolExhausted with the numbers, where it does not fit without any of them.
    """
    idle = others.idle
    sizing = _Sizing(others, vault, new)
    best = sizing.offer(idle)
    if not isinstance(best, Plan):
        raise best()

    def fits(gone: Sequence[Model]) -> bool:
        pools = sizing.offer(gone)
        return isinstance(pools, Plan) and _is_worth(pools, best)

    evicted = fewest(idle, fits)
    pools = best if len(evicted) == len(idle) else sizing.offer(evicted)
    assert isinstance(pools, Plan)
    return pools._replace(evicted=tuple(evicted))


def _is_worth(pools: Plan, best: Plan) -> bool:
    """Shares that come to something; pages that were asked for by number are equal."""
    pairs = zip((*pools.device_pages, *pools.host_pages), (*best.device_pages, *best.host_pages), strict=True)
    return all(pages * STARVED >= most for pages, most in pairs)


class _Sizing:
    """Pools of a newcomer, by the idle models that are evicted."""

    def __init__(self, others: Others, vault: Vault, new: RegisterRequest) -> None:
        self._others = others
        self._vault = vault
        self._new = new
        self._sizes = PoolSizes(new.layout)
        self._least = self._memory_at_least()
        self._own = {model.id: memory_of((model,)) for model in others.own}

    def offer(self, gone: Sequence[Model]) -> Plan | Refusal:
        """The pools, or what refuses them. Many are asked for, so the reason is put into words only once."""
        new, sizes = self._new, self._sizes
        models = self._others.models - len(gone) + 1
        if self._others.model is None and models > self._others.limit:
            return partial(LimitExceeded, "models in use", models, self._others.limit)
        used = self._used(gone)
        if (refusal := new.budget.refusal(used, self._least)) is not None:
            return lambda: refusal
        left = self._vault.headroom([model.id for model in gone])
        pages = self._device_pages(left, used)
        if min(pages) < new.pages_least or sizes.device_bytes(pages) > left.left_on(new.devices):
            return self._no_device_memory
        if max(pages) > MAX_POOL_PAGES:
            return partial(_too_many, "device", max(pages), sizes.device_block_bytes)
        if self._others.model is not None:
            return Plan(pages)
        host_pages = new.host_pool.pages or self._host_share(left, used, pages)
        if new.host_pool.pages and not left.holds(sizes, new.devices, host_pages):
            return self._no_host_memory
        if max(host_pages) > MAX_POOL_PAGES:
            return partial(_too_many, "host", max(host_pages), sizes.host_block_bytes)
        return Plan(pages, host_pages)

    def _used(self, gone: Sequence[Model]) -> Memory:
        """Memory of the tenant's models that stay."""
        left = {model.id for model in gone}
        stay = [held for model, held in self._own.items() if model not in left]
        return Memory(*(sum(column) for column in zip(*stay, strict=True))) if stay else Memory(0, 0, 0, 0)

    def _memory_at_least(self) -> Memory:
        """Least memory of the newcomer: of a share, one block on the devices."""
        new = self._new
        is_new, pages = self._others.model is None, new.device_pool.pages or (new.pages_least,) * len(new.layout.groups)
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
        if self._others.model is None and not new.host_pool.pages and new.host_pool.share:
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
