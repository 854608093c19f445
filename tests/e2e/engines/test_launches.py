"""Launches that overlap: no page is another's while a launch may use it, and every page comes back.

A launch reads and writes by the tables that were read for it, but only when it ends: as late as a GPU may be. Between
two launches a neighbour takes every page that is free, writes it full, and looks whether it stays as it was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pytest
from cachesvc_client import NO_PAGE, Conflict, PoolExhausted, Sequence, StepStream
from cachesvc_client.records.sequence_record import Pages
from kvcache.v1 import lease_pb2, lease_pb2_grpc

from tests.e2e.engine import BLOCK_TOKENS, WINDOW_TOKENS, WINDOWED, Engine, prompt
from tests.e2e.rig import Node, wait_until

pytestmark = pytest.mark.usefixtures("each_way")

BLOCKS = 9
PAGES = 64
POISON = 0xA5


class Snapshot(NamedTuple):
    """The tables of one sequence as a launch got them; cells out of the window's reach are holes."""

    tables: tuple[Pages, ...]


class Work(NamedTuple):
    """One block of one request in one launch."""

    request: Request
    position: int
    snapshot: Snapshot


class Request:
    """A prompt whose blocks are computed one in each launch; some launches run past its end before that is known."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.keys = engine.keys(prompt(seed, BLOCKS + 4))
        self.sequence = engine.lease.match(self.keys, max_blocks=BLOCKS - 1)
        self.scheduled = self.computed = self.sequence.hit_blocks

    def schedule(self) -> Work:
        """The next block: its table is read here, and grows first."""
        self.sequence.allocate(self.scheduled + 1)
        tables = tuple(table.copy() for table in self.sequence.tables)
        dead = max(0, self.scheduled * BLOCK_TOKENS - WINDOW_TOKENS + 1) // BLOCK_TOKENS
        tables[WINDOWED.group_index["window"]][:dead] = NO_PAGE
        self.scheduled += 1
        return Work(self, self.scheduled - 1, Snapshot(tables))


class Neighbour:
    """Takes what is free, and sees to it that no other engine writes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequence: Sequence | None = None
        self.bad: list[str] = []

    def take_all(self) -> None:
        """Every page that can be had, full of poison."""
        self.sequence = self.engine.lease.match(b"")
        for blocks in range(1, PAGES + 1):
            try:
                self.sequence.allocate(blocks)
            except PoolExhausted:
                break
        for page in self._pages():
            page[:] = POISON

    def give_back(self) -> None:
        """Look, and let go."""
        if self.sequence is not None:
            self.bad += ["a neighbour's page was written" for page in self._pages() if np.any(page != POISON)]
            self.sequence.release()

    def _pages(self) -> Iterator[np.ndarray]:
        assert self.sequence is not None
        for group, table in zip(WINDOWED.groups, self.sequence.tables, strict=True):
            for page in table.tolist():
                if page != NO_PAGE:
                    for plane in self.engine.pool.page(group.name, page).values():
                        yield plane.reshape(-1).view(np.uint8)


class Overlapped:
    """An engine with ``depth`` launches under way. ``tells``: it says so. ``steps``: its calls travel in batches."""

    def __init__(
        self, engine: Engine, neighbour: Neighbour, depth: int, *, tells: bool, steps: StepStream | None = None
    ) -> None:
        self.engine, self.neighbour, self.depth, self.tells, self.steps = engine, neighbour, depth, tells, steps
        self.under_way: deque[tuple[int, list[Work]]] = deque()
        self.bad: list[str] = []
        self.duplicates = 0

    def run(self, requests: list[Request]) -> None:
        """Compute them all."""
        running = list(requests)
        while running or self.under_way:
            self.neighbour.give_back()
            if running:
                launch = self.engine.lease.launch() if self.tells else 0
                self.under_way.append((launch, [request.schedule() for request in running]))
            self.neighbour.take_all()
            if len(self.under_way) == self.depth or not running:
                running = self._end_oldest(running)
        self.neighbour.give_back()

    def _end_oldest(self, running: list[Request]) -> list[Request]:
        launch, works = self.under_way.popleft()
        for work in works:
            self.engine.fill(work.snapshot, work.request.keys, [work.position])
        for work in works:
            self.bad += self.engine.bad(work.snapshot, work.request.keys, range(work.position + 1))
        if self.tells:
            self.engine.lease.completed(launch)
        for request in (work.request for work in works if work.request in running):
            request.computed += 1
            self._take_in(request, launch if self.tells else None)
        return [request for request in running if request.computed < BLOCKS]

    def _take_in(self, request: Request, launch: int | None) -> None:
        sequence, tokens = request.sequence, request.computed * BLOCK_TOKENS
        if self.steps is None:
            self.duplicates += len(sequence.publish(request.computed).duplicate_positions)
            sequence.recycle(tokens, launch=launch)
            if request.computed == BLOCKS:
                sequence.release()
            return
        batch = self.steps.batch()
        place = batch.publish(sequence, request.computed)
        batch.recycle(sequence, tokens)
        if request.computed == BLOCKS:
            batch.release(sequence)
        self.duplicates += len(self.steps.submit(batch)[place].duplicate_positions)


