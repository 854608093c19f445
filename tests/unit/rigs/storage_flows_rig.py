"""A core with storage that records what it is asked, and a test that says what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from cachesvc.flows.core import tidy_all
from cachesvc.flows.fetch import fetched
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match
from cachesvc.flows.storage_writes import begin_soon, kept
from cachesvc.ledger.ledger import Model
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState, WritePolicy
from cachesvc.storage.seam import Outcome, Part, Shape, Use
from cachesvc.storage.tier import News
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of

WHOLE, LENT, GONE = Outcome.OK, Outcome.LENT, Outcome.MISS
MISPLACED, LATE, BACK = Outcome.MISPLACED, Outcome.LATE, None


class FetchRequest(NamedTuple):
    """A fetch that was begun."""

    model: Model
    ticket: int
    keys: bytes
    pages: Sequence[Sequence[int]]
    parent: bytes


class KeepRequest(NamedTuple):
    """A write that was begun."""

    model: Model
    key: bytes
    pages: Sequence[int]
    parent: bytes


class RecordingStorage:
    """Believes to have what ``there`` says, if it ``knows``; an object for each group of a block."""

    def __init__(self) -> None:
        self.wait_seconds = 0.25
        self.keeps_all = True
        self.keeps_used = True
        self.knows = True
        self.there: set[bytes] = set()
        self.fetches: list[FetchRequest] = []
        self.keeps: list[KeepRequest] = []
        self.uses: list[Use] = []
        self.lags = 0
        self.bytes_left = 1 << 40
        self.forgotten: list[int] = []

    def forget(self, model_id: int) -> None:
        self.forgotten.append(model_id)

    def expects(self, model: Model, keys: bytes) -> int | None:
        if not self.knows:
            return None
        count = 0
        while keys[count * KEY_BYTES : (count + 1) * KEY_BYTES] in self.there:
            count += 1
        return count

    def has(self, model: Model, key: bytes) -> bool:
        return key in self.there

    def used(self, model: Model, uses: Sequence[Use]) -> None:
        self.uses += uses

    def fetch(self, model: Model, ticket: int, keys: bytes, pages: Sequence[Sequence[int]], parent: bytes) -> list[int]:
        request = FetchRequest(model, ticket, keys, pages, parent)
        self.fetches.append(request)
        blocks = len(request.keys) // KEY_BYTES
        return [sum(pages[block] != NO_PAGE for pages in request.pages) for block in range(blocks)]

    def lagged(self) -> None:
        self.lags += 1

    def room(self) -> int:
        return self.bytes_left

    def keep(self, model: Model, key: bytes, pages: Sequence[int], parent: bytes) -> int:
        request = KeepRequest(model, key, pages, parent)
        self.keeps.append(request)
        return sum(page != NO_PAGE for page in request.pages)


class StorageRig(NamedTuple):
    """A rig, its storage and a lease."""

    rig: Rig
    storage: RecordingStorage
    lease: str

    def ask(self, prompt: str, sequence: int, limit: int = 0) -> partial[Matched | Wait]:
        """One Match call, to be run again and again."""
        return partial(self.rig.once, partial(match, sharing=Sharing()), self.lease, sequence, chain(*prompt), limit)

    def tell(self, blocks: Iterable[int], outcome: Outcome | None, group: int = 0, fetch: int = -1) -> None:
        """So it went with objects of some blocks of a fetch."""
        request = self.storage.fetches[fetch]
        shape = Shape(Part(group, 0, 1), ((group, 0),), (group,))
        found = [News(request.model.id, request.ticket, b"", block, shape, outcome) for block in blocks]
        fetched(self.rig.core, request.model.id, request.ticket, found)
        self.settle()

    def tell_kept(self, key: bytes, *outcomes: Outcome | None) -> bool:
        """So it went with a block that was being written."""
        ended = kept(self.rig.core, self.rig.model.id, key, outcomes)
        self.settle()
        return ended

    def settle(self) -> None:
        """Chores are done, and all adds up."""
        tidy_all(self.rig.core)
        self.rig.check()

    def pages(self, state: PageState) -> int:
        """Host pages in a state, of all groups."""
        return sum(pool.counts[state] for pool in self.rig.host.pools)


def storing(
    prompt: str = "",
    *,
    layout: Layout | None = None,
    device: int = 16,
    host: int | tuple[int, ...] = 16,
    policy: WritePolicy = WritePolicy.WRITE_BACK,
    replicas: int = 1,
) -> StorageRig:
    """A rig whose storage believes to have ``prompt``."""
    layout = layout or one_group()
    groups = len(layout.groups)
    hosts = (host,) * groups if isinstance(host, int) else host
    rig = rig_of(layout, device=(device,) * groups, host=hosts, policy=policy, replicas=replicas)
    storage = RecordingStorage()
    storage.there = set(packed(prompt))
    rig.core.storage = storage
    rig.core.on_wanted = partial(begin_soon, rig.core)
    return StorageRig(rig, storage, rig.lease("a", 0))


def hit(answer: object) -> tuple[int, int, int]:
    """Blocks in place, to be loaded, and of those from storage."""
    assert isinstance(answer, Matched), answer
    return answer.device_blocks, answer.host_blocks, answer.storage_blocks


def waits(answer: object) -> Wait:
    assert isinstance(answer, Wait), answer
    assert answer.seconds is not None, "storage never holds a call up without end"
    return answer


def packed(prompt: str) -> list[bytes]:
    """Its keys, one by one."""
    keys = chain(*prompt)
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def keys_of(requests: Sequence[KeepRequest]) -> list[bytes]:
    return [request.key for request in requests]


__all__ = [
    "BACK",
    "GONE",
    "LATE",
    "LENT",
    "WHOLE",
    "RecordingStorage",
    "StorageRig",
    "hit",
    "keys_of",
    "packed",
    "storing",
    "waits",
]
