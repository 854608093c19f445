"""Memory that a process can have the daemon hold without a page: keys of sequences, frames that never come whole."""

from __future__ import annotations

import socket

import pytest

from cachesvc.flows.core import Limits
from cachesvc.flows.leases import close_lease, process_arrived
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.model.errors import LimitExceeded
from cachesvc.service import lane
from cachesvc.wire.lane import HEADER, HELLO_BYTES, METHODS, PING, READ_BYTES, FrameReader, encode
from tests.unit.flows.leases.test_flows_leases import lease_of
from tests.unit.rigs.dispatch_rig import turns
from tests.unit.rigs.lane_rig import LaneSite, greeted
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of

FRAME_BYTES = (8 << 20) - 64


def test_keys_of_open_sequences_are_bounded_for_each_process_and_given_back() -> None:
    rig = rig_of(one_group(), device=(4,))
    rig.core.limits = Limits(key_bytes_per_process=10 * 4 * 32)
    a, also_a, b = lease_of(rig, 1), lease_of(rig, 1), lease_of(rig, 2)
    for number in range(10):
        rig.run(match, (a if number < 5 else also_a).id, number + 1, chain(number, *"abc"), 0)
    with pytest.raises(LimitExceeded, match="bytes of keys"):
        rig.run(match, a.id, 99, chain("one more"), 0)
    rig.run(match, b.id, 1, chain(*"abcd"), 0)
    rig.run(release, a.id, 1)
    rig.run(match, a.id, 99, chain(*"wxyz"), 0)
    for number in range(2):
        rig.run(match, b.id, number + 2, b"", 0)
    for lease in (a, also_a, b):
        close_lease(rig.core, lease.id, quiesced=True)
    assert not rig.core.ledger.key_bytes


def test_room_for_a_long_frame_grows_with_what_has_come_of_it() -> None:
    reader = FrameReader()
    data = HEADER.pack(FRAME_BYTES, METHODS["Match"], 0, 0, 1) + bytes(FRAME_BYTES)
    came = 0
    while reader.next() is None:
        room = reader.room()
        part = data[came : came + min(len(room), 100_000)]
        room[: len(part)] = part
        came += len(part)
        reader.add(len(part))
        assert reader.size_bytes <= max(READ_BYTES, 2 * came)
    assert came == len(data)
    assert reader.size_bytes == READ_BYTES


def test_before_hello_a_lane_takes_a_short_frame_alone() -> None:
    reader = FrameReader(is_welcome=False)
    assert reader.size_bytes == HELLO_BYTES
    head = HEADER.pack(FRAME_BYTES, METHODS["Match"], 0, 0, 1)
    reader.room()[: len(head)] = head
    reader.add(len(head))
    with pytest.raises(LimitExceeded, match="bytes of a frame"):
        reader.next()


async def test_a_process_with_too_many_half_read_frames_loses_the_lane_that_goes_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "MOST_HALF_READ_BYTES", 4 * READ_BYTES)
    async with LaneSite() as site:
        half_read = HEADER.pack(FRAME_BYTES, METHODS["Match"], 0, 0, 1) + bytes(READ_BYTES)
        other = site.connect(b"another process")
        await other.hello()
        also_other = site.connect(b"another process")
        await also_other.hello()
        peers = [await greeted(site) for _ in range(4)]
        for peer in (also_other, *peers):
            await peer.send(half_read)
            await turns(8)
        assert await peers[-1].frame() is None, "each has room for 512 KiB: the third and the fourth go beyond"
        assert site.lanes.count == 4
        await other.send(encode(PING, 0, 0, 9, b""))
        answer = await other.frame()
        assert answer is not None
        assert answer.tag == 9


async def test_life_connections_of_one_process_share_its_part_for_half_read_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "MOST_HALF_READ_BYTES", 4 * READ_BYTES)
    async with LaneSite() as site:
        half_read = HEADER.pack(FRAME_BYTES, METHODS["Match"], 0, 0, 1) + bytes(READ_BYTES)
        peers = []
        for number in range(3):
            token = b"%016d" % number
            process_arrived(site.desk.rig.core, token, 7, 1000)
            peers.append(site.connect(token))
            await peers[-1].hello()
        for peer in peers:
            await peer.send(half_read)
            await turns(8)
        assert await peers[-1].frame() is None, "each has room for 512 KiB: the third goes beyond"
        assert site.lanes.count == 2


async def test_a_long_frame_before_hello_ends_its_lane() -> None:
    async with LaneSite() as site:
        peer = site.connect()
        await peer.send(HEADER.pack(FRAME_BYTES, METHODS["Match"], 0, 0, 1) + bytes(100))
        peer.socket.shutdown(socket.SHUT_WR)
        assert await peer.refusal() == (0, "LIMIT")
        assert await peer.frame() is None
