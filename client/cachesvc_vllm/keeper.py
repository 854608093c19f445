"""A process that keeps an engine's lease alive for as long as the engine lives: its beats need nothing of the engine's.

vLLM may hold the interpreter for longer than a lease may be silent: while it loads weights, compiles, or schedules a
very large batch. The engine starts this beside itself; it ends with the engine, and says nothing for one that is
stopped, whose pages others wait for.

    python -m cachesvc_vllm.keeper SOCKET LEASE_ID BEAT_SECONDS [TOKEN_FILE]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from cachesvc_client.wire.credentials import credentials_from
from kvcache.v1 import lease_pb2, lease_pb2_grpc

from cachesvc.model.addresses import unix_target
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER

STOPPED = ("T", "t", "Z", "X")
"""States of /proc/PID/stat in which a process does nothing."""

OVER = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED)
"""The daemon does not know the lease any more."""


def start_keeper(
    socket_path: str, lease_id: str, beat_seconds: float, token_file: str | None
) -> subprocess.Popen[bytes]:
    """Start one for a lease of this process, and wait until it beats; terminate it with the lease."""
    command = [sys.executable, "-P", "-m", __name__, socket_path, lease_id, str(beat_seconds)]
    keeper = subprocess.Popen(  # noqa: S603 - ourselves
        [*command, *([token_file] if token_file else [])], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert keeper.stdout is not None
    with keeper.stdout as said:
        said.readline()
    return keeper


def main(arguments: Sequence[str]) -> None:
    """Beat until the engine has ended or its lease is over."""
    socket_path, lease_id, beat_seconds = arguments[0], arguments[1], float(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the engine's whole group
    engine = os.getppid()
    print("beats", flush=True)
    while os.getppid() == engine:
        token = credentials_from(None, arguments[3] if len(arguments) > 3 else None).read_token()
        proof = ((AUTHORIZATION_METADATA_KEY, BEARER + token),) if token else ()
        with grpc.insecure_channel(unix_target(str(Path(socket_path).absolute()))) as channel:
            try:
                for _ in lease_pb2_grpc.LeaseServiceStub(channel).KeepAlive(
                    _beats(engine, lease_id, beat_seconds), metadata=proof
                ):
                    pass
            except grpc.RpcError as error:
                if error.code() in OVER:
                    return
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


if __name__ == "__main__":
    main(sys.argv[1:])
