"""This node's digest: what a model's journal says, from a snapshot on, while other nodes ask."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from cachesvc.flows.pinning import evict
from cachesvc.flows.registration import PoolRequest, RegisterRequest, register
from cachesvc.model.words import KEY_BYTES
from cachesvc.peer.fleet import LEAST_BITS, CountedDigest, PeerDigest, bits_for, words_of
from cachesvc.service.calls.lending import MOST_PATIENT, MOST_READERS, DigestFeed
from cachesvc.service.rpc.peer_service import MOST_CALLS
from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import chain, one_group, serve


def has(digest: PeerDigest, prompt: str) -> list[bool]:
    keys = chain(*prompt)
    return [digest.has(words_of(keys[at : at + KEY_BYTES])) for at in range(0, len(keys), KEY_BYTES)]


async def learn(feed: DigestFeed, digest: PeerDigest, patience: float = 0.0) -> None:
    feed.tick()
    news = await feed.news(digest.epoch, digest.version, patience)
    if news is not None:
        digest.learn(news)


def test_what_is_sealed_is_in_it_and_what_is_evicted_leaves_it() -> None:
    async def run() -> None:
        async with Desk() as desk:
            rig, digest, feed = desk.rig, PeerDigest(), DigestFeed(desk.node)
            lease = rig.lease()
            serve(rig, lease, 1, "abcd")
            await learn(feed, digest)
            assert has(digest, "abcd") == [True] * 4
            serve(rig, lease, 2, "wxyz")
            assert has(digest, "wxyz") == [False] * 4
            await learn(feed, digest)
            assert has(digest, "wxyz") == [True] * 4
            rig.run(evict, rig.model.id, "device", 0)
            rig.settle()
            rig.run(evict, rig.model.id, "host", 0)
            assert not rig.device_keys() | rig.host_keys()
            await learn(feed, digest)
            assert has(digest, "abcd") == has(digest, "wxyz") == [False] * 4

    asyncio.run(run())


def test_a_reader_waits_for_a_change_and_gets_what_has_flipped() -> None:
    async def run() -> None:
        async with Desk() as desk:
            digest, feed = PeerDigest(), DigestFeed(desk.node)
            await learn(feed, digest)
            assert digest.is_known, "a node without blocks says so"
            waiting = asyncio.ensure_future(feed.news(digest.epoch, digest.version, 30.0))
            await asyncio.sleep(0)
            assert not waiting.done()
            serve(desk.rig, desk.rig.lease(), 1, "abcd")
            feed.tick()
            news = await waiting
            assert news is not None
            assert news.flips
            digest.learn(news)
            assert has(digest, "abcd") == [True] * 4

    asyncio.run(run())


def test_readers_that_wait_leave_places_for_calls_that_do_not() -> None:
    assert MOST_READERS + MOST_PATIENT < MOST_CALLS

    async def run() -> None:
        async with Desk() as desk:
            digest, feed = PeerDigest(), DigestFeed(desk.node)
            await learn(feed, digest)
            ask = [feed.news(digest.epoch, digest.version, 30.0) for _ in range(MOST_READERS)]
            waiting = [asyncio.ensure_future(each) for each in ask]
            await asyncio.sleep(0)
            assert await feed.news(digest.epoch, digest.version, 30.0) is None
            assert not any(each.done() for each in waiting)
            serve(desk.rig, desk.rig.lease(), 1, "abcd")
            feed.tick()
            assert all(await asyncio.gather(*waiting))

    asyncio.run(run())


def test_it_is_made_anew_when_there_are_more_blocks_than_it_has_bits_for() -> None:
    """Daemons start, and are asked for their digests, before engines register."""

    async def run() -> None:
        async with Desk() as desk:
            rig, digest, feed = desk.rig, PeerDigest(), DigestFeed(desk.node)
            serve(rig, rig.lease(), 1, "abcd")
            await learn(feed, digest)
            assert 8 * len(digest.bits) == LEAST_BITS
            pages, devices = PoolRequest((LEAST_BITS,)), tuple(rig.vault.device_bytes)
            register(rig.core, rig.vault, RegisterRequest("large", one_group(), b"", devices, pages, pages), 0.0)
            await learn(feed, digest)
            assert 8 * len(digest.bits) == bits_for(2 * LEAST_BITS + 16 + 32)
            assert has(digest, "abcd") == [True] * 4
            assert has(digest, "wxyz") == [False] * 4
            before = digest.version
            await learn(feed, digest)
            assert digest.version == before, "once"

    asyncio.run(run())


def test_a_digest_that_is_full_is_none() -> None:
    digest, counted = PeerDigest(), CountedDigest(LEAST_BITS)
    keys = b"".join(sha256(bytes([at & 255, at >> 8])).digest() for at in range(LEAST_BITS))
    few = LEAST_BITS // 16 * KEY_BYTES
    found = []
    for some, came, version in ((keys[:few], True, 0), (keys[few:], True, 0), (keys[few:], False, None)):
        counted.change(some, came=came)
        digest.learn(counted.news(1, digest.version if version is None else version))
        found.append((digest.is_known, counted.is_saturated))
    assert found == [(True, False), (False, True), (True, False)], "of a node that may have anything, none is known"
