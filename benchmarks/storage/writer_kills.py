"""Kill a writer of ``file`` in mid-write again and again: ``python -m benchmarks.storage.writer_kills FOLDER``.

The writer keeps paths of blocks in a folder that is always full, so that every write evicts. After each SIGKILL the
next daemon's engine is started on the folder. Then no file is left of the dead one, what lies there is within the
capacity, every object verifies, and of every path that is there in part its beginning is there.
"""

from __future__ import annotations

import json
import mmap
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.recording import parser_of, save
from cachesvc.storage.file.engine import FileOptions, FileStorage
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import ObjectName, Outcome, Part, Scope

SCOPE = Scope(b"k" * 32, b"l" * 8)
PART = Part(0, 0, 1)
PATH_BLOCKS = 12
PAGE_BYTES = 60 << 10
CAPACITY_BLOCKS = 64
LATEST_SECONDS = 0.15
"""A writer is killed so long after it began to write, or earlier."""
FAR = 1e9


class Found(NamedTuple):
    """Findings of the next daemon after a kill."""

    objects: int
    wrong: int
    headless: int
    over_bytes: int
    orphans: int

    @property
    def is_sound(self) -> bool:
        """True where nothing is wrong."""
        return not (self.wrong or self.headless or self.over_bytes > 0 or self.orphans)


def options(folder: Path) -> FileOptions:
    """A folder that 64 objects fill."""
    return FileOptions(str(folder), CAPACITY_BLOCKS * (PAGE_BYTES + 4096), floor=0)


def path_of(number: int) -> list[ObjectName]:
    """Names of the blocks of a path, root first."""
    return [ObjectName(SCOPE, f"{number:08}.{at:08}".encode().ljust(32, b"."), PART) for at in range(PATH_BLOCKS)]


def parents(path: Sequence[ObjectName]) -> list[bytes]:
    """Keys of the blocks above."""
    return [b"", *(name.key for name in path[:-1])]


class Caller:
    """Calls that are waited for."""

    def __init__(self, folder: Path) -> None:
        self.backend = FileStorage(options(folder))
        self.store = ObjectStore(self.backend, time.monotonic)
        self.store.start()
        self.backend.join_scan()
        self._memory = memoryview(mmap.mmap(-1, PATH_BLOCKS * (PAGE_BYTES + 4096)))
        self.pages = [(self._memory[at * 65536 : at * 65536 + PAGE_BYTES],) for at in range(PATH_BLOCKS)]

    def put(self, path: Sequence[ObjectName]) -> list[Outcome]:
        """Keep a path."""
        for name, (page,) in zip(path, self.pages, strict=True):
            page[:] = (name.key * (PAGE_BYTES // 32 + 1))[:PAGE_BYTES]
        return self._wait(Verb.PUT, path)

    def get(self, path: Sequence[ObjectName]) -> list[Outcome]:
        """Read and verify a path."""
        return self._wait(Verb.GET, path)

    def _wait(self, verb: Verb, path: Sequence[ObjectName]) -> list[Outcome]:
        told: dict[int, Outcome] = {}
        ended = threading.Event()

        def each(index: int, outcome: Outcome) -> None:
            told[index] = outcome
            if len(told) == len(path):
                ended.set()

        self.store.prepare(verb, path, self.pages, FAR, each, print, parents(path))()
        ended.wait()
        return [told[at] for at in range(len(path))]


def write(folder: Path, first: int) -> None:
    """Write paths until the process is killed."""
    caller, number = Caller(folder), first
    print("writing", flush=True)
    while True:
        caller.put(path_of(number))
        print(number, flush=True)
        number += 1


def kill_once(folder: Path, first: int, rng: random.Random) -> int:
    """Kill a writer some time after it has begun; returns the number of the next path."""
    command = [sys.executable, "-m", "benchmarks.storage.writer_kills", str(folder), "--write", str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    threading.Event().wait(rng.random() * LATEST_SECONDS)
    process.send_signal(signal.SIGKILL)
    written = [line for line in process.stdout if line.endswith("\n")]
    process.wait()
    return first + len(written) + 1


def look(folder: Path, paths: int) -> Found:
    """Start the next daemon's engine, and look at everything."""
    caller = Caller(folder)
    try:
        daemons = list((folder / "daemons").iterdir())
        left = [path for daemon in daemons for path in daemon.iterdir() if path.name not in ("lock", "clock")]
        orphans = len(left) + len(daemons) - 1
        orphans += sum(path.name not in ("clock", "daemons", "format", "objects") for path in folder.iterdir())
        files = [path for path in (folder / "objects").rglob("*of*") if path.is_file()]
        over = sum(path.stat().st_blocks * 512 for path in files) - options(folder).capacity
        there = {bytes.fromhex(path.name[:64]) for path in files}
        wrong = headless = 0
        for number in range(paths):
            path = path_of(number)
            has = [name.key in there for name in path]
            if any(has):
                headless += sum(has[has.index(False) :]) if False in has else 0
                told = caller.get(path)
                wrong += sum(outcome is not Outcome.OK for outcome, is_there in zip(told, has, strict=True) if is_there)
        return Found(len(files), wrong, headless, over, orphans)
    finally:
        caller.backend.close()


def run(folder: Path, kills: int, seed: int = 0) -> list[Found]:
    """Kill and look, ``kills`` times."""
    rng, first, found = random.Random(seed), 0, []
    for _ in range(kills):
        first = kill_once(folder, first, rng)
        found.append(look(folder, first + 1))
    return found


def main() -> int:
    """1 where anything was wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=int, help="be the writer, from this path on")
    said = parser.parse_args()
    if said.write is not None:
        write(said.folder, said.write)
    began = time.monotonic()
    found = run(said.folder, said.kills, said.seed)
    result = {
        "what": "SIGKILL of a writer in mid-write: what the next daemon finds",
        "kills": said.kills,
        "unsound": sum(not each.is_sound for each in found),
        "objects_verified": sum(each.objects for each in found),
        "wrong": sum(each.wrong for each in found),
        "most_blocks_behind_a_hole": max(each.headless for each in found),
        "most_over_capacity_bytes": max(each.over_bytes for each in found),
        "orphans": sum(each.orphans for each in found),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=2))
    save(said, result)
    return int(bool(result["unsound"]))


if __name__ == "__main__":
    sys.exit(main())
