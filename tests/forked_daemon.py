"""Daemons forked from a process that has imported one, for tests that need many. Others start theirs as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

from cachesvc_ctl.core.daemon_process import DaemonProcess

from tests.forked_process import ForkedProcess, Forker

PRELOAD = "tests.preloaded_daemon"
NETWORK = Path("/proc/thread-self/ns/net")


class ForkedDaemon(DaemonProcess):
    """A daemon that runs the same module as one that is started, in a process that has its imports. In another network,
    or under a command, it is started."""

    def _launch(self, flags: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        forker, network = _forker()
        if self._under or NETWORK.readlink() != network:
            return super()._launch(flags, log)
        with Path(os.devnull).open("rb") as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            process = ForkedProcess(forker.socket, "cachesvc", flags, os.environ, streams)
        return cast("subprocess.Popen[bytes]", process)


def daemon_forker() -> Forker:
    """The process that forks daemons."""
    return _forker()[0]


@cache
def _forker() -> tuple[Forker, Path]:
    """The process that forks, and the network that it is in."""
    return Forker(sys.executable, PRELOAD, dict(os.environ)), NETWORK.readlink()
