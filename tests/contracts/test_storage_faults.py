"""Results of an ``ObjectStore`` are right or absent, whatever the engine behind it does or says."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import Checked, Outcome, Part
from tests.contracts.storage_rig import PAGE_BYTES, WHOLE_PART, Bench, SimTurning, content_of, name_of
from tests.contracts.test_storage import ENGINES
from tests.sim.sim_storage import FAULTS, SimStorage

OK, MISS, WRONG, LATE = Outcome.OK, Outcome.MISS, Outcome.WRONG, Outcome.LATE


@pytest.fixture(params=sorted(ENGINES))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(ENGINES[request.param](tmp_path)).start()


def test_two_objects_that_change_places_are_both_wrong(bench: Bench) -> None:
    """Another request's KV from the store: the header names another block."""
    one, other = name_of("a"), name_of("b")
    bench.keep([one, other])
    bench.turning.swap(one, other)
    assert bench.fetch([one, other]) == [WRONG, WRONG]
    assert bench.store.counts.items[Verb.GET, WRONG] == 2
    assert bench.fetch([one, other]) == [MISS, MISS], "and are removed"


def test_ranks_that_change_places_are_wrong(bench: Bench) -> None:
    ranks = [name_of("a", Part(0, rank, 2)) for rank in range(2)]
    bench.keep(ranks)
    bench.turning.swap(*ranks)
    assert bench.fetch(ranks) == [WRONG, WRONG]


def test_a_changed_byte_anywhere_is_wrong(bench: Bench) -> None:
    rng, name = random.Random(7), name_of("a")
    places = [*range(128), *(rng.randrange(PAGE_BYTES) for _ in range(64))]
    for place in places:
        bench.keep([name])
        head = place < 128

        def change(content: bytes, place: int = place, head: bool = head) -> bytes:
            at = place if head else len(content) - PAGE_BYTES + place
            return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]

        bench.turning.damage(name, change)
        assert bench.fetch([name]) == [WRONG], place


