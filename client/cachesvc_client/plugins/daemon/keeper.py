"""A process that keeps an engine's lease alive while the engine lives: its heartbeats need nothing of the engine's.

An engine may hold the interpreter for longer than a lease may be silent: while it loads weights, compiles, or
schedules a very large batch. It starts this beside itself; it ends with the engine, and sends no heartbeat for a
stopped engine, whose pages others wait for.

A keeper that ends before its lease is replaced by another one. It finds its modules where the engine found them: not
in the working directory, which ``python -m`` would search first.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from kvcache.v1 import lease_pb2, lease_pb2_grpc

from cachesvc.model.text.addresses import unix_target
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER
from cachesvc_client.wire.credentials import credentials_from

STOPPED = ("T", "t", "Z", "X")
"""States of /proc/PID/stat in which a process does nothing."""

OVER = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED)
"""The daemon does not know the lease any more."""

LEASE_OVER = 3
"""The exit code of a keeper whose lease is over."""


BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from cachesvc_client.plugins.daemon.keeper import main
main(sys.argv[1:])
"""

PAUSE_S = 1.0
"""Between the end of a keeper and the start of the next: one that cannot start costs an import of gRPC each time."""

log = logging.getLogger(__name__)


class Keeper:
    """Has a process beat for a lease of this process until ``end``. ``beat_seconds``: between two beats."""

    def __init__(self, socket_path: str, lease_id: str, beat_seconds: float, token_file: str | None) -> None:
        self._lease_id = lease_id
        said = [str(os.getpid()), socket_path, lease_id, str(beat_seconds), *([token_file] if token_file else [])]
        self._command = [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path), *said]
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cachesvc-keeper", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the current heartbeat process; 0 before the first."""
        process = self._process
        return 0 if process is None else process.pid

    def start(self) -> None:
        """Begin. The first beat comes once the process has started, which takes some tenths of a second. Until then the
        engine's own process sends heartbeats, as it does beside this one."""
        self._thread.start()

    def end(self) -> None:
        """End the process. Idempotent."""
        with self._changing:
            self._ended.set()
            if self._process is not None:
                self._process.kill()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changing:
                if self._ended.is_set():
                    return
                process = self._process = subprocess.Popen(  # noqa: S603 - ourselves
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            code = process.wait()
            if self._ended.is_set():
                return
            if code == LEASE_OVER:
                log.info("keeper_done lease=%s", self._lease_id)
                return
            log.error("keeper_ended lease=%s code=%s: another one is started", self._lease_id, code)
            self._ended.wait(PAUSE_S)


def main(arguments: Sequence[str]) -> None:
    """Beat until the engine has ended or its lease is over. The first argument is the engine's process id: its parent
    may be another process already, where the engine was killed while this one started."""
    engine, socket_path, lease_id, beat_seconds = int(arguments[0]), arguments[1], arguments[2], float(arguments[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the engine's whole group
    while os.getppid() == engine:
        token = credentials_from(None, arguments[4] if len(arguments) > 4 else None).read_token()
        proof = ((AUTHORIZATION_METADATA_KEY, BEARER + token),) if token else ()
        with grpc.insecure_channel(unix_target(str(Path(socket_path).absolute()))) as channel:
            try:
                for _ in lease_pb2_grpc.LeaseServiceStub(channel).KeepAlive(
                    _beats(engine, lease_id, beat_seconds), metadata=proof
                ):
                    pass
            except grpc.RpcError as error:
                if error.code() in OVER:
                    sys.exit(LEASE_OVER)
        time.sleep(beat_seconds)  # before it connects again


def _beats(engine: int, lease_id: str, beat_seconds: float) -> Iterator[lease_pb2.KeepAliveRequest]:
    while os.getppid() == engine:
        if _state(engine) not in STOPPED:
            yield lease_pb2.KeepAliveRequest(lease_id=lease_id)
        time.sleep(beat_seconds)  # between two beats


def _state(process: int) -> str:
    try:
        said = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return "X"
    return said.rpartition(")")[2].split()[0]
