"""``cachesvc status``: attention, pools, hits and transfers; on demand all counters and settings."""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc_client.core.errors import InvalidRequest
from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, status_pb2, storage_pb2

from cachesvc_ctl.core.command import (
    DEADLINE_SECONDS,
    Admin,
    Flag,
    Listing,
    Question,
    Table,
    describe_bytes,
    flag,
    one_line,
    table,
)

SIZE_ENDINGS = ("_pool", "_chunk", "_limit", "_bytes")
"""Endings of the names of settings that are bytes, or bytes per second."""


class Status(Question[admin_pb2.GetStatusResponse]):
    name = "status"
    about = "what needs attention, pools, hits, transfers"
    flags = (
        flag("--counters", action="store_true", help="what was counted since the start, too"),
        flag("--config", action="store_true", help="the settings in effect, too"),
    )

    def ask(self, admin: Admin) -> admin_pb2.GetStatusResponse:
        brief = not (self.arguments.counters or self.arguments.config or self.arguments.json)
        return admin.GetStatus(admin_pb2.GetStatusRequest(brief=brief), timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.GetStatusResponse) -> str:
        """A screen, with more below where it was asked for."""
        host_pool = f"{describe_bytes(answer.host_pool_ready_bytes)} of {describe_bytes(answer.host_pool_bytes)} ready"
        first = [
            describe_daemon(answer) + f", epoch {answer.epoch}",
            f"host pool: {host_pool}",
            *map(describe_device, answer.devices),
            *([f"! {one_line(line)}" for line in answer.attention] or ["nothing needs attention"]),
            describe_hits(answer.hits),
            describe_transfers(answer.transfers),
            describe_transports(answer.transports),
            describe_loop(answer.loop),
        ]
        parts = [
            "\n".join(first),
            POOLS.text(answer.pools) if answer.pools else "no pools: no model is registered yet",
        ]
        if answer.pins:
            parts.append(PINS.text(answer.pins))
        if self.arguments.counters:
            parts.append(table(("counter", "value"), sorted(answer.counters.items())))
        if self.arguments.config:
            settings = [(name, describe_setting(name, value)) for name, value in sorted(answer.config.items())]
            parts.append(table(("setting", "value"), settings))
        return "\n\n".join(parts)


POOLS = Table(
    "model | place | group | pages=capacity | free | private | sealed | in flight=in_flight | quarantined | "
    "page=page_bytes",
    model=lambda pool: pool.model or pool.model_id,
)
PINS = Table(
    "pinned={key_hex:.16} | model | blocks | ends in={seconds_left:,.0f} s | kept on=places",
    places=lambda pin: ", ".join(pin.places),
)


def describe_daemon(status: admin_pb2.GetStatusResponse) -> str:
    """Facts of the daemon, and whether it drains."""
    drains = ", DRAINING" if status.draining else ""
    return f"cachesvcd {status.version}, backend {status.backend}, up {status.uptime_seconds:.0f} s{drains}"


def describe_device(d: status_pb2.DeviceStatus) -> str:
    """Memory that the daemon takes of a GPU, and the speed of its link."""
    link = (
        f"link {d.load_gb_per_second:.1f} GB/s in, {d.store_gb_per_second:.1f} out, {d.both_gb_per_second:.1f} both; "
        f"planes under {describe_bytes(d.narrow_plane_bytes)} load at less than half of that"
        if d.load_gb_per_second
        else f"link not measured ({'calibration never' if d.name else 'broken when the daemon started'})"
    )
    taken = f"pool {describe_bytes(d.pool_bytes)}, {describe_bytes(d.context_bytes)} beside it"
    return f"{d.name} {d.uuid}: {taken}\n  {link}".lstrip()


def describe_hits(h: status_pb2.HitStatus) -> str:
    """Describe in one line how many of the blocks that engines asked for were there."""
    if not h.looked_up_blocks:
        return "hits: nothing was looked up yet"
    return (
        f"hits: {h.looked_up_blocks:,} blocks looked up, {h.device_ratio:.1%} in place, {h.host_ratio:.1%} from "
        f"the host, {h.storage_ratio:.1%} from storage, {h.missed_blocks / h.looked_up_blocks:.1%} computed"
    )


def describe_transfers(t: status_pb2.TransferStatus) -> str:
    """Two lines: what moves now, and what has moved."""
    return (
        f"transfers: {t.running_loads} loads and {t.running_stores} stores run ({t.awaited} awaited, "
        f"{describe_bytes(t.running_bytes)}); {t.done:,} done, {t.failed:,} failed\n"
        f"  {describe_bytes(t.loaded_bytes)} in, {describe_bytes(t.stored_bytes)} out, "
        f"{describe_bytes(t.peer_bytes)} between replicas"
    )


