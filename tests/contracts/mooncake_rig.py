"""A real Mooncake Store for tests: a master and servers as processes of their own, and what damages it from outside."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cachesvc.model.errors import Unavailable
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.native import MooncakeOptions, connect, load
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Chooser,
    Each,
    Found,
    Gone,
    Item,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Step,
    StorageBackend,
    StoreStatus,
    Totals,
    Use,
    no_step,
)

DISCARD_SECONDS = 3
SEGMENT_BYTES = 128 << 20
BORN_SECONDS = 30.0
LOOK_SECONDS = 0.02
REQUIRE_VARIABLE = "CACHESVC_REQUIRE_MOONCAKE"
"""Set where a Mooncake that is not there is an error: ``make mooncake-test``."""


@cache
def why_not() -> str:
    """Reason why there is no Mooncake here; empty where there is."""
    try:
        load()
    except Unavailable as error:
        return str(error)
    return "" if _binary("mooncake_master").is_file() else "the Mooncake package has no master"


def require() -> None:
    """Skip where it cannot run, in words; end the whole run where it was to be there."""
    if why := why_not():
        if os.environ.get(REQUIRE_VARIABLE):
            pytest.exit(why, returncode=1)
        pytest.skip(why)


def _binary(name: str) -> Path:
    """The program inside the package: the console script of its name leaves its child behind."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / name


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Program:
    """A process whose words go to a file."""

    def __init__(self, folder: Path, name: str, *flags: str) -> None:
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            binary = _binary(name)
            if not os.access(binary, os.X_OK):
                binary.chmod(0o755)
            self.process = subprocess.Popen([str(binary), *flags], stdout=log, stderr=subprocess.STDOUT)

    def freeze(self) -> None:
        """Stop the process, and wait until it stands: one of its threads may answer until then."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once."""
        self.process.kill()
        self.process.wait()


BORN = """
import os, sys
from cachesvc.storage.mooncake.native import connect, load
from cachesvc.storage.mooncake.native import MooncakeOptions
library = connect(load(), MooncakeOptions(sys.argv[1], sys.argv[2]))
while library.put("born", b"1") != 0:
    pass
library.remove("born", True)
os._exit(0)
"""


class Store:
    """A master and a server at ``host``. Every flag is said: defaults have changed between versions."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        discard: int = DISCARD_SECONDS,
        release: int = 600,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.folder = folder
        self.host = host
        self.segment_bytes = segment_bytes
        self.release = release
        self.discard = discard
        self.port, self.metrics_port = free_port(host), free_port(host)
        self.master = self.start_master()
        self.server = self.start_server()

    @property
    def address(self) -> str:
        """The master's."""
        return f"{self.host}:{self.port}"

    def start_master(self) -> Program:
        """A new one, on the same port."""
        master = Program(
            self.folder,
            "mooncake_master",
            f"-rpc_port={self.port}",
            f"-metrics_port={self.metrics_port}",
            "-default_kv_lease_ttl=1000",
            "-client_ttl=10",
            f"-put_start_discard_timeout_sec={self.discard}",
            f"-put_start_release_timeout_sec={self.release}",
            "-eviction_high_watermark_ratio=0.90",
            "-eviction_ratio=0.05",
            "-enable_metric_reporting=false",
        )
        until, pause = time.monotonic() + BORN_SECONDS, threading.Event()
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=1).close()
                return master
            except OSError:
                assert time.monotonic() < until, master.log.read_text()[-2000:]
                assert master.process.poll() is None, master.log.read_text()[-2000:]
                pause.wait(LOOK_SECONDS)

    def start_server(self) -> Program:
        """Memory for objects."""
        return Program(
            self.folder,
            "mooncake_client",
            f"-host={self.host}",
            f"-port={free_port(self.host)}",
            "-metadata_server=P2PHANDSHAKE",
            f"-master_server_address={self.address}",
            f"-global_segment_size={self.segment_bytes >> 20} MB",
            "-protocol=tcp",
        )

    def wait_for_server(self) -> None:
        """Until the master knows it."""
        subprocess.run([sys.executable, "-c", BORN, self.address, self.host], check=True, capture_output=True)

    def close(self) -> None:
        """All of it."""
        for program in (self.server, self.master):
            program.kill()


