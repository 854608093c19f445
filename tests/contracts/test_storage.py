"""Contract of every storage engine: objects come back whole or not at all, and each item ends once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.file.engine import FileOptions
from cachesvc.storage.seam import ObjectName, Outcome, Part, StorageBackend
from tests.contracts.mooncake_rig import shared_turning
from tests.contracts.s3_rig import shared_bucket
from tests.contracts.storage_rig import (
    FAR,
    OTHER,
    PAGE_BYTES,
    SCOPE,
    WHOLE_PART,
    Bench,
    FileTurning,
    SimTurning,
    Turning,
    name_of,
)

OK, MISS, WRONG, BUSY = Outcome.OK, Outcome.MISS, Outcome.WRONG, Outcome.BUSY
Make = Callable[[Path], Turning]
CAPACITY = 64 << 20
ENGINES: dict[str, Make] = {
    "file": lambda folder: FileTurning(FileOptions(str(folder / "cache"), CAPACITY, floor=0)),
    "mooncake": shared_turning,
    "s3": shared_bucket,
    "sim": lambda _: SimTurning(),
}
"""Every engine, over a folder of its own."""


@pytest.fixture(params=sorted(ENGINES))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(ENGINES[request.param](tmp_path)).start()
    yield made
    made.turning.close()


def test_what_was_kept_comes_back(bench: Bench) -> None:
    names = [name_of(key) for key in "abc"]
    assert bench.keep(names) == [OK] * 3
    assert bench.fetch(names) == [OK] * 3
    assert bench.exists([*names, name_of("d")]) == [True, True, True, False]


def test_what_was_never_kept_is_a_miss(bench: Bench) -> None:
    bench.keep([name_of("a")])
    assert bench.fetch([name_of("b"), name_of("a")]) == [MISS, OK]


def test_a_name_is_all_of_it(bench: Bench) -> None:
    """Namespace, layout, key, group, rank and the number of ranks: another one of any is another object."""
    name = name_of("a")
    bench.keep([name])
    others = [
        name_of("b"),
        name._replace(scope=OTHER),
        name._replace(scope=SCOPE._replace(layout=b"m" * 8)),
        *(name._replace(part=part) for part in (Part(1, 0, 1), Part(0, 1, 2), Part(0, 0, 2), WHOLE_PART)),
    ]
    assert bench.fetch(others) == [MISS] * len(others)
    assert bench.keep(others) == [OK] * len(others)
    assert bench.fetch([name, *others]) == [OK] * (len(others) + 1)


def test_an_object_of_many_pieces(bench: Bench) -> None:
    """Pages of several groups, of sizes that no border divides."""
    name, sizes = name_of("a", WHOLE_PART), (1, 4095, 8192, 37)
    assert bench.keep([name], sizes) == [OK]
    assert bench.fetch([name], sizes) == [OK]


@pytest.mark.parametrize("size", [1, 127, 128, 4096, 4097, 3 * PAGE_BYTES])
def test_any_size_comes_back(bench: Bench, size: int) -> None:
    assert bench.keep([name_of("a")], (size,)) == [OK]
    assert bench.fetch([name_of("a")], (size,)) == [OK]


def test_another_size_is_not_it(bench: Bench) -> None:
    name = name_of("a")
    bench.keep([name])
    assert bench.fetch([name], (PAGE_BYTES // 2,)) == [WRONG]
    assert bench.fetch([name]) == [MISS], "what is wrong is removed"


def test_a_key_that_is_kept_twice(bench: Bench) -> None:
    name = name_of("a")
    assert bench.keep([name, name]) == [OK, OK]
    assert bench.fetch([name]) == [OK]


def test_what_is_removed_is_gone(bench: Bench) -> None:
    names = [name_of(key) for key in "ab"]
    bench.keep(names)
    bench.turning.backend.remove([names[0], name_of("never")])
    bench.turning.crank()
    assert bench.fetch(names) == [MISS, OK]


def test_a_restart_loses_nothing_that_was_kept(bench: Bench) -> None:
    names = [name_of(key) for key in "abc"]
    bench.keep(names)
    again = Bench(bench.turning.reopen())
    again.store.start()
    assert again.fetch([*names, name_of("d")]) == [OK, OK, OK, MISS]
    again.turning.close()


def test_it_expects_what_it_has_from_the_first_on(bench: Bench) -> None:
    parts = (Part(0, 0, 2), Part(0, 1, 2))
    bench.keep([name_of(key, part) for key in "abd" for part in parts] + [name_of("c", parts[0])])
    keys = b"".join(name_of(key).key for key in "abcd")
    expected = bench.store.backend.expects(SCOPE, keys, parts)
    assert expected in (2, None)
    assert bench.store.backend.expects(SCOPE, keys[3 * KEY_BYTES :], parts) in (1, None)
    assert bench.store.backend.expects(OTHER, keys, parts) in (0, None)
    assert bench.store.backend.expects(SCOPE, b"", parts) in (0, None)


def test_what_has_not_begun_by_its_deadline_is_busy(bench: Bench) -> None:
    name = name_of("a")
    bench.keep([name])
    late = bench.get([name], deadline=-1.0)
    bench.turning.crank()
    assert late.told() == [BUSY]
    assert bytes(late.pages[0][0]) == bytes(PAGE_BYTES), "nothing was written"


def test_nothing_begins_after_the_end(bench: Bench) -> None:
    bench.keep([name_of("a")])
    bench.turning.close()
    for asked in (bench.get([name_of("a")]), bench.put([name_of("b")])):
        assert asked.told() == [BUSY]
    bench.turning.close()


def test_purging_a_scope_leaves_others(bench: Bench) -> None:
    mine, others = [name_of("a"), name_of("b")], [name_of("a", scope=OTHER)]
    bench.keep(mine + others)
    assert bench.turning.backend.purge(SCOPE) == 2
    assert bench.fetch(mine + others) == [MISS, MISS, OK]
    assert bench.turning.backend.purge(None) == 1
    assert bench.fetch(others) == [MISS]


def test_it_tells_what_it_keeps(bench: Bench) -> None:
    backend: StorageBackend = bench.turning.backend
    backend.describe(SCOPE, "a model")
    bench.keep([name_of("a"), name_of("b"), name_of("a", scope=OTHER)])
    status = backend.status()
    assert status.objects == 3
    assert status.size_bytes >= 3 * PAGE_BYTES
    assert (status.scopes[SCOPE].objects, status.scopes[SCOPE].label) == (2, "a model")
    assert status.scopes[OTHER].objects == 1
    assert backend.totals()[:2] == (status.objects, status.size_bytes)


def test_many_at_once_each_end_once(bench: Bench) -> None:
    names = [name_of(f"key {at}") for at in range(64)]
    puts = [bench.put(names[at : at + 8]) for at in range(0, 64, 8)]
    gets = [bench.get(names[at : at + 16]) for at in range(0, 64, 16)]
    bench.turning.crank()
    assert all(outcome is OK for asked in puts for outcome in asked.told())
    assert all(outcome in (OK, MISS) for asked in gets for outcome in asked.told())
    assert bench.fetch(names) == [OK] * 64


def test_an_item_without_names(bench: Bench) -> None:
    none: list[ObjectName] = []
    assert bench.put(none).told() == bench.get(none, FAR).told() == []
