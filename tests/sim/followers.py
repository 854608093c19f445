"""Subscribers beside the simulated node: what each has been told must be what the ledger had at that change.

They begin at any time, with a snapshot or behind a change, and take answers at their own pace; the journal is short, so
that some fall behind. Messages go through the wire's words and the client's mirror.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cachesvc_client.events import BlockMirror, CopyLocation, parse_batch

from cachesvc.ledger.ledger import Model
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.errors import EventsForgotten, SubscriberTooSlow
from cachesvc.model.words import READY
from cachesvc.questions.explanation import Feed
from tests.sim.node import SimNode

FOLLOWERS = 3
Truth = dict[bytes, tuple[bytes, frozenset[CopyLocation]]]


@dataclass
class Follower:
    """One subscriber of one model. ``pace``: how likely it takes an answer at each look."""

    model: Model
    feed: Feed
    pace: float
    mirror: BlockMirror = field(default_factory=BlockMirror)


class Followers:
    """``check`` after every step. Its chance is its own: it changes nothing of the world's."""

    def __init__(self, seed: int, node: SimNode) -> None:
        self._node = node
        self._rng = random.Random(f"followers of {seed}")
        self._followers: list[Follower] = []
        self._truths: dict[tuple[int, int], Truth] = {}

    def check(self) -> None:
        """Raises AssertionError where a mirror shows anything but what was so at its change."""
        models = self._node.core.ledger.models
        for model in models.values():
            self._truths[model.id, model.blocks.journal.last] = truth_of(model)
        self._followers = [each for each in self._followers if models.get(each.model.id) is each.model]
        while models and len(self._followers) < FOLLOWERS:
            self._followers.append(self._begin(self._rng.choice(list(models.values()))))
        for follower in list(self._followers):
            if self._rng.random() < follower.pace:
                self._take(follower)

    def _begin(self, model: Model) -> Follower:
        rng = self._rng
        rows, changes = rng.choice((1, 3, 8, 1024)), rng.choice((1, 2, 7, 1024))
        feed = Feed(model, snapshot=True, rows_at_once=rows, changes_at_once=changes)
        return Follower(model, feed, rng.choice((0.05, 0.5, 1.0)))

    def _take(self, follower: Follower) -> None:
        """One answer, or all that there are; then sometimes hang up and come back where it was."""
        takes_all = self._rng.random() < 0.3
        while True:
            try:
                changes = follower.feed.next()
            except SubscriberTooSlow:
                self._node.events["follower_cut_off"] += 1
                self._followers.remove(follower)
                return
            if changes is None:
                break
            changes.epoch = 1
            follower.mirror.apply(parse_batch(changes))
            self._compare(follower)
            if not takes_all:
                break
        if follower.mirror.is_whole and self._rng.random() < 0.05:
            self._come_back(follower)

    def _come_back(self, follower: Follower) -> None:
        try:
            follower.feed = Feed(follower.model, snapshot=False, after=follower.mirror.last)
            self._node.events["follower_resumed"] += 1
        except EventsForgotten:
            self._followers.remove(follower)

    def _compare(self, follower: Follower) -> None:
        mirror = follower.mirror
        truth = self._truths.get((follower.model.id, mirror.last))
        if not mirror.is_whole or truth is None:
            return
        self._node.events["mirror_compared"] += 1
        assert shown_by(mirror) == truth, f"at change {mirror.last} of model {follower.model.id}"


def shown_by(mirror: BlockMirror) -> Truth:
    """Copies that a mirror shows."""
    return {key: (mirror.parents[key], frozenset(locations)) for key, locations in mirror.locations.items()}


def truth_of(model: Model) -> Truth:
    """Copies that the ledger has, read without any of the code under test."""
    index = model.blocks.index
    out: Truth = {}
    for key, row in index.rows.items():
        locations = set()
        for place in index.told:
            number = place.number
            for group, states in enumerate(place.states):
                if states[row] >= READY:
                    locations.add(CopyLocation(group, "device" if number else "host", max(0, number - 1)))
        if locations:
            parent = index.parent[row]
            above = index.keys[parent] if parent != NO_ROW else b""
            assert above is not None
            out[key] = (above, frozenset(locations))
    return out
