"""An engine of a replay on a busy machine: a daemon that is slow to answer is asked again."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from cachesvc_client import DaemonUnavailable
from cachesvc_lab.replay import EngineSettings, connect

from cachesvc.wire.status import LIFE_SUFFIX
from tests.e2e.rig import running_node

REQUEST = {"block_ids": [1, 2], "seconds": 0.0, "output_tokens": 1}
SERVED = {"device": 0, "host": 0, "computed": 2, "uncached": 0, "verified": 0, "corrupt": 0}


def settings(folder: Path) -> EngineSettings:
    """Settings of an engine whose daemon is to be in that folder."""
    return EngineSettings(
        str(folder / "cachesvc.sock"), "e", "m@1", block_bytes=64, block_tokens=16, layers=1, device_blocks=8,
        host_blocks=0,
    )  # fmt: skip


@contextmanager
def never_answering(folder: Path) -> Iterator[socket.socket]:
    """A life socket that connections come to, and no greeting from."""
    path = folder / f"cachesvc.sock{LIFE_SUFFIX}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener
    path.unlink()


def test_an_engine_tries_again_until_it_is_answered(folder: Path) -> None:
    line = [sys.executable, "-m", "cachesvc_lab.replay", json.dumps(asdict(settings(folder)))]
    with never_answering(folder) as listener:
        engine = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        listener.accept()[0].close()  # the first attempt has failed
    with running_node(folder=folder):
        said, _ = engine.communicate(json.dumps(REQUEST) + "\n")
    ready, served = map(json.loads, said.splitlines())
    assert ready == {"ready": True}
    assert served.items() >= SERVED.items()
    assert engine.returncode == 0


def test_its_patience_has_a_limit(folder: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="no daemon at"):
        connect(settings(folder), limit_seconds=0.0)