class Cluster(Store):
    """A store, and the library itself as a client of it in this process: ``raw``."""

    def __init__(self, folder: Path, *, discard: int = DISCARD_SECONDS, release: int = 600) -> None:
        super().__init__(folder, discard=discard, release=release)
        self.raw = self.client()
        self.wait_for_server()

    @property
    def options(self) -> MooncakeOptions:
        """For a client of it."""
        return MooncakeOptions(self.address, discard=float(self.discard), readers=2)

    def wait_for_server(self) -> None:
        """Until the master knows it."""
        while self.raw.put("born", b"1") != 0:
            assert self.server.process.poll() is None, self.server.log.read_text()[-2000:]
        self.raw.remove("born", True)

    def client(self) -> Any:
        """The library itself."""
        return connect(load(), self.options)

    def engine(self) -> MooncakeStorage:
        """An engine of ours over it."""
        return MooncakeStorage(self.options)

    def close(self) -> None:
        """All of it."""
        self.raw.close()
        super().close()


class Counted:
    """An engine of which it is known what is under way."""

    def __init__(self, engine: StorageBackend) -> None:
        self.engine = engine
        self.kind = engine.kind
        self.caps: Caps = engine.caps
        self._out = 0
        self._changed = threading.Condition()

    def start(self) -> None:
        self.engine.start()

    def register(self, chunk: memoryview) -> None:
        self.engine.register(chunk)

    def describe(self, scope: Scope, label: str) -> None:
        self.engine.describe(scope, label)

    def watch(self, gone: Gone) -> None:
        self.engine.watch(gone)

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        self.engine.used(scope, uses, chooser)

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        return self.engine.expects(scope, keys, parts)

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        self._begin(1)

        def told(answers: Sequence[bool] | None) -> None:
            found(answers)
            self._end()

        self.engine.exists(names, deadline, told)

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        self._begin(len(items))
        self.engine.get(items, deadline, self._counting(each))

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        self._begin(len(items))
        self.engine.put(items, deadline, self._counting(each))

    def remove(self, names: Sequence[ObjectName]) -> None:
        self.engine.remove(names)

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        self.engine.doubt(names, check)

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        return self.engine.purge(scope, step)

    def status(self) -> StoreStatus:
        return self.engine.status()

    def totals(self) -> Totals:
        return self.engine.totals()

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        return self.engine.check_all(check, step)

    def close(self) -> None:
        self.engine.close()

    def wait(self) -> None:
        """Until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._out)

    def _counting(self, each: Each) -> Each:
        ended: set[int] = set()

        def told(index: int, outcome: Outcome) -> None:
            each(index, outcome)
            if index not in ended:  # a failed transfer is reported twice
                ended.add(index)
                self._end()

        return told

    def _begin(self, count: int) -> None:
        with self._changed:
            self._out += count

    def _end(self) -> None:
        with self._changed:
            self._out -= 1
            self._changed.notify_all()


class MooncakeTurning:
    """An engine over a cluster, as the contract suite turns it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.backend = Counted(cluster.engine())

    def crank(self) -> None:
        self.backend.wait()

    def reopen(self) -> MooncakeTurning:
        return MooncakeTurning(self.cluster)

    def damage(self, name: ObjectName, change: Callable[[bytes], bytes]) -> None:
        self._replace(name, change(self.content(name)))

    def content(self, name: ObjectName) -> bytes:
        content: bytes = self.cluster.raw.get(name.text)
        return content

    def swap(self, one: ObjectName, other: ObjectName) -> None:
        first, second = self.content(one), self.content(other)
        self._replace(one, second)
        self._replace(other, first)

    def close(self) -> None:
        self.backend.close()

    def _replace(self, name: ObjectName, content: bytes) -> None:
        raw = self.cluster.raw
        assert raw.remove(name.text, True) == 0
        if content:
            assert raw.put(name.text, content) == 0


_CLUSTERS: list[Cluster] = []


def shared_turning(folder: Path) -> MooncakeTurning:
    """An engine over an empty store; one store for all tests of a process, which ``tests/conftest`` need not know."""
    require()
    if not _CLUSTERS:
        import atexit

        _CLUSTERS.append(Cluster(folder))
        atexit.register(_CLUSTERS[0].close)
    cluster = _CLUSTERS[0]
    assert cluster.raw.remove_all(True) >= 0
    return MooncakeTurning(cluster)
