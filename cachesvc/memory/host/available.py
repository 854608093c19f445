"""Memory that may still be taken: by the kernel's estimate, and by every cgroup above this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
