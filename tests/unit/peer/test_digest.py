"""Digests: a set in some bits a block, kept by changes, by which the right peer is asked."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cachesvc.model.words import KEY_BYTES
from cachesvc.peer.borrower import MOST_ASKED, candidates, may_have
from cachesvc.peer.fleet import MOST_BITS, MOST_FLIPS, CountedDigest, DigestNews, Peer, PeerDigest, bits_for, words_of
from tests.unit.peer.peer_rig import NearControl

EPOCH = 5


def keys_of(seed: int, count: int) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(KEY_BYTES) for _ in range(count)]


def told(counted: CountedDigest, digest: PeerDigest) -> None:
    digest.learn(counted.news(EPOCH, digest.version if digest.epoch == EPOCH else 0))


def test_what_came_is_there_and_what_left_is_not_whatever_the_order() -> None:
    dice = random.Random(1)
    counted, digest = CountedDigest(bits_for(2000)), PeerDigest()
    there: Counter[bytes] = Counter()
    for round_ in range(60):
        come = keys_of(round_, 40) + dice.choices([*there] or [b"\1" * KEY_BYTES], k=5)
        counted.change(b"".join(come), came=True)
        there.update(come)
        gone = dice.sample(sorted(there.elements()), 20)
        counted.change(b"".join(gone), came=False)
        there.subtract(gone)
        if round_ % 3 == 0:
            told(counted, digest)
            assert all(digest.has(words_of(key)) for key, count in there.items() if count)
    wrong = sum(digest.has(words_of(key)) for key in keys_of(1000, 2000))
    assert wrong < 100


def test_a_reader_that_is_far_behind_gets_all_and_one_that_is_not_what_has_flipped() -> None:
    counted, digest = CountedDigest(MOST_BITS), PeerDigest()
    counted.change(b"".join(keys_of(1, 10)), came=True)
    told(counted, digest)
    version = digest.version
    counted.change(b"".join(keys_of(2, 10)), came=True)
    assert not counted.news(EPOCH, version).bits
    assert len(counted.news(EPOCH, version).flips) <= 4 * 40
    for seed in range(3, 3 + MOST_FLIPS // 4000):
        counted.change(b"".join(keys_of(seed, 1100)), came=True)
    assert counted.news(EPOCH, version).bits
    told(counted, digest)
    assert all(digest.has(words_of(key)) for seed in (1, 2, 3) for key in keys_of(seed, 10))


@pytest.mark.parametrize(
    "news",
    [
        DigestNews(EPOCH, 2, bytes(1000), b""),
        DigestNews(EPOCH, 2, bytes(1 << 20), b""),
        DigestNews(EPOCH, 2, b"", b"abc"),
        DigestNews(EPOCH + 1, 2, b"", b"abcd"),
    ],
)
def test_nonsense_is_forgotten(news: DigestNews) -> None:
    counted, digest = CountedDigest(bits_for(10)), PeerDigest()
    told(counted, digest)
    assert digest.is_known
    digest.learn(news)
    assert not digest.is_known


def peers_with(chains: list[list[bytes]]) -> list[Peer]:
    """Peers that have the prefixes of one chain, as their digests tell."""
    control = NearControl.__new__(NearControl)
    peers = []
    for chain in chains:
        peer = Peer(control, lambda: 100.0)
        counted = CountedDigest(bits_for(1000))
        if chain:
            counted.change(b"".join(chain), came=True)
        told(counted, peer.digest)
        peers.append(peer)
    return peers


def test_of_many_peers_those_with_most_of_a_prompt_are_asked_and_none_where_none_has_it() -> None:
    chain, right, asked_in_vain = keys_of(7, 64), 0, 0
    dice = random.Random(2)
    for trial in range(50):
        others = [keys_of(1000 * trial + number, 300) for number in range(64)]
        best = dice.randrange(64)
        lengths = [dice.choice((0, 0, 8, 20)) for _ in range(64)]
        lengths[best] = 40
        peers = peers_with([chain[:length] + other for length, other in zip(lengths, others, strict=True)])
        chosen = candidates(peers, chain)
        right += chosen[0] is peers[best]
        assert len(chosen) <= MOST_ASKED
        asked_in_vain += len(candidates(peers, keys_of(trial, 10)))
    assert right >= 48
    assert asked_in_vain <= 50
    assert not may_have(peers_with([[] for _ in range(64)]), chain[0])


def test_few_peers_are_asked_for_what_was_sealed_a_moment_ago() -> None:
    peers = peers_with([[], []])
    assert may_have(peers, keys_of(1, 1)[0])
    assert len(candidates(peers, keys_of(1, 1))) == 2


def test_a_peer_that_told_nothing_yet_is_asked_after_those_that_have_it() -> None:
    chain = keys_of(7, 4)
    peers = [Peer(NearControl.__new__(NearControl), lambda: 100.0), *peers_with([[], chain, []])]
    assert candidates(peers, chain) == [peers[2], peers[0]]
