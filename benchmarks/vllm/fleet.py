"""Engines and their daemon, as ``benchmarks.vllm`` has them: processes with logs, and nothing waits without end."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from benchmarks.vllm.engine import MODEL

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0
LOOK_SECONDS = 0.1
SPARE_SECONDS = 60.0
"""Timeout of an answer beyond the time that was asked for."""


class EngineFailed(Exception):
    """An engine ended, refused, or did not answer in time; the message says which, and where its log is."""


@dataclass(frozen=True)
class Shape:
    """Configuration that all engines of a run share. ``pool_bytes``: of KV, an engine's own or the daemon's;
    ``host_bytes``: of the host tier. ``python``: that has vLLM. ``backend``: of attention; ``runner``: "1", "2", or
    empty for vLLM's own choice. ``split``: engine cores in processes of their own. ``options``: further arguments of
    ``LLM``; ``latent_values``: a token's KV in a layer, where that is no key and value; ``draft_layers``: of the
    drafter, which have KV too; ``ranks``: of tensor parallelism."""

    folder: Path
    pool_bytes: int
    host_bytes: int
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    python: str = sys.executable
    block_tokens: int = 64
    sequences: int = 128
    eager: bool = True
    compilation: Mapping[str, Any] | None = None
    backend: str = "TRITON_ATTN"
    runner: str = ""
    split: bool = False
    on_gpu: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    latent_values: int = 0
    draft_layers: int = 0
    ranks: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return int(self.model["max_position_embeddings"])

    @property
    def pool_tokens(self) -> int:
        """Number of tokens whose KV fits on the device, in the layers that keep whole sequences."""
        model = self.model
        heads = model["num_key_value_heads"] // self.ranks
        values = self.latent_values or 2 * heads * model["head_dim"]  # each rank keeps the latents whole
        whole = model.get("layer_types", ["full_attention"] * model["num_hidden_layers"]).count("full_attention")
        return int(self.pool_bytes // (2 * values * max(1, whole + self.draft_layers)))

    @property
    def engine(self) -> str:
        """Name of the engine's kind."""
        return "vLLM"

    @property
    def program(self) -> str:
        """Module that runs an engine."""
        return "benchmarks.vllm.engine"

    def environment(self) -> dict[str, str]:
        """Environment of an engine's process."""
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(self.runner == "2"))} if self.runner else {}
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.split)),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
            **runner,
        }

    def wish(self, kind: str, address: str) -> dict[str, Any]:
        """Configuration message for an engine."""
        blocks = self.pool_tokens // self.block_tokens
        options: dict[str, Any] = {"gpu_memory_utilization": 0.35, "kv_cache_memory_bytes": self.pool_bytes}
        if not self.on_gpu:
            options = {"gpu_memory_utilization": 0.2, "num_gpu_blocks_override": blocks}
        if self.compilation is not None:
            options["compilation_config"] = dict(self.compilation)
        if self.backend:
            options["attention_backend"] = self.backend
        if self.ranks > 1:
            options["tensor_parallel_size"] = self.ranks
        options |= self.options
        return {
            "kind": kind,
            "address": address,
            "model": str(self.folder / "model"),
            "host_bytes": self.host_bytes,
            "block_tokens": self.block_tokens,
            "sequences": self.sequences,
            "longest": self.longest,
            "eager": self.eager,
            "split": self.split,
            "options": options,
        }


