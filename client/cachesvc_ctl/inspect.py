"""The commands that look into a daemon (and the few that act on it): each one RPC of AdminService."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inspect_pb2

from cachesvc_ctl.lab.report import describe_bytes
from cachesvc_ctl.target import add_target, count, target_of

DEADLINE_SECONDS = 30.0
VERIFY_DEADLINE_SECONDS = 600.0
Admin = admin_pb2_grpc.AdminServiceStub
Show = Callable[[Admin, argparse.Namespace], tuple[Message, str, int]]


def add_commands(commands: Any) -> None:
    """Add those that look, to the parser."""
    rows: list[tuple[str, str, Show]] = [
        ("status", "what needs attention, pools, hits, transfers, settings", _status),
        ("models", "models, layouts and replicas", _models),
        ("leases", "which engine holds what", _leases),
        ("tenants", "what each tenant holds and may hold", _tenants),
        ("sequences", "open sequences", _sequences),
        ("blocks", "resident blocks, most recently used or most often hit first", _blocks),
        ("tree", "the prefix index as a tree, the biggest branches first", _tree),
        ("tickets", "transfers, the newest first", _tickets),
        ("verify", "check that all pages and counts add up; exit code 1 if not", _verify),
    ]
    for row in rows:
        _add(commands, *row)


def add_actions(commands: Any) -> None:
    """Add those that change something, to the parser."""
    _add(commands, "evict", "drop unpinned blocks from a tier", _evict)
    _add(commands, "drain", "open nothing new from now on", _drain)


def _add(commands: Any, name: str, text: str, show: Show) -> None:
    parser = commands.add_parser(name, help=text, description=text)
    add = parser.add_argument
    if name in ("blocks", "tree", "evict"):
        add("--model", type=count, default=1, metavar="ID", help="default 1")
    if name == "verify":
        add("--model", type=count, default=0, metavar="ID", help="default 0: every model")
        add("--checksums", action="store_true", help="also compare sealed pages with their checksums")
    if name == "blocks":
        add("--order", choices=("recent", "hits"), default="recent", help="default recent")
        add("--key", type=_hex, action="append", default=[], metavar="HEX", help="only this block; its first digits do")
    if name in ("sequences", "blocks", "tickets", "tree"):
        add("--limit", type=count, default=40, metavar="N", help="lines at most (default 40)")
    if name == "tree":
        add("--key", type=_hex, metavar="HEX", help="start at this block; its first digits do")
        add("--depth", type=count, default=6, metavar="N", help="levels at most (default 6)")
    if name == "evict":
        add("--tier", choices=("device", "host"), default="device", help="default device")
        add("--blocks", type=count, default=0, metavar="N", help="0: all that can go (default)")
    add("--json", action="store_true", help="print the answer as JSON")
    add_target(parser)
    parser.set_defaults(command=_runner(show))


def _hex(text: str) -> str:
    """A key, or its first digits."""
    if not text or set(text.lower()) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal")
    return text.lower()


def _runner(show: Show) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        with target_of(arguments).open() as channel:
            message, text, code = show(Admin(channel), arguments)
        if arguments.json:
            print(json.dumps(MessageToDict(message, preserving_proto_field_name=True), indent=2))
        else:
            print(text)
        return code

    return run


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; numbers to the right."""
    if not rows:
        return "none"
    cells = [list(head), *([f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def describe_device(d: admin_pb2.DeviceStatus) -> str:
    """One line: what the daemon takes of a GPU, and how fast its link is."""
    link = (
        f"link {d.load_gb_per_second:.1f} GB/s in, {d.store_gb_per_second:.1f} out, {d.both_gb_per_second:.1f} both; "
        f"planes under {describe_bytes(d.narrow_plane_bytes)} load at less than half of that"
        if d.load_gb_per_second
        else "link not measured (calibration never)"
    )
    return (
        f"{d.name} {d.uuid}: pool {describe_bytes(d.pool_bytes)}, {describe_bytes(d.context_bytes)} beside it, {link}"
    )


def describe_hits(h: admin_pb2.HitStatus) -> str:
    """One line: what of the blocks that engines asked for was there."""
    if not h.looked_up_blocks:
        return "hits: nothing was looked up yet"
    return (
        f"hits: {h.looked_up_blocks:,} blocks looked up, {h.device_ratio:.1%} in place, {h.host_ratio:.1%} loaded from "
        f"the host, {h.missed_blocks / h.looked_up_blocks:.1%} computed"
    )


def describe_transfers(t: admin_pb2.TransferStatus) -> str:
    """One line: what moves now, and what has moved."""
    return (
        f"transfers: {t.running_loads} loads and {t.running_stores} stores run ({t.awaited} awaited, "
        f"{describe_bytes(t.running_bytes)}); {t.done:,} done, {t.failed:,} failed; "
        f"{describe_bytes(t.loaded_bytes)} in, {describe_bytes(t.stored_bytes)} out, "
        f"{describe_bytes(t.peer_bytes)} between replicas"
    )


def _status(admin: Admin, _: argparse.Namespace) -> tuple[Message, str, int]:
    answer = admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=DEADLINE_SECONDS)
    head = (
        f"cachesvcd {answer.version}, backend {answer.backend}, up {answer.uptime_seconds:.0f} s, epoch {answer.epoch}"
        f"{', DRAINING' if answer.draining else ''}\n"
        f"host pool: {describe_bytes(answer.host_pool_ready_bytes)} of {describe_bytes(answer.host_pool_bytes)} ready"
    )
    devices = "".join(f"\n{describe_device(device)}" for device in answer.devices)
    attention = "".join(f"\n! {line}" for line in answer.attention)
    pools = table(
        ("model", "place", "group", "pages", "free", "private", "sealed", "in flight", "quarantined", "page"),
        [
            (
                p.model_id,
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
        ],
    )
    counters = table(("counter", "value"), sorted(answer.counters.items()))
    config = table(("setting", "value"), sorted(answer.config.items()))
    use = f"{describe_hits(answer.hits)}\n{describe_transfers(answer.transfers)}"
    return answer, f"{head}{devices}{attention}\n{use}\n\n{pools}\n\n{counters}\n\n{config}", 0


def _models(admin: Admin, _: argparse.Namespace) -> tuple[Message, str, int]:
    answer = admin.ListModels(admin_pb2.ListModelsRequest(), timeout=DEADLINE_SECONDS)
    rows = [
        (
            m.model_id,
            m.model,
            m.namespace.hex()[:12],
            m.layout.block_tokens,
            m.layout.ranks,
            len(m.layout.planes),
            ",".join(g.name for g in m.layout.groups),
            m.blocks,
            " ".join(map(str, m.device_pages)),
            " ".join(map(str, m.host_pages)),
            sum(r.leases for r in m.replicas),
        )
        for m in answer.models
    ]
    head = (
        "id",
        "model",
        "namespace",
        "block tokens",
        "ranks",
        "planes",
        "groups",
        "blocks",
        "device pages",
        "host pages",
        "leases",
    )
    return answer, table(head, rows), 0


def _leases(admin: Admin, _: argparse.Namespace) -> tuple[Message, str, int]:
    answer = admin.ListLeases(admin_pb2.ListLeasesRequest(), timeout=DEADLINE_SECONDS)
    rows = [
        (
            le.lease_id[:12],
            le.engine,
            le.model_id,
            le.replica,
            le.state,
            f"{le.silent_seconds:.1f}",
            le.sequences,
            le.private_pages,
            le.pinned_blocks,
            " ".join(map(str, le.process_ids)),
        )
        for le in answer.leases
    ]
    head = (
        "lease",
        "engine",
        "model",
        "replica",
        "state",
        "silent s",
        "sequences",
        "private pages",
        "pinned",
        "processes",
    )
    return answer, table(head, rows), 0


def _tenants(admin: Admin, _: argparse.Namespace) -> tuple[Message, str, int]:
    answer = admin.ListTenants(inspect_pb2.ListTenantsRequest(), timeout=DEADLINE_SECONDS)
    rows = [
        (t.tenant or "(shared)", what, t.used.get(what, 0), t.limits.get(what, 0) or "-")
        for t in answer.tenants
        for what in sorted({*t.used, *t.limits})
    ]
    return answer, table(("tenant", "of what", "used", "limit"), rows), 0


def _sequences(admin: Admin, arguments: argparse.Namespace) -> tuple[Message, str, int]:
    request = admin_pb2.ListSequencesRequest(limit=arguments.limit)
    answer = admin.ListSequences(request, timeout=DEADLINE_SECONDS)
    rows = [
        (
            s.lease_id[:12],
            s.sequence_id,
            s.blocks,
            s.sealed_blocks,
            s.private_pages,
            "out" if s.swapped_out else "device",
            s.failed or "-",
        )
        for s in answer.sequences
    ]
    head = ("lease", "sequence", "blocks", "sealed", "private pages", "where", "failed")
    return answer, table(head, rows) + _more(answer.truncated), 0


def _blocks(admin: Admin, arguments: argparse.Namespace) -> tuple[Message, str, int]:
    order = admin_pb2.BLOCK_ORDER_HITS if arguments.order == "hits" else admin_pb2.BLOCK_ORDER_RECENT
    request = admin_pb2.ListBlocksRequest(
        model_id=arguments.model, limit=arguments.limit, key_hex=arguments.key, order=order
    )
    answer = admin.ListBlocks(request, timeout=DEADLINE_SECONDS)
    rows = [
        (
            b.key.hex()[:16],
            b.parent_key.hex()[:16] or "-",
            b.position,
            b.children,
            b.pins,
            b.hits,
            "  ".join(f"{c.place}/{c.group} {c.state} page {c.page}" for c in b.copies),
        )
        for b in answer.blocks
    ]
    return (
        answer,
        table(("key", "parent", "position", "children", "pins", "hits", "copies"), rows) + _more(answer.truncated),
        0,
    )


def _tickets(admin: Admin, arguments: argparse.Namespace) -> tuple[Message, str, int]:
    answer = admin.ListTickets(admin_pb2.ListTicketsRequest(limit=arguments.limit), timeout=DEADLINE_SECONDS)
    rows = [
        (
            t.id,
            t.direction,
            common_pb2.TicketState.Name(t.state).removeprefix("TICKET_STATE_").lower(),
            t.blocks,
            describe_bytes(t.size_bytes),
            t.reason or "-",
        )
        for t in answer.tickets
    ]
    return answer, table(("ticket", "direction", "state", "blocks", "bytes", "reason"), rows), 0


def _tree(admin: Admin, arguments: argparse.Namespace) -> tuple[Message, str, int]:
    request = admin_pb2.GetTreeRequest(
        model_id=arguments.model, key_hex=arguments.key or "", depth=arguments.depth, limit=arguments.limit
    )
    answer = admin.GetTree(request, timeout=DEADLINE_SECONDS)
    lines = [
        f"{'  ' * n.depth}{n.key.hex()[:16]}  block {n.position}, {n.tiers}, {n.children} children, "
        f"{n.descendants:,} below"
        for n in answer.nodes
    ]
    return answer, ("\n".join(lines) or "none") + _more(answer.truncated), 0


def _evict(admin: Admin, arguments: argparse.Namespace) -> tuple[Message, str, int]:
    request = admin_pb2.EvictRequest(model_id=arguments.model, tier=arguments.tier, blocks=arguments.blocks)
    answer = admin.Evict(request, timeout=DEADLINE_SECONDS)
    return answer, f"evicted {answer.evicted:,} blocks", 0


def _drain(admin: Admin, _: argparse.Namespace) -> tuple[Message, str, int]:
    answer = admin.Drain(admin_pb2.DrainRequest(), timeout=DEADLINE_SECONDS)
    return answer, f"draining; {answer.live_leases} leases are still live", 0


def _verify(admin: Admin, arguments: argparse.Namespace) -> tuple[Message, str, int]:
    request = admin_pb2.VerifyRequest(checksums=arguments.checksums, model_id=arguments.model)
    answer = admin.Verify(request, timeout=VERIFY_DEADLINE_SECONDS)
    looked = (
        f"{answer.pages_checked:,} pages and {answer.blocks_checked:,} blocks checked in {answer.seconds:.2f} s, "
        f"in {len(answer.checks)} parts of which none kept calls waiting for more than {answer.longest_pause_ms:.1f} ms"
    )
    lines = [looked, *(_checksums(answer.checksums) if arguments.checksums else [])]
    return answer, f"{'ok' if answer.ok else 'NOT ok'}: " + "\n".join([*lines, *answer.problems]), int(not answer.ok)


def _checksums(c: inspect_pb2.ChecksumStatus) -> list[str]:
    if c.mode == "off":
        return ["no checksums are taken: start the daemon with --checksums sample or --checksums all"]
    read = (
        f"{c.pages_checked:,} pages of {c.known_blocks:,} blocks read ({describe_bytes(c.bytes_read)}) and compared "
        f"with their checksums; {c.pages_skipped:,} skipped, {c.passed_over_blocks:,} blocks have none"
    )
    return [
        read,
        *(
            f"model {m.model_id}, {m.place}, group {m.group}, rank {m.rank}, page {m.page}: the bytes of block "
            f"{m.key_hex} changed since they were published ({m.published} then, {m.found} now)"
            for m in c.mismatches
        ),
    ]


def _more(truncated: bool) -> str:
    return "\n(more are there; raise --limit)" if truncated else ""
