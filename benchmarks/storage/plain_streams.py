"""Plain TCP streams over loopback: each has a process that sends and one that receives, and copies nothing else."""

from __future__ import annotations

import mmap
import multiprocessing
import resource
import socket
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

PIECE_BYTES = 2 << 20
BUFFER_BYTES = 1 << 30
"""Most memory of each side: more than the processors' caches hold. Larger transfers pass over it again."""


class Moved(NamedTuple):
    """Bytes moved, the seconds from the first to the last, and the processor seconds of all processes."""

    size_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_s(self) -> float:
        """Rate in 10^9 bytes a second."""
        return self.size_bytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor seconds for 10^9 bytes."""
        return self.cpu_seconds / self.size_bytes * 1e9


class PlainStreams:
    """``most`` streams. Made before the process has other threads: it forks."""

    def __init__(self, most: int, size_bytes: int) -> None:
        self._size_bytes = min(size_bytes, BUFFER_BYTES)
        self._most = most
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def start(self) -> None:
        """Start the processes, whose memory is in place then."""
        fork = multiprocessing.get_context("fork")
        for _ in range(self._most):
            with socket.create_server(("127.0.0.1", 0)) as server:
                one = socket.create_connection(server.getsockname())
                other, _ = server.accept()
            for stream, role in ((one, _send), (other, _receive)):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                mine, theirs = fork.Pipe()
                process = fork.Process(target=_serve, args=(stream, theirs, role, self._size_bytes // self._most))
                process.start()
                self._pipes.append(mine)
                self._processes.append(process)
            one.close()
            other.close()
        for pipe in self._pipes:
            pipe.recv()

    def move(self, streams: int, size_bytes: int) -> Moved:
        """Move some bytes over the first ``streams`` streams at once."""
        used = self._pipes[: 2 * streams]
        began = time.perf_counter()
        for pipe in used:
            pipe.send(size_bytes // streams)
        cpu_seconds = sum(pipe.recv() for pipe in used)
        return Moved(size_bytes // streams * streams, time.perf_counter() - began, cpu_seconds)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()


def _serve(stream: socket.socket, orders: Connection, role: object, size_bytes: int) -> None:
    """Root of a process."""
    assert callable(role)
    memory = memoryview(mmap.mmap(-1, max(size_bytes, PIECE_BYTES)))
    memory[:] = b"\x5a" * len(memory)
    orders.send(0)
    while left := orders.recv():
        before = _cpu_seconds()
        at = 0
        while left:
            piece = memory[at : at + min(left, PIECE_BYTES)]
            role(stream, piece)
            left -= len(piece)
            at = (at + PIECE_BYTES) % (len(memory) - PIECE_BYTES + 1)
        orders.send(_cpu_seconds() - before)


def _send(stream: socket.socket, piece: memoryview) -> None:
    stream.sendall(piece)


def _receive(stream: socket.socket, piece: memoryview) -> None:
    at = 0
    while at < len(piece):
        at += stream.recv_into(piece[at:])


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
