"""Models and their memory: register a layout, size its pools, give way when a newcomer needs the room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from cachesvc.flows.budget import Budget, make_room
from cachesvc.flows.core import Core
from cachesvc.flows.counters import Count
from cachesvc.ledger.blocks import BlockLedger
from cachesvc.ledger.evict import Evictor
from cachesvc.ledger.ledger import Model, Replica
from cachesvc.ledger.pages import PagePool
from cachesvc.model.errors import CacheError, DaemonDraining, InvalidRequest, LimitExceeded, PoolExhausted
from cachesvc.model.geometry import device_bytes
from cachesvc.model.keys import namespace_of
from cachesvc.model.layout import Layout
from cachesvc.model.words import Run

MAX_SALT_BYTES = 256
MAX_MODEL_NAME_BYTES = 512
NO_BUDGET = Budget()


class Vault(Protocol):
    """Where the bytes of pools come from."""

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the daemon's devices."""

    def device_free_bytes(self, device: str) -> int:
        """What is left of a device's pool."""

    def host_pages_for(self, layout: Layout, share: float) -> int:
        """Pages that ``share`` of what is left of the host pool holds, the same number in every group."""

    def open_host(self, model: int, layout: Layout, pages: tuple[int, ...]) -> list[list[Run]]:
        """Reserve host pages; returns for each group the runs that are usable now. Raises PoolExhausted."""

    def open_replica(
        self, model: int, replica: int, layout: Layout, devices: tuple[str, ...], pages: tuple[int, ...]
    ) -> None:
        """Make the device slabs of a replica, zeroed. Raises PoolExhausted."""

    def close_model(self, model: int) -> None:
        """Give back everything of a model."""


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What a caller wants of a pool: pages for each group, or a share of what is left."""

    pages: tuple[int, ...] = ()
    share: float = 1.0


class Registered(NamedTuple):
    """A model and one of its replicas, and whether they were there already."""

    model: Model
    replica: Replica
    existed: bool


def register(
    core: Core,
    vault: Vault,
    name: str,
    layout: Layout,
    salt: bytes,
    devices: tuple[str, ...],
    device_wish: PoolWish,
    host_wish: PoolWish,
    now: float,
    budget: Budget = NO_BUDGET,
) -> Registered:
    """Find or make the pools for a model on a set of devices, for the tenant of ``budget`` and within it.

    Raises InvalidRequest (names, devices, shares), PoolExhausted with the numbers, QuotaExceeded, LimitExceeded,
    DaemonDraining.
    """
    device_wish = replace(device_wish, pages=layout.fill_pages(device_wish.pages))
    host_wish = replace(host_wish, pages=layout.fill_host_pages(host_wish.pages))
    _check(name, salt, (device_wish, host_wish), layout)
    chosen = _devices(vault, layout, devices)
    namespace = namespace_of(name, layout.fingerprint, salt, budget.tenant)
    model = next((m for m in core.ledger.models.values() if m.namespace == namespace), None)
    if model is not None:
        model.require_trusted()
        for replica in model.replicas:
            if replica.devices == chosen:
                return Registered(model, replica, existed=True)
    if core.ledger.draining:
        raise DaemonDraining("the daemon is draining and registers nothing new")
    _require_pages(device_wish)
    if model is None:
        _require_place_in_list(core)
    keep = model.id if model is not None else None
    room = make_room(
        core,
        budget,
        layout,
        device_wish.pages,
        host_wish.pages,
        is_new=model is None,
        dismiss=lambda idle: _dismiss(core, vault, idle),
        keep=keep,
    )
    pages = _device_pages(core, vault, layout, chosen, device_wish, keep, room.device_bytes)
    if model is None:
        _make_place_in_list(core, vault)
        host_pages = host_wish.pages or (_host_share(vault, layout, host_wish.share, room.host_pages),) * len(
            layout.groups
        )
        model = _new_model(core, vault, name, layout, namespace, host_pages)
        model.tenant, model.is_salted = budget.tenant, bool(salt)
    replica = _new_replica(core, vault, model, chosen, pages)
    model.last_used = now
    return Registered(model, replica, existed=False)


def _check(name: str, salt: bytes, wishes: tuple[PoolWish, ...], layout: Layout) -> None:
    if not name or len(name.encode()) > MAX_MODEL_NAME_BYTES:
        raise InvalidRequest(f"model must be a name of 1 to {MAX_MODEL_NAME_BYTES} bytes")
    if len(salt) > MAX_SALT_BYTES:
        raise LimitExceeded("tenant_salt bytes", len(salt), MAX_SALT_BYTES)
    for wish in wishes:
        if wish.pages and len(wish.pages) != len(layout.groups):
            raise InvalidRequest(f"{len(wish.pages)} page counts for {len(layout.groups)} groups; give one for each")
        if min(wish.pages, default=1) < 0:
            raise InvalidRequest(f"page counts cannot be negative, got {wish.pages}")
        if not 0 <= wish.share <= 1:
            raise InvalidRequest(f"a pool share must be between 0 and 1, got {wish.share}")


def _devices(vault: Vault, layout: Layout, devices: tuple[str, ...]) -> tuple[str, ...]:
    known = vault.devices()
    chosen = devices or known[: layout.ranks]
    if len(chosen) != layout.ranks or len(set(chosen)) != len(chosen):
        raise InvalidRequest(
            f"{layout.ranks} ranks need as many distinct devices, got {len(chosen)}; this daemon has {', '.join(known)}"
        )
    unknown = [device for device in chosen if device not in known]
    if unknown:
        raise InvalidRequest(f"unknown device {unknown[0]!r}; this daemon has {', '.join(known)}")
    return chosen


def _device_pages(
    core: Core,
    vault: Vault,
    layout: Layout,
    devices: tuple[str, ...],
    wish: PoolWish,
    keep: int | None,
    most_bytes: int | None,
) -> tuple[int, ...]:
    """Pages for each group on every device, making idle models give way while they do not fit.

    A share comes to ``most_bytes`` on each device at most.
    """
    share = 1.0 if wish.pages else wish.share
    while True:
        left = min(vault.device_free_bytes(device) for device in devices)
        wanted = int(left * wish.share)
        pages = wish.pages or _fitting(layout, wanted if most_bytes is None else min(wanted, most_bytes))
        if all(pages) and device_bytes(layout, pages) <= left:
            return pages
        idle = _idle_models(core, devices, keep)
        least = device_bytes(layout, wish.pages or (1,) * len(layout.groups))
        if not idle or any(
            least > share * (vault.device_free_bytes(d) + sum(_bytes_on(model, d) for model in idle)) for d in devices
        ):
            break
        _dismiss(core, vault, min(idle, key=lambda model: (model.last_used, model.id)))
    per_block = sum(layout.page_bytes(group) for group in range(len(layout.groups)))
    raise PoolExhausted(
        pool=f"device pool of {', '.join(devices)} ({left} bytes left, {per_block} bytes a block)",
        wanted=max(wish.pages, default=1),
        free=left // per_block,
        evictable=sum(min(_bytes_on(model, d) for d in devices) for model in idle) // per_block,
        pinned=0,
        quarantined=0,
        capacity=left // per_block,
    )


def _require_pages(wish: PoolWish) -> None:
    if not all(wish.pages):
        raise InvalidRequest(f"a device pool needs at least one page in every group, got {wish.pages}")


def _host_share(vault: Vault, layout: Layout, share: float, most: int | None) -> int:
    pages = vault.host_pages_for(layout, share)
    return pages if most is None else min(pages, most)


def _fitting(layout: Layout, size_bytes: int) -> tuple[int, ...]:
    units = layout.unit_pages
    count = size_bytes // sum(layout.page_bytes(group) * unit for group, unit in enumerate(units))
    while count > 0 and device_bytes(layout, tuple(count * unit for unit in units)) > size_bytes:
        count -= 1
    return tuple(count * unit for unit in units)


def _idle_models(core: Core, devices: tuple[str, ...] | None, keep: int | None) -> list[Model]:
    """Models that nobody uses: those that hold memory on one of ``devices``, or all (None)."""
    busy = {lease.model for lease in core.ledger.leases.values()}
    busy |= {ticket.model for ticket in core.ledger.tickets.running.values()}
    return [
        model
        for model in core.ledger.models.values()
        if model.id not in busy
        and model.id != keep
        and (devices is None or any(set(r.devices) & set(devices) for r in model.replicas))
    ]


def _bytes_on(model: Model, device: str) -> int:
    return sum(device_bytes(model.layout, r.device_pages) for r in model.replicas if device in r.devices)


def _require_place_in_list(core: Core) -> None:
    """Raises LimitExceeded where there are as many models as may be, all in use."""
    if len(core.ledger.models) >= core.limits.models and not _idle_models(core, None, None):
        raise LimitExceeded("models in use", len(core.ledger.models) + 1, core.limits.models)


def _make_place_in_list(core: Core, vault: Vault) -> None:
    """The longest idle model gives way where there are as many as may be; only once nothing else refuses the new."""
    idle = _idle_models(core, None, None)
    if len(core.ledger.models) >= core.limits.models:
        _dismiss(core, vault, min(idle, key=lambda model: (model.last_used, model.id)))


def _dismiss(core: Core, vault: Vault, model: Model) -> None:
    vault.close_model(model.id)
    del core.ledger.models[model.id]
    core.count(Count.MODELS_DISMISSED)


def _new_model(core: Core, vault: Vault, name: str, layout: Layout, namespace: bytes, pages: tuple[int, ...]) -> Model:
    model_id = core.next_model
    ready = vault.open_host(model_id, layout, pages)
    core.next_model += 1
    pools = tuple(
        PagePool(f"host pool of model {model_id}, group {g.name}", n) for g, n in zip(layout.groups, pages, strict=True)
    )
    for pool, runs in zip(pools, ready, strict=True):
        for run in runs:
            pool.add(run.first, run.count)
    blocks = BlockLedger(layout, pools, core.rank, core.ledger.ages, core.ledger.moment, core.limits.events_per_model)
    model = Model(model_id, name, layout, namespace, blocks, Evictor(blocks), pages)
    core.ledger.models[model_id] = model
    return model


def _new_replica(core: Core, vault: Vault, model: Model, devices: tuple[str, ...], pages: tuple[int, ...]) -> Replica:
    replica_id = len(model.replicas)
    try:
        vault.open_replica(model.id, replica_id, model.layout, devices, pages)
    except CacheError:
        if not model.replicas:
            vault.close_model(model.id)
            del core.ledger.models[model.id]
        raise
    pools = []
    for group, count in zip(model.layout.groups, pages, strict=True):
        pool = PagePool(f"device pool of model {model.id}, replica {replica_id}, group {group.name}", count)
        pool.add(0, count)
        pools.append(pool)
    place = model.blocks.add_replica(f"replica {replica_id}", tuple(pools))
    replica = Replica(replica_id, devices, place, pages)
    model.replicas.append(replica)
    return replica


def host_pages_arrived(core: Core, model_id: int, group: int, run: Run) -> None:
    """More of the host pool is populated: its pages may be used."""
    model = core.ledger.models.get(model_id)
    if model is not None:
        model.blocks.host.pools[group].add(run.first, run.count)
