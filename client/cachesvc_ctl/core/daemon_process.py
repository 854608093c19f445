"""A child daemon: started as a process, awaited until it serves, stopped by SIGTERM."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from cachesvc.model.text import module_command

START_SECONDS = 60.0
STOP_SECONDS = 30.0
LOOK_SECONDS = 0.02


class DaemonFailed(Exception):
    """The daemon did not come up; the message holds what it said."""


class DaemonProcess:
    """``with DaemonProcess(["--host-pool", "1GiB"]) as daemon: daemon.socket``. Its log goes to ``daemon.log``."""

    def __init__(
        self, flags: Sequence[str], *, folder: str | None = None, under: Sequence[str] = (), whole: bool = False
    ) -> None:
        """``under``: a command that runs it, such as ``prlimit``. ``whole``: it has started when its whole host pool is
        there, not when it serves."""
        self._flags = list(flags)
        self._is_awaited_whole = whole
        self._under = list(under)
        self._folder = folder
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = ""
        self.log = Path()
        self.seconds_to_ready = 0.0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start, again after ``kill``, and wait until it is ready. Raises DaemonFailed with the daemon's own words."""
        if self._folder is None and self._made is None:
            self._made = tempfile.TemporaryDirectory(prefix="cachesvc-")
        folder = Path(self._made.name if self._made is not None else str(self._folder))
        self.socket = str(folder / "cachesvc.sock")
        self.log = folder / "cachesvcd.log"
        with self.log.open("ab") as log:
            began = log.tell()
            self._process = self._launch(["--socket", self.socket, *self._flags], log)
        until = time.monotonic() + START_SECONDS
        while not self._is_ready(began):
            if self._process.poll() is not None or time.monotonic() > until:
                self._process.kill()
                self._process.wait()
                said = self.log.read_text(encoding="utf-8", errors="replace").strip()
                self._clean_up()
                raise DaemonFailed(f"the daemon did not start: {reason_of(said) or said[-2000:] or 'it said nothing'}")
            time.sleep(LOOK_SECONDS)  # the log is a file, so that a daemon never blocks on a full pipe

    def _launch(self, flags: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        command = [*self._under, *module_command("cachesvc", *flags)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603

    def _is_ready(self, began: int) -> bool:
        awaited = {"ready", "host_pool_whole"} if self._is_awaited_whole else {"ready"}
        for line in self.log.read_bytes()[began:].splitlines(keepends=True):
            if line.endswith(b"\n") and line.startswith(b"{"):
                said = json.loads(line)
                awaited.discard(said["event"])
                if said["event"] == "ready":
                    self.seconds_to_ready = float(said["seconds"])
        return not awaited

    def kill(self) -> None:
        """SIGKILL, and wait: ``start`` begins another one on the same socket."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, wait, and clean up; returns the exit code."""
        self.process.terminate()
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._clean_up()
        return code

    def _clean_up(self) -> None:
        if self._made is not None:
            self._made.cleanup()
            self._made = None

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def reason_of(log: str) -> str:
    """Reason why a daemon refused to start, from its log's last line; empty where that has none."""
    last = log.rpartition("\n")[2]
    if '"event": "start_refused"' not in last:
        return ""
    return str(json.loads(last)["reason"])
