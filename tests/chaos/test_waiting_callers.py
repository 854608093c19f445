"""Callers that wait, by the thousand: they cost the others neither an answer nor a lease, and themselves no more than
the calls that find no room."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import LimitExceeded, opaque
from cachesvc_client.core.errors import error_of
from kvcache.v1 import cache_pb2, cache_pb2_grpc, inspect_pb2

from tests.e2e.engine import BLOCK_TOKENS, Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

LEASE_SECONDS = 2.0
WAITING = 1100
EACH = 256
"""Calls of one process that may wait, by default."""
LARGE = opaque(block_bytes=1 << 20, block_tokens=BLOCK_TOKENS)
SLOW = f'store_limit = "1KiB"\nslice_bytes = "1MiB"\nlease_seconds = {LEASE_SECONDS}\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cachesvc.toml"
    path.write_text(SLOW)
    return path


@pytest.fixture
def node(file: Path) -> Iterator[Node]:
    with running_node(["--config", str(file)]) as running:
        yield running


def wait_by_the_thousand(node: Node, lease: str, ticket: int, channels: ExitStack) -> list[Any]:
    """Calls that wait for one ticket, over as many connections as it takes."""
    request = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=60_000)
    calls: list[Any] = []
    for _ in range(4):
        channel = grpc.insecure_channel(f"unix:{node.socket}", options=[("grpc.use_local_subchannel_pool", 1)])
        stub = cache_pb2_grpc.CacheServiceStub(channels.enter_context(channel))
        calls += [stub.WaitTickets.future(request) for _ in range(WAITING // 4)]
        # gRPC itself gives up some of more than a thousand calls that no server has looked at yet.
        stub.WaitTickets(cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket]))
    return calls


def test_a_thousand_waiting_calls_cost_nobody_a_lease_or_an_answer(node: Node, file: Path) -> None:
    with (
        Engine(node.socket, name="greedy", layout=LARGE, device_pages=8, host_pages=8) as greedy,
        Engine(node.socket, name="other", model="other@1", device_pages=16) as other,
        ExitStack() as channels,
        greedy.lease.match(b"") as sequence,
    ):
        sequence.allocate(4)
        [ticket] = sequence.swap_out().tickets
        calls = wait_by_the_thousand(node, greedy.lease.id, ticket.id, channels)
        wait_until(lambda: sum(call.done() for call in calls) == WAITING - EACH, "what finds no room is refused")
        refused = [call for call in calls if call.done()]
        assert all(isinstance(error_of(call.exception()), LimitExceeded) for call in refused)
        rounds = threading.Event()
        for number in range(10):  # longer than the silence limit
            assert other.serve(prompt(number, 4)).bad == []
            greedy.lease.match(b"").release()
            rounds.wait(LEASE_SECONDS / 4)
        assert set(node.lease_states().values()) == {"live"}
        assert "lease_silent" not in node.log()
        file.write_text(SLOW.replace("1KiB", "0"))
        node.admin.Reload(inspect_pb2.ReloadRequest())
        states = [call.result().tickets[0].state for call in calls if call not in refused]
        assert states == [2] * EACH, "those that waited are answered, all of them: done"
