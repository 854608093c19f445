"""The watch of the event loop: a round counts all that runs in it, however it came in; an idle loop is left alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any

from kvcache.v1 import cache_pb2, lease_pb2
from kvcache.v1.cache_pb2 import MatchResponse

from cachesvc.service.access.auth import EVERYONE
from cachesvc.service.loop.line import LONG_ROUND_SECONDS, LoopWatch, TimeSlices
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.lane_rig import LaneSite, greeted

LONG = 4 * LONG_ROUND_SECONDS


def burn() -> None:
    """Use processor time."""
    until = time.thread_time() + LONG
    while time.thread_time() < until:
        pass


class CountingLoop:
    """Counts what is to be called soon."""

    def __init__(self) -> None:
        self.soon: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append((callback, args))

    def turn(self) -> None:
        """Call what is due."""
        due, self.soon = self.soon, []
        for callback, args in due:
            callback(*args)


async def test_a_round_counts_what_nothing_else_measures() -> None:
    watch = LoopWatch()
    loop = asyncio.get_running_loop()
    watch.start(loop)
    loop.call_soon(burn)
    watch.begin()
    await turns(3)
    assert watch.longest_round() >= LONG
    assert watch.long_rounds >= 1
    assert watch.longest() == {}, "no flow of that name"


async def test_each_round_of_a_busy_loop_counts_by_itself() -> None:
    watch = LoopWatch()
    loop = asyncio.get_running_loop()
    watch.start(loop)
    for _ in range(3):
        watch.begin()
        burn()
        await turns(1)
    await turns(3)
    assert watch.long_rounds >= 3


def test_the_round_after_a_long_one_is_watched_and_an_idle_loop_left_alone() -> None:
    loop, watch = CountingLoop(), LoopWatch()
    watch.start(loop)
    watch.begin()
    watch.begin()
    burn()
    assert len(loop.soon) == 1
    loop.turn()
    assert len(loop.soon) == 1, "what follows from that work"
    while loop.soon:
        loop.turn()


async def test_the_time_before_a_message_is_a_call_counts() -> None:
    async with Desk() as desk:
        desk.dispatcher.charge(EVERYONE, 1)
        burn()  # parsing it
        await turns(2)
        assert desk.node.loop_watch.long_rounds >= 1


async def test_frames_of_a_lane_and_slices_of_questions_count() -> None:
    async with LaneSite(Desk()) as site:
        desk = site.desk
        a = desk.lease("a")
        peer = await greeted(site)
        await turns(2)
        before = desk.node.loop_watch.longest_round()
        assert before > 0, "the lane's HELLO"
        await peer.ask("Match", cache_pb2.MatchRequest(lease_id=a, sequence_id=1), MatchResponse)

        def question() -> Generator[None, Any, int]:
            burn()
            yield None
            return 7

        assert await TimeSlices(desk.node.loop_watch).answer(question()) == 7
        await turns(2)
        assert desk.node.loop_watch.long_rounds >= 1
        line = desk.node.loop_watch.status()
        assert line.longest_flow == "question"
        assert line.longest_flow_ms >= LONG * 1e3


async def test_the_flow_of_a_call_is_named() -> None:
    async with Desk() as desk:
        desk.ask(desk.leases.keep_alive, lease_pb2.KeepAliveRequest(lease_id=desk.lease("a")))
        assert list(desk.node.loop_watch.longest()) == ["LeaseService/KeepAlive"]
