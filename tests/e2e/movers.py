"""The movers of a daemon under test, as processes: which there are, and the death of one."""

from __future__ import annotations

import json
import os
import signal

from benchmarks.support.movers import movers_of
from tests.e2e.rig import Node, wait_until


def movers(node: Node) -> dict[str, int]:
    """Processes of the daemon's movers, by their devices."""
    return movers_of(node.daemon.process.pid)


def said(node: Node, event: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, node.log().splitlines()) if line.get("event") == event]


def kill_mover_of(node: Node, device: str, by: int = signal.SIGKILL) -> None:
    """Send the mover of a device a signal, and wait until there is another one."""
    deaths = len(said(node, "mover_started"))
    os.kill(movers(node)[device], by)
    wait_until(lambda: len(said(node, "mover_started")) > deaths, "a mover was started again")
