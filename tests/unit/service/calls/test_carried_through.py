"""A call of several turns that has done a part for good is carried through without its caller; its answer is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from kvcache.v1 import cache_pb2
from kvcache.v1.cache_pb2 import PublishResponse

from cachesvc.flows.allocate import refill_stock, swap_out
from cachesvc.flows.core import LAST_TURNS
from cachesvc.flows.publish import Publishing, publish
from cachesvc.flows.recycle import Recycling, recycle, release
from cachesvc.model.answers import Published, Recycled
from cachesvc.service.calls.dispatcher import Operation
from cachesvc.wire.convert import pack_pages
from cachesvc.wire.lane import CANCEL, encode
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.lane_rig import LaneSite, call, greeted
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, windowed
from tests.unit.rigs.turns_rig import SMALL, own

Long = tuple[Operation[Any, Any], Message, Message]
"""A call of several turns, and its answer."""


def publishing(desk: Desk) -> Long:
    """A publish of eight blocks, two in a turn."""
    a = desk.lease("a")
    desk.fill(a, 1, "abcdefgh")
    desk.rig.core.turns = SMALL
    request = cache_pb2.PublishRequest(lease_id=a, request_id=7, sequence_id=1, blocks=8)
    return desk.cache.publish, request, PublishResponse(sealed_blocks=8)


def recycling(desk: Desk) -> Long:
    """A recycle of a page of the stock, and of seven window blocks, one in a turn."""
    a = desk.lease("a")
    own(desk.rig, a, 1, 9)
    stock = desk.rig.run(refill_stock, a, (0, 1))
    desk.rig.core.turns = SMALL
    request = cache_pb2.RecycleRequest(lease_id=a, request_id=7, sequence_id=1, computed_tokens=36)
    request.pages.add(group=1, pages=pack_pages(stock[-1].pages))
    return desk.cache.recycle, request, cache_pb2.RecycleResponse(recycled_pages=8, cursors=[7])


async def answer_of(served: Any) -> Any:
    return await served if isinstance(served, asyncio.Future) else served


@pytest.mark.parametrize("begin", [publishing, recycling])
@pytest.mark.parametrize("rounds", [0, 3])
async def test_its_caller_cannot_cancel_it_and_a_retry_finds_its_answer(
    begin: Callable[[Desk], Long], rounds: int
) -> None:
    async with Desk(rig_of(windowed(8), device=(16, 16))) as desk:
        method, request, answer = begin(desk)
        served = desk.ask(method, request)
        await turns(rounds)
        assert not served.cancel()
        assert await answer_of(desk.ask(method, request)) == answer
        assert await served == answer
        assert desk.ask(method, request) == answer, "kept"
        desk.rig.check()


@pytest.mark.parametrize("begin", [publishing, recycling])
async def test_it_has_no_deadline(begin: Callable[[Desk], Long]) -> None:
    async with Desk(rig_of(windowed(8), device=(16, 16))) as desk:
        method, request, answer = begin(desk)
        assert await desk.ask(method, request, seconds=0.0) == answer


async def test_a_lane_that_ends_or_cancels_between_its_turns_leaves_it_to_its_retry() -> None:
    async with LaneSite(Desk(rig_of(one_group(), device=(16,)))) as site:
        _, request, answer = publishing(site.desk)
        peer = await greeted(site)
        await peer.send(call("Publish", 5, request) + encode(CANCEL, 0, 0, 5, b""))
        peer.socket.close()
        other = await greeted(site)
        assert await other.ask("Publish", request, PublishResponse) == answer


async def test_a_publish_that_still_waits_for_a_transfer_can_be_cancelled() -> None:
    async with Desk(rig_of(one_group(), device=(16,), host=(16,))) as desk:
        method, request, _ = publishing(desk)
        ticket = desk.swap_out(request.lease_id, 1)  # type: ignore[attr-defined]
        served = desk.ask(method, request)
        await turns()
        assert served.cancel()
        await desk.land(ticket)
        assert desk.rig.core.ledger.leases[request.lease_id].sequences[1].sealed == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("flow", [release, swap_out])
def test_a_call_between_the_turns_of_a_publish_leaves_it_what_is_sealed(flow: Any) -> None:
    rig, a = between()
    progress = Publishing()
    own(rig, a, 1, 6)
    assert rig.once(publish, a, 1, 0, chain(*"abcdef"), 0, progress) is LAST_TURNS
    rig.run(flow, a, 1)
    assert rig.once(publish, a, 1, 0, chain(*"abcdef"), 0, progress) == Published(2, (), (), (), pending=True)


@pytest.mark.parametrize("flow", [release, swap_out])
def test_a_call_between_the_turns_of_a_recycle_leaves_it_what_is_freed(flow: Any) -> None:
    rig, a = between()
    progress = Recycling()
    own(rig, a, 1, 9)
    assert rig.once(recycle, a, 1, 36, (), progress) is LAST_TURNS
    rig.run(flow, a, 1)
    assert rig.once(recycle, a, 1, 36, (), progress) == Recycled(1, ())


def between() -> tuple[Rig, str]:
    rig = rig_of(windowed(8), device=(16, 16), host=(16, 16))
    rig.core.turns = SMALL
    return rig, rig.lease("a")
