"""``file`` alone: capacity, a full filesystem, restarts, torn files, and several daemons on one folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.model.errors import CacheError, InvalidRequest
from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.file.engine import FileOptions, FileStorage, file_options
from cachesvc.storage.file.space import BATCH, Space, object_path
from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import ObjectName, Outcome, Part
from cachesvc.storage.spec import parse_storage
from tests.contracts.storage_rig import FAR, OTHER, PAGE_BYTES, SCOPE, Asked, Bench, FileTurning, name_of

OK, MISS, BUSY, WRONG = Outcome.OK, Outcome.MISS, Outcome.BUSY, Outcome.WRONG
MIB = 1 << 20


@contextmanager
def opened(folder: Path, **options: float) -> Iterator[Bench]:
    made = FileOptions(str(folder), **{"capacity": 64 * MIB, "floor": 0, **options})  # type: ignore[arg-type]
    bench = Bench(FileTurning(made)).start()
    try:
        yield bench
    finally:
        bench.turning.close()


def on_disk(folder: Path) -> int:
    """Bytes of every file below, of any owner."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def scanned(bench: Bench) -> None:
    """Until it knows what is there."""
    backend = bench.turning.backend
    assert isinstance(backend, FileStorage)
    backend.join_scan()


def test_a_gibibyte_through_64_mebibytes(tmp_path: Path) -> None:
    """It never has more than its capacity, and what is there at the end is what came last."""
    with opened(tmp_path / "cache") as bench:
        names = [name_of(f"{at}") for at in range(1024)]
        for first in range(0, 1024, 32):
            assert bench.keep(names[first : first + 32], (MIB,)) == [OK] * 32
            assert on_disk(tmp_path) <= 64 * MIB + 4096, "never, counting what is about to be written over"
        status = bench.turning.backend.status()
        assert 48 <= status.objects <= 63
        assert status.evicted_objects == 1024 - status.objects
        assert bench.fetch(names[-48:], (MIB,)) == [OK] * 48
        assert bench.fetch(names[:48], (MIB,)) == [MISS] * 48


