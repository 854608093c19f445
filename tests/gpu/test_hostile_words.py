"""An engine that writes all words that it can get, again and again: those of another namespace wait as they should."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cachesvc_client import NotFound
from cachesvc_client.memory.pool import LoadOutcome

from cachesvc.memory.mapped import map_memfd
from cachesvc.model.futex import words_of
from tests.e2e.engine import WAIT_SECONDS, prompt
from tests.e2e.rig import running_node
from tests.gpu.engine import LARGE, SLOWLY, SMALL, GpuEngine, take_to_host
from tests.gpu.frameworks import cupy

pytestmark = pytest.mark.gpu

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
        with victim.lease.match(keys) as sequence:
            prepared = victim.prepare(sequence, keys)
            stream = cupy.cuda.Stream(non_blocking=True)
            with flooding(hostile):
                sequence.allocate(blocks)
                (ticket,) = sequence.tickets
                wrong = victim.queue_checks(prepared, ticket, stream)
                assert victim.pool.outcome(ticket) is LoadOutcome.RUNNING
                assert not stream.done
                victim.pool.wait_layer(ticket, 0, WAIT_SECONDS)
                assert victim.bad(sequence, keys, range(blocks), [0]) == []
                assert victim.pool.outcome(ticket) is LoadOutcome.RUNNING
                stream.synchronize()
                victim.pool.confirm(ticket)
            assert [int(each.sum()) for each in wrong] == [0] * len(LARGE.planes)
            sequence.wait_loaded(WAIT_SECONDS)
            assert victim.bad(sequence, keys, range(blocks)) == []
