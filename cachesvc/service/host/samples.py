"""The last minutes as samples: how full the pools were, and what was hit and moved between one sample and the next."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from cachesvc.model.words import PageState
from cachesvc.questions.status import by_pool, hits, pools, transfers
from cachesvc.questions.view import View

SAMPLE_SECONDS = 1.0
KEPT_SAMPLES = 600
"""Number of samples of ten minutes."""


class Samples:
    """A ring of samples, one a second; costs some ten microseconds each."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._ring: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    def start(self) -> None:
        """Begin on the running loop."""
        self._take(0.0)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(SAMPLE_SECONDS)
            self._take(max(0.0, time.monotonic() - began - SAMPLE_SECONDS))

    def _take(self, late_seconds: float) -> None:
        models = self._view.models()
        found, moved = hits(models), transfers(self._view.running(), self._view.counters)
        device = dict.fromkeys(PageState, 0)
        host = dict.fromkeys(PageState, 0)
        for pool in by_pool(pools(models)):
            into = host if pool.place == "host" else device
            for state, pages in pool.counts.items():
                into[state] += pages
        self._number += 1
        self._ring.append(
            {
                "number": self._number,
                "unix_seconds": round(time.time(), 3),
                "looked_up": found.looked_up_blocks,
                "device": found.device_blocks,
                "host": found.host_blocks,
                "storage": found.storage_blocks,
                "loaded_bytes": moved.loaded_bytes,
                "stored_bytes": moved.stored_bytes,
                "peer_bytes": moved.peer_bytes,
                "tickets": moved.running_loads + moved.running_stores,
                "device_pages": {state.name.lower(): pages for state, pages in device.items()},
                "host_pages": {state.name.lower(): pages for state, pages in host.items()},
                "late_ms": round(late_seconds * 1e3, 2),
            }
        )

    def since(self, number: int) -> list[dict[str, Any]]:
        """Samples after the one of that number, oldest first; counts are totals since the daemon's start."""
        return [sample for sample in self._ring if sample["number"] > number]
