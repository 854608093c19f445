"""What the kernel knows of processes: memory beside pools, memory files held, children not waited for."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20
POOL_NAME = "memfd:kvcache-"


def bytes_beside_pools(pid: int, host_pool_bytes: int) -> int:
    """A daemon's own anonymous memory: without slabs and timelines, without the host pool, which is populated whole,
    and without libraries, whose share of it depends on who else runs."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss_Anon":
            total += int(rest.split()[0]) << 10
    return total - host_pool_bytes


def memory_files(pid: int) -> int:
    """Slabs and timelines that a process has mapped, or holds by descriptor."""
    files = {entry.stat().st_ino for entry in _open_files(pid) if POOL_NAME in _target(entry)}
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


def _open_files(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/fd").iterdir())


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed meanwhile
        return ""
