"""``cachesvc check``: what a daemon lacks on this machine. The daemon's own code looks, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachesvc_client.core.errors import NotSupported

from cachesvc.model.text import module_command
from cachesvc_ctl.core.command import Command, describe_bytes, flag, table
from gpu_ops.calibration import LinkFigures, calibrate
from gpu_ops.driver import CudaError, CudaMissing
from gpu_ops.gpu import Gpu, driver_version, find_gpus, started

SETTINGS = ("config", "socket", "backend", "device_pool", "host_pool")


class Check(Command):
    """Look at driver, memory, limits, socket, ports and versions, for a daemon of these settings."""

    name = "check"
    about = "what this machine lacks for a daemon, with remedies"
    epilog = "Exit codes: 0 nothing is missing, 1 something is, 2 the settings are invalid. Warnings change no code."
    flags = (
        flag("--config", metavar="FILE", help="the daemon's configuration (cachesvcd --config)"),
        flag("--socket", metavar="PATH", help="its socket (else CACHESVC_SOCKET, else /run/cachesvc/cachesvc.sock)"),
        flag("--backend", metavar="NAME", help="its memory: auto (default), cuda or shm"),
        flag("--device-pool", metavar="SIZE", help="its device pool (default 1GiB)"),
        flag("--host-pool", metavar="SIZE", help="its host pool (default 1GiB)"),
        flag("--json", action="store_true", help="print the lines as JSON"),
    )

    def run(self) -> int:
        said = self.arguments
        if said.socket is None and said.config is None:  # as for every other command
            said.socket = os.environ.get("CACHESVC_SOCKET")
        given = [(name, getattr(said, name)) for name in SETTINGS]
        flags = [word for name, value in given if value for word in ("--" + name.replace("_", "-"), value)]
        form = "json" if said.json else "text"
        return subprocess.run(module_command("cachesvc", *flags, "--check-machine", form), check=False).returncode  # noqa: S603


GIB = 1 << 30
DAEMON_BYTES = GIB
"""Memory that the daemon takes of a GPU beside its pool: a context of 0.3 GiB on an H100, and pins of the host pool."""
POOL_STEP_BYTES = 256 << 20
ACTIVATION_BYTES = 4 * GIB
"""Default for activations and CUDA graphs of vLLM with batches of 8k to 16k tokens."""
HOST_TIMES = 3
"""Host pool by device pools: three to ten times catch most of what comes back."""
RANKS_TRIED = (2, 4, 8, 16)
CONSOLIDATED = "consolidated."
"""Begin of names of the same weights once more, as Mistral's own programs read them."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU, and what is not the cache's. ``weights``: of all ranks together."""

    gpu: int
    weights: int
    activations: int

    def pool(self, ranks: int) -> int:
        """Bytes that are left for the device pool of one of ``ranks`` GPUs; negative where nothing is."""
        return self.gpu - -(-self.weights // ranks) - self.activations - DAEMON_BYTES


@dataclass(frozen=True, slots=True)
class Plan:
    """Pools and what they hold. ``requests``: of ``tokens`` tokens, while they decode."""

    ranks: int
    memory: Memory
    pool_bytes: int
    kv_bytes: int
    tokens_held: int
    tokens: int
    requests: int

    @property
    def host_bytes(self) -> int:
        """Host pool for all ranks, in whole GiB."""
        return max(1, HOST_TIMES * self.pool_bytes * self.ranks // GIB) * GIB

    @property
    def utilisation(self) -> float:
        """Share of the GPU that one engine takes beside the pool, less a hundredth: vLLM refuses to start where less is
        free. It sizes no KV memory by this where that is given in bytes."""
        own = -(-self.memory.weights // self.ranks) + self.memory.activations
        return max(1, own * 100 // self.memory.gpu - 1) / 100

    def as_json(self) -> dict[str, Any]:
        """The plan; the keys are a promise to scripts."""
        return {
            "gpu_memory_bytes": self.memory.gpu,
            "weights_bytes": self.memory.weights,
            "activations_bytes": self.memory.activations,
            "daemon_bytes": DAEMON_BYTES,
            "device_pool_bytes": self.pool_bytes,
            "host_pool_bytes": self.host_bytes,
            "kv_cache_memory_bytes": self.kv_bytes,
            "gpu_memory_utilization": self.utilisation,
            "tokens": self.tokens_held,
            "request_tokens": self.tokens,
            "requests": self.requests,
        }

    def describe(self) -> str:
        """The plan for people, with the flags to type."""
        pool, host = self.pool_bytes // GIB, self.host_bytes // GIB
        size = f"{pool}GiB" if pool else f"{self.pool_bytes >> 20}MiB"
        lines = [
            f"on each GPU of {describe_bytes(self.memory.gpu)}, {self.ranks} of them:",
            *(f"  {name:<26}{describe_bytes(value):>12}" for name, value in self._parts()),
            "",
            f"  cachesvcd --device-pool {size} --host-pool {host}GiB --write-policy write_through",
            f"  vllm serve ... --kv-cache-memory-bytes {self.kv_bytes} --gpu-memory-utilization {self.utilisation:.2f}",
            "",
            f"The pool holds {self.tokens_held:,} tokens: {self.requests:,} requests of {self.tokens:,} at a time.",
            "One engine a GPU: for several add the weights and activations of each (--weights, --activations).",
        ]
        if not self.requests:
            ways = f"--tp {self.ranks * 2}, --kv-dtype fp8, or shorter requests"
            lines.append(f"That is less than one request: try {ways}.")
        return "\n".join(lines)

    def _parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("weights", -(-self.memory.weights // self.ranks)),
            ("activations and graphs", self.memory.activations),
            ("the daemon's context", DAEMON_BYTES),
            ("left for the device pool", self.pool_bytes),
        )


def weights_beside(config: Path) -> int:
    """Bytes of the files with weights in the folder of a config.json; 0 where there are none."""
    folder = config if config.is_dir() else config.parent
    found = [path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES]
    kinds = {path.suffix for path in found}
    best = next((suffix for suffix in WEIGHT_SUFFIXES if suffix in kinds), "")  # a folder may have them in two forms
    files = [path for path in found if path.suffix == best]
    parts = [path for path in files if not path.name.startswith(CONSOLIDATED)]
    return sum(path.stat().st_size for path in parts or files)


def remedy(memory: Memory, ranks: int) -> str:
    """Ways out where the weights leave no pool on a GPU."""
    more = next((tried for tried in RANKS_TRIED if tried > ranks and memory.pool(tried) > 0), None)
    ways = [f"--tp {more} leaves {describe_bytes(memory.pool(more))}"] if more is not None else []
    return ", or ".join([*ways, "quantised weights (--weights)", "fewer --activations (smaller batches)"])


WIDTHS = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 128 << 10)
PLANES = 64


class Calibrate(Command):
    """Measure the GPUs of this machine, without a daemon."""

    name = "calibrate"
    about = "measure what bytes and copies between host and GPUs cost"
    flags = (flag("--json", action="store_true", help="print the figures as JSON"),)

    def run(self) -> int:
        """Raises NotSupported where there is no GPU that can be measured."""
        try:
            found = [(gpu, _measure(gpu)) for gpu in find_gpus()]
            release = ".".join(map(str, driver_version()))
        except (CudaMissing, CudaError) as error:
            raise NotSupported(str(error)) from error
        if self.arguments.json:
            rows = [{"uuid": gpu.uuid, "name": gpu.facts.name, **asdict(figures)} for gpu, figures in found]
            print(json.dumps({"cuda": release, "gpus": rows}, indent=1))
            return 0
        for gpu, figures in found:
            print(describe_link(gpu.facts.name, gpu.uuid, release, figures))
        return 0


def _measure(gpu: Gpu) -> LinkFigures:
    with started(gpu):
        return calibrate(gpu)


def efficiency(figures: LinkFigures, width: int, planes: int = PLANES) -> float:
    """Part of the link that loads of ``planes`` rows of ``width`` bytes a block reach, as estimated."""
    ideal_us = planes * width / figures.load_bytes_per_us
    return ideal_us / (ideal_us + figures.per_copy_us + planes * figures.per_row_ns / 1e3)


def describe_link(name: str, uuid: str, release: str, figures: LinkFigures) -> str:
    how = "one call for many copies" if figures.is_batched else "one call a copy (a driver older than CUDA 12.8)"
    rows = [
        (f"{width >> 10} KiB", f"{efficiency(figures, width):.2f}", "narrow" if is_narrow(figures, width) else "")
        for width in WIDTHS
    ]
    return (
        f"{name} {uuid}, driver for CUDA {release}, {how}\n"
        f"in {figures.load_bytes_per_us / 1e3:.1f} GB/s, out {figures.store_bytes_per_us / 1e3:.1f} GB/s, "
        f"both at once {figures.both_bytes_per_us / 1e3:.1f} GB/s\n"
        f"a copy {figures.per_copy_us:.2f} us, a row {figures.per_row_ns:.0f} ns, a step {figures.per_step_us:.2f} us, "
        f"largest pitch {figures.max_pitch_bytes} bytes\n"
        f"planes narrower than {figures.narrow_plane_bytes} bytes a block load at less than half of the link's speed\n"
        "\n" + table(("plane", f"of the link, {PLANES} planes a block", ""), rows) + "\n"
    )


def is_narrow(figures: LinkFigures, width: int) -> bool:
    """True where the copies' own cost is more than half of the time."""
    return width < figures.narrow_plane_bytes
