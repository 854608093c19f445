"""An engine that writes all words that it can get, again and again: those of another namespace wait as they should."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cachesvc_client import NotFound, TicketView
from cachesvc_client.memory.pool import LoadOutcome

from cachesvc.memory.extents import map_memfd
from cachesvc.model.futex import words_of
from gpu_ops.kernels.pages import check_pages
from tests.e2e.engine import WAIT_SECONDS, prompt
from tests.e2e.rig import running_node
from tests.gpu.engine import LARGE, SLOWLY, SMALL, GpuEngine, PlaneChecks, take_to_host
from tests.gpu.frameworks import cupy

pytestmark = pytest.mark.gpu

ENGINE_PRIORITY = -1000
"""The driver takes a number beyond its range for the end of it: the highest."""

FAR_AHEAD = 0x3FFFFFFF
"""Past whatever a young word is waited for."""


@contextmanager
def flooding(hostile: GpuEngine) -> Iterator[None]:
    """Meanwhile every word that the daemon gave to an engine is set, again and again."""
    attached = hostile.pool._attached.timeline  # noqa: SLF001 - what Attach answered
    descriptor = hostile.pool._life.fetch_fd(attached.token)  # noqa: SLF001
    words = words_of(map_memfd(descriptor, os.fstat(descriptor).st_size))
    os.close(descriptor)
    is_over, has_begun = threading.Event(), threading.Event()

    def flood() -> None:
        while not is_over.wait(1e-3):
            words[:] = FAR_AHEAD
            has_begun.set()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        has_begun.wait()
        yield
    finally:
        is_over.set()
        thread.join()


def seen(victim: GpuEngine, ticket: TicketView, stream: Any) -> str:
    """Progress of a load and of a stream that waits for it, for a failure's message."""
    slot = ticket.slot
    assert slot is not None
    word, failed = (int(victim.pool.timeline[at]) for at in (slot.word, slot.failed_word))
    return f"{slot}: word {word}, failed word {failed}, {victim.pool.outcome(ticket)}, stream done: {stream.done}"


def wrong_in(prepared: list[tuple[PlaneChecks, Any]], stream: Any) -> list[int]:
    """Wrong words of planes as they are now. Nothing here allocates on the device, where a stream waits."""
    for each, wrong in prepared:
        check_pages(each.plane, each.marks, wrong, stream.ptr)
    return [int(wrong.get(stream=stream).sum()) for _, wrong in prepared]


@pytest.mark.parametrize("movers", ["inside", "process"])
def test_a_flood_of_words_ends_no_wait_of_another_namespace(movers: str) -> None:
    blocks = 120
    with (
        running_node((*SLOWLY, "--movers", movers)) as node,
        GpuEngine(node.socket, layout=SMALL, salt=b"hostile", device_pages=8) as hostile,
        GpuEngine(node.socket, layout=LARGE, salt=b"victim", device_pages=130, host_pages=130) as victim,
    ):
        tokens = prompt(1, blocks)
        keys = victim.keys(tokens)
        take_to_host(node, victim, tokens)
        with pytest.raises(NotFound):
            hostile.pool._life.fetch_fd(victim.pool._attached.timeline.token)  # noqa: SLF001
        # of another priority than the stream that looks meanwhile: they never share a hardware queue
        stream = cupy.cuda.Stream(non_blocking=True, priority=ENGINE_PRIORITY)
        with victim.lease.match(keys) as sequence, flooding(hostile):
            assert sequence.allocate(blocks).loading_blocks == blocks, "what lies on the host has pages from here on"
            (ticket,) = sequence.tickets
            prepared = victim.prepare(sequence, keys)
            first = [one for one in victim.prepare(sequence, keys) if one[0].layer == 0]
            wrong = victim.queue_checks(prepared, ticket, stream)
            assert victim.pool.outcome(ticket) is LoadOutcome.RUNNING, seen(victim, ticket, stream)
            assert not stream.done, seen(victim, ticket, stream)
            victim.pool.wait_layer(ticket, 0, WAIT_SECONDS)
            assert wrong_in(first, victim.stream) == [0] * len(first), seen(victim, ticket, stream)
            assert victim.pool.outcome(ticket) is LoadOutcome.RUNNING, seen(victim, ticket, stream)
            stream.synchronize()
            victim.pool.confirm(ticket)
            found = [int(each.sum()) for each in wrong]
            assert found == [0] * len(LARGE.planes), f"{found} {seen(victim, ticket, stream)}"
            sequence.wait_loaded(WAIT_SECONDS)
            assert victim.bad(sequence, keys, range(blocks)) == []