def test_what_was_used_stays(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", capacity=16 * MIB) as bench:
        names = [name_of(f"{at}") for at in range(64)]
        bench.keep(names[:8], (MIB,))
        for name in names[8:]:
            assert bench.fetch(names[:4], (MIB,)) == [OK] * 4
            bench.keep([name], (MIB,))
        assert bench.fetch(names[4:8], (MIB,)) == [MISS] * 4


def test_an_object_larger_than_the_capacity_is_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", capacity=MIB) as bench:
        assert bench.keep([name_of("small")], (4096,)) == [OK]
        assert bench.keep([name_of("large")], (MIB,)) == [BUSY]
        assert bench.fetch([name_of("small")], (4096,)) == [OK], "and nothing went for it"


def test_objects_of_many_sizes_stay_within_the_capacity(tmp_path: Path) -> None:
    rng = random.Random(3)
    with opened(tmp_path / "cache", capacity=4 * MIB) as bench:
        for at in range(300):
            size = rng.choice((4096, 65536, 300_000, MIB))
            assert bench.keep([name_of(f"{at}")], (size,)) == [OK]
            assert bench.fetch([name_of(f"{at}")], (size,)) == [OK]
            assert on_disk(tmp_path) <= 4 * MIB + 4096


def test_a_small_filesystem_that_is_full_harms_nothing(tmp_path: Path) -> None:
    """ENOSPC: writes are refused for a while, reads go on."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with opened(folder / "cache", capacity=64 * MIB) as bench:
            names = [name_of(f"{at}") for at in range(16)]
            told = [bench.keep([name], (512 << 10,))[0] for name in names]
            kept = [name for name, outcome in zip(names, told, strict=True) if outcome is OK]
            assert BUSY in told
            assert 4 <= len(kept) < 8
            assert bench.fetch(kept, (512 << 10,)) == [OK] * len(kept)
            assert set(told) == {OK, BUSY}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_the_floor_of_the_filesystem_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", floor=1 << 60) as bench:
        assert bench.keep([name_of("a")]) == [BUSY], "no disk has an exbibyte left"
        assert bench.fetch([name_of("a")]) == [MISS]


def test_what_is_not_used_for_long_goes(tmp_path: Path) -> None:
    catalogue = Catalogue()
    space = Space(catalogue, tmp_path, 64 * MIB, 0)
    names = [name_of(f"{at}") for at in range(BATCH + 8)]
    for at, name in enumerate(names):
        catalogue.add(name, 4096, used=at)
    assert space.shrink(before=BATCH + 4) == BATCH, "a batch at a time"
    assert space.shrink(before=BATCH + 4) == 4
    assert space.shrink(before=BATCH + 4) == 0
    assert [name for name in names if name in catalogue] == names[-4:]


def test_what_it_evicts_is_told(tmp_path: Path) -> None:
    gone: list[ObjectName] = []
    with opened(tmp_path / "cache", capacity=4 * MIB) as bench:
        bench.turning.backend.watch(gone.extend)
        names = [name_of(f"{at}") for at in range(8)]
        for name in names:
            assert bench.keep([name], (MIB,)) == [OK]
        there = [name for name in names if bench.fetch([name], (MIB,)) == [OK]]
        assert gone == [name for name in names if name not in there]


def test_what_was_read_before_it_was_known_can_go_afterwards() -> None:
    """Another daemon's object, of a scope that this one had nothing of."""
    catalogue, name = Catalogue(), name_of("a")
    catalogue.hold(name)
    catalogue.add(name, 4096, used=1)
    assert catalogue.take_oldest(1, 0) == [], "it is being read"
    catalogue.let_go(name)
    assert [entry.name for entry in catalogue.take_oldest(1, 0)] == [name]


def test_after_a_restart_the_order_of_use_is_that_of_before(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as bench:
        names = [name_of(f"{at}") for at in range(8)]
        bench.keep(names, (MIB,))
    for at, name in enumerate(names):
        os.utime(object_path(tmp_path / "cache" / "objects", name), (1000 + (at * 3) % 8, 1000 + (at * 3) % 8))
    with opened(tmp_path / "cache", capacity=9 * MIB) as bench:
        scanned(bench)
        assert bench.store.backend.expects(SCOPE, names[0].key, [Part(0, 0, 1)]) == 1
        bench.keep([name_of("one more"), name_of("and more")], (MIB,))
        gone = [at for at, outcome in enumerate(bench.fetch(names, (MIB,))) if outcome is MISS]
        assert gone == [at for at in range(8) if (at * 3) % 8 < len(gone)]
        assert gone


KILLED = """
    import sys
    from cachesvc.storage.file.engine import FileOptions
    from cachesvc.storage.seam import Outcome
    from tests.contracts.storage_rig import Bench, FileTurning, name_of
    bench = Bench(FileTurning(FileOptions(sys.argv[1], 1 << 30, floor=0))).start()
    print("writing", flush=True)
    for first in range(0, 1 << 20, 16):
        names = [name_of(f"{sys.argv[2]} {at}") for at in range(first, first + 16)]
        for name, outcome in zip(names, bench.keep(names, (65536,))):
            if outcome is Outcome.OK:  # BUSY while the scan of a start still runs, as on a loaded machine
                print(name.key.hex(), flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_objects_and_nothing_else(tmp_path: Path) -> None:
    """SIGKILL in mid-write, again and again: what it had told of is there, every byte; nothing is half there."""
    told: list[str] = []
    folder = tmp_path / "cache"
    for life in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(life)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        for at, line in enumerate(process.stdout):
            if at:
                told.append(line.strip())
            if at == 40 + life * 7:
                process.send_signal(signal.SIGKILL)
        process.wait()
    with opened(folder) as bench:
        scanned(bench)
        names = [name_of("")._replace(key=bytes.fromhex(key)) for key in told if len(key) == 64]
        assert len(names) > 200
        asked = bench.get(names, sizes=(65536,))
        assert asked.told() == [OK] * len(names)
        left = [path for path in (folder / "daemons").rglob("*") if path.is_file() and path.name != "lock"]
        assert left == [], "what the dead were writing is removed"
        assert bench.store.counts.items.total() == len(names)


def test_two_daemons_on_one_folder(tmp_path: Path) -> None:
    """Each finds what the other has written, none removes what the other is writing, and both stay within bounds."""
    with opened(tmp_path / "cache", capacity=8 * MIB) as one, opened(tmp_path / "cache", capacity=8 * MIB) as other:
        assert one.keep([name_of("a"), name_of("b", scope=OTHER)]) == [OK, OK]
        assert other.fetch([name_of("a"), name_of("b", scope=OTHER)]) == [OK, OK]
        assert other.keep([name_of("a")]) == [OK]
        one.turning.backend.purge(None)
        assert other.fetch([name_of("a")]) == [MISS]
        assert other.keep([name_of("a")]) == [OK], "it is written anew"


def test_many_daemons_that_start_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    benches: list[Bench] = []
    failures: list[object] = []

    def start() -> None:
        try:
            benches.append(Bench(FileTurning(FileOptions(str(tmp_path / "cache"), 8 * MIB, floor=0))).start())
        except CacheError as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list((tmp_path / "cache" / "daemons").iterdir())) == 12
    for at, bench in enumerate(benches):
        assert bench.keep([name_of(f"{at}")]) == [OK]
        bench.turning.close()
    assert list((tmp_path / "cache" / "daemons").iterdir()) == []


def test_readers_race_with_writers_and_evictions(tmp_path: Path) -> None:
    """Read while it is written, evicted, written over, by two daemons: whole or not there, and never wrong."""
    names = [name_of(f"{at}") for at in range(40)]
    with opened(tmp_path / "cache", capacity=2 * MIB) as one, opened(tmp_path / "cache", capacity=2 * MIB) as other:
        failures: list[object] = []

        def work(bench: Bench, seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(150):
                    chosen = rng.sample(names, 4)
                    if rng.random() < 0.5:
                        bench.keep(chosen, (65536,))
                    else:
                        told = bench.fetch(chosen, (65536,))
                        assert set(told) <= {OK, MISS}, told
            except BaseException as error:  # noqa: BLE001 - told by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(bench, at)) for at, bench in enumerate((one, other, one, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert on_disk(tmp_path) <= 4 * MIB + 65536


def test_folders_stay_narrow(tmp_path: Path) -> None:
    """Keys are spread over 4,096 folders by their first digits; a look-up lists none of them."""
    paths = {object_path(tmp_path, name_of("")._replace(key=os.urandom(32))) for _ in range(20_000)}
    widths = Counter(path.rpartition("/")[0] for path in paths)
    assert len(widths) > 3900
    assert max(widths.values()) < 30


def test_many_objects_are_found_soon(tmp_path: Path) -> None:
    """A catalogue of a quarter of a million: what is asked for costs no more than among few."""
    catalogue = Catalogue()
    name = name_of("")
    names = [name._replace(key=at.to_bytes(32, "big")) for at in range(250_000)]
    catalogue.add_all([Entry(each, 4096, at) for at, each in enumerate(names)])
    keys = b"".join(each.key for each in names[:2048])
    assert catalogue.expects(SCOPE, keys, [name.part]) == 2048
    assert [entry.name for entry in catalogue.take_oldest(3, 0)] == names[:3]
    assert catalogue.status(250_000).objects == 249_997


def test_another_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with opened(tmp_path) as bench:
        assert "not empty" in bench.turning.backend.totals().problem
    assert (tmp_path / "mine.txt").read_text() == "precious"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "format").write_text("cachesvc storage, files, format 99\n")
    with opened(tmp_path / "cache") as bench:
        assert "another format" in bench.turning.backend.totals().problem
    with opened(tmp_path / "mine.txt") as bench:
        assert "cannot be used" in bench.turning.backend.totals().problem


def test_a_folder_of_strange_files_is_read_all_the_same(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as bench:
        bench.keep([name_of("a")])
        path = Path(object_path(tmp_path / "cache" / "objects", name_of("a")))
    path.with_name("README").write_text("?")
    path.with_name(path.name.replace(".0.", ".77777.")).write_text("?")
    (tmp_path / "cache" / "objects" / "elsewhere").mkdir()
    path.parent.with_name("zzz").mkdir()
    with opened(tmp_path / "cache") as bench:
        scanned(bench)
        assert bench.turning.backend.status().objects == 1
        assert bench.fetch([name_of("a")]) == [OK]


def test_a_link_in_place_of_an_object_is_not_followed(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as bench:
        bench.keep([name_of("a")])
        path = Path(object_path(tmp_path / "cache" / "objects", name_of("a")))
        path.rename(tmp_path / "stolen")
        path.symlink_to(tmp_path / "stolen")
        assert bench.fetch([name_of("a")]) == [Outcome.FAILED]


def test_a_file_is_read_from_unaligned_memory_too(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as bench:
        room = bytearray(PAGE_BYTES + 64)
        for at in (0, 1, 63):
            page = memoryview(room)[at : at + PAGE_BYTES]
            assert bench.keep([name_of("a")]) == [OK]
            asked = Asked([name_of("a")], [(page,)])
            bench.store.prepare(Verb.GET, asked.names, asked.pages, FAR, asked.each, asked.back.append)()
            assert asked.told() == [OK]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("file:/cache", "needs capacity"),
        ("file:cache?capacity=1GiB", "absolute path"),
        ("file:/cache?capacity=1GiB&size=3", "unknown option 'size'"),
        ("file:/cache?capacity=many", "capacity"),
        ("file:/cache?capacity=1KiB", "at least"),
        ("file:/cache?capacity=1GiB&ttl=soon", "is not a time"),
        ("file:/cache?capacity=1GiB&rescan=99999999999", "is longer than 3650d"),
        ("file:/cache?capacity=1GiB&readers=1.5", "is not a whole number"),
        ("file:/ca\0che?capacity=1GiB", "absolute path"),
        ("file:/cache?capacity=1GiB&write=sometimes", "never, selective, through"),
        ("file:/cache?capacity=1GiB&capacity=2GiB", "twice"),
        ("file:/cache?capacity=1GiB&readers=0", "1 to 64"),
        ("s4:/cache", "KIND"),
        ("file", "KIND"),
    ],
)
def test_what_cannot_be_is_told(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        file_options(parse_storage(text, ("file",)))


def test_every_option_is_read() -> None:
    spec = parse_storage(
        "file:/var/cache/cachesvc?capacity=200GiB&floor=5GiB&ttl=7d&readers=8&writers=3&rescan=1m&direct=0"
        "&write=through&write_rate=1GiB&wait=100ms&deadline=2s&recompute=20000",
        ("file",),
    )
    assert file_options(spec) == FileOptions("/var/cache/cachesvc", 200 << 30, 5 << 30, 7 * 86400.0, 8, 3, 60.0, 0)
    tier = spec.tier
    assert (tier.write.value, tier.write_rate, tier.wait, tier.deadline, tier.recompute) == (
        "through",
        1 << 30,
        0.1,
        2.0,
        20000.0,
    )
