"""Processes of a Python that has vLLM or SGLang, forked from one that has imported it (``tests.forker``)."""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[1]


class ForkedProcess:
    """The part of ``Popen`` that a test uses, of a process that runs a module as ``python -m`` does, in a session of
    its own. ``forker``: socket of the process that forks it."""

    def __init__(self, forker: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(forker)
        its_stdin, mine = os.pipe()
        its_mine, its_stdout = os.pipe()
        self.stdin = os.fdopen(mine, "w", encoding="utf-8")
        self.stdout = os.fdopen(its_mine, encoding="utf-8")
        socket.send_fds(connection, [b"3"], [its_stdin, its_stdout, 2])
        os.close(its_stdin)
        os.close(its_stdout)
        asked = {"module": module, "arguments": arguments, "environment": dict(environment)}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        self._connection = connection
        self._told = connection.makefile("r", encoding="utf-8")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal's number; None while it runs."""
        if self.returncode is None and not select.select([self._connection], [], [], 0)[0]:
            return None
        return self.wait()

    def wait(self) -> int:
        """Wait for its end: its exit code."""
        if self.returncode is None:
            self.returncode = int(self._told.readline())
            self._told.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: signal.Signals, *, to_all: bool = False) -> None:
        """Send it a signal, where it still runs. ``to_all``: to all of its processes."""
        if self.poll() is None:
            (os.killpg if to_all else os.kill)(self.pid, number)

    def end(self) -> int:
        """End its input, and wait for its end: its exit code."""
        with suppress(BrokenPipeError):  # it has ended, and what it has not read is lost
            self.stdin.close()
        code = self.wait()
        self.stdout.close()
        return code

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Forker:
    """Forks processes from one that has imported ``preload``, which ends with this process. ``environment``: of all."""

    def __init__(self, python: str, preload: str, environment: Mapping[str, str]) -> None:
        self._environment = environment
        folder = Path(tempfile.mkdtemp(prefix="forker-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._socket = str(folder / "s")
        process = subprocess.Popen(
            [python, "-m", "tests.forker", self._socket, preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            env=environment,
        )
        atexit.register(process.communicate)
        assert process.stdout is not None
        said = ""
        while said != "listens\n":
            said = process.stdout.readline()
            assert said, f"{preload} could not be imported"

    def start(self, module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> ForkedProcess:
        """Start a process that runs a module. ``variables``: of its environment, beside those of all."""
        return ForkedProcess(self._socket, module, arguments, {**self._environment, **(variables or {})})

    def run(self, module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> list[str]:
        """Run a module to its end, which must be a good one: the lines that it printed."""
        process = self.start(module, *arguments, variables=variables)
        process.stdin.close()
        lines = process.stdout.read().splitlines()
        assert process.end() == 0, f"{module} has failed"
        return lines
