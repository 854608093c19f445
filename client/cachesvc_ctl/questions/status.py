"""``cachesvc status``: attention, pools, hits and transfers; on demand all counters and settings."""

from __future__ import annotations

from collections.abc import Iterable

from kvcache.v1 import admin_pb2, inspect_pb2, status_pb2

from cachesvc_ctl.core.command import flag
from cachesvc_ctl.core.text import describe_bytes, one_line, table
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, Admin, Question

SIZE_ENDINGS = ("_pool", "_chunk", "_limit", "_bytes")
"""Endings of the names of settings that are bytes, or bytes per second."""


class Status(Question[admin_pb2.GetStatusResponse]):
    """GetStatus."""

    name = "status"
    about = "what needs attention, pools, hits, transfers"
    flags = (
        flag("--counters", action="store_true", help="what was counted since the start, too"),
        flag("--config", action="store_true", help="the settings in effect, too"),
    )

    def ask(self, admin: Admin) -> admin_pb2.GetStatusResponse:
        """Brief, unless more is shown."""
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
        parts = ["\n".join(first), _pools(answer)]
        if answer.pins:
            parts.append(pins_table(answer.pins))
        if self.arguments.counters:
            parts.append(table(("counter", "value"), sorted(answer.counters.items())))
        if self.arguments.config:
            settings = [(name, describe_setting(name, value)) for name, value in sorted(answer.config.items())]
            parts.append(table(("setting", "value"), settings))
        return "\n\n".join(parts)


def _pools(answer: admin_pb2.GetStatusResponse) -> str:
    head = ("model", "place", "group", "pages", "free", "private", "sealed", "in flight", "quarantined", "page")
    rows = [
        (
            p.model or p.model_id,
            p.place,
            p.group,
            p.capacity,
            p.free,
            p.private,
            p.sealed,
            p.in_flight,
            p.quarantined,
            describe_bytes(p.page_bytes),
        )
        for p in answer.pools
    ]
    return table(head, rows) if rows else "no pools: no model is registered yet"


def pins_table(pins: Iterable[inspect_pb2.PinStatus]) -> str:
    """Pins of operators, one a line."""
    rows = [(p.key_hex[:16], p.model, p.blocks, f"{p.seconds_left:,.0f} s", ", ".join(p.places)) for p in pins]
    return table(("pinned", "model", "blocks", "ends in", "kept on"), rows)


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