def describe_transports(t: status_pb2.TransportStatus) -> str:
    """Describe in one line the transports of calls."""
    return f"calls: {t.lane_calls:,} by lanes ({t.lanes} open now), {t.grpc_calls:,} by gRPC"


def describe_loop(loop: status_pb2.LoopStatus) -> str:
    """Describe in one line the longest rounds of the event loop."""
    flow = f"; {loop.longest_flow} {loop.longest_flow_ms:.1f} ms" if loop.longest_flow else ""
    rounds = f"longest round {loop.longest_round_ms:.1f} ms, {loop.long_rounds:,} above 2 ms"
    return f"event loop: {rounds}{flow}"


def describe_setting(name: str, value: str) -> str:
    """Value of a setting, with a unit beside sizes."""
    if name.endswith(SIZE_ENDINGS) and value.isdecimal() and int(value) >= 1024:
        return f"{value} ({describe_bytes(int(value))})"
    return value or "-"


LONG_SECONDS = 3600.0
"""Reading a disk takes its time."""


class Storage(Question[Message]):
    name = "storage"
    about = "what each storage tier keeps, its hits and errors"
    epilog = (
        "Exit code 1 where --verify finds what is wrong. A model is purged by its name or display name, with all its "
        "layouts."
    )
    flags = (
        flag("--verify", action="store_true", help="read every object; what is not what its name says is removed"),
        flag("--purge", metavar="MODEL", help="remove all objects of a model, or of one namespace of the listing"),
        flag("--purge-all", action="store_true", help="remove all objects of every model"),
    )

    def ask(self, admin: Admin) -> Message:
        said = self.arguments
        if said.verify:
            return admin.CheckStorage(storage_pb2.CheckStorageRequest(), timeout=LONG_SECONDS)
        if said.purge or said.purge_all:
            request = storage_pb2.PurgeStorageRequest(model=identity_of(admin, said.purge) if said.purge else "")
            return admin.PurgeStorage(request, timeout=LONG_SECONDS)
        return admin.GetStorage(storage_pb2.GetStorageRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: Message) -> str:
        if isinstance(answer, storage_pb2.CheckStorageResponse):
            return _checked(answer)
        if isinstance(answer, storage_pb2.PurgeStorageResponse):
            return f"removed {answer.objects:,} objects" if answer.objects else "there was nothing to remove"
        assert isinstance(answer, storage_pb2.GetStorageResponse)
        return "\n".join(_status(answer)) if answer.tiers else "no storage is configured; see cachesvcd --storage"

    def code(self, answer: Message) -> int:
        return int(isinstance(answer, storage_pb2.CheckStorageResponse) and bool(answer.wrong + answer.unreadable))


def _checked(found: storage_pb2.CheckStorageResponse) -> str:
    verdict = "ok" if not found.wrong + found.unreadable else "NOT ok"
    read = f"{found.objects_checked:,} objects ({describe_bytes(found.size_bytes)}) read in {found.seconds:.1f} s"
    return (
        f"{verdict}: {read}; {found.wrong:,} were wrong and are removed, {found.unreadable:,} could not be read, "
        f"{found.missing:,} had gone"
    )


def _status(found: storage_pb2.GetStorageResponse) -> Iterator[str]:
    for number, tier in enumerate(found.tiers):
        if number:
            yield ""
        yield from _tier(tier)
    if len(found.tiers) > 1:
        yield ""
    yield (
        f"blocks     {found.fetched_blocks:,} came to the host; {found.kept_blocks:,} were kept, "
        f"{found.not_kept_blocks:,} were not, {found.waiting_blocks:,} wait"
    )


def _tier(found: storage_pb2.StorageTier) -> Iterator[str]:
    yield f"storage    {found.storage}"
    used = {"closed": "used", "open": "NOT used", "probing": "NOT used, being tried"}[found.breaker]
    why = f"; last: {found.breaker_reason}" if found.breaker_reason else ""
    yield f"engine     {used}, given up {found.breaker_opened:,} times{why}"
    of = f" of {describe_bytes(found.capacity_bytes)}" if found.capacity_bytes else ""
    counted = "" if found.complete else ", still counting"
    yield f"kept       {found.objects:,} objects, {describe_bytes(found.size_bytes)}{of}{counted}; write={found.write}"
    yield (
        f"read       {found.hits:,} objects, {describe_bytes(found.read_bytes)}, lately "
        f"{describe_bytes(found.read_bytes_per_second)}/s{_latency(found.read_p50_seconds, found.read_p99_seconds)}"
    )
    written = _latency(found.write_p50_seconds, found.write_p99_seconds)
    yield f"written    {describe_bytes(found.written_bytes)}{written}; {found.items_under_way:,} objects under way"
    if found.errors:
        yield f"errors     {found.errors:,}, last: {found.last_error}"
    if found.problem:
        yield f"problem    {found.problem}"
    if found.outcomes:
        yield ""
        yield OUTCOMES.text(found.outcomes)
    if found.scopes:
        yield ""
        yield Table(
            "model? | "
            + ("tenant? | " if any(scope.tenant for scope in found.scopes) else "")
            + "namespace={namespace_hex:.12}? | objects={objects:,} | bytes=size_bytes | "
            "last use={newest_seconds:,.0f} s | oldest use={oldest_seconds:,.0f} s"
        ).text(found.scopes)


