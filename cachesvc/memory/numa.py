"""NUMA: the machine's nodes, and memory near one of them. What cannot be had is said, logged once, and
never fatal.

Topology comes from sysfs. Placement is libnuma's ``mbind`` (the package ``py-libnuma`` where it is
installed, else the library itself): the package places whole processes only, and one arena is what we
need.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
LIBRARY = "libnuma.so.1"
_MPOL_PREFERRED = 1  # not MPOL_BIND: a node that is full would end in the OOM killer, not in the next node
_MASK_BITS = 1024


@dataclass(frozen=True, slots=True)
class NumaNode:
    """``distances[i]``: to the i-th of all nodes, as the firmware tells it (10: itself)."""

    index: int
    cpus: tuple[int, ...]
    distances: tuple[int, ...]


class Placement(Enum):
    PLACED = "placed"
    ONE_NODE = "one node: nothing to choose"
    NO_NODE = "no node was asked for"
    NO_LIBRARY = "libnuma is missing or does not work here"
    NOT_PERMITTED = "not permitted: give the container CAP_SYS_NICE"
    NOT_SUPPORTED = "the kernel has no NUMA policies"
    REFUSED = "the kernel refused the node"


def nodes(sysfs: Path = SYSFS) -> tuple[NumaNode, ...]:
    """Nodes of this machine by index; none where sysfs does not tell."""
    found: list[NumaNode] = []
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        try:
            cpus = parse_list((folder / "cpulist").read_text())
            distances = tuple(int(word) for word in (folder / "distance").read_text().split())
        except (OSError, ValueError) as error:
            log.warning("numa_node_unreadable node=%s error=%s", folder.name, error)
            continue
        found.append(NumaNode(int(folder.name.removeprefix("node")), cpus, distances))
    return tuple(sorted(found, key=lambda node: node.index))


def node_of_pci(address: str, sysfs: Path = SYSFS) -> int | None:
    """Node of a PCI device such as ``0000:3b:00.0``; None where the firmware does not tell."""
    try:
        node = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` -> (0, 1, 2, 3, 8). Raises ValueError for anything else."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def bind(address: int, size_bytes: int, node: int | None, *, sysfs: Path = SYSFS, library: str = LIBRARY) -> Placement:
    """Have the pages of ``[address, address + size_bytes)`` allocated on ``node`` while it has room.

    ``address`` is page-aligned and nothing has been touched yet. The result says what was done.
    """
    if node is None:
        return Placement.NO_NODE
    if len(nodes(sysfs)) < 2:
        return _told(Placement.ONE_NODE, node)
    mbind = _mbind(library)
    if mbind is None:
        return _told(Placement.NO_LIBRARY, node)
    words = _MASK_BITS // 64
    mask = (ctypes.c_ulong * words)()
    mask[node // 64 % words] = 1 << node % 64
    if not mbind(address, size_bytes, _MPOL_PREFERRED, mask, _MASK_BITS + 1, 0):
        return Placement.PLACED
    why = ctypes.get_errno()
    return _told(refusal(why), node, os.strerror(why))


def refusal(error_number: int) -> Placement:
    if error_number == errno.EPERM:
        return Placement.NOT_PERMITTED
    return Placement.NOT_SUPPORTED if error_number == errno.ENOSYS else Placement.REFUSED


@cache
def _told(placement: Placement, node: int, detail: str = "") -> Placement:
    """Log a reason, once for each kind."""
    log.info("numa_not_applied node=%d reason=%r detail=%r", node, placement.value, detail)
    return placement


@cache
def _mbind(library: str) -> ctypes._NamedFuncPointer | None:
    try:
        loaded = ctypes.CDLL(_library_of_package() or library, use_errno=True)
        if loaded.numa_available() < 0:
            return None
        mbind = loaded.mbind
    except (OSError, AttributeError) as error:
        log.info("numa_library_missing library=%s error=%s", library, error)
        return None
    mbind.argtypes = [
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_uint,
    ]
    mbind.restype = ctypes.c_long
    return mbind


def _library_of_package() -> str | None:
    """File name of the library that ``py-libnuma`` has loaded; its import fails hard where there is none."""
    try:
        name = import_module("numa").LIBNUMA._name  # noqa: SLF001 - ctypes has no other
    except (ImportError, OSError, AttributeError):
        return None
    return name if isinstance(name, str) else None


ROOT = Path("/")
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``available_bytes`` may still be taken before ``source`` says no."""

    source: str
    available_bytes: int


def memory_limits(root: Path = ROOT) -> tuple[MemoryLimit, ...]:
    """All limits that apply to this process, the tightest first; none where nothing could be read."""
    limits = [*_meminfo(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    return tuple(sorted(limits, key=lambda limit: limit.available_bytes))


def _meminfo(root: Path) -> Iterator[MemoryLimit]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield MemoryLimit("MemAvailable", int(line.split()[1]) * 1024)


def _cgroup_v2(root: Path) -> Iterator[MemoryLimit]:
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            for folder in _upwards(mount, line[3:]):
                yield from _limit_of(folder, "memory.max", "memory.current")


def _cgroup_v1(root: Path) -> Iterator[MemoryLimit]:
    mount = root / "sys/fs/cgroup/memory"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for folder in _upwards(mount, path):
                yield from _limit_of(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A cgroup's folder and those above. In a container the path may be the host's, and only the mount
    exists."""
    folder = mount / path.strip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def _limit_of(folder: Path, limit_name: str, used_name: str) -> Iterator[MemoryLimit]:
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is not None and used is not None and limit < _UNLIMITED:
        yield MemoryLimit(str(folder / limit_name), max(0, limit - used))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
