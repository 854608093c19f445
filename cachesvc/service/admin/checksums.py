"""Checksums of sealed pages: taken in the background soon after they are published, compared when an operator asks.

Pages are read through the memory seam, off the event loop and at a limited rate. A page may be evicted while it is
read, so what was read counts only where the page is the same one, of the same grant, before and after.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from kvcache.v1 import inspect_pb2

from cachesvc.model.errors import CacheError
from cachesvc.questions import dump
from cachesvc.questions.dump import SealedPage
from cachesvc.service.loop.line import TimeSlices
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events

ReadPage = Callable[[int, int | None, int, int, int], bytes]
"""``(model, replica or None for the host, rank, group, page)``: a page's bytes. Raises CacheError, RuntimeError."""

WAITING_MAX = 4096
"""Publishes whose blocks wait for their checksums; more are passed over."""

PAGES_AT_ONCE = 32
SAMPLE = 16
"""With ``sample``, one block of this number."""

MOST_MISMATCHES = 1024
MOST_REASONS = 8

MOST_SUMS = 16
"""Most checksums of one block and group: a block that comes and goes has new pages each time. Beyond them, copies of
pages that have gone are passed over, since the checksum of what they were copied from may be forgotten."""


class Sums(NamedTuple):
    """A page's checksums, one for each rank that keeps bytes of its own; None where it could not be read, and why."""

    page: SealedPage
    ranks: tuple[int | None, ...]
    size_bytes: int
    why: str = ""


