"""Registering models: a layout finds its pools, or gets new ones, for which idle models may be evicted.

Sizing pools takes a while and making them waits for drivers, so a registration has parts:

    begin    on the ledger thread: find the pools, or survey the other models
    plan     on any thread: size new ones and choose the idle models to evict, or refuse
    evict    on the ledger thread: evict them, unless one of them is in use by now
    reserve  on any thread: free the host memory that they held, and take a new model's
    claim    on the ledger thread: count what comes, so that other registrations plan beside it
    make     on any thread: make the device pools, all or none
    enter    on the ledger thread: add the replica, and the model with its first one; or ``give_up``

From ``begin`` to ``claim`` no device is asked for anything, and one registration goes at a time. ``make`` waits for the
devices of its own replica alone, beside those of others: a device that hangs keeps only its own engines waiting. Two
replicas of a new model on different devices are one model, which the first that is made brings into the ledger.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from cachesvc.flows.core import NO_MODEL, Chore, Core, Count
from cachesvc.flows.sizing import (
    Budget,
    HasHeadroom,
    Newcomer,
    Plan,
    PoolRequest,
    Pools,
    expect_open,
    idle_models,
    models_for,
    plan_pools,
    survey,
)
from cachesvc.ledger.block_ledger import BlockLedger
from cachesvc.ledger.ledger import Model, PendingReplica, Replica
from cachesvc.ledger.page_pool import PagePool
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.shared_pool import group_pools
from cachesvc.model.errors import Conflict, DaemonDraining, InvalidRequest, LimitExceeded
from cachesvc.model.layout import Layout
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.words import Run, namespace_of

MAX_SALT_BYTES = 256
MAX_MODEL_NAME_BYTES = 512
MAX_DISPLAY_NAME_BYTES = 128
MAX_RESERVED_PAGES = 1024


class Vault(HasHeadroom, Protocol):
    """Allocator of the pools' bytes. Any thread may open and close pools, one at a time for each device."""

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the daemon's devices."""

    def open_host(self, model: int, layout: Layout, pages: tuple[int, ...], devices: tuple[str, ...]) -> None:
        """Reserve a model's host pages, each rank's near its device. Raises PoolExhausted, Unavailable."""

    def take_news(self, model: int) -> list[tuple[int, Run]]:
        """(group, run) of host pages that have become usable since the last look."""

    def open_replica(
        self, model: int, replica: int, layout: Layout, devices: tuple[str, ...], pages: tuple[int, ...]
    ) -> None:
        """Make the device slabs of a replica, zeroed. Raises PoolExhausted, Unavailable, with nothing made."""

    def has_replica(self, model: int, replica: int) -> bool:
        """False where a device lost its memory since the replica was begun."""

    def close_model(self, model: int) -> None:
        """Free the memory of a model that did not come into the ledger."""

    def free_retired(self) -> None:
        """Free the host memory of retired models. Waits for no device."""

    def close_retired(self, devices: Collection[str] | None = None) -> None:
        """Free the memory of retired models on ``devices``; None: all."""

    def announce(self, model: int) -> list[tuple[int, Run]]:
        """Announce a model that is in the ledger: ``host_pages_arrived`` gets further host pages. The last
        ``take_news``."""

    def retire(self, model: int) -> None:
        """The model has left the ledger: give out nothing of it any more."""


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


class Registered(NamedTuple):
    """A model and one of its replicas, and whether they were there already."""

    model: Model
    replica: Replica
    existed: bool


