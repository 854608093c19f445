"""Loans to other nodes: from their calls to the ledger's pins, and back when no stream sends any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from cachesvc.flows.core import Promise
from cachesvc.flows.loads import end_lending, lend
from cachesvc.flows.match import computing_blocks
from cachesvc.ledger.change_log import Kind
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.storage_state import LentBlocks
from cachesvc.model.answers import Wait
from cachesvc.model.errors import CacheError, InvalidRequest, LimitExceeded, SubscriberTooSlow
from cachesvc.model.numbers import Party
from cachesvc.model.words import KEY_BYTES, NO_PAGE, Tier
from cachesvc.peer.borrower import PeerStorage
from cachesvc.peer.fleet import CountedDigest, DigestNews, Loan, PeerPaused, PeerRefused, bits_for
from cachesvc.peer.lender import Lent, LentObject, LoanDesk
from cachesvc.questions.explanation import Feed
from cachesvc.questions.view import models_named
from cachesvc.service.loop.line import OTHER_NODES
from cachesvc.service.loop.node import Node
from cachesvc.storage.seam import ObjectName, Part, Scope, Shape, Shapes, shapes_of
from cachesvc.telemetry import events

MOST_BLOCKS = 1024
"""Most blocks of one lease."""
MOST_LEASES = 256
MOST_PATIENT = 256
"""Most borrowers that wait for a first block at a time; others are answered at once."""
MOST_PATIENCE_SECONDS = 10.0
GIVEN_UP_SECONDS = 0.5
"""Time for which a prompt that a request has given up may be begun anew, seconds: one preempted, or sent again."""
LEND_SECONDS = 0.4
"""Longest wait of a borrower for room on the host, seconds: it gives up asking a little later."""

View = Callable[[int, int, int, int], memoryview]
"""``(model, group, host rank, page)``: a host page's bytes. Raises a CacheError."""


