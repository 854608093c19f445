"""Check of this machine for ``cachesvcd --check-machine``: what a daemon of a configuration lacks here, and the remedy.

Every look reads and changes nothing; it is the daemon's own code that would refuse. Part of the composition root.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from cachesvc import __version__
from cachesvc.config import Config
from cachesvc.hardware import find_ports
from cachesvc.memory.numa import ROOT, memory_limits
from cachesvc.model.errors import CacheError
from cachesvc.model.text import describe_bytes
from cachesvc.service.host.socket_files import group_number, is_served
from cachesvc.storages import check_storage
from gpu_ops.driver import CudaError, CudaMissing
from gpu_ops.gpu import driver_version, find_gpus

OK, WARNING, MISSING = "ok", "warning", "missing"
LEAST_CUDA = (12, 0)
EARLIEST_PYTHON, LATEST_PYTHON = (3, 11), (3, 13)
KERNEL_OF_PIDFDS, KERNEL_OF_HUGE_PAGES = (6, 5), (6, 1)
FILES = 4096
"""Descriptors that a node with a hundred engine processes takes, three each, and some to spare."""
SHM_BYTES = 1 << 30
"""vLLM's ranks exchange messages in /dev/shm, and container engines give it 64 MiB."""
DEV_SHM = "/dev/shm"  # noqa: S108 - its name, for a line of text
PACKAGES = {"server": ("grpc_health", "grpc_reflection", "grpc_channelz"), "": ("grpc", "google.protobuf", "numpy")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One look: its subject, ``state``, what there is, and what to do where that is not enough."""

    subject: str
    state: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """The finding as one line of text."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.subject:<14} {self.found}{remedy}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def look(config: Config, root: Path = ROOT) -> list[Finding]:
    """All findings, in the order in which a start needs them. ``root``: of the files that tell about the machine."""
    looks = (
        *(_versions(), _kernel(), _gpus(config), _memory(config, root), _huge_pages(root), _limits(config)),
        *(_dev_shm(root), _socket(config), _ports(config), _storage(config)),
    )
    return [finding for each in looks for finding in each]


def _judged(subject: str, found: str, state: str, remedy: str, *, is_fine: bool) -> Finding:
    """``state`` and ``remedy`` are for what is not enough."""
    return Finding(subject, OK, found) if is_fine else Finding(subject, state, found, remedy)


def is_ready(findings: list[Finding]) -> bool:
    """True where nothing that a start needs is missing."""
    return all(finding.state != MISSING for finding in findings)


def _versions() -> Iterator[Finding]:
    here = sys.version_info[:2]
    said = f"cachesvc {__version__} on Python {platform.python_version()}"
    is_tested = EARLIEST_PYTHON <= here <= LATEST_PYTHON
    yield _judged("versions", said, WARNING, "it is tested with Python 3.11 to 3.13", is_fine=is_tested)
    for extra, modules in PACKAGES.items():
        lacking = [module for module in modules if find_spec(module.partition(".")[0]) is None]
        if lacking:
            wanted = f"pip install 'cachesvc[{extra}]'" if extra else "pip install cachesvc"
            yield Finding("packages", MISSING, f"no module {', '.join(lacking)}", wanted)
    try:
        yield Finding("packages", OK, f"grpcio {version('grpcio')}, protobuf {version('protobuf')}")
    except PackageNotFoundError as missing:
        yield Finding("packages", WARNING, str(missing), "the environment is damaged: make it anew")


def _kernel() -> Iterator[Finding]:
    remedy = "an engine in another pod that ends is noticed after lease_seconds, with 6.5 and later at once"
    has_pidfds = _kernel_numbers() >= KERNEL_OF_PIDFDS
    yield _judged("kernel", f"Linux {platform.release()}", WARNING, remedy, is_fine=has_pidfds)


def _kernel_numbers() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdecimal())


def _gpus(config: Config) -> Iterator[Finding]:
    if config.backend == "shm":
        yield Finding("GPU", OK, "none is used: --backend shm")
        return
    state = MISSING if config.backend == "cuda" else WARNING
    instead = "" if state is MISSING else "; until then the daemon runs on shared memory"
    try:
        release, gpus = driver_version(), find_gpus()
    except CudaMissing as missing:
        remedy = "install NVIDIA's driver (CUDA 12 or later), or docker run --gpus all"
        yield Finding("GPU", state, str(missing).partition(";")[0], remedy + instead)
        return
    except CudaError as broken:
        yield Finding("GPU", state, str(broken), "see nvidia-smi, and dmesg for Xid" + instead)
        return
    for gpu in gpus:
        size = gpu.facts.total_bytes
        said = f"{gpu.facts.name} {gpu.uuid}, {describe_bytes(size)}"
        remedy = f"--device-pool is {describe_bytes(config.device_pool)}: take less"
        yield _judged("GPU", said, MISSING, remedy, is_fine=config.device_pool <= size)
    said = "driver for CUDA {}.{}".format(*release)
    yield _judged("driver", said, MISSING, "update it to CUDA 12 or later", is_fine=release >= LEAST_CUDA)


