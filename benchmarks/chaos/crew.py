"""A daemon and N engine processes under load, each started again when it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from cachesvc_ctl.core.daemon_process import DaemonProcess
from cachesvc_lab.replay import EngineSettings
from cachesvc_lab.traces import TraceRequest
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from benchmarks.chaos.figures import Figures
from benchmarks.chaos.proc import memory_files, zombies

CHUNK_BYTES = 1 << 30
SLACK_BYTES = 1 << 20
SETTLE_SECONDS = 60.0
LOOK_SECONDS = 0.02
LOOPS_PER_SALT = 2
"""The trace is replayed twice under each salt: once it turns the cache over, once it finds what is left of it."""


class RunFailed(Exception):
    """The run could not go on, or ended unsound; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Configuration of a run. ``fault_copies``: share of the daemon's copy slices that fail. Pools in blocks."""

    engines: int = 8
    backend: str = "shm"
    device_blocks: int = 2048
    host_blocks: int = 4096
    block_bytes: int = 4096
    block_tokens: int = 512
    layers: int = 4
    write_policy: str = "write_back"
    lease_seconds: float = 2.0
    fault_copies: float = 0.0

    @property
    def host_pool_bytes(self) -> int:
        """Host pool of the daemon, with room for what chunks cut off."""
        host = self.host_blocks * self.block_bytes
        return host + -(-host // CHUNK_BYTES) * (self.block_bytes + SLACK_BYTES)

    def flags(self) -> list[str]:
        """The daemon's."""
        flags = {
            "--backend": self.backend,
            "--device-pool": str(self.device_blocks * self.block_bytes + self.layers * SLACK_BYTES),
            "--host-pool": str(self.host_pool_bytes),
            "--write-policy": self.write_policy,
            "--lease-seconds": str(self.lease_seconds),
            "--drain-seconds": "0",
            "--calibration": "never",
        }
        if self.fault_copies:
            flags["--fault-copies"] = str(self.fault_copies)
        return [part for pair in flags.items() for part in pair]


class EngineSlot(threading.Thread):
    """Keeps one engine process at work; the request that a killed one was at goes to its successor."""

    def __init__(self, number: int, crew: Crew) -> None:
        super().__init__(name=f"engine {number}", daemon=True)
        self.number = number
        self.error: Exception | None = None
        self.process: subprocess.Popen[str] | None = None
        self.is_ready = False
        self.served = 0
        self.epoch = 0
        self.mapped_epochs = 0
        self._crew = crew
        self._starts = 0

    def run(self) -> None:
        """Serve until the crew says that it is enough, then let the engine end by itself."""
        try:
            while (request := self._crew.next_request()) is not None:
                while (outcome := self._ask(request)) is None:
                    self._reap()
                self.served += 1
                self.epoch = outcome["epoch"]
                self._crew.figures.add(self.number, outcome, self._crew.second())
            self._end()
        except Exception as error:  # noqa: BLE001 - the root of this thread; the run reports it
            self.error = error
            self._crew.stop()

    def tell(self, number: signal.Signals) -> bool:
        """Send a signal to the engine if it is at work."""
        process = self.process
        if process is None or not self.is_ready or process.poll() is not None:
            return False
        process.send_signal(number)
        return True

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """A request's outcome; None when the engine has died over it."""
        process = self.process or self._start()
        if process is None:
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(process)

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith("\n"):
            return None
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _start(self) -> subprocess.Popen[str] | None:
        self._starts += 1
        settings = replace(self._crew.settings, name=f"chaos-{self.number}.{self._starts}")
        command = [sys.executable, "-m", "benchmarks.chaos.engine", json.dumps(asdict(settings))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._crew.engine_log, text=True
        )
        self._crew.pids.add(self.process.pid)
        if self._read(self.process) is None:
            return None
        self.is_ready = True
        return self.process

    def _reap(self) -> None:
        process, self.process, self.is_ready = self.process, None, False
        assert process is not None
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what was still to be written goes to its successor
        if code != -signal.SIGKILL:
            raise RunFailed(f"engine {self.number} ended with exit code {code}: {self._crew.engine_words()}")

    def _end(self) -> None:
        process = self.process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        last = self._read(process)
        code = process.wait()
        assert process.stdout is not None
        process.stdout.close()
        if last is None or code != 0:
            raise RunFailed(f"engine {self.number} did not end well ({code}): {self._crew.engine_words()}")
        self.mapped_epochs = last["mapped_epochs"]


class Crew:
    """The daemon, the engines, and what is seen of them. ``start``, and then ``finish`` or ``abandon``."""

    def __init__(self, plan: Plan, requests: list[TraceRequest], folder: Path) -> None:
        self.plan = plan
        self.figures = Figures()
        self.folder = folder
        self.daemon = DaemonProcess(plan.flags(), folder=str(folder))
        self.engine_log = (folder / "engines.log").open("ab")
        self.slots = [EngineSlot(number, self) for number in range(plan.engines)]
        self.settings = EngineSettings(
            socket=str(folder / "cachesvc.sock"),
            name="",
            model=f"chaos {time.time_ns()}",
            block_bytes=plan.block_bytes,
            block_tokens=plan.block_tokens,
            layers=plan.layers,
            device_blocks=plan.device_blocks,
            host_blocks=plan.host_blocks,
        )
        self.stopping = threading.Event()
        self.daemon_lock = threading.Lock()
        self.pids: set[int] = set()
        self._requests = _endless(requests)
        self._taking = threading.Lock()
        self._began = time.monotonic()

    def start(self) -> None:
        """Start the daemon and the engines. Raises DaemonFailed."""
        self.daemon.start()
        self.pids.add(self.daemon.process.pid)
        self._began = time.monotonic()
        for slot in self.slots:
            slot.start()

    def stop(self) -> None:
        """No more requests: engines end what they are at."""
        self.stopping.set()

    def second(self) -> int:
        """Whole seconds since the engines were started."""
        return int(time.monotonic() - self._began)

    def next_request(self) -> dict[str, Any] | None:
        """The next request of the endless trace, or None when it is enough."""
        if self.stopping.is_set():
            return None
        with self._taking:
            return next(self._requests)

    def check(self) -> None:
        """Raises RunFailed when an engine or the daemon has ended by itself."""
        for slot in self.slots:
            if slot.error is not None:
                raise RunFailed(str(slot.error)) from slot.error
        with self.daemon_lock:
            code = self.daemon.process.poll()
        if code is not None:
            raise RunFailed(f"the daemon ended with exit code {code}: {self.daemon_words()}")

    def restart_daemon(self) -> float:
        """SIGKILL the daemon, start it again at once on the same socket; when it was killed, in monotonic seconds."""
        with self.daemon_lock:
            self.daemon.process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            self.daemon.process.wait()
            self.daemon = DaemonProcess(self.plan.flags(), folder=str(self.folder))
            self.daemon.start()
            self.pids.add(self.daemon.process.pid)
        return killed_at

    def wait_until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Look again and again. Raises RunFailed when the time is up, and as ``check``."""
        until = time.monotonic() + seconds
        while not holds():
            self.check()
            if time.monotonic() > until:
                raise RunFailed(f"after {seconds:g} s it is still not so: {what}; {self.engine_words()}")
            time.sleep(LOOK_SECONDS)  # between two looks at other processes

    def epoch(self) -> int:
        """Epoch of the running daemon."""
        with grpc.insecure_channel(f"unix:{self.daemon.socket}") as channel:
            return int(admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest()).epoch)

    def finish(self) -> dict[str, Any]:
        """Let the engines end, check the books, stop the daemon, and look for what was left behind."""
        processes = [slot.process for slot in self.slots]
        files = max((memory_files(each.pid) for each in processes if each is not None), default=0)
        self.stop()
        self.wait_until(lambda: not any(slot.is_alive() for slot in self.slots), 4 * SETTLE_SECONDS, "engines ended")
        self.check()
        with grpc.insecure_channel(f"unix:{self.daemon.socket}") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            self.wait_until(lambda: not any(held(admin).values()), SETTLE_SECONDS, "no page is held")
            pages = held(admin)
            leases = len(admin.ListLeases(admin_pb2.ListLeasesRequest()).leases)
            verdict = admin.Verify(admin_pb2.VerifyRequest())
            counters = dict(admin.GetStatus(admin_pb2.GetStatusRequest()).counters)
        code = self.daemon.stop()
        self.engine_log.close()
        names = {Path(self.daemon.socket).name, Path(self.daemon.socket).name + ".life"}
        log = self.daemon.log.read_text(encoding="utf-8", errors="replace")
        return {
            "leaked_pages": sum(pages.values()),
            "leases_left": leases,
            "conservation": "ok" if verdict.ok else "; ".join(verdict.problems[:10]),
            "daemon_exit_code": code,
            "sockets_left": sorted(path.name for path in self.folder.iterdir() if path.name in names),
            "processes_left": sorted(pid for pid in self.pids if Path(f"/proc/{pid}").exists()),
            "memory_files_of_an_engine": files,
            "zombies": zombies(),
            "old_pools_mapped": sum(max(slot.mapped_epochs - 1, 0) for slot in self.slots),
            "tracebacks_in_log": log.count('"traceback"') + log.count("Traceback"),
            "counters_of_last_life": counters,
        }

    def abandon(self) -> None:
        """End everything at once."""
        self.stop()
        for slot in self.slots:
            if slot.process is not None:
                slot.process.kill()
        with self.daemon_lock:
            if self.daemon.process.poll() is None:
                self.daemon.process.kill()
                self.daemon.process.wait()

    def engine_words(self) -> str:
        """The last that engines said."""
        return (self.folder / "engines.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def daemon_words(self) -> str:
        """The last that the daemon said."""
        return self.daemon.log.read_text(encoding="utf-8", errors="replace")[-3000:]


def held(admin: admin_pb2_grpc.AdminServiceStub) -> dict[str, int]:
    """Pages held or in flight, by state: all zero once no engine holds any."""
    pools = admin.GetStatus(admin_pb2.GetStatusRequest()).pools
    return {state: sum(getattr(pool, state) for pool in pools) for state in ("private", "in_flight", "quarantined")}


def _endless(requests: list[TraceRequest]) -> Iterator[dict[str, Any]]:
    loop = 0
    while True:
        for request in requests:
            if request.block_ids:
                yield {"index": request.index, "salt": loop // LOOPS_PER_SALT, "block_ids": list(request.block_ids)}
        loop += 1
