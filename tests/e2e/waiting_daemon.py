"""``python -m tests.e2e.waiting_daemon SOCKET``: a daemon that begins again until it can start.

What a supervisor does, without the second that an interpreter needs: it is there the moment that the socket is free.
"""

from __future__ import annotations

import asyncio
import sys

from cachesvc.config import Config
from cachesvc.daemon import Daemon
from cachesvc.model.errors import Unavailable
from cachesvc.telemetry.events import start_logging

POOL_BYTES = 16 << 20


async def wait_and_run(path: str) -> None:
    """Until it was stopped, once it has started."""
    config = Config(socket=path, backend="shm", device_pool=POOL_BYTES, host_pool=POOL_BYTES, drain_seconds=0)
    while True:
        try:
            await Daemon(config).run()
            return
        except Unavailable:
            await asyncio.sleep(0)


if __name__ == "__main__":
    start_logging("info")
    asyncio.run(wait_and_run(sys.argv[1]))
