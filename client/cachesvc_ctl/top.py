"""``cachesvc top``: a daemon's pools, hits, swaps, leases and hottest prefixes, live in a terminal or once as text."""

from __future__ import annotations

import argparse
from typing import Any

from kvcache.v1 import admin_pb2_grpc

from cachesvc_ctl.extras import MissingExtraError
from cachesvc_ctl.inspect import describe_hits, describe_transfers, table
from cachesvc_ctl.rates import Look, hot_rows, lease_rows, pool_line, take_look
from cachesvc_ctl.target import add_target, target_of

BAR = 24


def add_command(commands: Any) -> None:
    """Add it to the parser."""
    text = "a live view: pools, hits, swaps, leases, hottest prefixes"
    parser = commands.add_parser("top", help=text, description=text)
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="S", help="seconds between looks (default 1)")
    parser.add_argument("--once", action="store_true", help="print one look as text and end; needs no extra")
    add_target(parser)
    parser.set_defaults(command=_top)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.1 and 3600 seconds")
    return value


def _top(arguments: argparse.Namespace) -> int:
    if arguments.once:
        with target_of(arguments).open() as channel:
            print(as_text(take_look(admin_pb2_grpc.AdminServiceStub(channel))))
        return 0
    try:
        from cachesvc_ctl.top_app import TopApp
    except ImportError as error:
        raise MissingExtraError(error.name or "textual", "top", "cachesvc top (without --once)") from error
    TopApp(target_of(arguments), arguments.every).run()
    return 0


def as_text(look: Look) -> str:
    """One look in 80 columns, for a pipe or a report."""
    status = look.status
    parts = [
        f"cachesvcd {status.version}, {status.backend}, up {status.uptime_seconds:.0f} s"
        + (", DRAINING" if status.draining else ""),
        *(f"! {line}" for line in status.attention),
        describe_hits(status.hits),
        describe_transfers(status.transfers),
        "",
        "pools: # sealed, o private, > in flight, ! quarantined",
        "\n".join(pool_line(pool, BAR) for pool in status.pools) or "none",
        "",
        table(("engine", "lease", "silent s", "sequences", "private", "pinned"), lease_rows(look))
        if look.leases
        else "no leases",
        "",
        table(("hottest prefix", "blocks", "hits", "places"), hot_rows(look))
        if look.hottest
        else "no prefix was hit yet",
    ]
    return "\n".join(parts)
