"""The daemon's end of a lane: frames, order, flow control, and whatever is no frame."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import LimitExceeded, NotSupported
from cachesvc.service import lane
from cachesvc.service import lane as lane_module
from cachesvc.wire.lane import CANCEL, HEADER, HELLO, METHODS, NO_ANSWER, PING, encode
from tests.unit.rigs.dispatch_rig import Desk, allocate, kinds, match, step, turns
from tests.unit.rigs.lane_rig import PROCESS, LaneSite, Peer, call, greeted, matching


def releasing(lease: str, sequence: int) -> cache_pb2.ReleaseRequest:
    return cache_pb2.ReleaseRequest(lease_id=lease, sequence_id=sequence)


# -- calls -----------------------------------------------------------------------------------------------------


async def test_a_call_is_the_dispatchers_own() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        answer = await peer.ask("Match", matching(lease, 1, "ab", 7), cache_pb2.MatchResponse)
        assert isinstance(answer, cache_pb2.MatchResponse)
        again = site.desk.ask(site.desk.cache.match, matching(lease, 1, "ab", 7))
        assert again == answer, "one request_id is carried out once, by whichever way it comes again"
        refused = await peer.ask("Match", matching(lease, 1, "ab", 8), cache_pb2.MatchResponse)
        assert refused.code == "CONFLICT"
        assert (await peer.ask("Release", releasing(lease, 1), cache_pb2.ReleaseResponse)).freed_pages == 0
        assert site.lanes.calls == 3


async def test_hello_tells_what_the_daemon_knows() -> None:
    async with LaneSite() as site:
        welcome = await site.connect().hello(version=9)
        assert (welcome.version, welcome.epoch, welcome.frames) == (1, 0xE, 16)
        assert set(welcome.methods) == {*METHODS.values(), CANCEL, HELLO, PING}


async def test_a_ping_comes_back() -> None:
    async with LaneSite() as site:
        peer = await greeted(site)
        await peer.send(encode(PING, 0, 0, 5, b""))
        assert await peer.frame() == (PING, 0, 0, 5, b"", "")


async def test_a_release_may_do_without_its_answer_and_nothing_else_may() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        await peer.send(call("Release", 2, releasing(lease, 1), flags=NO_ANSWER) + encode(PING, 0, 0, 3, b""))
        answered = await peer.frame()
        assert answered is not None
        assert answered.tag == 3
        assert not site.desk.rig.core.ledger.leases[lease].sequences
        await peer.send(call("Match", 4, matching(lease, 2, "ab"), flags=NO_ANSWER))
        assert await peer.refusal() == (4, "INVALID")
        assert await peer.frame() is None


async def test_bytes_that_are_no_message_are_refused_and_the_lane_goes_on() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        await peer.send(encode(METHODS["Match"], 0, 0, 2, b"\xff\xff"))
        assert await peer.refusal() == (2, "INVALID")
        assert isinstance(
            await peer.ask("Match", matching(lease, 1, "a"), cache_pb2.MatchResponse), cache_pb2.MatchResponse
        )


# -- order and waiting -----------------------------------------------------------------------------------------


async def test_answers_come_by_their_tags_and_steps_of_a_lease_keep_their_order() -> None:
    async with LaneSite() as site:
        lease, other, peer = site.desk.lease(), site.desk.lease("b"), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        await peer.send(
            call("Step", 10, step(lease, 1, allocate(1, 3)))
            + call("Step", 11, step(lease, 2, match(2, "x")))
            + call("Step", 12, step(lease, 3, match(3, "y")))
            + call("Step", 13, step(other, 1, match(1, "z")))
            + call("Match", 14, matching(lease, 4, "w"))
        )
        frames = [await peer.frame() for _ in range(2)]
        assert [frame.tag for frame in frames if frame is not None] == [13, 14]
        assert sorted(site.desk.rig.core.ledger.leases[lease].sequences) == [1, 4], "no step overtakes the first"
        await site.desk.land(ticket)
        frames = [await peer.frame() for _ in range(3)]
        assert [frame.tag for frame in frames if frame is not None] == [10, 11, 12]
        last = frames[-1]
        assert last is not None
        assert kinds(cache_pb2.StepResponse.FromString(last.body)) == ["match"]


async def test_what_is_cancelled_or_late_is_given_up_and_has_no_answer() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        waiting = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=60_000)
        await peer.send(call("WaitTickets", 2, waiting) + call("WaitTickets", 3, waiting, deadline=1))
        answered = await peer.frame()
        assert answered is not None
        assert answered.tag == 3, "its deadline of 10 ms has passed"
        assert site.desk.admission.waits.held == 1
        await peer.send(encode(CANCEL, 0, 0, 2, b"") + encode(CANCEL, 0, 0, 99, b"") + encode(PING, 0, 0, 4, b""))
        answered = await peer.frame()
        assert answered is not None
        assert answered.tag == 4
        await turns()
        assert site.desk.admission.waits.held == 0


async def test_a_lane_that_ends_gives_up_what_waits_but_its_steps() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        waiting = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=60_000)
        request = step(lease, 1, allocate(1, 3), match(2, "x"))
        await peer.send(call("WaitTickets", 2, waiting) + call("Step", 3, request))
        await turns()
        assert site.desk.admission.waits.held == 2
        peer.socket.close()
        await turns(20)
        assert (site.lanes.count, site.desk.admission.waits.held) == (0, 1)
        await site.desk.land(ticket)
        again = site.desk.ask(site.desk.cache.step, request)
        assert kinds(again) == ["CONFLICT", "match"], "it was carried out, once: sent again it finds its answer"


async def test_nothing_of_a_lane_that_has_ended_waits_for_the_collector() -> None:
    """A tenant that opened lanes and read nothing cost 200 MiB a minute: lane and outbox kept each other."""
    async with LaneSite() as site:
        peer = await greeted(site)
        lanes = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, lane_module.Lane)]
        gc.disable()
        try:
            peer.socket.close()
            await turns(20)
            assert site.lanes.count == 0
            assert [each() for each in lanes] == [None]
        finally:
            gc.enable()


# -- flow control ----------------------------------------------------------------------------------------------


async def test_reading_rests_at_sixteen_without_an_answer() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        waiting = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=60_000)
        await peer.send(b"".join(call("WaitTickets", tag, waiting) for tag in range(2, 42)))
        await turns(20)
        assert site.desk.admission.waits.held == 16
        await site.desk.land(ticket)
        tags = [frame.tag for frame in [await peer.frame() for _ in range(40)] if frame is not None]
        assert sorted(tags) == list(range(2, 42))


async def test_a_peer_that_does_not_read_is_waited_for_and_costs_nobody() -> None:
    async with LaneSite() as site:
        lease, peer, other = site.desk.lease(), await greeted(site), await greeted(site)
        sent = await send_until_full(peer)
        answer = await other.ask("Match", matching(lease, 1, "a"), cache_pb2.MatchResponse)
        assert isinstance(answer, cache_pb2.MatchResponse)
        assert [await peer.frame() for _ in range(sent)] == [(PING, 0, 0, 9, b"", "")] * sent


async def send_until_full(peer: Peer) -> int:
    """Pings, none of whose answers is read, until neither side takes any more; how many went out."""
    sent = 0
    while True:
        try:
            assert peer.socket.send(encode(PING, 0, 0, 9, b"")) == HEADER.size
        except BlockingIOError:
            return sent
        sent += 1
        await turns(1)


async def test_a_peer_that_never_reads_its_large_answers_loses_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "MAX_UNREAD_BYTES", 1 << 10)
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        many = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket] * 1000, wait_ms=60_000)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        await peer.send(b"".join(call("WaitTickets", tag, many) for tag in range(2, 18)))
        await turns(20)
        await site.desk.land(ticket)
        await turns(20)
        assert site.lanes.count == 0
        assert site.desk.admission.waits.held == 0


async def test_a_flood_of_frames_gives_the_others_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "TURN_SECONDS", 0.0)
    async with LaneSite() as site:
        lease, peer, other = site.desk.lease(), await greeted(site), await greeted(site)
        await peer.send(b"".join(encode(PING, 0, 0, tag, b"") for tag in range(2, 1002)))
        await other.ask("Match", matching(lease, 1, "a"), cache_pb2.MatchResponse)
        assert len(peer.socket.recv(1 << 20, socket.MSG_PEEK)) < 1000 * HEADER.size
        tags = [frame.tag for frame in [await peer.frame() for _ in range(1000)] if frame is not None]
        assert tags == list(range(2, 1002))


async def test_a_long_call_with_nothing_behind_it_goes_on_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """To stop and begin again is several calls of the system, and only what has come already could wait for them."""
    monkeypatch.setattr(lane_module, "TURN_SECONDS", 0.0)
    async with LaneSite() as site:
        peer = await greeted(site)
        stopped: list[socket.socket] = []
        loop = asyncio.get_running_loop()
        remove = loop.remove_reader

        def removing(end: socket.socket | int) -> bool:
            if isinstance(end, socket.socket):  # a lane's; the peer's reads name descriptors
                stopped.append(end)
            return remove(end)

        monkeypatch.setattr(loop, "remove_reader", removing)
        lease = site.desk.lease()
        for number in (1, 2):
            assert (await peer.ask("Match", matching(lease, number, "a"), cache_pb2.MatchResponse)).device_blocks == 0
        assert stopped == []


async def test_a_process_has_so_many_lanes_and_they_end_with_it() -> None:
    async with LaneSite(each=2) as site:
        first, second, other = site.connect(), site.connect(), site.connect(b"another")
        with pytest.raises(LimitExceeded):
            site.connect()
        await other.hello()
        site.lanes.end(PROCESS)
        assert site.lanes.count == 1
        assert [await first.frame(), await second.frame()] == [None, None]
        site.connect()
        site.lanes.each = 0
        with pytest.raises(NotSupported):
            site.connect()


async def test_calls_of_a_lane_count_for_its_process() -> None:
    async with LaneSite(Desk(waiting=64, waiting_each=1)) as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        waiting = cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=60_000)
        await peer.send(call("WaitTickets", 2, waiting) + call("WaitTickets", 3, waiting))
        assert await peer.refusal() == (3, "LIMIT")
