"""A connection that broke while both sides live: noticed at once, come back from, and nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Iterator

import pytest
from cachesvc_client import DaemonUnavailable, Lease, Reattacher
from cachesvc_client.aio import AsyncCacheClient
from cachesvc_client.wire.settings import TRANSPORT_VARIABLE

from benchmarks.chaos.engine import cut
from tests.e2e.engine import PLAIN, WAIT_SECONDS, Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node(["--lease-seconds", "300"]) as running:  # silence is not what brings the pages back here
        yield running


def test_a_broken_call_connection_costs_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT_VARIABLE, "grpc")  # a lane has no path by which it could be found and cut
    with Engine(node.socket, device_pages=8) as engine:
        assert engine.serve(prompt(1, 4)).computed == 4
        lease = engine.lease.id
        for _ in range(3):
            assert cut(node.socket) >= 1
            assert engine.serve(prompt(1, 4)).device == 4
        assert node.lease_states() == {lease: "live"}


@pytest.mark.parametrize("closes", ["before it is back", "afterwards"])
def test_a_broken_life_connection_loses_the_lease_and_its_close_is_told(node: Node, closes: str) -> None:
    engine = Engine(node.socket, device_pages=8).start()
    back: queue.SimpleQueue[tuple[Lease, ...]] = queue.SimpleQueue()
    old = engine.lease
    sequence = old.match(engine.keys(prompt(1, 4)))
    sequence.allocate(4)
    assert node.pages("private") == 4
    assert cut(node.socket + ".life") == 1
    assert engine.client.wait_lost(WAIT_SECONDS)
    with pytest.raises(DaemonUnavailable):
        sequence.publish(4)
    if closes == "before it is back":
        old.close(quiesced=True)
        assert node.pages("private") == 4, "no close could reach the daemon"
    with Reattacher(engine.client, back.put):
        leases = back.get(timeout=WAIT_SECONDS)
    if closes == "afterwards":
        assert node.pages("private") == 4
        assert old.is_lost
        old.close(quiesced=True)
    wait_until(lambda: node.pages("private") + node.pages("quarantined") == 0, "the old pages came back")
    assert old.id not in node.lease_states()
    lease = leases[0] if leases else engine.client.open_lease(engine.registration)
    engine.take(lease)
    assert engine.serve(prompt(2, 8)).computed == 8
    engine.close()
    assert node.lease_states() == {}


async def test_the_awaited_client_tells_it_too(node: Node) -> None:
    async with AsyncCacheClient(node.socket) as client:
        registration = await client.register("m", PLAIN, device_pages=[8])
        early, late = await client.open_lease(registration), await client.open_lease(registration)
        for lease in (early, late):
            await (await lease.match(b"")).allocate(2)
        assert cut(node.socket + ".life") == 1
        while client.connected:
            with contextlib.suppress(DaemonUnavailable):  # one call may come through before the loss is noticed
                await early.match(b"")
        await early.close()
        (fresh,) = await client.reconnect()
        assert sorted(node.lease_states().values()) == ["live", "live"], "the closed one is known"
        assert late.is_lost
        await late.close()
        await asyncio.to_thread(wait_until, lambda: not any(node.held().values()), "the old pages came back")
        assert list(node.lease_states()) == [fresh.id]
