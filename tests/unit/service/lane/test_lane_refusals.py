"""Broken frames and refused lanes: the client gets a named error, the lane ends, and no other caller is affected."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
from pathlib import Path

import pytest
from kvcache.v1 import cache_pb2

from cachesvc.service.access.tokens import Keyring
from cachesvc.wire.lane import HEADER, HELLO, METHODS, PING, READ_BYTES, FrameReader, encode
from cachesvc.wire.status import MAX_MESSAGE_BYTES
from tests.unit.rigs.dispatch_rig import allocate, step, turns
from tests.unit.rigs.lane_rig import LaneSite, Peer, call, greeted, hello, matching

A, B = "a" * 32, "b" * 32
"""Tokens, and their tenants."""
PUBLISH = METHODS["Publish"]
WRONG: dict[str, tuple[bytes, tuple[int, str]]] = {
    "a call before hello": (encode(PUBLISH, 0, 0, 7, b""), (7, "INVALID")),
    "a ping before hello": (encode(PING, 0, 0, 7, b""), (7, "INVALID")),
    "hello twice": (hello() + hello(tag=8), (8, "INVALID")),
    "hello that is no message": (encode(HELLO, 0, 0, 7, b"\xff"), (7, "INVALID")),
    "hello without a version": (hello(version=0), (1, "INVALID")),
    "hello with a token without end": (hello("x" * 5000), (1, "LIMIT")),
    "an unknown method": (hello() + encode(99, 0, 0, 7, b""), (7, "UNSUPPORTED")),
    "method zero": (hello() + encode(0, 0, 0, 7, b""), (7, "UNSUPPORTED")),
    "an error that is not ours": (hello() + encode(PUBLISH, 2, 0, 7, b""), (7, "INVALID")),
    "too long": (hello() + HEADER.pack(MAX_MESSAGE_BYTES + 1, PUBLISH, 0, 0, 7), (0, "LIMIT")),
    "too long by far": (HEADER.pack(0xFFFFFFFF, HELLO, 0, 0, 7), (0, "LIMIT")),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_no_frame_is_told_and_ends_the_lane(what: str) -> None:
    raw, expected = WRONG[what]
    async with LaneSite() as site:
        peer = site.connect()
        await peer.send(raw)
        if raw.startswith(hello()) and expected[0] != 1:
            greeting = await peer.frame()
            assert greeting is not None
            assert greeting.method == HELLO
        assert await peer.refusal() == expected
        assert await peer.frame() is None
        assert site.lanes.count == 0


async def test_a_tag_that_has_no_answer_yet_is_not_taken_again() -> None:
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), await greeted(site)
        site.desk.fill(lease, 1, "ab")
        ticket = site.desk.swap_out(lease, 1)
        waiting = call("WaitTickets", 2, cache_pb2.WaitTicketsRequest(lease_id=lease, tickets=[ticket], wait_ms=9000))
        await peer.send(waiting + waiting)
        assert await peer.refusal() == (2, "INVALID")
        assert await peer.frame() is None
        await turns()
        assert site.desk.admission.waits.held == 0


@pytest.mark.parametrize("seed", range(4))
async def test_frames_cut_anywhere_and_glued_are_the_same_frames(seed: int) -> None:
    rng = random.Random(seed)
    async with LaneSite() as site:
        lease, peer = site.desk.lease(), site.connect()
        bodies = [rng.randbytes(rng.choice((0, 1, 100, 5000, 300_000))) for _ in range(30)]
        raw = hello() + b"".join(encode(PING, 0, 0, tag, body) for tag, body in enumerate(bodies, start=2))
        raw += call("Match", 99, matching(lease, 1, "ab"))
        sending = asyncio.ensure_future(send_in_pieces(peer, raw, rng))
        tags = [frame.tag for frame in [await peer.frame() for _ in range(32)] if frame is not None]
        assert tags == [1, *range(2, 32), 99]
        await sending


async def send_in_pieces(peer: Peer, raw: bytes, rng: random.Random) -> None:
    at = 0
    while at < len(raw):
        size = rng.choice((1, 7, 15, 16, 17, 4000, 70_000))
        await peer.send(raw[at : at + size])
        await turns(rng.randrange(3))
        at += size


def test_a_reader_gives_frames_larger_than_its_room_and_keeps_no_room_of_theirs() -> None:
    reader, body = FrameReader(), b"x" * (3 * READ_BYTES)
    raw = encode(PING, 0, 0, 1, body) + encode(PING, 0, 0, 2, b"y")
    frames = []
    while raw:
        room = reader.room()
        count = min(len(room), len(raw))
        room[:count] = raw[:count]
        raw = raw[count:]
        reader.add(count)
        while (frame := reader.next()) is not None:
            frames.append((frame.tag, frame.body))
    assert frames == [(1, body), (2, b"y")]
    assert len(reader.room()) == READ_BYTES


@pytest.mark.parametrize("seed", range(8))
async def test_noise_ends_its_lane_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    async with LaneSite() as site:
        lease, noisy, other = site.desk.lease(), site.connect(), await greeted(site)
        sound = hello() + call("Match", 2, matching(lease, 1, "ab")) + call("Step", 3, step(lease, 1, allocate(1, 2)))
        raw = bytearray(sound * 3)
        for _ in range(rng.randrange(1, 12)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        noisy.socket.send(raw)
        noisy.socket.shutdown(socket.SHUT_WR)
        while await noisy.frame() is not None:
            pass
        assert isinstance(
            await other.ask("Match", matching(lease, 77, "q"), cache_pb2.MatchResponse), cache_pb2.MatchResponse
        )
        assert site.lanes.count == 1


# -- callers ---------------------------------------------------------------------------------------------------


def keyring(path: Path, *tokens: str) -> Keyring:
    """Knows these tokens, each of a tenant of its own."""
    write_tokens(path, *tokens)
    ring = Keyring(str(path), lambda _: None)
    ring.load()
    return ring


def write_tokens(path: Path, *tokens: str, scope: str = "engine") -> None:
    entries = [
        {"name": token, "sha256": hashlib.sha256(token.encode()).hexdigest(), "scopes": [scope], "tenant": token}
        for token in tokens
    ]
    path.write_text(json.dumps({"token": entries}), encoding="utf-8")
    path.chmod(0o600)


@pytest.mark.parametrize("token", ["", "guess", "guess" * 8])
async def test_a_lane_without_a_good_token_is_refused(tmp_path: Path, token: str) -> None:
    async with LaneSite(keeper=keyring(tmp_path / "tokens.json", A)) as site:
        peer = site.connect()
        await peer.send(hello(token))
        assert await peer.refusal() == (1, "UNAUTHENTICATED")
        assert await peer.frame() is None


async def test_a_token_that_is_good_for_something_else_opens_no_lane(tmp_path: Path) -> None:
    ring = keyring(tmp_path / "tokens.json", A)
    write_tokens(tmp_path / "tokens.json", B, scope="read-only")
    ring.load()
    async with LaneSite(keeper=ring) as site:
        peer = site.connect()
        await peer.send(hello(B))
        assert await peer.refusal() == (1, "PERMISSION_DENIED")
        assert await peer.frame() is None


async def test_a_token_that_is_revoked_ends_its_lane_with_the_next_frame(tmp_path: Path) -> None:
    ring = keyring(tmp_path / "tokens.json", A, B)
    async with LaneSite(keeper=ring) as site:
        lease, first, second = site.desk.lease(), site.connect(), site.connect()
        await first.hello(A)
        await second.hello(B)
        unseen = await first.ask("Match", matching(lease, 1, "ab"), cache_pb2.MatchResponse)
        assert unseen.code == "NOT_FOUND", "the lease is another tenant's"
        write_tokens(tmp_path / "tokens.json", B)
        ring.reload()
        revoked = await first.ask("Match", matching(lease, 1, "ab"), cache_pb2.MatchResponse)
        assert revoked.code == "UNAUTHENTICATED"
        assert await first.frame() is None
        assert (await second.ask("Match", matching(lease, 1, "ab"), cache_pb2.MatchResponse)).code == "NOT_FOUND"