class Engine:
    """Engine of a ``kind``: "plain", "offload", "hicache", "ours" or "lmcache"; the last two have a server, at
    ``address``. It imports vLLM or SGLang at once; ``start`` makes its engine. ``gpus``: places of its GPUs among those
    that this process sees; empty: the first ones."""

    def __init__(self, shape: Shape, name: str, kind: str, address: str, gpus: Sequence[int] = ()) -> None:
        self.name, self.kind = name, kind
        self.facts: dict[str, Any] = {}
        self.shape, self._address = shape, address
        self.log = shape.folder / f"{name}.log"
        self.begun_s = time.monotonic()
        self.first_answer_s = 0.0
        read_fd, write_fd = os.pipe()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [shape.python, "-m", shape.program, str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write_fd],
                env={**shape.environment(), **_seen(gpus)},
                cwd=ROOT,
                start_new_session=True,
            )
        os.close(write_fd)
        self._read_fd, self._unread = read_fd, b""

    def begin(self) -> Engine:
        """Have it make its engine; ``wait_ready`` waits."""
        self._write(self.shape.wish(self.kind, self._address))
        return self

    def wait_ready(self) -> Engine:
        """Until it serves. Raises EngineFailed."""
        self.facts = {**self._read(START_SECONDS), **self._read(START_SECONDS)}
        self.facts["ready_s"] = time.monotonic() - self.begun_s
        progress(f"{self.name} is ready: {json.dumps(self.facts)}")
        return self

    def send(self, prompts: Sequence[Mapping[str, Any]], *, at_a_time: int, seconds: float, gaps: bool = False) -> None:
        """Ask, and collect later. ``gaps``: the time between tokens is wanted too (vLLM)."""
        self._limit_s = seconds + SPARE_SECONDS
        self._write({"do": "run", "prompts": list(prompts), "at_a_time": at_a_time, "seconds": seconds, "gaps": gaps})

    def collect(self) -> dict[str, Any]:
        """The answer to what was sent. Raises EngineFailed."""
        return dict(self._read(self._limit_s))

    def ask(
        self, *prompts: Mapping[str, Any], at_a_time: int = 1, seconds: float = SPARE_SECONDS, gaps: bool = False
    ) -> dict[str, Any]:
        """Call ``send``, then ``collect``."""
        self.send(prompts, at_a_time=at_a_time, seconds=seconds, gaps=gaps)
        return self.collect()

    def do(self, what: str) -> Any:
        """``take_times``, ``take_loads`` or ``reset``."""
        self._write({"do": what})
        return self._read(SPARE_SECONDS)

    @property
    def has_times(self) -> bool:
        """True where ``take_times`` and ``take_loads`` say something."""
        return self.kind == "ours" and not self.shape.split

    @property
    def is_running(self) -> bool:
        """False once its process has ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """With all its processes, at once. Idempotent."""
        if self.is_running:
            os.killpg(self.process.pid, signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """Let it end by itself, for a while."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            progress(f"{self.name} does not end: killed")
        self.kill()

    def _end(self) -> None:
        self.process.wait()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as gone:
            raise EngineFailed(f"{self.name} ended: {self.log}") from gone

    def _read(self, timeout_s: float) -> Any:
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(until_s - time.monotonic()):
                    raise EngineFailed(f"{self.name} said nothing within {timeout_s:g} s: {self.log}")
                more = os.read(self._read_fd, 1 << 20)
                if not more:
                    raise EngineFailed(f"{self.name} ended: {self.log}")
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "failed" in answer:
            raise EngineFailed(f"{self.name}: {answer['failed']}")
        return answer


