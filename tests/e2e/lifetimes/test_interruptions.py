"""A daemon that stops in order, is stopped for a while, or was replaced: the errors that its callers get."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import opaque
from kvcache.v1 import cache_pb2, cache_pb2_grpc

from tests.e2e.engine import BLOCK_TOKENS, Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

pytestmark = pytest.mark.usefixtures("each_way")

LARGE = opaque(block_bytes=1 << 20, block_tokens=BLOCK_TOKENS)
SLOW = ("--store-limit", "1KiB", "--slice-bytes", "1MiB")


def own_channel(node: Node) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{node.socket}", options=[("grpc.use_local_subchannel_pool", 1)])


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """End of a call, and the kind that the daemon names."""
    return call.code(), dict(call.trailing_metadata() or ()).get("kv-error-code", "")


def test_calls_that_wait_are_told_that_the_daemon_stops_and_the_next_one_knows_their_lease(folder: Path) -> None:
    with running_node(SLOW, folder) as node, own_channel(node) as channel:
        engine = Engine(node.socket, layout=LARGE, device_pages=8, host_pages=8)
        with engine:
            sequence = engine.lease.match(b"")
            sequence.allocate(4)
            [ticket] = sequence.swap_out().tickets
            lease = engine.lease.id
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            request = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket.id], wait_ms=60_000)
            tickets = stub.WaitTickets.future(request)
            grown = stub.Allocate.future(cache_pb2.AllocateRequest(lease_id=lease, sequence_id=sequence.id, blocks=5))
            wait_until(lambda: node.pages("in_flight") > 0, "the swap is under way")
            look = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket.id])
            stub.WaitTickets(look)  # it came behind the others, so they have been taken
            node.daemon.process.send_signal(signal.SIGTERM)
            for call in (tickets, grown):
                assert call.exception() is not None
                assert refusal(call) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
            assert node.daemon.process.wait() == os.EX_OK
    with running_node((), folder) as node, own_channel(node) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        matched = stub.Match.future(cache_pb2.MatchRequest(lease_id=lease, sequence_id=1))
        assert matched.exception() is not None
        assert refusal(matched) == (grpc.StatusCode.ABORTED, "LEASE_LOST")
        assert "earlier daemon" in str(matched.details())


def test_a_daemon_that_was_stopped_for_a_while_takes_nobody_for_silent() -> None:
    with running_node(["--lease-seconds", "1"]) as node, Engine(node.socket, device_pages=8) as engine:
        assert engine.serve(prompt(1, 4)).computed == 4
        os.kill(node.daemon.process.pid, signal.SIGSTOP)
        threading.Event().wait(2.5)
        os.kill(node.daemon.process.pid, signal.SIGCONT)
        assert engine.serve(prompt(1, 4)).device == 4
        threading.Event().wait(1.5)
        assert engine.serve(prompt(1, 4)).device == 4
        assert "lease_silent" not in node.log()
