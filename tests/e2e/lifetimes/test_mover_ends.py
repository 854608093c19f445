"""A daemon ends in the middle of a load: clients learn of it at once, and copies that are not on their way do not come
any more."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from cachesvc_client import Sequence, Timeouts, opaque
from cachesvc_client.memory.pool import LoadOutcome
from kvcache.v1 import admin_pb2

from tests.e2e.engine import BLOCK_TOKENS, WAIT_SECONDS, Engine, prompt
from tests.e2e.movers import movers, said
from tests.e2e.rig import Node, running_node, wait_until

BLOCKS = 32
WIDE = opaque(block_bytes=1 << 20, block_tokens=BLOCK_TOKENS, layers=1)
SLOWLY = ("--write-policy", "write_through", "--slice-bytes", "1MiB", "--load-limit", "8MiB", "--drain-seconds", "0")
"""A block a slice, eight slices a second: what is begun would take four seconds."""
LONG = Timeouts(call_s=10 * WAIT_SECONDS, wait_s=10 * WAIT_SECONDS)
MARK = 0x5A


def load_slowly(node: Node, engine: Engine) -> Sequence:
    """Begin to load a prompt that the host alone has, and wait until some of it has come."""
    tokens = prompt(1, BLOCKS)
    assert engine.serve(tokens).bad == []
    wait_until(lambda: node.pages("sealed", "host") >= BLOCKS, "the prompt is on the host")
    wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
    node.admin.Evict(admin_pb2.EvictRequest(model_id=engine.registration.model_id, tier="device"))
    scribble(engine)
    sequence = engine.lease.match(engine.keys(tokens))
    assert sequence.host_blocks == BLOCKS
    sequence.allocate(BLOCKS)
    wait_until(lambda: 0 < len(others(engine)) < BLOCKS, "the load has begun")
    return sequence


def scribble(engine: Engine) -> None:
    for plane in engine.pool.planes.values():
        plane[:] = MARK


def others(engine: Engine) -> set[int]:
    """Pages of which a byte is another one than ``scribble`` wrote."""
    found: set[int] = set()
    for plane in engine.pool.planes.values():
        found |= set(np.flatnonzero((plane != MARK).reshape(len(plane), -1).any(axis=1)).tolist())
    return found


@pytest.mark.parametrize(("by", "most"), [(signal.SIGKILL, 2), (signal.SIGTERM, 0)])
def test_no_copy_begins_once_clients_know_that_their_daemon_is_gone(
    by: signal.Signals, most: int, folder: Path
) -> None:
    """A mover finished each job that had begun, for seconds, in pages that engines had recomputed by then."""
    with running_node(("--movers", "process", *SLOWLY), folder=folder) as node:
        engine = Engine(node.socket, layout=WIDE, device_pages=BLOCKS, host_pages=BLOCKS + 8, timeouts=LONG).start()
        sequence = load_slowly(node, engine)
        (ticket,) = sequence.tickets
        pids = list(movers(node).values())
        assert not engine.pool.is_quiet
        node.daemon.process.send_signal(by)
        assert engine.client.wait_lost(WAIT_SECONDS)
        if by is signal.SIGTERM:
            assert engine.pool.outcome(ticket) is LoadOutcome.FAILED, "it had ended before the engine was told"
        scribble(engine)
        assert sequence.lost_tokens() == range(BLOCKS * BLOCK_TOKENS)
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the movers are gone")
        assert len(others(engine)) <= most, "a slice may have been on its way, unless the daemon ended in order"
        node.daemon.process.wait()
        engine.close(quiesced=False)


@pytest.mark.parametrize("kind", ["process", "inside"])
def test_nothing_is_written_any_more_once_the_pool_is_quiet(kind: str, folder: Path) -> None:
    with running_node(("--movers", kind, *SLOWLY), folder=folder) as node:
        engine = Engine(node.socket, layout=WIDE, device_pages=BLOCKS, host_pages=BLOCKS + 8, timeouts=LONG).start()
        load_slowly(node, engine)
        pids = list(movers(node).values())
        assert not engine.pool.wait_quiet(0.01), "the daemon serves"
        node.daemon.process.kill()
        assert engine.client.wait_lost(WAIT_SECONDS)
        assert engine.pool.wait_quiet(WAIT_SECONDS)
        scribble(engine)
        node.daemon.process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the movers are gone")
        assert others(engine) == set()
        assert engine.pool.is_quiet
        engine.close(quiesced=False)


def test_a_new_daemon_waits_until_the_movers_of_a_killed_one_have_ended(folder: Path) -> None:
    """Their memory is not free before."""
    with running_node(("--movers", "process"), folder=folder) as node:
        (mover,) = movers(node).values()
        os.kill(mover, signal.SIGSTOP)
        node.daemon.kill()
        starting = threading.Thread(target=node.daemon.start)
        starting.start()
        wait_until(lambda: bool(said(node, "start_waits")), "it says that it waits")
        (line,) = said(node, "start_waits")
        assert f"process {mover} " in str(line["holders"])
        assert len(said(node, "ready")) == 1
        os.kill(mover, signal.SIGCONT)
        starting.join()
        assert len(said(node, "ready")) == 2
        wait_until(lambda: not Path(f"/proc/{mover}/cmdline").exists(), "the mover is gone")
