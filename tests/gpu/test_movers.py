"""A mover in a process of its own on a GPU: engines map its memory, streams wait for its words, it may be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cachesvc_client import LeaseLost, Timeouts

from tests.e2e.engine import WAIT_SECONDS, prompt
from tests.e2e.movers import kill_mover_of, said
from tests.e2e.rig import running_node, wait_until
from tests.gpu.engine import BACKED_UP, LARGE, LAYOUTS, SLOWLY, GpuEngine, take_to_host
from tests.gpu.frameworks import cupy
from tests.gpu.remote import RemoteGpuEngine

pytestmark = pytest.mark.gpu

PROCESS = ("--movers", "process")
MEMORY = pytest.mark.parametrize("memory", ["ipc", "vmm"])
FAULT = """
import signal
import sys

def fault(*_):
    import cupy
    cupy.RawKernel('extern "C" __global__ void fault() { *(volatile int *)8 = 1; }', "fault")((1,), (1,), ())

if "cachesvc.mover" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, fault)
"""
LONG = Timeouts(call_s=10 * WAIT_SECONDS, wait_s=10 * WAIT_SECONDS)


@MEMORY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_is_a_hit_in_place_and_comes_back_from_the_host_layer_by_layer(layout: str, memory: str) -> None:
    blocks = 60
    with (
        running_node((*BACKED_UP, *PROCESS, "--device-memory", memory)) as node,
        RemoteGpuEngine(node.socket, layout=layout, device_pages=80, host_pages=160) as a,
        GpuEngine(node.socket, layout=LAYOUTS[layout], device_pages=80, host_pages=160) as b,
    ):
        a.ask("start")
        first = a.ask("serve", tokens=prompt(1, blocks))
        assert (first["computed"], first["bad"]) == (blocks, [])
        served = b.serve(prompt(1, blocks))
        assert (served.device, served.computed, served.bad) == (blocks, 0, [])
        tokens = prompt(2, blocks)
        keys = b.keys(tokens)
        take_to_host(node, b, tokens)
        with b.lease.match(keys) as sequence:
            sequence.allocate(blocks)
            (ticket,) = sequence.tickets
            wrong = b.check_behind_waits(sequence, keys, ticket, b.stream)
            b.stream.synchronize()
            b.pool.confirm(ticket)
            assert sum(int(each.sum()) for each in wrong) == 0
            assert b.bad(sequence, keys, range(blocks)) == []


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGUSR1], ids=["killed", "faulted"])
@MEMORY
def test_a_mover_that_dies_during_a_load_lets_streams_go_on_and_a_new_one_serves(
    memory: str, death: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT, encoding="utf-8")  # a kernel of its own writes where nothing is
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    blocks, pages = 120, 130
    flags = (*SLOWLY, *PROCESS, "--device-memory", memory)
    with running_node(flags) as node:
        with GpuEngine(node.socket, layout=LARGE, device_pages=pages, host_pages=pages, timeouts=LONG) as engine:
            tokens = prompt(1, blocks)
            keys = engine.keys(tokens)
            take_to_host(node, engine, tokens)
            device = engine.registration.devices[0]
            sequence = engine.lease.match(keys)
            sequence.allocate(blocks)
            (ticket,) = sequence.tickets
            engine.pool.wait_layer(ticket, 0, WAIT_SECONDS)
            stream = cupy.cuda.Stream(non_blocking=True)
            engine.pool.wait_ticket_on(stream, ticket)
            kill_mover_of(node, device, death)
            wait_until(lambda: bool(stream.done), "the engine's stream goes on")
            with pytest.raises(LeaseLost, match="register again"):
                engine.lease.match(keys)
        assert [line["device"] for line in said(node, "device_memory_lost")] == [device]
        assert bool(said(node, "gpu_broken")) == (death == signal.SIGUSR1)
        with GpuEngine(node.socket, layout=LARGE, device_pages=pages, host_pages=pages, timeouts=LONG) as again:
            served = again.serve(tokens)
            assert (served.device, served.host, served.computed, served.bad) == (0, blocks, 0, [])
