"""Questions for the digests of peers: one at a time for each, and no faster than this side looks."""

from __future__ import annotations

from collections.abc import Callable

from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.peer.fleet import LEAST_BITS, PATIENCE_SECONDS, DigestNews, NewsReader, Peer
from tests.unit.peer.peer_rig import LendingNode, NearControl

ALL_BITS = bytes(LEAST_BITS // 8)


class TellingControl(NearControl):
    """Keeps questions, which the test answers, or ``at_once`` answers each by itself, at each question."""

    def __init__(self, node: LendingNode) -> None:
        super().__init__(node)
        self.known: list[int] = []
        self.told: list[Callable[[DigestNews | CacheError], None]] = []
        self.at_once: DigestNews | None = None

    def news_later(
        self, epoch: int, version: int, patience: float, answered: Callable[[DigestNews | CacheError], None]
    ) -> None:
        self.known.append(version)
        self.told.append(answered)
        assert len(self.known) < 50, "questions follow one another without a pause"
        if self.at_once is not None:
            answered(self.at_once)


class Reading:
    """A reader of one peer, in a time that the test sets."""

    def __init__(self) -> None:
        node = LendingNode()
        node.close()
        self.now = 100.0
        self.control = TellingControl(node)
        self.peer = Peer(self.control, lambda: self.now)
        self.peers = [self.peer]
        self.reader = NewsReader(lambda: self.peers, lambda: self.now)


def test_a_peer_that_answers_at_once_is_asked_once_a_look_whatever_it_tells() -> None:
    for news in (DigestNews(5, 3, bytes(1000), b""), DigestNews(5, 3, ALL_BITS, b""), DigestNews(0, 0, b"", b"")):
        reading = Reading()
        reading.control.at_once = news
        for look in range(1, 4):
            reading.reader.look()
            assert len(reading.control.known) == look


def test_a_peer_that_has_waited_for_a_change_is_asked_again_at_once() -> None:
    reading = Reading()
    reading.reader.look()
    reading.control.told[-1](DigestNews(5, 1, ALL_BITS, b""))
    reading.reader.look()
    reading.now += PATIENCE_SECONDS
    reading.control.told[-1](DigestNews(5, 1, b"", b""))
    assert reading.control.known == [0, 1, 1]
    reading.reader.look()
    assert len(reading.control.known) == 3, "one question of a peer at a time"
    assert reading.peer.digest.is_known


def test_without_its_news_a_peer_may_have_anything() -> None:
    reading = Reading()
    reading.reader.look()
    reading.control.told[-1](DigestNews(5, 1, ALL_BITS, b""))
    reading.reader.look()
    reading.control.told[-1](Unavailable("it does not answer"))
    assert not reading.peer.digest.is_known
    reading.reader.look()
    reading.peers.clear()
    reading.control.told[-1](DigestNews(5, 2, ALL_BITS, b""))
    assert not reading.peer.digest.is_known, "it is none of the peers any more"
