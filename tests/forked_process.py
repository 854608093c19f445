"""Processes forked from one that has imported what they need (``tests.forker``)."""

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
    its own. ``forker``: socket of the process that forks it. ``streams``: its standard streams. ``folder``: where it
    runs, our own unless named."""

    def __init__(
        self,
        forker: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        folder: str = "",
    ) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(forker)
        socket.send_fds(connection, [b"3"], streams)
        asked = {"module": module, "arguments": arguments, "environment": dict(environment)}
        asked["folder"] = folder or str(Path.cwd())
        connection.sendall(json.dumps(asked).encode() + b"\n")
        self._connection = connection
        self._told = connection.makefile("r", encoding="utf-8")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal's number; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end: its exit code. Raises TimeoutExpired after ``timeout`` seconds."""
        if self.returncode is None:
            if timeout is not None:
                poll = select.poll()  # select() takes no descriptor beyond 1023
                poll.register(self._connection, select.POLLIN)
                if not poll.poll(1000 * timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: signal.Signals, *, to_all: bool = False) -> None:
        """Send it a signal, where it still runs. ``to_all``: to all of its processes."""
        if self.poll() is None:
            (os.killpg if to_all else os.kill)(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class PipedProcess(ForkedProcess):
    """A forked process that is written to and read from."""

    def __init__(self, forker: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        its_stdin, mine = os.pipe()
        its_mine, its_stdout = os.pipe()
        self.stdin = os.fdopen(mine, "w", encoding="utf-8")
        self.stdout = os.fdopen(its_mine, encoding="utf-8")
        super().__init__(forker, module, arguments, environment, (its_stdin, its_stdout, 2))
        os.close(its_stdin)
        os.close(its_stdout)

    def end(self) -> int:
        """End its input, and wait for its end: its exit code."""
        with suppress(BrokenPipeError):  # it has ended, and what it has not read is lost
            self.stdin.close()
        code = self.wait()
        self.stdout.close()
        return code

    def __enter__(self) -> PipedProcess:
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
        self.socket = str(folder / "s")
        process = subprocess.Popen(
            [python, "-m", "tests.forker", self.socket, preload],
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

    def start(self, module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> PipedProcess:
        """Start a process that runs a module. ``variables``: of its environment, beside those of all."""
        return PipedProcess(self.socket, module, arguments, {**self._environment, **(variables or {})})

    def run(self, module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> list[str]:
        """Run a module to its end, which must be a good one: the lines that it printed."""
        process = self.start(module, *arguments, variables=variables)
        process.stdin.close()
        lines = process.stdout.read().splitlines()
        assert process.end() == 0, f"{module} has failed"
        return lines
