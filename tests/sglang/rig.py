"""Real SGLang engines over a real daemon on shared memory."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.sglang.comparison import write_plugin
from tests.vllm.rig import MODEL, ROOT, Engine

PYTHON_VARIABLE = "CACHESVC_SGLANG_PYTHON"


class ForkedProcess:
    """The part of ``Popen`` that a test uses, of a process whose parent is another one. ``stdin``: its requests."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.answers = connection.makefile("r", encoding="utf-8")
        self.stdin = _Half(connection)
        self.pid = int(json.loads(self.answers.readline())["pid"])
        self._ended = os.pidfd_open(self.pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None and not select.select([self._ended], [], [], 0)[0]:
            return None
        return self.wait()

    def wait(self) -> int:
        """Wait for its end. 0: it has ended in order."""
        if self._code is None:
            select.select([self._ended], [], [])
            os.close(self._ended)
            with self._connection:
                self._code = int(not any(json.loads(line).get("ended") for line in self._rest()))
        return self._code

    def _rest(self) -> list[str]:
        try:
            return [line for line in self.answers if line.startswith("{")]
        except OSError:  # it was killed
            return []


class _Half:
    """The writing half of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file: TextIO = connection.makefile("w", encoding="utf-8")

    def write(self, text: str) -> None:
        """Write requests."""
        self._file.write(text)

    def flush(self) -> None:
        """Send them."""
        self._file.flush()

    def close(self) -> None:
        """There are no more."""
        self._connection.shutdown(socket.SHUT_WR)


class SglangEngine(Engine):
    """An SGLang, with processes of its own."""

    def __init__(self, path: Path, wish: Mapping[str, Any]) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        self.process = ForkedProcess(connection)  # type: ignore[assignment]
        self._answers = self.process.answers  # type: ignore[attr-defined]
        self._write(wish)


@dataclass(frozen=True)
class SglangFleet:
    """Makes engines of one model. ``forker``: the socket of ``engine_process``."""

    folder: Path
    forker: Path
    load_format: str = "dummy"

    def engine(
        self,
        socket_path: str | None,
        blocks: int = 256,
        *,
        extra: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        **wish: Any,
    ) -> SglangEngine:
        """An engine that starts. ``socket_path``: of its daemon, None: plain SGLang. ``variables``: of its
        environment."""
        return SglangEngine(
            self.forker,
            {
                "model": str(self.folder),
                "load_format": self.load_format,
                "blocks": blocks,
                "cachesvc": socket_path is not None,
                "log": "",
                "environment": {
                    "CACHESVC_SOCKET": socket_path or "",
                    "CACHESVC_SGLANG": json.dumps(extra or {}),
                    **(variables or {}),
                },
                **wish,
            },
        )


def python_path(*before: Path) -> str:
    """Folders in which the Python that has SGLang finds the product, joined as PYTHONPATH."""
    return os.pathsep.join(map(str, [*before, *(ROOT / each for each in (".", "client", "proto/gen"))]))


@contextmanager
def forking(folder: Path) -> Iterator[SglangFleet]:
    """Makes engines of a model of random weights, the same in each of them, until the block ends."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    path = folder / "s"
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(write_plugin(folder / "plugin")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [os.environ[PYTHON_VARIABLE], "-m", "tests.sglang.engine_process", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT) as forker:
        try:
            assert forker.stdout is not None
            said = b""
            while said != b"listens\n":
                said = forker.stdout.readline()
                assert said, "SGLang could not be imported"
            yield SglangFleet(model, path)
        finally:
            forker.kill()
