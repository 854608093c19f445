"""Figures of processes from the kernel: memory beside pools, memory files held, children not waited for."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20
POOL_NAME = "memfd:kvcache-"


def bytes_beside_pools(pid: int, host_pool_bytes: int) -> int:
    """A daemon's own anonymous memory: without slabs and timelines, without the host pool, which is populated whole,
    and without libraries, whose share of it depends on other processes."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss_Anon":
            total += int(rest.split()[0]) << 10
    return total - host_pool_bytes


def memory_files(pid: int) -> int:
    """Slabs and timelines that a process has mapped, or holds by descriptor."""
    files = {number for entry in list(Path(f"/proc/{pid}/fd").iterdir()) if (number := _pool_file(entry))}
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return len(files | {int(line.split()[4]) for line in maps if POOL_NAME in line})


def zombies() -> list[int]:
    """Children of this process that ended and were not waited for."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            state = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state == "Z":
                found.append(int(child))
    return found


def _pool_file(entry: Path) -> int:
    """The file's number, where a descriptor is that of a slab or a timeline; else 0."""
    try:
        return entry.stat().st_ino if POOL_NAME in str(entry.readlink()) else 0
    except OSError:  # closed meanwhile
        return 0
