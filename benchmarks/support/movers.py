"""Mover processes of a daemon under measurement."""

from __future__ import annotations

from pathlib import Path


def movers_of(daemon: int) -> dict[str, int]:
    """Process ids of a daemon's movers, by device."""
    found = dict[str, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text(encoding="utf-8").split("\0")
            parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:  # the process ended meanwhile
            continue
        if "cachesvc.mover" in words and parent == daemon:
            found[words[words.index("--gpu") + 1]] = int(folder.name)
    return found
