"""``file`` keeps what is of use: leaf-first eviction, uses in memory, ages, restarts; and the capacity throughout."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.storage.writer_kills import run
from cachesvc.storage.file.disk import Moments
from cachesvc.storage.file.engine import FileOptions, FileStorage
from cachesvc.storage.file.space import object_path, size_of
from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import ObjectName, Outcome, Part, Use
from tests.contracts.storage_rig import FAR, SCOPE, Asked, Bench, FileTurning, content_of, name_of

OK = Outcome.OK
MIB = 1 << 20
PAGE = 60 << 10
OBJECT = PAGE + 4096
PART = Part(0, 0, 1)


@dataclass
class Machine:
    """The machine's clocks, ms."""

    since_boot: int = 5_000_000
    wall: int = 1_800_000_000_000

    def moments(self) -> Moments:
        return Moments(lambda: self.since_boot, lambda: self.wall, lambda: "boot")

    def runs(self, seconds: float) -> None:
        self.since_boot += int(seconds * 1000)
        self.wall += int(seconds * 1000)


@contextmanager
def opened(folder: Path, machine: Machine | None = None, **options: float) -> Iterator[Bench]:
    made = FileOptions(str(folder), **{"capacity": 64 * MIB, "floor": 0, **options})  # type: ignore[arg-type]
    turning = FileTurning(made)
    if machine is not None:
        turning.backend = FileStorage(made, moments=machine.moments())
    bench = Bench(turning).start()
    turning.backend.join_scan()
    try:
        yield bench
    finally:
        bench.turning.close()


def path_of(prefix: str, blocks: int) -> list[ObjectName]:
    return [name_of(f"{prefix}{at:03}") for at in range(blocks)]


def above(names: list[ObjectName]) -> list[bytes]:
    """Parents of a path's blocks."""
    return [names[at - 1].key if at else b"" for at in range(len(names))]


def keep(bench: Bench, names: list[ObjectName], size: int = PAGE) -> list[Outcome]:
    """Write blocks of one path, each below the one before."""
    return put(bench, names, above(names), size)


def put(bench: Bench, names: list[ObjectName], parents: list[bytes], size: int = PAGE) -> list[Outcome]:
    """Write blocks below others."""
    asked = Asked(names, [bench.memory((size,)) for _ in names])
    for name, (page,) in zip(names, asked.pages, strict=True):
        page[:] = content_of(name, size)
    bench.store.prepare(Verb.PUT, names, asked.pages, FAR, asked.each, asked.back.append, parents)()
    return asked.told()


def fetch(bench: Bench, names: list[ObjectName]) -> list[Outcome]:
    """Read a path, and look at every byte."""
    asked = Asked(names, [bench.memory((PAGE,)) for _ in names])
    bench.store.prepare(Verb.GET, names, asked.pages, FAR, asked.each, asked.back.append, above(names))()
    told = asked.told()
    for at, name in enumerate(names):
        assert told[at] is not OK or asked.content(at) == content_of(name, PAGE)
    return told


def until(holds: Callable[[], bool]) -> None:
    """Wait for what the engine's own thread does."""
    pause = threading.Event()
    while not holds():
        pause.wait(0.01)


def there(bench: Bench, names: list[ObjectName]) -> int:
    """Number of leading blocks of a path that it has."""
    expected = bench.store.backend.expects(SCOPE, b"".join(name.key for name in names), [PART])
    assert expected is not None
    return expected


def files(folder: Path) -> list[Path]:
    return sorted((folder / "objects").rglob("*of*"))


def allocated(folder: Path) -> int:
    """Bytes that all objects, and files to be written over, take on the disk; some may go while it is looked at."""
    daemons = [path for path in (folder / "daemons").rglob("*") if path.is_file()]
    return sum(size_of(str(path)) for path in (*files(folder), *daemons))


TIMES: dict[str, Callable[[int], int]] = {
    "equal": lambda _: 1_700_000_000,
    "before 1970": lambda at: -1000 - at,
    "in the future": lambda at: 9_000_000_000 + at,
    "reversed": lambda at: 1_700_000_000 - at,
    "any": lambda at: random.Random(at).randrange(-(10**9), 10**10),
}


@pytest.mark.parametrize("times", TIMES)
def test_after_a_restart_what_stays_of_a_path_is_its_beginning(times: str, tmp_path: Path) -> None:
    folder, names = tmp_path / "cache", path_of("a", 40)
    with opened(folder) as bench:
        assert set(keep(bench, names)) == {OK}
    for at, name in enumerate(names):
        second = TIMES[times](at)
        os.utime(object_path(folder / "objects", name), (second, second))
    with opened(folder, capacity=20 * OBJECT, rescan=0.05) as bench:
        until(lambda: len(files(folder)) <= 20)
        assert keep(bench, path_of("another", 3)) == [OK] * 3
        left = there(bench, names)
        assert 0 < left <= 17
        assert len(files(folder)) == left + 3
        assert fetch(bench, names[:left]) == [OK] * left


