"""A far network between two daemons, in user space: every byte comes late, and streams stall or are cut.

It stands in for a kernel's delay where there is none to be had: packets are not lost, connections are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

LENDER, BORROWED_AT = "127.0.0.1", "127.0.0.3"
"""Address that the lending daemon listens on, and address at which others reach it through the relay."""
PIECE_BYTES = 64 << 10


class Relay:
    """Passes on what comes to ports of ``BORROWED_AT``, ``delay_s`` later in either direction. ``passed_bytes``: to
    borrowers, by port."""

    def __init__(self, delay_s: float) -> None:
        self.passed_bytes: dict[int, int] = {}
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._writers: dict[asyncio.StreamWriter, int] = {}
        self._moving: dict[int, asyncio.Event] = {}
        self._cut_at: dict[int, int] = {}

    def open(self, *ports: int) -> None:
        """Listen on these ports."""
        for port in ports:
            self.passed_bytes[port] = 0
            self._run(self._listen(port))

    def stall(self, port: int) -> None:
        """Pass on nothing of a port from now on; connections stay."""
        self._loop.call_soon_threadsafe(self._moving[port].clear)

    def go_on(self, port: int) -> None:
        """Pass on what has come meanwhile, and all that follows."""
        self._loop.call_soon_threadsafe(self._moving[port].set)

    def cut_after(self, port: int, size_bytes: int) -> None:
        """Cut all connections of a port, once, when ``size_bytes`` more have been passed on."""
        self._cut_at[port] = self.passed_bytes[port] + size_bytes

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Cut everything."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self, port: int) -> None:
        self._moving[port] = asyncio.Event()
        self._moving[port].set()
        await asyncio.start_server(partial(self._join, port), BORROWED_AT, port)

    async def _join(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(LENDER, port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer: port, far_writer: port}
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(port, reader, far_writer, 0), self._pass(port, far_reader, writer, 1))

    async def _pass(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: int) -> None:
        while piece := await reader.read(PIECE_BYTES):
            await self._moving[port].wait()
            self._loop.call_later(self._delay_s, self._write, writer, piece)
            self.passed_bytes[port] += counts * len(piece)
            if self.passed_bytes[port] >= self._cut_at.get(port, self.passed_bytes[port] + 1):
                del self._cut_at[port]
                self._cut(port)
        self._loop.call_later(self._delay_s, writer.close)

    def _write(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        if not writer.is_closing():
            writer.write(piece)

    def _cut(self, port: int) -> None:
        for writer in [each for each, of in self._writers.items() if of == port]:
            del self._writers[writer]
            writer.transport.abort()

    async def _end(self) -> None:
        for port in self.passed_bytes:
            self._cut(port)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def running_relay(delay_s: float) -> Iterator[Relay]:
    """A relay, until the end of the block."""
    relay = Relay(delay_s)
    relay.start()
    try:
        yield relay
    finally:
        relay.close()
