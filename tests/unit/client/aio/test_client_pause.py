"""A lease tells with an extra beat that decode is being hurt."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cachesvc_client import CacheClient
from cachesvc_client.core.errors import AlreadyClosed, InvalidRequest
from cachesvc_client.layouts.families import opaque

from tests.unit.rigs.client_rig import FakeDaemon, break_way

LAYOUT = opaque(block_bytes=64, block_tokens=4)
PROMPT_S = 2.0
"""Far less than from one beat to the next, which is 10 s."""


def pauses(daemon: FakeDaemon) -> list[int]:
    return [request.pause_write_backs_ms for request in daemon.seen["KeepAlive"]]


def test_a_pause_is_told_at_once_and_once(daemon: FakeDaemon) -> None:
    with CacheClient(daemon.path) as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        assert daemon.beats.acquire(timeout=PROMPT_S)
        began = time.monotonic()
        for seconds in (0.25, 1.0):
            lease.pause_write_backs(seconds)
            assert daemon.beats.acquire(timeout=PROMPT_S)
        assert time.monotonic() - began < PROMPT_S
        assert pauses(daemon) == [0, 250, 1000]
        for seconds in (0.0, -1.0, 1.001):
            with pytest.raises(InvalidRequest, match="at most 1 s at a time"):
                lease.pause_write_backs(seconds)
        lease.close()
        with pytest.raises(AlreadyClosed):
            lease.pause_write_backs(0.5)


def test_a_pause_is_told_by_the_stream_that_lives(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.faults["KeepAlive"].append(break_way)
    daemon.start()
    with CacheClient(daemon.path) as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        assert daemon.beats.acquire(timeout=PROMPT_S)
        lease.pause_write_backs(0.5)
        assert daemon.beats.acquire(timeout=PROMPT_S)
        assert pauses(daemon) == [0, 0, 500]
        lease.close()
    daemon.close()