class LmcacheServer:
    """LMCache's own, for all engines of a node, without its HTTP: made with all of its memory before it serves."""

    def __init__(self, shape: Shape) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self._port}"
        self._log = shape.folder / "lmcache.log"
        flags = {
            "host": "127.0.0.1",
            "port": self._port,
            "l1-size-gb": shape.host_bytes / 2**30,
            "eviction-policy": "LRU",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [shape.python, "-m", "lmcache.v1.multiprocess.server", "--no-l1-use-lazy", "--disable-observability"]
                + [f"--{name}={value}" for name, value in flags.items()],
                stdout=log,
                stderr=log,
                env={**shape.environment(), "LMCACHE_TRACK_USAGE": "false"},
            )

    def wait_ready(self) -> None:
        """Until it listens. Raises EngineFailed."""
        until_s = time.monotonic() + START_SECONDS
        while time.monotonic() < until_s and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(LOOK_SECONDS)  # between two looks; nothing is timed here
        raise EngineFailed(f"LMCache's server ended, or does not listen: {self._log}")

    def stop(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()


class Fleet:
    """One daemon, and the engines that were made; all of them end with it."""

    def __init__(self, shape: Shape, daemon_flags: Sequence[str]) -> None:
        self.shape = shape
        self._daemon = DaemonProcess(daemon_flags, folder=str(shape.folder))
        self._engines: dict[str, Engine] = {}
        self._lmcache: LmcacheServer | None = None
        self.starts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Fleet:
        (self.shape.folder / "model").mkdir(exist_ok=True)
        (self.shape.folder / "model" / "config.json").write_text(json.dumps(dict(self.shape.model)), encoding="utf-8")
        self._daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.kill()
        self.stop_lmcache()
        self._daemon.stop()

    def standby(self, name: str, kind: str, gpus: Sequence[int] = ()) -> Engine:
        """A process that imports vLLM, if there is none of that name; on the first GPUs where ``gpus`` is empty."""
        known = self._engines.get(name)
        if known is None or not known.is_running:
            address = self._daemon.socket if self._lmcache is None or kind != "lmcache" else self._lmcache.address
            known = self._engines[name] = Engine(self.shape, name, kind, address, gpus)
        return known

    def start_lmcache(self) -> None:
        """LMCache's server, and a process for its engine meanwhile. Raises EngineFailed."""
        self._lmcache = LmcacheServer(self.shape)
        self.standby("lmcache", "lmcache")
        self._lmcache.wait_ready()

    def stop_lmcache(self) -> None:
        """Give its memory back. Idempotent."""
        if self._lmcache is not None:
            self._lmcache.stop()
            self._lmcache = None

    def start(self, **kinds: str) -> list[Engine]:
        """Engines by name, all at once; those that serve already are taken as they are."""
        wanted = [self.standby(name, kind) for name, kind in kinds.items()]
        new = [each.begin() for each in wanted if not each.facts]
        for engine in new:
            self.starts[f"{engine.name} {len(self.starts)}"] = engine.wait_ready().facts
        return wanted

    def stop(self, *names: str) -> None:
        """End these."""
        for name in names:
            if name in self._engines:
                self._engines.pop(name).stop()

    def kill(self, name: str) -> None:
        """End it as a crash would."""
        self._engines.pop(name).kill()

    def kill_daemon(self) -> None:
        """Kill the daemon as a crash would."""
        self._daemon.kill()

    def start_daemon(self) -> None:
        """Start the daemon again, on the same socket; returns when it is ready."""
        self._daemon.start()

    def verify(self, *, checksums: bool) -> list[str]:
        """Problems that the daemon finds; ``checksums``: check sealed pages too."""
        with grpc.insecure_channel(f"unix:{self._daemon.socket}") as channel:
            answer = admin_pb2_grpc.AdminServiceStub(channel).Verify(admin_pb2.VerifyRequest(checksums=checksums))
        return list(answer.problems)

    def places(self) -> list[dict[str, Any]]:
        """Pages on each device and on the host, and one rank's bytes of each. What the host keeps once for all ranks
        has as many pages as fit of these in its pool, and costs as many bytes to store."""
        with grpc.insecure_channel(f"unix:{self._daemon.socket}") as channel:
            told = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
        fields = ("place", "capacity", "sealed", "page_bytes")
        return [
            {"host_pool_bytes": told.host_pool_bytes, "d2h_bytes": told.counters["d2h_bytes"]},
            *({name: getattr(each, name) for name in fields} for each in told.pools),
        ]

    def counters(self) -> dict[str, int]:
        """The daemon's, by name."""
        with grpc.insecure_channel(f"unix:{self._daemon.socket}") as channel:
            return dict(admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest()).counters)


def progress(text: str) -> None:
    """One line, at once."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _seen(gpus: Sequence[int]) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [visible[each] if len(visible) > each and visible[each] else str(each) for each in gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(named)} if named else {}
