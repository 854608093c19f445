"""This node's digest for other nodes, kept up by its models' journals while a node asks for it."""

from __future__ import annotations

import asyncio

from cachesvc.ledger.change_log import STORAGE, Kind
from cachesvc.ledger.ledger import Model
from cachesvc.model.errors import SubscriberTooSlow
from cachesvc.peer.digest import CountedDigest, DigestNews, bits_for
from cachesvc.questions.follow import Feed
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events

IDLE_SECONDS = 60.0
"""Time without a reader after which the digest is given up, seconds."""
ANSWERS_A_TICK = 4
"""Answers of a feed, of some thousand blocks each, that are taken in at a time."""
MOST_PATIENCE_SECONDS = 30.0
MOST_READERS = 256
"""Most readers that wait for a change at a time, as many as there are peers; others are answered at once."""


class DigestFeed:
    """Digest of what this node has on devices and host. On the ledger thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._core = node.core
        self._digest: CountedDigest | None = None
        self._feeds: dict[int, Feed] = {}
        self._asked_at = 0.0
        self._is_whole = False
        self._life = 0
        self._is_warned = False
        self._waiting: set[asyncio.Future[None]] = set()

    async def news(self, epoch: int, version: int, patience: float) -> DigestNews | None:
        """Changes since ``version`` of the life ``epoch``, once there are any; None: there were none for ``patience``
        seconds."""
        self._asked_at = self._node.now()
        until = self._asked_at + min(patience, MOST_PATIENCE_SECONDS)
        self.tick()
        while True:
            digest = self._digest
            if digest is not None and self._is_whole and (epoch != self.epoch or digest.version != version):
                return digest.news(self.epoch, version if epoch == self.epoch else 0)
            left = until - self._node.now()
            if left <= 0 or len(self._waiting) >= MOST_READERS:
                return None
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await asyncio.wait_for(changed, left)
            except TimeoutError:
                return None
            finally:
                self._waiting.discard(changed)

    def attention(self) -> list[str]:
        """A sentence about a digest that cannot hold this node's blocks."""
        if self._digest is None or not self._digest.is_saturated:
            return []
        most = f"its digest of {self._digest.size} bits can tell apart"
        return [f"this node has more blocks than {most}; share such a cache by a storage tier, not by peers"]

    @property
    def epoch(self) -> int:
        """Epoch of the digest: of the daemon's life, and of how often it was made anew."""
        return (self._node.epoch + self._life) & ((1 << 63) - 1)

    def tick(self) -> None:
        """Take in what has changed. Called periodically."""
        if self._node.now() - self._asked_at > IDLE_SECONDS:
            self._drop()
            return
        models = self._core.ledger.models
        blocks = sum(_capacity(model) for model in models.values())
        is_too_small = self._digest is not None and self._digest.size < bits_for(blocks)  # a model came, or grew
        if self._digest is None or is_too_small or any(number not in models for number in self._feeds):
            self._drop()
            self._digest, self._life = CountedDigest(bits_for(blocks)), self._life + 1
        before, was_whole = self._digest.version, self._is_whole
        try:
            whole = [self._follow(model, self._digest) for model in models.values()]
        except SubscriberTooSlow:
            self._drop()
            return
        self._is_whole |= all(whole)
        if self._digest.is_saturated and not self._is_warned:
            self._is_warned = True
            events.warning("peer_digest_full", bits=self._digest.size, blocks=blocks)
        if self._is_whole and (before != self._digest.version or not was_whole):
            for changed in self._waiting:
                if not changed.done():
                    changed.set_result(None)

    def _follow(self, model: Model, digest: CountedDigest) -> bool:
        """Take in changes of a model; False while there are more."""
        feed = self._feeds.get(model.id)
        if feed is None:
            feed = self._feeds[model.id] = Feed(model, snapshot=True)
        lead = model.blocks.host.lead
        for _ in range(ANSWERS_A_TICK):
            changes = feed.next()
            if changes is None:
                return True
            for run in changes.runs:
                if run.group == lead and run.place != STORAGE and run.kind is not Kind.COPY_FAILED:
                    digest.change(bytes(run.keys), came=run.present)
        return not feed.behind and not feed.is_in_snapshot

    def _drop(self) -> None:
        self._digest, self._is_whole = None, False
        self._feeds.clear()


def _capacity(model: Model) -> int:
    """Blocks that a model can have on this node at most."""
    lead = model.blocks.host.lead
    return model.host_pages[lead] + sum(replica.device_pages[lead] for replica in model.replicas)