class Checksums:
    """``mode``: off, sample or all. ``bytes_per_second``: what the background reads at most."""

    def __init__(self, node: Node, read: ReadPage, mode: str, bytes_per_second: int) -> None:
        self._node = node
        self._read = read
        self.mode = mode
        self._rate = bytes_per_second
        self._sum = _digest()
        self._known: dict[tuple[int, bytes], list[Sums]] = {}
        self._waiting: deque[tuple[int, int, int, int]] = deque()
        self._passed_over: dict[int, int] = {}
        self._news = asyncio.Event()
        self._ended = asyncio.Condition()
        self._taken = self._is_taking = 0
        self._task: asyncio.Task[None] | None = None
        self._last_why = ""

    def start(self) -> None:
        """Begin to listen for publishes, unless it is off."""
        if self.mode != "off":
            self._node.core.on_sealed.append(self._on_sealed)
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._node.core.on_sealed.remove(self._on_sealed)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    # -- taking ------------------------------------------------------------------------------------------------

    def _on_sealed(self, model: int, replica: int, tip: int, count: int) -> None:
        if len(self._waiting) < WAITING_MAX:
            self._waiting.append((model, replica, tip, count))
            self._news.set()
            return
        self._passed_over[model] = self._passed_over.get(model, 0) + count
        for key in dump.lately_sealed(self._node.core, model, tip, count):
            self._known.pop((model, key), None)  # an older checksum of the same key would not fit new bytes

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                model, replica, tip, count = self._waiting.popleft()
                self._is_taking = 1
                try:
                    await self._take(model, replica, tip, count)
                except Exception:  # noqa: BLE001 - the root of a task
                    events.failure("checksums_not_taken", model=model, blocks=count)
                async with self._ended:
                    self._taken += 1
                    self._is_taking = 0
                    self._ended.notify_all()
            self._prune()

    async def _take(self, model: int, replica: int, tip: int, count: int) -> None:
        core = self._node.core
        keys = dump.lately_sealed(core, model, tip, count)
        wanted = [key for key in keys if self.mode == "all" or key[0] % SAMPLE == 0]
        pages = [
            (page, dump.ranks_of(core, page))
            for key in wanted
            for page in dump.pages_of(core, model, key, iter((replica + 1,)))
            if not any(sums.page == page for sums in self._known.get((model, key), ()))
        ]
        for at in range(0, len(pages), PAGES_AT_ONCE):
            read = await asyncio.to_thread(self._sums, pages[at : at + PAGES_AT_ONCE])
            for sums in read:
                if None not in sums.ranks and dump.is_still(core, sums.page):
                    self._keep(sums)
            await asyncio.sleep(sum(sums.size_bytes for sums in read) / self._rate)

    def _keep(self, sums: Sums) -> None:
        known = self._known.setdefault((sums.page.model, sums.page.key), [])
        known.append(sums)
        same_group = [each for each in known if each.page.group == sums.page.group]
        if len(same_group) > MOST_SUMS:
            known.remove(same_group[0])

    def _sums(self, pages: list[tuple[SealedPage, int]]) -> list[Sums]:
        out: list[Sums] = []
        for page, ranks in pages:
            sums: list[int | None] = []
            size, why = 0, ""
            for rank in range(ranks):
                try:
                    replica = page.place - 1 if page.place else None
                    content = self._read(page.model, replica, rank, page.group, page.page)
                except (CacheError, RuntimeError) as error:  # its model has gone, or its GPU
                    why = str(error)
                    sums.append(None)
                    continue
                size += len(content)
                sums.append(self._sum(content))
            out.append(Sums(page, tuple(sums), size, why))
        self._note_unread(out)
        return out

    def _note_unread(self, read: list[Sums]) -> None:
        """Log the first page that could not be read for a reason, and none that follows with the same."""
        for sums in read:
            if sums.why and sums.why != self._last_why:
                self._last_why = sums.why
                events.event("page_not_read", model=sums.page.model, page=sums.page.page, reason=sums.why)

    def _prune(self) -> None:
        """Forget what has left the index once that is the larger part."""
        resident = sum(len(model.blocks.index) for model in self._node.view().models())
        self._forget_models()
        if len(self._known) > 2 * resident + WAITING_MAX:
            core = self._node.core
            self._known = {at: sums for at, sums in self._known.items() if dump.is_resident(core, *at)}

    def _forget_models(self) -> None:
        """Forget models that were evicted; numbers are not used again."""
        models = {model.id for model in self._node.view().models()}
        if any(model not in models for model in {at[0] for at in self._known} | self._passed_over.keys()):
            self._known = {at: sums for at, sums in self._known.items() if at[0] in models}
            self._passed_over = {model: count for model, count in self._passed_over.items() if model in models}

    # -- comparing ---------------------------------------------------------------------------------------------

    async def compare(self, slices: TimeSlices, models: Collection[int]) -> inspect_pb2.ChecksumStatus:
        """Read every page of the models whose checksum is known and compare; other models are left out."""
        answer = inspect_pb2.ChecksumStatus(mode=self.mode)
        await self._catch_up()
        self._forget_models()
        keys = [at for at in self._known if at[0] in models]
        for first in range(0, len(keys), PAGES_AT_ONCE):
            pages = slices.take(partial(self._pages, keys[first : first + PAGES_AT_ONCE]))
            for sums in await slices.off_loop(partial(self._sums, pages)):
                self._judge(answer, sums)
        answer.known_blocks = sum(model in models for model, _ in self._known)
        answer.waiting_blocks = sum(count for model, _, _, count in self._waiting if model in models)
        answer.passed_over_blocks = sum(count for model, count in self._passed_over.items() if model in models)
        return answer

    async def _catch_up(self) -> None:
        """Wait until every publish that waits now has its checksums; later publishes are not waited for."""
        if self._task is None:
            return
        async with self._ended:
            until = self._taken + len(self._waiting) + self._is_taking
            await self._ended.wait_for(lambda: self._taken >= until)

    def _pages(self, keys: list[tuple[int, bytes]]) -> list[tuple[SealedPage, int]]:
        """Every sealed page of these blocks, with its ranks."""
        core = self._node.core
        out: list[tuple[SealedPage, int]] = []
        for model, key in keys:
            pages = dump.pages_of(core, model, key)
            out += [(page, dump.ranks_of(core, page)) for page in pages]
            if not dump.is_resident(core, model, key):
                self._known.pop((model, key), None)
        return out

    def _judge(self, answer: inspect_pb2.ChecksumStatus, found: Sums) -> None:
        """Compare a page with what was taken of this very page, or else with any that its bytes were copied from."""
        page = found.page
        known = [s for s in self._known.get((page.model, page.key), ()) if s.page.group == page.group]
        same = [sums for sums in known if sums.page == page]
        if not same and len(known) < MOST_SUMS and not self._waiting and not self._is_taking:
            same = known  # a copy of one of these; while others wait, it may be of bytes that are still to be read
        if not same or not dump.is_still(self._node.core, page):
            answer.pages_skipped += 1
            return
        answer.bytes_read += found.size_bytes
        for rank, there in enumerate(found.ranks):
            published = {sums.ranks[rank] for sums in same if rank < len(sums.ranks)}
            if there is None:
                answer.pages_unread += 1
                if found.why not in answer.unread_reasons and len(answer.unread_reasons) < MOST_REASONS:
                    answer.unread_reasons.append(found.why)
                continue
            answer.pages_checked += 1
            if there not in published and len(answer.mismatches) < MOST_MISMATCHES:
                place, group = dump.names_of(self._node.core, page)
                answer.mismatches.add(
                    model_id=page.model,
                    key_hex=page.key.hex(),
                    place=place,
                    group=group,
                    rank=rank,
                    page=page.page,
                    published=" or ".join(f"{one:016x}" for one in sorted(s for s in published if s is not None)),
                    found=f"{there:016x}",
                )


def _digest() -> Callable[[bytes], int]:
    """xxh3 where it is installed, else BLAKE2b: 64 bits either way."""
    try:
        import xxhash
    except ImportError:
        return lambda content: int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    digest: Callable[[bytes], int] = xxhash.xxh3_64_intdigest
    return digest
