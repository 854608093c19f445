"""Leases that surely live, and that may not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc_client import CacheClient, Lease, Retries, Timeouts
from cachesvc_client.layouts.families import opaque
from cachesvc_client.records.lease_record import Tenure

from tests.e2e.rig import wait_until
from tests.unit.rigs.client_rig import FakeDaemon

LAYOUT = opaque(block_bytes=64, block_tokens=4)
LONG_S = 30.0


@contextmanager
def sure_lease(daemon: FakeDaemon) -> Iterator[Lease]:
    """One whose first beat was answered; the next comes in 10 s."""
    with CacheClient(daemon.path, timeouts=Timeouts(close_s=1), retries=Retries(pause_s=0.001)) as client:
        daemon.draining = True
        made = client.open_lease(client.register("m", LAYOUT))
        wait_until(lambda: made.is_draining, "it has heard the answer")
        yield made


def expire(lease: Lease) -> None:
    """Let the lease expire, like a stop for longer than the limit does."""
    lease.record.tenure = Tenure(LONG_S, -math.inf)
    assert not sure(lease)


def sure(what: Lease | Tenure) -> bool:
    """True while it is valid, which changes."""
    return what.is_sure
