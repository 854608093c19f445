"""``cachesvc top``: a daemon's pools, hits, swaps, leases and hottest prefixes, live in a terminal or once as text."""

from __future__ import annotations

from kvcache.v1 import admin_pb2_grpc

from cachesvc_ctl.core.command import DaemonCommand, MissingExtraError, flag, for_terminal, one_line, seconds, table
from cachesvc_ctl.looks import Look, hot_rows, lease_rows, pool_line, take_look
from cachesvc_ctl.status import describe_daemon, describe_hits, describe_transfers

BAR = 20


class Top(DaemonCommand):
    """Several calls of AdminService, again and again."""

    name = "top"
    about = "a live view: pools, hits, swaps, leases, hottest prefixes"
    epilog = "It has no --json: what it shows are answers of status, leases, tickets and blocks, which have."
    flags = (
        flag("--every", type=seconds, default=1.0, metavar="S", help="seconds between looks (default 1)"),
        flag("--once", action="store_true", help="print one look as text and end; needs no extra"),
    )

    def run(self) -> int:
        """Run until it is quit. Raises MissingExtraError."""
        if self.arguments.once:
            with self.target.open() as channel:
                print(for_terminal(as_text(take_look(admin_pb2_grpc.AdminServiceStub(channel)))))
            return 0
        try:
            from cachesvc_ctl.top_app import TopApp
        except ImportError as error:  # whichever module of it was missed first
            raise MissingExtraError("textual", "top", "cachesvc top (without --once)") from error
        TopApp(self.target, self.arguments.every).run()
        return 0


def as_text(look: Look) -> str:
    """One look in 80 columns, for a pipe or a report."""
    status = look.status
    parts = [
        describe_daemon(status),
        *(f"! {one_line(line)}" for line in status.attention),
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
        table(("hottest prefix", "blocks", "hits", "places", "model"), hot_rows(look))
        if look.hottest
        else "no prefix was hit yet",
    ]
    return "\n".join(parts)