def run(node: Node, depth: int, *, tells: bool, is_batched: bool = False) -> tuple[Overlapped, list[str]]:
    """Four requests, two for each of two prompts; what was bad."""
    with ExitStack() as stack:
        engine, other = (
            stack.enter_context(Engine(node.socket, layout=WINDOWED, device_pages=PAGES)) for _ in range(2)
        )
        steps = stack.enter_context(engine.lease.step()) if is_batched else None
        neighbour = Neighbour(other)
        overlapped = Overlapped(engine, neighbour, depth, tells=tells, steps=steps)
        overlapped.run([Request(engine, seed) for seed in (0, 0, 1, 1)])
        if steps is not None:
            steps.submit()
        wait_until(lambda: not any(node.held().values()), "all pages came back")
        return overlapped, overlapped.bad + neighbour.bad


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize(("depth", "tells"), [(1, False), (1, True), (2, True), (3, True)])
def test_no_page_is_given_back_while_a_launch_uses_it(node: Node, depth: int, tells: bool, is_batched: bool) -> None:
    overlapped, bad = run(node, depth, tells=tells, is_batched=is_batched)
    assert bad == []
    assert overlapped.duplicates == 2 * BLOCKS


def test_what_overlaps_untold_is_seen_by_its_bytes(node: Node) -> None:
    """The control of the test above: without a word about launches pages do go too early."""
    _, bad = run(node, 3, tells=False)
    assert "a neighbour's page was written" in bad
    assert any(line.startswith("block") for line in bad)


def test_a_release_waits_for_its_own_launch_and_a_swap_says_which(node: Node) -> None:
    with Engine(node.socket, layout=WINDOWED, host_pages=64) as engine:
        lease = engine.lease
        first, second = (lease.match(engine.keys(prompt(seed, 3))) for seed in (1, 2))
        first.allocate(3)
        second.allocate(3)
        one, two = lease.launch(), lease.launch()
        with pytest.raises(Conflict, match="launch 1 may still write"):
            second.swap_out(launch=one)
        assert first.release(launch=one) == 0
        assert first.is_released
        assert node.pages("private") == 12
        lease.completed(one)
        assert node.pages("private") == 6
        second.swap_out(launch=one)
        second.wait_swapped()
        assert second.release() == 0
        lease.completed(two)
        assert node.held() == {"private": 0, "in_flight": 0, "quarantined": 0}


def test_a_lease_that_ends_with_launches_under_way_keeps_their_pages_from_others(node: Node) -> None:
    held = {"private": 0, "in_flight": 0, "quarantined": 6}
    for quiesced in (None, True):
        with Engine(node.socket, layout=WINDOWED) as engine:
            sequence = engine.lease.match(engine.keys(prompt(3, 3)))
            sequence.allocate(3)
            engine.lease.launch()
            assert sequence.release() == 0
            engine.lease.close(quiesced=quiesced)
            assert node.held() == (held if quiesced is None else held | {"quarantined": 0})
            close = lease_pb2.CloseRequest(lease_id=engine.lease.id, quiesced=True)
            lease_pb2_grpc.LeaseServiceStub(node.channel).Close(close)
            assert not any(node.held().values())
