"""Daemons and engines are killed in the middle of loads: the others go on, and nothing wrong is taken for right."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from cachesvc_client import DaemonUnavailable, LoadFailed, Timeouts
from cachesvc_client.memory.pool import LoadOutcome

from tests.e2e.engine import BLOCK_TOKENS, WAIT_SECONDS, prompt
from tests.e2e.rig import running_node, wait_until
from tests.gpu.engine import CUDA, LARGE, SLOWLY, GpuEngine, take_to_host
from tests.gpu.frameworks import cupy
from tests.gpu.remote import RemoteGpuEngine

pytestmark = pytest.mark.gpu

BLOCKS, PAGES = 150, 160
LONG = Timeouts(call_s=10 * WAIT_SECONDS, wait_s=10 * WAIT_SECONDS)


@pytest.mark.parametrize("memory", ["ipc", "vmm"])
def test_an_engines_stream_goes_on_when_the_daemon_is_killed_during_a_load(folder: Path, memory: str) -> None:
    flags = ("--device-memory", memory)
    with running_node((*SLOWLY, *flags), folder=folder) as node:
        engine = GpuEngine(node.socket, layout=LARGE, device_pages=PAGES, host_pages=PAGES, timeouts=LONG).start()
        tokens = prompt(1, BLOCKS)
        keys = engine.keys(tokens)
        take_to_host(node, engine, tokens)
        sequence = engine.lease.match(keys)
        sequence.allocate(BLOCKS)
        (ticket,) = sequence.tickets
        engine.pool.wait_layer(ticket, 0, WAIT_SECONDS)
        assert engine.bad(sequence, keys, range(BLOCKS), [0]) == []
        behind = cupy.zeros(1, np.uint8)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        engine.pool.wait_ticket_on(stream, ticket)
        cupy.cuda.runtime.memsetAsync(behind.data.ptr, 1, 1, stream.ptr)
        assert not stream.done
        assert not sequence.lost_tokens()

        node.daemon.process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        wait_until(lambda: bool(stream.done), "the engine's stream goes on")
        print(f"{memory}: the stream went on {time.monotonic() - began:.3f} s after the daemon was killed")
        node.daemon.process.wait()
        assert engine.client.wait_lost(WAIT_SECONDS)
        stream.synchronize()
        assert behind.get().tolist() == [1]
        with pytest.raises((LoadFailed, DaemonUnavailable)):  # either the mover ends it first, or this client
            engine.pool.confirm(ticket)
        with pytest.raises(DaemonUnavailable):
            engine.pool.wait_ticket_on(stream, ticket)
        assert engine.pool.outcome(ticket) in (LoadOutcome.FAILED, LoadOutcome.LOST)
        assert sequence.lost_tokens() == range(BLOCKS * BLOCK_TOKENS)
        engine.fill(sequence, keys, range(BLOCKS))  # recompute, in memory without another owner
        assert engine.bad(sequence, keys, range(BLOCKS)) == []

    with running_node((*CUDA, *flags), folder=folder) as again:
        (lease,) = engine.client.reconnect()
        engine.take(lease)
        served = engine.serve(prompt(1, 20))
        assert (served.device, served.computed, served.bad) == (0, 20, [])
        assert engine.serve(prompt(1, 20)).device == 20
        engine.close()
        assert again.lease_states() == {}


def test_the_daemon_goes_on_when_an_engine_is_killed_during_a_load() -> None:
    with (
        running_node(SLOWLY) as node,
        RemoteGpuEngine(node.socket, layout="large", device_pages=PAGES, host_pages=PAGES) as doomed,
        GpuEngine(node.socket, layout=LARGE, device_pages=PAGES, host_pages=PAGES, timeouts=LONG) as engine,
    ):
        doomed.ask("start")
        tokens = prompt(1, BLOCKS)
        keys = engine.keys(tokens)
        take_to_host(node, engine, tokens)
        assert doomed.ask("match", name="open", tokens=tokens)["host"] == BLOCKS
        assert len(doomed.ask("begin_load", name="open", blocks=BLOCKS)) == 1
        assert node.pages("in_flight", "replica 0") == BLOCKS
        doomed.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(node.held().values()), "its load has ended, and no page is held")
        assert node.problems() == []
        wait_until(lambda: len(node.lease_states()) == 1, "its lease is gone")
        with engine.lease.match(keys) as sequence:
            sequence.allocate(BLOCKS)
            sequence.wait_loaded(10 * WAIT_SECONDS)
            assert engine.bad(sequence, keys, range(BLOCKS)) == []


def test_a_killed_engine_leaves_what_it_sealed_and_its_other_pages_come_back() -> None:
    with (
        running_node(CUDA) as node,
        RemoteGpuEngine(node.socket, layout="large", device_pages=40) as doomed,
        GpuEngine(node.socket, layout=LARGE, device_pages=40) as engine,
    ):
        doomed.ask("start")
        assert doomed.ask("serve", tokens=prompt(1, 10))["computed"] == 10
        doomed.ask("match", name="open", tokens=prompt(2, 20))
        doomed.ask("allocate", name="open", blocks=20)
        doomed.ask("fill_forever", name="open", first=0, last=20)
        assert node.pages("private") == 20
        doomed.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(node.held().values()), "its private pages are free")
        served = engine.serve(prompt(1, 10))
        assert (served.device, served.bad) == (10, [])
        assert engine.serve(prompt(2, 20)).device == 0
        assert node.problems() == []


def test_an_engine_that_is_killed_gives_the_gpu_back() -> None:
    """Three generations of engines on one daemon: each finds the prefix, and maps all of it."""
    with running_node(CUDA) as node:
        for generation in range(3):
            with RemoteGpuEngine(node.socket, layout="large", device_pages=100) as engine:
                engine.ask("start")
                served = engine.ask("serve", tokens=prompt(1, 90))
                assert (served["device"], served["bad"]) == (90 if generation else 0, [])
                engine.send_signal(signal.SIGKILL)
            wait_until(lambda: node.lease_states() == {}, "its lease is gone")
        with GpuEngine(node.socket, layout=LARGE, device_pages=100) as last:
            assert last.serve(prompt(1, 90)).bad == []
