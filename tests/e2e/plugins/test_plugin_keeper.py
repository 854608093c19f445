"""The process that keeps an engine's lease alive: replaced when it is killed, and gone when its engine is."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cachesvc_client import CacheClient
from cachesvc_client.plugins.keeper import Keeper
from cachesvc_vllm.cache_groups import slab_layout

from tests.e2e.rig import BOUND_SECONDS, running_node, wait_until
from tests.style.tree import ROOT
from tests.unit.rigs.vllm_rig import layers_outermost


def test_a_keeper_that_is_killed_is_missed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "cachesvc_client.plugins.keeper")
    with running_node() as node, CacheClient(node.socket) as client:
        registration = client.register("m", slab_layout(layers_outermost(64)), device_pages=[64])
        lease = client.open_lease(registration)
        keeper = Keeper(node.socket, lease.id, 0.1, None)
        keeper.start()
        try:
            wait_until(lambda: keeper.pid > 0, "it was started")
            first = keeper.pid
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: keeper.pid != first, "another one was started")
            assert [f"keeper_ended lease={lease.id} code=-9" in each.getMessage() for each in caplog.records] == [True]
        finally:
            keeper.end()


ABANDON = """
import os, sys
from cachesvc_client.plugins.keeper import Keeper
keeper = Keeper(sys.argv[1], "lease", 0.1, None)
keeper.start()
while not keeper.pid:
    pass
print(keeper.pid, flush=True)
os._exit(0)
"""


def test_a_keeper_whose_engine_ends_before_it_has_started_ends_too(folder: Path) -> None:
    """Its parent is another process by then, which does not end."""
    done = subprocess.run(
        [sys.executable, "-c", ABANDON, str(folder / "none.sock")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    try:
        keeper = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:  # it has ended already
        return
    try:
        assert select.select([keeper], [], [], BOUND_SECONDS)[0], "the keeper lives on without its engine"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(keeper, signal.SIGKILL)
        os.close(keeper)
