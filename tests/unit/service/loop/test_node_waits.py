"""Waits of a call: until a ticket ends, for as long as its flow has patience, and never beyond its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kvcache.v1 import cache_pb2

from cachesvc.flows.core import Limits, resolve
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.errors import DeadlineExceeded, Unavailable
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.steps import OPERATIONS
from tests.unit.rigs.ledger_rig import Rig, chain
from tests.unit.rigs.peers_rig import shared


def on_node(rig: Rig, wait_seconds: float, call: Callable[[Node], Any]) -> Any:
    """Run ``call(node)`` on a loop of its own, with a node over the rig's core."""

    async def main() -> Any:
        node = Node(rig.core, epoch=1, wait_seconds=wait_seconds, lease_seconds=60.0)
        vault: Any = None
        node.start(vault)
        try:
            return await call(node)
        finally:
            await node.close()

    return asyncio.run(main())


async def see_out(node: Node, flow: Callable[[], Any], seconds: float = 600.0) -> Any:
    """Run a flow as a call does that has so long."""
    until = node.now() + min(seconds, node.wait_seconds)
    answer = node.run(flow)
    return await node.wait_out(lambda: node.run(flow), answer, until, "a") if isinstance(answer, Wait) else answer


def match_flow(rig: Rig, lease: str) -> Callable[[], Any]:
    message = cache_pb2.MatchRequest(lease_id=lease, sequence_id=1, keys=chain(*"abcd"))
    sharing = OPERATIONS["match"].memory()
    return lambda: OPERATIONS["match"].flow(rig.core, resolve(rig.core.ledger, lease, 0.0), message, sharing)


def test_a_match_comes_back_with_what_a_peer_brought() -> None:
    rig, _, b = shared("abcd")

    async def call(node: Node) -> Matched:
        asyncio.get_running_loop().call_soon(lambda: node.on_transfer_done(next(iter(rig.mover.transfers)), None))
        answer = await see_out(node, match_flow(rig, b))
        assert isinstance(answer, Matched)
        return answer

    assert on_node(rig, 30.0, call).device_blocks == 4


@pytest.mark.parametrize(("wait_seconds", "peer_wait_seconds"), [(30.0, 0.01), (0.01, 30.0), (0.0, 30.0)])
def test_a_match_that_no_peer_answers_goes_on_without(wait_seconds: float, peer_wait_seconds: float) -> None:
    rig, _, b = shared("abcd")
    rig.core.limits = Limits(peer_wait_seconds=peer_wait_seconds)
    answer = on_node(rig, wait_seconds, lambda node: see_out(node, match_flow(rig, b)))
    assert (answer.device_blocks, answer.host_blocks) == (0, 0)
    assert len(rig.core.ledger.tickets.running) == 1
    rig.settle()
    assert len(rig.device_keys(1)) == 4


def test_a_flow_that_cannot_do_without_is_told_the_deadline() -> None:
    rig, _, b = shared("abcd")
    waits = match_flow(rig, b)()
    assert isinstance(waits, Wait)
    with pytest.raises(DeadlineExceeded):
        on_node(rig, 0.01, lambda node: see_out(node, lambda: Wait(waits.tickets)))
    rig.settle()


def test_a_prefetch_answers_with_the_load_that_it_began() -> None:
    rig, _, b = shared("abcd")
    message = cache_pb2.PrefetchRequest(lease_id=b, keys=chain(*"abcd"))
    answer = OPERATIONS["prefetch"].flow(
        rig.core, resolve(rig.core.ledger, b, 0.0), message, OPERATIONS["prefetch"].memory()
    )
    assert not isinstance(answer, Wait)
    assert (answer.device_blocks, [ticket.blocks for ticket in answer.tickets]) == (4, [4])


def test_tickets_that_end_without_helping_do_not_keep_a_call_forever() -> None:
    """A daemon that stopped in the midst of an allocate ran its flow again and again, and never ended."""
    with pytest.raises(DeadlineExceeded):
        on_node(shared("abcd")[0], 0.05, lambda node: see_out(node, lambda: Wait((1,))))


def test_a_node_that_closes_refuses_who_still_waits() -> None:
    async def close_and_wait(node: Node) -> None:
        await node.close()
        await see_out(node, lambda: Wait((1,)))

    with pytest.raises(Unavailable):
        on_node(shared("abcd")[0], 60.0, close_and_wait)