class Registration:
    """Pools on their way: of a new model, or a further replica of one."""

    def __init__(self, core: Core, request: RegisterRequest, newcomer: Newcomer) -> None:
        self.request = request
        self._new = newcomer
        self._others = survey(core, newcomer)
        self._plan = Plan(Pools(()), ())
        self._model = newcomer.model
        self._model_id = self._place = 0
        self._on_device: tuple[PagePool, ...] = ()
        self._on_host: tuple[PagePool, ...] = ()

    def plan(self, vault: Vault) -> None:
        """Decide. Raises PoolExhausted with the numbers, QuotaExceeded, LimitExceeded."""
        self._plan = plan_pools(self._others, vault, self._new)

    def evict(self, core: Core, vault: Vault) -> bool:
        """Evict the idle models that the plan names; False where one of them is in use by now: plan again."""
        idle = {model.id for model in idle_models(core)}
        if not all(model.id in idle for model in self._plan.evicted):
            self._others = survey(core, self._new)
            return False
        for model in self._plan.evicted:
            evict_model(core, vault, model)
        if self._model is None:
            self._model_id = next(core.model_numbers)
        else:
            self._model_id = self._model.id
        return True

    def reserve(self, vault: Vault) -> None:
        """Free the host memory of evicted models, and take that of a new one. Raises PoolExhausted and Unavailable,
        with nothing taken."""
        vault.free_retired()
        if self._model is None:
            layout, pages = self._new.layout, self._plan.pools.host_pages
            self._on_host = _host_pools(f"host pool of model {self._model_id}", layout, pages)
            vault.open_host(self._model_id, layout, pages, self._new.devices)
            for group, run in vault.take_news(self._model_id):
                self._on_host[group].add(run.first, run.count)

    def claim(self, core: Core) -> None:
        """Have other registrations count the memory that is being made, and find a new model by its namespace."""
        if self._model is None:
            self._model = core.ledger.coming[self.request.namespace] = self._new_model(core)
        self._place = self._model.blocks.next_place()
        self._model.coming[self._place] = PendingReplica(self._new.devices, self._plan.pools.device_pages)

    def make(self, vault: Vault) -> None:
        """Free what evicted models held on these devices, and make the replica's pools there. Raises PoolExhausted and
        Unavailable, with nothing made: then ``give_up``."""
        new, pools, replica = self._new, self._plan.pools, self._place - 1
        where = f"device pool of model {self._model_id}, replica {replica}"
        self._on_device = _device_pools(where, new.layout, pools.device_pages, new.reserved_pages)
        for groups in new.layout.pools:
            pool = self._on_device[groups[0]]
            pool.add(pool.first, pool.capacity)
        vault.close_retired(new.devices)
        vault.open_replica(self._model_id, replica, new.layout, new.devices, pools.device_pages)

    def give_up(self, core: Core, vault: Vault) -> None:
        """The pools could not be made. A new model that no other registration makes leaves with its host memory."""
        model = self._model
        assert model is not None, "it was claimed"
        del model.coming[self._place]
        if not model.coming and core.ledger.coming.get(model.namespace) is model:
            del core.ledger.coming[model.namespace]
            vault.retire(model.id)

    def enter(self, core: Core, vault: Vault, now: float) -> Registered:
        """The pools are there: the model is too, or has one replica more; lost (``gone``) where a device lost its
        memory while they were made."""
        model, replica = self._model, self._place - 1
        assert model is not None, "it was claimed"
        if core.ledger.coming.get(model.namespace) is model:
            del core.ledger.coming[model.namespace]
            core.ledger.models[model.id] = model
            for group, run in vault.announce(model.id):
                host_pages_arrived(core, model.id, group, run)
        del model.coming[self._place]
        place = model.blocks.add_replica(f"replica {replica}", self._on_device, self._place)
        made = Replica(replica, self._new.devices, place, self._plan.pools.device_pages)
        made.shadow = core.eviction.new_shadow(place.pools[place.lead].capacity)
        model.replicas.append(made)
        if not vault.has_replica(model.id, replica):
            model.lose(made, "a device lost its memory while the pools were made")
        model.last_used = now
        expect_open(core, model)
        return Registered(model, made, existed=False)

    def _new_model(self, core: Core) -> Model:
        ledger, request, keep = core.ledger, self.request, core.limits.events_per_model
        policy, layout = core.eviction, request.layout
        history, made = policy.new_history(layout.block_tokens), policy.new_positions
        blocks = BlockLedger(layout, self._on_host, policy.rank, ledger.ages, ledger.moment, keep, history, made)
        return Model(
            self._model_id,
            request.name,
            request.layout,
            request.namespace,
            blocks,
            Evictor(blocks),
            self._plan.pools.host_pages,
            tenant=request.budget.tenant,
            reserved_pages=request.reserved_pages,
            is_salted=bool(request.salt),
            display_name=request.display_name,
            party=request.party,
        )


def register(core: Core, vault: Vault, request: RegisterRequest, now: float) -> Registered:
    """Run all parts of a registration in one go, where a long call is acceptable.

    Raises as its parts do; a refused registration has evicted no model.
    """
    begun = begin(core, vault, request)
    if isinstance(begun, Registered):
        return begun
    begun.plan(vault)
    assert begun.evict(core, vault), "no other registration came between"
    begun.reserve(vault)
    begun.claim(core)
    try:
        begun.make(vault)
    except BaseException:
        begun.give_up(core, vault)
        vault.free_retired()
        raise
    return begun.enter(core, vault, now)


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


def begin(core: Core, vault: Vault, request: RegisterRequest) -> Registered | Registration:
    """Find the pools, or begin to make new ones. Raises as ``find``, LimitExceeded (models of the process), and
    DaemonDraining."""
    found = find(core, vault, request)
    if found is not None:
        return found
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and registers nothing new")
    layout = request.layout
    device_pool = replace(request.device_pool, pages=layout.fill_pages(request.device_pool.pages))
    host_pool = replace(request.host_pool, pages=layout.fill_host_pages(request.host_pool.pages))
    reserved = request.reserved_pages
    if min(device_pool.pages, default=reserved + 1) <= reserved:
        beside = f" beside {reserved} reserved ones" if reserved else ""
        raise InvalidRequest(f"a device pool needs at least one page in every group{beside}, got {device_pool.pages}")
    devices, model = devices_of(vault, request), _known_model(core, request)
    most = core.limits.models if request.budget.models or model is not None else models_for(core, request.party)
    newcomer = Newcomer(layout, devices, device_pool, host_pool, request.budget, model, most, reserved)
    return Registration(core, request, newcomer)


def evict_model(core: Core, vault: Vault, model: Model) -> None:
    """Forget an idle model; its memory is freed with the next pools that are made, and its keys in turns."""
    vault.retire(model.id)
    del core.ledger.models[model.id]
    if core.storage is not None:
        core.storage.forget(model.id)
    core.chores.append(Chore(NO_MODEL, partial(_forget_keys, model, core.turns.forgotten)))
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


def _host_pools(where: str, layout: Layout, pages: tuple[int, ...]) -> tuple[PagePool, ...]:
    return _pools_of(where, layout, layout.host_pools, pages, 0)


def _device_pools(where: str, layout: Layout, pages: tuple[int, ...], reserved: int) -> tuple[PagePool, ...]:
    """The reserved pages are the first of each pool."""
    return _pools_of(where, layout, layout.pools, pages, reserved)


def _pools_of(
    where: str, layout: Layout, pools: tuple[tuple[int, ...], ...], pages: tuple[int, ...], withheld: int
) -> tuple[PagePool, ...]:
    """The page pool of each group, of counts for each."""
    found: dict[int, PagePool] = {}
    for groups in pools:
        names = [layout.groups[group].name for group in groups]
        made = group_pools(where, names, pages[groups[0]], withheld)
        found |= zip(groups, made, strict=True)
    return tuple(found[group] for group in range(len(layout.groups)))