def _is_shm(config: Config) -> bool:
    """True where device pools are this machine's memory."""
    try:
        return config.backend == "shm" or (config.backend == "auto" and not find_gpus())
    except (CudaMissing, CudaError):
        return config.backend == "auto"


def _memory(config: Config, root: Path) -> Iterator[Finding]:
    limits = memory_limits(root)
    needed = config.host_pool + (config.device_pool * config.shm_devices if _is_shm(config) else 0)
    if not limits:
        yield Finding("memory", WARNING, "no limit can be read", f"the pools take {describe_bytes(needed)}")
        return
    tightest = limits[0]
    said = f"{describe_bytes(tightest.available_bytes)} left by {tightest.source}, pools take {describe_bytes(needed)}"
    does_fit = needed <= tightest.available_bytes
    yield _judged("memory", said, MISSING, "take a smaller --host-pool, or raise the limit", is_fine=does_fit)


def _huge_pages(root: Path) -> Iterator[Finding]:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        setting = path.read_text(encoding="utf-8").partition("[")[2].partition("]")[0]
    except OSError:
        setting = "absent"
    if setting in {"never", "absent"} or _kernel_numbers() < KERNEL_OF_HUGE_PAGES:
        remedy = "the host pool gets pages of 4 KiB and fills three to ten times slower; nothing else is lost"
        yield Finding("huge pages", WARNING, f"transparent: {setting}, Linux {platform.release()}", remedy)
    else:
        yield Finding("huge pages", OK, f"transparent: {setting}; reserved ones are not used")


def _limits(config: Config) -> Iterator[Finding]:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    said = "unlimited" if locked == resource.RLIM_INFINITY else describe_bytes(locked)
    needs_it = any(each.startswith("mooncake") and "rdma" in each for each in config.storage)
    if needs_it and locked != resource.RLIM_INFINITY:
        remedy = "RDMA locks the host pool: ulimit -l unlimited, LimitMEMLOCK=infinity"
        yield Finding("locked memory", MISSING, said, remedy)
    else:
        yield Finding("locked memory", OK, f"{said}; pinning goes through the GPU's driver and takes none of it")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    remedy = f"an engine process takes three: ulimit -n {FILES}, or LimitNOFILE={FILES}"
    are_enough = files == resource.RLIM_INFINITY or files >= FILES
    yield _judged("open files", f"{files} at most", WARNING, remedy, is_fine=are_enough)


def _dev_shm(root: Path) -> Iterator[Finding]:
    path = root / "dev/shm"
    if not path.is_dir():
        yield Finding(DEV_SHM, WARNING, "absent", "the daemon needs none; vLLM's ranks do: --shm-size 1g")
        return
    size = shutil.disk_usage(path).total
    if size < SHM_BYTES:
        remedy = "the daemon needs none; vLLM with several ranks wants --shm-size 1g, or an emptyDir of medium Memory"
        yield Finding(DEV_SHM, WARNING, describe_bytes(size), remedy)
    else:
        yield Finding(DEV_SHM, OK, f"{describe_bytes(size)}; the daemon uses none of it")


def _socket(config: Config) -> Iterator[Finding]:
    folder = Path(config.socket).parent
    if is_served(config.socket):
        remedy = "cachesvc status asks it; a further daemon needs another --socket"
        yield Finding("socket", WARNING, f"{config.socket} is served by a daemon", remedy)
    elif not folder.is_dir():
        owner = f"sudo install -d -m 0750 -o {os.geteuid()} {folder}"
        remedy = f"{owner}, or RuntimeDirectory={folder.name} in a systemd unit"
        yield Finding("socket", MISSING, f"the folder {folder} does not exist", remedy)
    elif not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"run the daemon as the folder's owner, or sudo chown {os.geteuid()} {folder}"
        yield Finding("socket", MISSING, f"user {os.geteuid()} may not write to {folder}", remedy)
    else:
        yield Finding("socket", OK, config.socket)
    if config.socket_group:
        try:
            yield Finding("socket group", OK, f"{config.socket_group} is group {group_number(config.socket_group)}")
        except CacheError as refused:
            yield Finding("socket group", MISSING, str(refused))


def _ports(config: Config) -> Iterator[Finding]:
    for _, flag, text, reason in find_ports(config):
        remedy = f"choose another {flag}; ss -ltnp shows who has a port" if reason else ""
        yield Finding("port", MISSING if reason else OK, f"{flag} {text}{reason and ': '}{reason}", remedy)


def _storage(config: Config) -> Iterator[Finding]:
    try:
        check_storage(config.storage)
    except CacheError as refused:
        yield Finding("storage", MISSING, str(refused))
        return
    for each in config.storage:
        yield Finding("storage", OK, each.partition("?")[0])