def test_an_object_that_ends_too_soon_is_not_it(bench: Bench) -> None:
    """Whatever was written of it when its writer died."""
    name = name_of("a")
    for share in range(0, 100, 7):
        bench.keep([name])
        bench.turning.damage(name, lambda content, share=share: content[: len(content) * share // 100])  # type: ignore[misc]
        assert bench.fetch([name]) in ([WRONG], [MISS]), share
        assert bench.fetch([name]) == [MISS], "and is removed"


def test_a_torn_object_is_wrong_wherever_it_was_torn(bench: Bench) -> None:
    """New bytes up to some place, those of before behind it: a slot that was written over."""
    name, before = name_of("a"), name_of("b")
    bench.keep([before])
    old = bench.turning.content(before)
    for share in range(1, 100, 9):
        bench.keep([name])
        bench.turning.damage(name, partial(_torn, old, share))
        assert bench.fetch([name]) == [WRONG], share


def _torn(old: bytes, share: int, content: bytes) -> bytes:
    cut = len(content) * share // 100
    return content[:cut] + old[cut:]


def test_an_object_that_vanishes_between_exists_and_get_is_a_miss(bench: Bench) -> None:
    name = name_of("a")
    bench.keep([name])
    assert bench.exists([name]) == [True]
    bench.turning.backend.remove([name])
    assert bench.fetch([name]) == [MISS]


def test_a_check_of_everything_finds_what_is_wrong_and_removes_it(bench: Bench) -> None:
    names = [name_of(key, WHOLE_PART) for key in "abcdef"]
    bench.keep(names, (1, 4096, 37))
    assert bench.store.check_all() == Checked(6, bench.turning.backend.status().size_bytes)
    bench.turning.swap(names[0], names[1])
    bench.turning.damage(names[2], lambda content: content[:-40] + bytes(40))
    bench.turning.damage(names[3], lambda content: content[:60])
    found = bench.store.check_all()
    assert found.wrong in (3, 4), "the last 40 bytes of a file may be padding"
    assert bench.store.check_all().wrong == 0
    assert bench.fetch(names[4:], (1, 4096, 37)) == [OK, OK]


# -- an engine that lies ------------------------------------------------------------------------------------------


def sim(**odds: float) -> tuple[Bench, SimStorage]:
    engine = SimStorage(odds=odds)
    return Bench(SimTurning(engine)).start(), engine


def test_an_ok_that_was_never_true() -> None:
    """The writer died in the middle, and a later put gets OK: a get alone shows it."""
    bench, engine = sim(lose=1.0)
    assert bench.keep([name_of("a")]) == [OK]
    assert bench.fetch([name_of("a")]) == [MISS]
    engine.odds = {}
    assert bench.keep([name_of("a")]) == [OK]
    assert bench.fetch([name_of("a")]) == [OK], "put again, it is there"


def test_a_hint_is_no_hit() -> None:
    bench, _ = sim(invent=1.0)
    assert bench.exists([name_of("a")]) == [True]
    assert bench.store.backend.expects(name_of("a").scope, name_of("a").key, [Part(0, 0, 1)]) == 1
    assert bench.fetch([name_of("a")]) == [MISS]


def test_an_engine_that_answers_twice_is_heard_once() -> None:
    bench, _ = sim(twice=1.0, fail=1.0)
    assert bench.keep([name_of("a")]) == [Outcome.FAILED]
    assert bench.fetch([name_of("a")]) == [Outcome.FAILED]


def test_a_deadline_ends_the_wait_and_not_the_call() -> None:
    """A frozen engine writes four seconds later: the memory is in quarantine until it has."""
    bench, engine = sim()
    name = name_of("a")
    bench.keep([name])
    engine.frozen = True
    asked = bench.get([name], deadline=bench.now + 1)
    bench.turning.crank()
    assert bench.store.expire() == 0
    bench.now += 2
    assert bench.store.expire() == 1
    assert asked.told() == [LATE]
    assert asked.back == [], "its memory is not free yet"
    assert bench.store.expire() == 1, "and it is reported once"
    engine.frozen = False
    engine.land_late()
    assert asked.content(0) == content_of(name), "the bytes did land"
    assert asked.told() == [LATE]
    assert asked.back == [0]
    assert bench.store.expire() == 0


def test_of_a_slow_call_what_has_come_counts() -> None:
    bench, engine = sim()
    names = [name_of(key) for key in "abcd"]
    bench.keep(names)
    asked = bench.get(names, deadline=bench.now + 1)
    engine.step()
    engine.step()
    bench.now += 2
    bench.store.expire()
    assert Counter(asked.told()) == {OK: 2, LATE: 2}
    bench.now -= 2
    engine.land_late()
    assert sorted(asked.back) == [at for at, outcome in enumerate(asked.told()) if outcome is LATE]


def test_headers_of_late_calls_are_not_used_again() -> None:
    bench, engine = sim()
    bench.keep([name_of("a")])
    engine.frozen = True
    bench.get([name_of("a")], deadline=bench.now + 1)
    bench.now += 2
    bench.store.expire()
    taken = bench.store.heads.take(200)
    for head in taken:
        head[:] = bytes(len(head))
    engine.land_late()
    assert not any(map(any, taken)), "the late header landed elsewhere"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_goes_wrong_what_is_ok_is_right(seed: int) -> None:
    """``Bench.fetch`` compares every byte of what is OK."""
    rng = random.Random(seed)
    odds = {fault: rng.choice((0.0, 0.1, 0.3)) for fault in FAULTS}
    engine = SimStorage(seed, odds)
    bench = Bench(SimTurning(engine)).start()
    names = [name_of(f"{at}", Part(0, at % 2, 2)) for at in range(8)]
    told: Counter[Outcome] = Counter()
    for _ in range(30):
        bench.keep(rng.sample(names, 3))
        told.update(bench.fetch(rng.sample(names, 3)))
    engine.odds = {}
    bench.turning.backend.remove(names)
    bench.keep(names)
    assert bench.fetch(names) == [OK] * 8, "and it is as good as new once nothing goes wrong"
    assert told