class Waiters:
    """Calls that wait for a change, ``most`` at a time. On the loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[asyncio.Future[None], int] = {}

    async def wait(self, seconds: float, model: int = 0) -> bool:
        """Wait for a change, of a model, for so long at most. False at once where no time is left, or too many wait."""
        if seconds <= 0 or len(self._waiting) >= self._most:
            return False
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[changed] = model
        try:
            await asyncio.wait((changed,), timeout=seconds)
        finally:
            del self._waiting[changed]
        return True

    def wake(self, model: int = 0) -> None:
        for changed, awaited in self._waiting.items():
            if awaited == model and not changed.done():
                changed.set_result(None)


class LendingDesk:
    """Desk on the ledger thread. ``view``: from any thread. ``lease_seconds``: silence after which a lease is over."""

    def __init__(self, node: Node, view: View, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.loans = LoanDesk(node.now)
        self._node = node
        self._view = view
        self._waiters = Waiters(MOST_PATIENT)
        node.core.on_sealed.append(self._on_sealed)

    async def borrow(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float = 0.0
    ) -> tuple[Lent | None, int, bool]:
        """Keep what is there; None: nothing is, and no first block was sealed for ``patience`` seconds. Beside it, the
        number of blocks behind that an engine is computing, and True where the request that was to compute the first
        has ended. Raises InvalidRequest, LimitExceeded, Unavailable."""
        if not keys or len(keys) % KEY_BYTES:
            raise InvalidRequest(f"keys has {len(keys)} bytes, which are no keys of {KEY_BYTES}")
        if len(keys) // KEY_BYTES > MOST_BLOCKS:
            raise LimitExceeded("block keys", len(keys) // KEY_BYTES, MOST_BLOCKS)
        if len(self.loans) >= MOST_LEASES:
            raise LimitExceeded("leases of other nodes", len(self.loans) + 1, MOST_LEASES)
        each = ((model, shapes_of(model)) for model in models_named(self._node.core, scope.namespace))
        found = next(((model, shapes) for model, shapes in each if shapes.scope == scope), None)
        if found is None:
            return None, 0, False
        model, shapes = found
        wanted = self._wanted(shapes, parts)
        model.require_trusted()

        def run() -> LentBlocks | Wait | None:
            return self._node.run_of(model.id, lend, self._node.core, model, keys)

        asked_at = self._node.now()
        until = asked_at + min(patience, MOST_PATIENCE_SECONDS)
        while True:
            answer = run()
            if isinstance(answer, Wait):
                answer = await self._node.wait_out(run, answer, self._node.now() + LEND_SECONDS, OTHER_NODES, "borrow")
            ended_at = model.blocks.given_up_at(keys[:KEY_BYTES]) if answer is None else None
            over_at = inf if ended_at is None else max(asked_at, ended_at) + GIVEN_UP_SECONDS
            left = min(until, over_at) - self._node.now()
            if answer is not None or not await self._waiters.wait(min(left, GIVEN_UP_SECONDS), model.id):
                break
        here = 0 if answer is None else len(answer.rows)
        computing = computing_blocks(model, keys, here) if model.blocks.computing else 0
        lent = None if answer is None else await self._hand_out(model, scope, wanted, answer)
        return lent, computing, over_at <= self._node.now()

    def _on_sealed(self, model: int, replica: int, row: int, count: int) -> None:
        """Wake borrowers that wait for a block of the model."""
        del replica, row, count
        self._waiters.wake(model)

    def _wanted(self, shapes: Shapes, parts: Sequence[Part]) -> list[Shape]:
        by_part = {shape.part: shape for shape in (*shapes.full, *shapes.windows)}
        if not parts or any(part not in by_part for part in parts):
            raise InvalidRequest("parts are of another layout: both nodes need the same model, ranks and version")
        if len(set(parts)) < len(parts):
            raise InvalidRequest(f"parts names one of its {len(parts)} twice; name each once")
        return [by_part[part] for part in parts]

    async def _hand_out(self, model: Model, scope: Scope, shapes: list[Shape], blocks: LentBlocks) -> Lent | None:
        """The pages stay from here on, whatever becomes of the call."""
        end = partial(self._node.run_news, model.id, partial(end_lending, self._node.core, model, blocks))
        try:
            objects = await asyncio.to_thread(self._objects, model.id, scope, shapes, blocks)
            lent = self.loans.lend(objects, self.lease_seconds, ready=0, quiet=lambda _: self._node.soon(end))
        except BaseException as error:
            end()
            if isinstance(error, CacheError):  # the host pool is closed: the daemon ends
                return None
            raise  # the call was given up
        blocks.on_change = partial(self._changed, lent.lease, blocks, len(shapes))
        blocks.on_change()
        return lent

    def _changed(self, lease: int, blocks: LentBlocks, parts: int) -> None:
        """Have what has come of a loan sent; end one of which something does not come."""
        if blocks.is_cut:
            self.loans.give_back(lease)
        else:
            self.loans.fill(lease, blocks.ready() * parts)

    def _objects(self, model: int, scope: Scope, shapes: list[Shape], blocks: LentBlocks) -> list[LentObject | None]:
        """On a thread of its own: some microseconds a page. Objects are named by what the index has there."""
        found: list[LentObject | None] = []
        for at, key in enumerate(blocks.keys):
            parent = blocks.keys[at - 1] if at else blocks.parent
            for shape in shapes:
                pages = [(group, rank, blocks.pages[group][at]) for group, rank in shape.pieces]
                if any(page == NO_PAGE for _, _, page in pages):
                    found.append(None)
                    continue
                views = tuple(self._view(model, group, rank, page) for group, rank, page in pages)
                found.append(LentObject(ObjectName(scope, key, shape.part), views, parent))
        return found


FULL_PAUSE_SECONDS = 0.1
"""Pause before a peer is asked again that has lent as much as it may, seconds."""
WARN_SECONDS = 10.0
"""Between two warnings that a peer is not asked: requests may name any number of them."""


class PeerLenders:
    """Lenders seam of the flows. ``own``: addresses at which this node lends."""

    def __init__(self, node: Node, peers: PeerStorage, own: Callable[[], tuple[str, ...]]) -> None:
        self._node = node
        self._peers = peers
        self._own = own
        self._warn_at = 0.0
        node.core.lenders = self

    def is_here(self, peer: str) -> bool:
        return peer in self._own()

    def ask(
        self, model: Model, party: Party, keys: bytes, peer: str, seconds: float, on_promise: Callable[[Promise], None]
    ) -> str:
        shapes = shapes_of(model)
        parts = [shape.part for shape in (*shapes.full, *shapes.windows)]

        def answered(answer: Loan | CacheError) -> None:
            promise = _promise(answer, len(parts), len(shapes.full))
            self._node.soon(partial(self._node.run_news, model.id, partial(on_promise, promise)))

        try:
            self._peers.expect(peer, shapes.scope, keys, parts, seconds, answered, party)
        except CacheError as error:
            if self._node.now() >= self._warn_at:
                self._warn_at = self._node.now() + WARN_SECONDS
                events.warning("peer_not_asked", peer=peer, reason=str(error))
            return str(error)
        return ""

    def drop(self, model: Model, keys: Sequence[bytes]) -> None:
        shapes = shapes_of(model)
        self._peers.drop([ObjectName(shapes.scope, key, shapes.full[0].part) for key in keys])


def _promise(answer: Loan | CacheError, parts: int, full: int) -> Promise:
    if isinstance(answer, CacheError):
        is_full = isinstance(answer, PeerRefused) and answer.is_full
        seconds = answer.seconds if isinstance(answer, PeerPaused) else FULL_PAUSE_SECONDS * is_full
        return Promise(problem=str(answer), ask_in=seconds)
    there, lent = answer.lent, 0
    while (lent + 1) * parts <= len(there) and all(there[lent * parts : lent * parts + full]):
        lent += 1
    return Promise(lent, answer.computing, answer.epoch, is_given_up=answer.is_given_up)


IDLE_SECONDS = 60.0
"""Time without a reader after which the digest is given up, seconds."""
ANSWERS_A_TICK = 4
"""Answers of a feed, of some thousand blocks each, that are taken in at a time."""
MOST_DIGEST_SECONDS = 30.0
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
        self._waiters = Waiters(MOST_READERS)

    async def news(self, epoch: int, version: int, patience: float) -> DigestNews | None:
        """Changes since ``version`` of the life ``epoch``, once there are any; None: there were none for ``patience``
        seconds."""
        self._asked_at = self._node.now()
        until = self._asked_at + min(patience, MOST_DIGEST_SECONDS)
        self.tick()
        while True:
            digest = self._digest
            if digest is not None and self._is_whole and (epoch != self.epoch or digest.version != version):
                return digest.news(self.epoch, version if epoch == self.epoch else 0)
            if not await self._waiters.wait(until - self._node.now()):
                return None

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
            self._waiters.wake()

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
                if run.group == lead and run.tier != Tier.STORAGE.value and Kind(run.kind) is not Kind.COPY_FAILED:
                    digest.change(run.keys, came=run.present)
        return not feed.behind and not feed.is_in_snapshot

    def _drop(self) -> None:
        self._digest, self._is_whole = None, False
        self._feeds.clear()


def _capacity(model: Model) -> int:
    """Blocks that a model can have on this node at most."""
    lead = model.blocks.host.lead
    return model.host_pages[lead] + sum(replica.device_pages[lead] for replica in model.replicas)
