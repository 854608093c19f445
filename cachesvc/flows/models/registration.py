"""Registering models: a layout finds its pools, or gets new ones, for which idle models may be evicted.

Sizing pools takes a while and making them waits for drivers, so a registration has parts, and no other one begins
before it is through:

    begin    on the ledger thread: find the pools, or survey the other models
    plan     on any thread: size new ones and choose the idle models to evict, or refuse
    evict    on the ledger thread: evict them, unless one of them is in use by now
    make     on any thread: free what they held, then make the pools, all or none
    enter    on the ledger thread: add the model
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from cachesvc.flows.context.core import Core
from cachesvc.flows.context.counters import Count
from cachesvc.flows.context.turns import NO_MODEL, Chore
from cachesvc.flows.models.idle import expect_open, idle_models, models_for
from cachesvc.flows.models.sizing import HasHeadroom, Newcomer, Plan, PoolRequest, Pools, plan_pools, survey
from cachesvc.flows.models.tenant_budget import Budget
from cachesvc.ledger.eviction.planner import Evictor
from cachesvc.ledger.index.block_ledger import BlockLedger
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pages.page_pool import PagePool
from cachesvc.ledger.pages.shared_pool import group_pools
from cachesvc.model.errors import Conflict, DaemonDraining, InvalidRequest, LimitExceeded
from cachesvc.model.keys import namespace_of
from cachesvc.model.layout import Layout
from cachesvc.model.numbers.sharing import BACKGROUND, Party
from cachesvc.model.words import Run

MAX_SALT_BYTES = 256
MAX_MODEL_NAME_BYTES = 512
MAX_DISPLAY_NAME_BYTES = 128
MAX_RESERVED_PAGES = 1024


class Vault(HasHeadroom, Protocol):
    """Allocator of the pools' bytes. Any thread may open and close pools, one at a time."""

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

    def close_retired(self) -> None:
        """Free the memory of retired models."""

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
        self._model_id = self._replica_id = 0
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
        if self._new.model is None:
            self._model_id = core.next_model
            core.next_model += 1
        else:
            self._model_id, self._replica_id = self._new.model.id, self._new.model.blocks.places_made - 1
        return True

    def make(self, vault: Vault) -> None:
        """Free what evicted models held and make the pools. Raises PoolExhausted and Unavailable, with nothing made."""
        new, pools, is_new = self._new, self._plan.pools, self._new.model is None
        where = f"device pool of model {self._model_id}, replica {self._replica_id}"
        self._on_device = _device_pools(where, new.layout, pools.device_pages, new.reserved_pages)
        for groups in new.layout.pools:
            pool = self._on_device[groups[0]]
            pool.add(pool.first, pool.capacity)
        vault.close_retired()
        with ExitStack() as undo:
            if is_new:
                self._on_host = _host_pools(f"host pool of model {self._model_id}", new.layout, pools.host_pages)
                vault.open_host(self._model_id, new.layout, pools.host_pages, new.devices)
                undo.callback(vault.close_model, self._model_id)
                for group, run in vault.take_news(self._model_id):
                    self._on_host[group].add(run.first, run.count)
            vault.open_replica(self._model_id, self._replica_id, new.layout, new.devices, pools.device_pages)
            undo.pop_all()

    def enter(self, core: Core, vault: Vault, now: float) -> Registered:
        """The pools are there: the model is too, or has one replica more; lost (``gone``) where a device lost its
        memory while they were made."""
        model = self._new.model or self._enter_model(core, vault)
        place = model.blocks.add_replica(f"replica {self._replica_id}", self._on_device)
        made = Replica(self._replica_id, self._new.devices, place, self._plan.pools.device_pages)
        made.shadow = core.eviction.new_shadow(place.pools[place.lead].capacity)
        model.replicas.append(made)
        if not vault.has_replica(self._model_id, self._replica_id):
            model.lose(made, "a device lost its memory while the pools were made")
        model.last_used = now
        expect_open(core, model)
        return Registered(model, made, existed=False)

    def _enter_model(self, core: Core, vault: Vault) -> Model:
        ledger, request, keep = core.ledger, self.request, core.limits.events_per_model
        policy, layout = core.eviction, request.layout
        history, made = policy.new_history(layout.block_tokens), policy.new_positions
        blocks = BlockLedger(layout, self._on_host, policy.rank, ledger.ages, ledger.moment, keep, history, made)
        model = ledger.models[self._model_id] = Model(
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
        for group, run in vault.announce(self._model_id):
            host_pages_arrived(core, self._model_id, group, run)
        return model


def register(core: Core, vault: Vault, request: RegisterRequest, now: float) -> Registered:
    """Run all parts of a registration in one go, where a long call is acceptable.

    Raises as its parts do; a refused registration has evicted no model.
    """
    begun = begin(core, vault, request)
    if isinstance(begun, Registered):
        return begun
    begun.plan(vault)
    assert begun.evict(core, vault), "no other registration came between"
    begun.make(vault)
    return begun.enter(core, vault, now)


def find(core: Core, vault: Vault, request: RegisterRequest) -> Registered | None:
    """The pools that are there for this model, layout, salt, tenant and devices, whatever size is asked for.

    Raises InvalidRequest (names, devices, counts, shares), LimitExceeded (salt, reserved pages), Conflict (another
    number of reserved pages), Unavailable (a model that is out of service).
    """
    _check(request)
    devices = _devices(vault, request)
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
    devices, model = _devices(vault, request), _known_model(core, request)
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


def host_pages_arrived(core: Core, model_id: int, group: int, run: Run) -> None:
    """Use pages of a newly populated part of the host pool."""
    model = core.ledger.models.get(model_id)
    if model is not None:
        model.blocks.host.pools[group].add(run.first, run.count)


def _known_model(core: Core, request: RegisterRequest) -> Model | None:
    namespace = request.namespace
    return next((model for model in core.ledger.models.values() if model.namespace == namespace), None)


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


def _devices(vault: Vault, request: RegisterRequest) -> tuple[str, ...]:
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
