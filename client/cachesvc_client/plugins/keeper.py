"""A process that keeps an engine's lease alive while the engine lives: its heartbeats need nothing of the engine's.

An engine may hold the interpreter for longer than a lease may be silent: while it loads weights, compiles, or
schedules a very large batch. It starts this beside itself; it ends with the engine, and sends no heartbeat for a
stopped engine, whose pages others wait for.

A keeper that ends before its lease is replaced by another one. It finds its modules where the engine found them: not
in the working directory, which ``python -m`` would search first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
from kvcache.v1 import lease_pb2, lease_pb2_grpc

from cachesvc.model.text import unix_target
from cachesvc.model.words import KEY_BYTES
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER
from cachesvc_client import CacheClientError
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
from cachesvc_client.plugins.keeper import main
main(sys.argv[1:])
"""

PAUSE_S = 1.0
"""Between the end of a keeper and the start of the next: one that cannot start costs an import of gRPC each time."""

# The version of an engine's weights, on which all engines of a model agree: keys are mixed with it.
#
# An engine starts with the weights of its checkpoint, or with the version of its settings. An operator announces a
# version (``cachesvc weights MODEL VERSION``), the engine loads it, and ``reset_prefix_cache`` has the engine adopt it.
# Engines of one version share, and no others.

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
        """Start the process, which sends its first heartbeat after some tenths of a second. The engine's own process
        sends heartbeats until then, and beside it."""
        # Not left to the thread: the caller may hold the interpreter from now on, and the thread would never run.
        self._spawn()
        self._thread.start()

    def end(self) -> None:
        with self._changing:
            self._ended.set()
            if self._process is not None:
                self._process.kill()
        if self._thread.is_alive():
            self._thread.join()

    def _spawn(self) -> None:
        with self._changing:
            if not self._ended.is_set():
                self._process = subprocess.Popen(  # noqa: S603 - ourselves
                    self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )

    def _run(self) -> None:
        while not self._ended.is_set():
            assert self._process is not None, "start has made the first"
            code = self._process.wait()
            if self._ended.is_set():
                return
            if code == LEASE_OVER:
                log.info("keeper_done lease=%s", self._lease_id)
                return
            log.error("keeper_ended lease=%s code=%s: another one is started", self._lease_id, code)
            self._ended.wait(PAUSE_S)
            self._spawn()


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


REPEAT_S = 60.0
"""Time after which a refusal that goes on is a warning again, seconds."""


class ConnectorRefused(ValueError):
    """The engine is configured in a way that the connector cannot serve; the message says what works instead."""


STUCK = (
    "the daemon is gone or took this engine's lease, what is asked for needs pages that are not the engine's own, and "
    "its memory cannot be replaced: start it again; with --device-memory vmm the daemon's next memory takes its place"
)
"""Process exit of an engine that cannot serve any more; its supervisor restarts it."""


class News:
    """Decides which refusals are warnings: each of another kind than the last, and one that goes on every ``REPEAT_S``,
    for requests wait meanwhile and only an operator can end it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: object = None
        self._told_s = 0.0

    def is_new(self, refusal: object) -> bool:
        """True where this refusal is to be a warning."""
        now_s = self._clock()
        if refusal == self._last and now_s - self._told_s < REPEAT_S:
            return False
        self._last, self._told_s = refusal, now_s
        return True

    def end(self) -> None:
        """Note that the daemon does again what it refused."""
        self._last = None


class Announced(NamedTuple):
    """The last announcement. ``memory``: the daemon's epoch and the model's number; in another one, the daemon has
    forgotten what was announced before. ``version``: empty without an announcement."""

    memory: tuple[int, int]
    version: str


class WeightsVersion:
    """``initial``: the setting ``weights_version``, by which weights change with announcements alone; empty: the engine
    starts with its checkpoint's weights, and each reset may mean other ones. ``seen``: the announcement at the start.
    ``announced``: asks the daemon, and may raise CacheClientError and ConnectorRefused. ``version``: empty while the
    weights have none. ``salt``: keys are mixed with it."""

    def __init__(self, initial: str, seen: Announced, announced: Callable[[], Announced]) -> None:
        self.version = initial
        self.salt = _salt_of(initial)
        self.is_shared = True
        self._changes_announced = bool(initial)
        self._seen = seen
        self._announced = announced

    def reset(self) -> None:
        """Choose the keys after a reset of the prefix cache, while the engine runs nothing.

        A new announcement is adopted. Without one, an engine with the setting keeps its version: ``sleep`` and
        ``pause_generation`` reset too. Everything else leaves the weights unknown, and the engine shares with no other:
        no setting, no answer, a daemon that forgot announcements, or one of another version before the start.
        """
        found = self._ask()
        is_known = found is not None and found == self._seen
        if found is not None and found.version and not is_known:
            self.version, self.salt, self.is_shared = found.version, _salt_of(found.version), True
            log.info("weights_adopted version=%s", found.version)
        elif is_known and self._changes_announced and self.version and self._seen.version in ("", self.version):
            log.info("weights_kept version=%s", self.version)
        else:
            self.lose("the prefix cache was reset without a newly announced version of weights")
        self._seen = found or self._seen

    def lose(self, why: str) -> None:
        """Share with no other engine: it is not known which weights this one has. ``why``: for operators."""
        self.version, self.salt, self.is_shared = "", secrets.token_bytes(KEY_BYTES), False
        log.warning(
            "not_shared why=%s: this engine shares with no other until a version of weights is announced "
            "(cachesvc weights MODEL VERSION) and it is reset",
            why,
        )

    def _ask(self) -> Announced | None:
        """Return the last announcement; None without an answer."""
        try:
            return self._announced()
        except (CacheClientError, ConnectorRefused) as error:
            log.warning("weights_unknown why=%s", error)
            return None


def _salt_of(version: str) -> bytes:
    """Return 32 bytes; none for a checkpoint's own weights."""
    digest = hashlib.blake2b(version.encode(), digest_size=KEY_BYTES, person=b"kv-vllm-weights")
    return digest.digest() if version else b""