def test_writes_right_after_a_start_are_within_the_capacity(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as bench:
        keep(bench, path_of("a", 100))
    made = FileOptions(str(folder), capacity=30 * OBJECT, floor=0)
    bench = Bench(FileTurning(made)).start()
    try:
        before = allocated(folder)
        for at in range(50):
            keep(bench, [name_of(f"{at}")])
            assert allocated(folder) <= max(before, 30 * OBJECT)
        assert allocated(folder) <= 30 * OBJECT
    finally:
        bench.turning.close()


def test_a_use_in_memory_keeps_a_path_on_disk_now_and_after_a_restart(tmp_path: Path) -> None:
    folder, machine, hot = tmp_path / "cache", Machine(), path_of("hot", 8)
    with opened(folder, machine, capacity=40 * OBJECT) as bench:
        keep(bench, hot)
        for turn in range(12):
            machine.runs(1)
            keep(bench, path_of(f"cold{turn}", 8))
            bench.turning.backend.used(SCOPE, [Use(hot[-1].key)], None)
            assert there(bench, hot) == 8
        last = path_of("cold11", 8)
        machine.runs(1)
        bench.turning.backend.used(SCOPE, [Use(hot[-1].key)], None)
    with opened(folder, machine, capacity=40 * OBJECT) as bench:
        machine.runs(1)
        keep(bench, path_of("new", 30))
        assert there(bench, hot) == 8
        assert there(bench, last) < 8


def test_the_time_to_live_counts_uses_in_memory_and_time_alone(tmp_path: Path) -> None:
    folder, machine, names, cold = tmp_path / "cache", Machine(), path_of("a", 4), path_of("b", 4)
    with opened(folder, machine, ttl=60, rescan=0.01) as bench:
        keep(bench, names)
        keep(bench, cold)
        machine.wall += 8 * 86_400_000
        for _ in range(5):
            machine.runs(50)
            bench.turning.backend.used(SCOPE, [Use(names[-1].key)], None)
        machine.wall -= 80 * 86_400_000
        until(lambda: len(files(folder)) == 4)
        assert (there(bench, names), there(bench, cold)) == (4, 0)
    machine.runs(30)
    with opened(folder, machine, ttl=60, rescan=0.01) as bench:
        assert there(bench, names) == 4
        machine.runs(31)
        until(lambda: not files(folder))


def test_bytes_are_those_that_the_disk_has_allocated(tmp_path: Path) -> None:
    folder, names = tmp_path / "cache", path_of("a", 4)
    with opened(folder) as bench:
        keep(bench, names)
    os.truncate(object_path(folder / "objects", names[3]), 3 * MIB)  # a hole takes no room
    with opened(folder) as bench:
        totals = bench.turning.backend.totals()
        assert totals.size_bytes == allocated(folder) < MIB
        assert fetch(bench, names) == [OK] * 4


def test_objects_that_cannot_be_removed_count_are_shown_and_keep_what_is_above_them(tmp_path: Path) -> None:
    folder, stuck = tmp_path / "cache", path_of("stuck", 8)
    with opened(folder, capacity=16 * OBJECT, rescan=0.05) as bench:
        keep(bench, stuck)
        last = Path(object_path(folder / "objects", stuck[-1]))
        content = last.read_bytes()
        last.unlink()
        last.mkdir()  # stands for what an operator, a snapshot or a network filesystem holds
        for at in range(60):
            keep(bench, path_of(f"{at}", 2), PAGE // 2)  # of another size: its file is removed, and not written over
            assert bench.turning.backend.totals().size_bytes <= 16 * OBJECT
        assert bench.turning.backend.totals().stuck_objects == 1
        assert there(bench, stuck) == 8, "what is above it was not evicted"
        assert bench.turning.backend.status().stuck_bytes == OBJECT
        last.rmdir()
        last.write_bytes(content)
        until(lambda: bench.turning.backend.totals().stuck_objects == 0)
        keep(bench, path_of("more", 16))
        assert allocated(folder) <= 16 * OBJECT


def test_wrong_objects_that_cannot_be_removed_count_too(tmp_path: Path) -> None:
    folder, names = tmp_path / "cache", path_of("a", 2)
    with opened(folder, capacity=4 * OBJECT, rescan=0.05) as bench:
        keep(bench, names)
        path = Path(object_path(folder / "objects", names[1]))
        path.unlink()
        path.mkdir()
        bench.turning.backend.remove(names[1:])
        assert there(bench, names) == 1
        assert bench.turning.backend.status().stuck_objects == 1
        path.rmdir()
        until(lambda: bench.turning.backend.totals().stuck_objects == 0)
        assert keep(bench, names[1:]) == [OK], "and it may be written again"


def test_a_writer_that_is_killed_in_mid_write_leaves_what_verifies_and_nothing_else(tmp_path: Path) -> None:
    """SIGKILL again and again while every write evicts. ``python -m benchmarks.storage.writer_kills`` does it more
    often."""
    for found in run(tmp_path / "cache", kills=4):
        assert found.objects > 0
        assert found.is_sound, found


def test_a_block_becomes_an_object_after_the_one_above_it(tmp_path: Path) -> None:
    """However many threads write a path."""
    with opened(tmp_path / "cache", writers=8) as bench:
        names = path_of("a", 40)
        asked = Asked(names, [bench.memory((PAGE,)) for _ in names])
        order: list[int] = []

        def each(index: int, outcome: Outcome) -> None:
            order.extend([index] * (outcome is OK))
            assert there(bench, names) >= index + 1, "all above it are there"
            asked.each(index, outcome)

        bench.store.prepare(Verb.PUT, names, asked.pages, FAR, each, asked.back.append, above(names))()
        assert asked.told() == [OK] * 40
        assert sorted(order) == list(range(40))
