"""Looks at a running daemon, and what both forms of ``cachesvc top`` show of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvcache.v1 import admin_pb2, admin_pb2_grpc, common_pb2

from cachesvc_ctl.blocks import ticket_state
from cachesvc_ctl.core.command import describe_bytes, one_line

LOOK_DEADLINE_SECONDS = 5.0
KEPT_LOOKS = 120
HOTTEST = 12
POOL_STATES = ("sealed", "private", "in_flight", "quarantined")
MARKS = "#o>!"
"""Mark of each pool state, in their order; spaces are free pages."""

TITLE = 24
"""Characters of a pool's title."""

SPARKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Look:
    """One moment of a daemon. ``seconds``: monotonic, of this process."""

    seconds: float
    status: admin_pb2.GetStatusResponse
    leases: Sequence[admin_pb2.LeaseStatus]
    tickets: Sequence[common_pb2.Ticket]
    hottest: Sequence[tuple[str, admin_pb2.BlockStatus]]


@dataclass(frozen=True)
class Rates:
    """Between two looks: blocks and bytes a second, and hit shares of what was looked up (None: nothing was)."""

    looked_up: float
    device: float | None
    host: float | None
    computed: float | None
    in_bytes: float
    out_bytes: float


@dataclass
class History:
    """The last looks at one daemon; a restarted daemon (another epoch) begins anew."""

    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=KEPT_LOOKS))

    def add(self, look: Look) -> bool:
        """Returns True where the daemon is another one than before."""
        is_new = bool(self.looks) and self.looks[-1].status.epoch != look.status.epoch
        if is_new:
            self.looks.clear()
        self.looks.append(look)
        return is_new

    def rates(self) -> list[Rates]:
        """Rates of each pair of neighbours, oldest first."""
        looks = list(self.looks)
        return [rates(before, after) for before, after in pairwise(looks)]


def take_look(admin: admin_pb2_grpc.AdminServiceStub) -> Look:
    """Ask the daemon. Raises grpc.RpcError."""
    status = admin.GetStatus(admin_pb2.GetStatusRequest(brief=True), timeout=LOOK_DEADLINE_SECONDS)
    leases = admin.ListLeases(admin_pb2.ListLeasesRequest(), timeout=LOOK_DEADLINE_SECONDS).leases
    tickets = admin.ListTickets(admin_pb2.ListTicketsRequest(limit=HOTTEST), timeout=LOOK_DEADLINE_SECONDS).tickets
    hottest: list[tuple[str, admin_pb2.BlockStatus]] = []
    for model, name in sorted({pool.model_id: pool.model for pool in status.pools}.items()):
        request = admin_pb2.ListBlocksRequest(model_id=model, limit=HOTTEST, order=admin_pb2.BLOCK_ORDER_HITS)
        hottest += [(name, block) for block in admin.ListBlocks(request, timeout=LOOK_DEADLINE_SECONDS).blocks]
    hottest.sort(key=lambda pair: -pair[1].hits)
    return Look(time.monotonic(), status, leases, tickets, hottest[:HOTTEST])


def rates(before: Look, after: Look) -> Rates:
    """Changes between two looks at one daemon."""
    seconds = max(1e-6, after.seconds - before.seconds)
    old, new = before.status.hits, after.status.hits
    asked = new.looked_up_blocks - old.looked_up_blocks

    def share(blocks: int) -> float | None:
        return min(1.0, max(0.0, blocks / asked)) if asked > 0 else None

    device = new.device_blocks - old.device_blocks
    host = new.host_blocks - old.host_blocks
    moved, had = after.status.transfers, before.status.transfers
    return Rates(
        asked / seconds,
        share(device),
        share(host),
        share(asked - device - host),
        (moved.loaded_bytes + moved.peer_bytes - had.loaded_bytes - had.peer_bytes) / seconds,
        (moved.stored_bytes - had.stored_bytes) / seconds,
    )


def bar(pool: admin_pb2.PoolStatus, width: int) -> str:
    """A pool in ``width`` characters: ``#`` sealed, ``o`` private, ``>`` in flight, ``!`` quarantined, blank free."""
    out, total, filled = "", 0, 0
    for state, mark in zip(POOL_STATES, MARKS, strict=True):
        pages = int(getattr(pool, state))
        total += pages
        # Each mark ends where all pages so far end, so that roundings do not add up; what is there is seen.
        until = max(filled + (pages > 0), round(width * total / max(1, pool.capacity)))
        out += mark * min(until - filled, width - filled)
        filled = len(out)
    return out.ljust(width)


def spark(values: Sequence[float], width: int, most: float | None = None) -> str:
    """The last ``width`` values as one line of blocks, of ``most`` (None: of the largest)."""
    shown = list(values)[-width:]
    top = most if most is not None else max(shown, default=0.0)
    steps = len(SPARKS) - 1
    marks = [SPARKS[min(steps, max(0, round(steps * value / top)))] if top > 0 else SPARKS[0] for value in shown]
    return "".join(marks).rjust(width)


def percent(share: float | None) -> str:
    """Format a share; a dash where nothing was asked."""
    return "-" if share is None else f"{share:.0%}"


def per_second(bytes_per_second: float) -> str:
    """GB/s, the unit of links, or MB/s where that would be nothing."""
    return f"{bytes_per_second / 1e9:.2f} GB/s" if bytes_per_second >= 1e8 else f"{bytes_per_second / 1e6:.1f} MB/s"


def pool_title(pool: admin_pb2.PoolStatus) -> str:
    """The place and the model, in ``TITLE`` characters: of a long name how it begins and ends."""
    place = pool.place if pool.group == "full" else f"{pool.place}/{pool.group}"
    name, room = one_line(pool.model), TITLE - len(place) - 1
    if len(name) > room > 4:
        name = f"{name[: room - room // 2 - 1]}~{name[-(room // 2) :]}"
    return f"{place} {name}"[:TITLE].ljust(TITLE)


def pool_line(pool: admin_pb2.PoolStatus, width: int) -> str:
    """One pool: its name, its bar, and what is free."""
    return f"{pool_title(pool)} [{bar(pool, width)}] {pool_use(pool)}"


def pool_use(pool: admin_pb2.PoolStatus) -> str:
    used = 1 - pool.free / pool.capacity if pool.capacity else 0.0
    return f"{used:4.0%} of {pool.capacity:,} x {describe_bytes(pool.page_bytes)}"


def lease_rows(look: Look) -> list[tuple[object, ...]]:
    """Leases, those that are silent for longest first."""
    return [
        (
            lease.engine,
            lease.lease_id[:6],
            f"{lease.silent_seconds:.1f}" if lease.state == "live" else lease.state,
            lease.sequences,
            lease.private_pages,
            lease.pinned_blocks,
        )
        for lease in sorted(look.leases, key=lambda lease: -lease.silent_seconds)
    ]


def hot_rows(look: Look) -> list[tuple[object, ...]]:
    """The ends of the prefixes that were hit most."""
    return [
        (
            block.key_hex[:10],
            block.position + 1,
            block.hits,
            ", ".join(dict.fromkeys(copy.place.replace("replica ", "r") for copy in block.copies)),
            one_line(model)[:TITLE],
        )
        for model, block in look.hottest
    ]


def ticket_rows(look: Look) -> list[tuple[object, ...]]:
    return [
        (
            ticket.id,
            ticket.direction,
            ticket_state(ticket),
            ticket.blocks,
            describe_bytes(ticket.size_bytes),
        )
        for ticket in look.tickets
    ]
