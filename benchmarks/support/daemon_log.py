"""Lookups in a daemon's log."""

from __future__ import annotations

import json
import time
from typing import Any

from cachesvc_ctl.core.daemon_process import DaemonProcess

LOOK_SECONDS = 0.02


def event_of(daemon: DaemonProcess, event: str) -> dict[str, Any]:
    """Fields of an event in a daemon's log; waits for it."""
    while True:
        for line in daemon.log.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith("{") and line.endswith("}\n") and (said := json.loads(line)).get("event") == event:
                return dict(said)
        if daemon.process.poll() is not None:
            raise RuntimeError(f"the daemon has ended before {event}")
        time.sleep(LOOK_SECONDS)  # between two looks; nothing is timed here
