"""The movers of a daemon under test, as processes: which there are, and the death of one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.e2e.rig import Node, wait_until


def movers(node: Node) -> dict[str, int]:
    """Processes of the daemon's movers, by their devices."""
    found: dict[str, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has gone
            continue
        if "cachesvc.mover" in words and parent == node.daemon.process.pid:
            found[words[words.index("--gpu") + 1]] = int(folder.name)
    return found


def said(node: Node, event: str) -> list[dict[str, object]]:
    return [line for line in map(json.loads, node.log().splitlines()) if line.get("event") == event]


def kill_mover_of(node: Node, device: str, by: int = signal.SIGKILL) -> None:
    """Send the mover of a device a signal, and wait until there is another one."""
    deaths = len(said(node, "mover_started"))
    os.kill(movers(node)[device], by)
    wait_until(lambda: len(said(node, "mover_started")) > deaths, "a mover was started again")
