"""Kill the daemon in mid-write again and again, and hold what the next one hits against what lay whole on disk.

A trace is served through a daemon whose storage takes all that it computes. Every few seconds it is killed (SIGKILL).
Then the folder is read here, file by file: whose header and checksums are right is whole. The next daemon, which
writes nothing while it is asked, must hit exactly the longest prefix that is whole of every prompt so far, with the
right bytes.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachesvc_client.core.errors import CacheClientError
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.wire.credentials import open_remote
from cachesvc_client.wire.settings import as_path
from cachesvc_ctl.core.daemon_process import DaemonProcess
from cachesvc_lab.replay import EngineSettings, Outcome, ReplayEngine, connect
from cachesvc_lab.traces import read_trace
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from benchmarks.support.recording import parser_of, save
from cachesvc.model.words import KEY_BYTES
from cachesvc.storage import seam
from cachesvc.storage.file.disk import ALIGN_BYTES
from cachesvc.storage.file.space import object_of, scope_of
from cachesvc.storage.objects import check_content, require_digest

LOOK_SECONDS = 0.05


class Run:
    """One trace through many daemons on one folder."""

    def __init__(self, folder: Path, capacity: str, settings: EngineSettings, host_bytes: int) -> None:
        self.folder = folder
        self.capacity = capacity
        self.settings = settings
        self.host_bytes = host_bytes
        self.served: list[list[int]] = []

    def daemon(self, write: str) -> DaemonProcess:
        """One more, which writes all that it computes, or nothing."""
        spec = f"file:{self.folder}/cache?capacity={self.capacity}&floor=0&wait=30s&deadline=60s&write={write}"
        pools = ["--device-pool", str(self.settings.device_blocks * self.settings.block_bytes + (2 << 20))]
        pools += ["--host-pool", str(self.host_bytes)]
        flags = [*pools, "--storage", spec, "--write-policy", "write_through", "--backend", "shm"]
        return DaemonProcess(flags, folder=str(self.folder))

    def serve(self, requests: list[list[int]], seconds: float) -> None:
        """Serve until ``seconds`` have passed, then kill the daemon, whatever it is at."""
        daemon = self.daemon("through")
        daemon.start()
        killer = threading.Timer(seconds, daemon.process.kill)
        engine, ends = self._engine(daemon)
        killer.start()  # from when it serves
        try:
            while requests:
                self.served.append(requests[0])
                engine.serve(requests[0], 0.0, 0)
                requests.pop(0)
        except (CacheClientError, OSError):
            pass  # it was killed
        killer.join()
        daemon.process.wait()
        for end in ends:
            end()

    def _engine(self, daemon: DaemonProcess) -> tuple[ReplayEngine, list[Any]]:
        wait_for_host(daemon)
        client = connect(EngineSettings(**{**_asdict(self.settings), "socket": daemon.socket}))
        registration = self.settings.register(client)
        lease: Lease = client.open_lease(registration)
        pool: AttachedPool = lease.attach(0)
        self.namespace = registration.namespace

        def end() -> None:
            try:
                client.close()
            except CacheClientError:
                return  # its daemon is gone

        return ReplayEngine(self.settings, lease, pool, registration.namespace), [end]

    def whole(self) -> tuple[set[bytes], int]:
        """Keys whose objects are whole, read without the daemon's help, and how many files are not."""
        digest, keys, torn = require_digest(), set(), 0
        for path in (self.folder / "cache" / "objects").rglob("*of*"):
            scope = scope_of(path.parent.parent.name)
            name = None if scope is None else object_of(scope, path.name)
            if name is None or name.scope.namespace != self.namespace:
                continue
            if check_content(digest, ALIGN_BYTES, name, memoryview(path.read_bytes())) is seam.Outcome.OK:
                keys.add(name.key)
            else:
                torn += 1
        return keys, torn

    def compare(self, whole: set[bytes]) -> tuple[int, int, int, int]:
        """Prompts, blocks that should be hit, blocks that were, and pages with wrong bytes."""
        should = were = corrupt = 0
        with self.daemon("never") as daemon:
            engine, ends = self._engine(daemon)
            prompts = {tuple(prompt[: self.settings.device_blocks]) for prompt in self.served}
            for prompt in sorted(prompts):
                keys = b"".join(map(engine._key_of, prompt))  # noqa: SLF001 - the engine's own names for blocks
                expected = 0
                while keys[expected * KEY_BYTES : (expected + 1) * KEY_BYTES] in whole:
                    expected += 1
                outcome = Outcome()
                sequence = engine._lease.match(keys)  # noqa: SLF001
                found = sequence.hit_blocks
                if found:
                    sequence.allocate(found)
                    engine._wait_loads(sequence, outcome)  # noqa: SLF001
                    engine._verify(sequence, keys, 0, found, outcome)  # noqa: SLF001
                sequence.release()
                should, were, corrupt = should + expected, were + found, corrupt + outcome.corrupt
                if found != expected:
                    print(f"a prompt of {len(prompt)} blocks: {expected} are whole, {found} were hit", file=sys.stderr)
            for end in ends:
                end()
        return len(prompts), should, were, corrupt


def wait_for_host(daemon: DaemonProcess) -> None:
    """Until the whole host pool is populated: what comes from storage, and what goes there, lies in it."""
    with open_remote(as_path(daemon.socket)) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        pause = threading.Event()
        while True:
            status = admin.GetStatus(admin_pb2.GetStatusRequest(brief=True), wait_for_ready=True)
            if status.host_pool_ready_bytes == status.host_pool_bytes:
                return
            pause.wait(LOOK_SECONDS)


def _asdict(settings: EngineSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def size_of(folder: Path) -> int:
    """Bytes of every file of the cache."""
    return sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a hit differs or a byte is wrong."""
    parser = parser_of(__doc__, "python -m benchmarks.storage.kills")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills (default 5)")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--capacity", default="8GiB")
    parser.add_argument("--host-bytes", type=int, default=2 << 30)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is meant; emptied")
    said = parser.parse_args(arguments)
    shutil.rmtree(said.folder, ignore_errors=True)
    said.folder.mkdir(parents=True)
    requests = [list(request.block_ids) for request in read_trace(said.trace) if request.block_ids]
    host_blocks = said.host_bytes // said.block_bytes // 2
    settings = EngineSettings("", "kills", "kills", said.block_bytes, 512, 1, 2048, host_blocks)
    run = Run(said.folder, said.capacity, settings, said.host_bytes)
    rows: list[dict[str, float]] = []
    for number in range(said.kills):
        before, began = len(run.served), time.monotonic()
        run.serve(requests, said.every)
        whole, torn = run.whole()
        prompts, should, were, corrupt = run.compare(whole)
        rows.append(
            {
                "kill": number + 1,
                "served": len(run.served) - before,
                "whole_objects": len(whole),
                "torn_objects": torn,
                "prompts": prompts,
                "blocks_whole_prefix": should,
                "blocks_hit": were,
                "corrupt_pages": corrupt,
                "folder_bytes": size_of(said.folder),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if not requests:
            break
    sound = all(row["blocks_hit"] == row["blocks_whole_prefix"] and not row["corrupt_pages"] for row in rows)
    result = {
        "what": "SIGKILL in mid-write: hits of the next daemon against what lay whole on disk",
        "trace": said.trace.name,
        "every_seconds": said.every,
        "block_bytes": said.block_bytes,
        "capacity": said.capacity,
        "sound": sound,
        "rows": rows,
    }
    save(said, result)
    shutil.rmtree(said.folder, ignore_errors=True)
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