def _latency(p50_seconds: float, p99_seconds: float) -> str:
    return f", p50 {p50_seconds * 1e3:.1f} ms, p99 {p99_seconds * 1e3:.1f} ms" if p99_seconds else ""


OUTCOMES = Table("call=way | ended=outcome | items={items:,}")


class UnknownModel(Exception):
    """The daemon has no model of that name or number; ``wanted`` None: it has none at all."""

    def __init__(self, wanted: str | None) -> None:
        super().__init__(wanted)
        self.wanted = wanted

    def __str__(self) -> str:
        there_is = "no model is registered yet" if self.wanted is None else f"there is no model {self.wanted}"
        return f"{there_is}; cachesvc models lists those that are"


class Models(Listing[admin_pb2.ListModelsResponse]):
    name = "models"
    about = "models, layouts and replicas"
    lines = "models"
    table = Table(
        "id=model_id | model=shown | identity | weights=weights_version | namespace={namespace_hex:.12} | "
        "tokens=layout.block_tokens | ranks=layout.ranks | planes | groups | blocks | device=device_pages | "
        "host=host_pages | leases",
        shown=lambda model: model.display_name or model.model,
        identity=lambda model: model.model if model.display_name else "",
        planes=lambda model: len(model.layout.planes),
        groups=lambda model: ",".join(group.name for group in model.layout.groups),
        leases=lambda model: sum(replica.leases for replica in model.replicas),
    )

    def ask(self, admin: Admin) -> admin_pb2.ListModelsResponse:
        return list_models(admin)


def list_models(admin: Admin) -> admin_pb2.ListModelsResponse:
    """Every model that the caller may see. Raises grpc.RpcError."""
    return admin.ListModels(admin_pb2.ListModelsRequest(), timeout=DEADLINE_SECONDS)


def model_flag(otherwise: str = "the only one") -> Flag:
    """``--model``; ``otherwise``: what is meant where it is left out."""
    return flag("--model", metavar="MODEL", help=f"its name or number (default: {otherwise})")


def pick_model(admin: Admin, wanted: str | None) -> admin_pb2.ModelStatus | None:
    """The model that was named, by number, identity or display name. Where none was: the only one, or None while there
    is none.

    Raises UnknownModel for one that is not there, InvalidRequest where several could be meant.
    """
    models = list(list_models(admin).models)
    if wanted is not None:
        found = [each for each in models if str(each.model_id) == wanted]
        found = found or [each for each in models if each.model == wanted]
        found = found or [each for each in models if each.display_name == wanted]
        if not found:
            raise UnknownModel(wanted)
        models = found
    if len(models) > 1:
        named = ", ".join(f"{each.model_id} ({_shown(each)})" for each in models[:8])
        raise InvalidRequest(f"which of {len(models)} models? name one by its number: {named}")
    return models[0] if models else None


def only_number(admin: Admin, wanted: str | None) -> int:
    """Number of ``pick_model``; 0, of which the daemon lists nothing, while there is no model."""
    model = pick_model(admin, wanted)
    return 0 if model is None else model.model_id


def require_model(admin: Admin, wanted: str | None) -> admin_pb2.ModelStatus:
    """``pick_model``, where without one there is nothing to do. Raises UnknownModel, InvalidRequest."""
    model = pick_model(admin, wanted)
    if model is None:
        raise UnknownModel(None)
    return model


def identity_of(admin: Admin, wanted: str) -> str:
    """Return the identity of the model that has the display name ``wanted``; ``wanted`` itself where no registered
    model has it. Raises InvalidRequest where several have."""
    models = list_models(admin).models
    if any(each.model == wanted for each in models) or all(each.display_name != wanted for each in models):
        return wanted
    return require_model(admin, wanted).model


def _shown(model: admin_pb2.ModelStatus) -> str:
    return f"{model.display_name}, {model.model}" if model.display_name else model.model


def model_number(admin: Admin, wanted: str | None) -> int:
    """Number of a model; 0, which stands for every model, where none was named. Raises UnknownModel, InvalidRequest."""
    return 0 if wanted is None else require_model(admin, wanted).model_id
