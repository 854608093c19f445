"""The tree of blocks on disk: a block never goes before its descendants, whatever order they were found in."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cachesvc.policy.eviction import EVICTION_POLICIES
from cachesvc.storage.file.catalogue import Catalogue, Entry
from cachesvc.storage.seam import ObjectName, Part, Rank, Use, oldest_first
from tests.contracts.storage_rig import OTHER, SCOPE, name_of
from tests.long_cases import looped

EVERYTHING = 0


def chain(prefix: str, blocks: int) -> list[ObjectName]:
    return [name_of(f"{prefix}{at:05}") for at in range(blocks)]


def write(catalogue: Catalogue, names: Sequence[ObjectName], used: int, first: int = 0) -> None:
    """Blocks of one path, root first, one ms apart."""
    for at, name in enumerate(names[first:], start=first):
        parent = names[at - 1].key if at else b""
        catalogue.add(name, 4096, used + at, parent)


def gone(catalogue: Catalogue, objects: int) -> list[ObjectName]:
    return [entry.name for entry in catalogue.take_oldest(objects, EVERYTHING)]


def test_the_tail_of_a_path_goes_before_its_head() -> None:
    catalogue, names = Catalogue(), chain("a", 60)
    write(catalogue, names, used=100)
    assert gone(catalogue, 20) == names[:39:-1]
    assert all(name in catalogue for name in names[:40])


def test_what_was_used_last_keeps_its_whole_path() -> None:
    catalogue, hot, cold = Catalogue(), chain("hot", 8), chain("cold", 8)
    write(catalogue, hot, used=0)
    write(catalogue, cold, used=1000)
    catalogue.use_blocks(SCOPE, [Use(hot[-1].key)], None, 5000)
    assert gone(catalogue, 8) == cold[::-1]
    assert gone(catalogue, 8) == hot[::-1]


def test_a_shared_beginning_goes_last_and_inherits_the_last_use_below_it() -> None:
    catalogue, head = Catalogue(), chain("head", 4)
    write(catalogue, head, used=0)
    for branch, used in (("x", 100), ("y", 300), ("z", 200)):
        catalogue.add(name_of(branch), 4096, used, head[-1].key)
    other = chain("other", 2)
    write(catalogue, other, used=250)
    names = gone(catalogue, 99)
    assert names == [name_of("x"), name_of("z"), *other[::-1], name_of("y"), *head[::-1]]


@looped("seed", range(10), range(30))
def test_headers_that_are_read_in_any_order_give_the_same_tree(seed: int) -> None:
    rng, catalogue = random.Random(seed), Catalogue()
    parents: dict[ObjectName, bytes] = {}
    for at in range(200):
        above = rng.choice([*parents, None])
        parents[name_of(f"{at:05}")] = b"" if above is None else above.key
    found = [Entry(name, 4096, rng.choice((0, 7, 7, 9)), None) for name in parents]
    rng.shuffle(found)
    catalogue.add_all(found)
    assert gone(catalogue, 1) == [], "no order is known before the headers are"
    rng.shuffle(found)
    for entry in found:
        catalogue.link(entry.name, parents[entry.name])
    assert catalogue.unlinked == 0
    before: set[bytes] = set()
    while names := gone(catalogue, rng.randrange(1, 9)):
        for name in names:
            assert name.key not in {parents[each] for each in parents if each.key not in before}, "leaves only"
            before.add(name.key)
    assert len(before) == 200
    assert (len(catalogue), catalogue.size_bytes) == (0, 0)


def test_a_block_whose_parent_is_lost_and_comes_again_hangs_below_it() -> None:
    catalogue, names = Catalogue(), chain("a", 3)
    write(catalogue, names, used=0)
    assert catalogue.drop(names[1])
    catalogue.add(names[1], 4096, 50, names[0].key)
    assert gone(catalogue, 3) == names[::-1]


def test_what_no_hit_reaches_for_a_block_above_is_missing_goes_first() -> None:
    catalogue, cut, whole = Catalogue(), chain("cut", 6), chain("whole", 3)
    write(catalogue, whole, used=10)
    write(catalogue, cut, used=1000)
    catalogue.drop(cut[2])
    catalogue.demote_detached()
    assert gone(catalogue, 3) == cut[:2:-1]
    assert gone(catalogue, 3) == whole[::-1]
    catalogue.add(cut[2], 4096, 2000, cut[1].key)
    assert gone(catalogue, 9) == cut[2::-1]


def test_all_objects_of_a_block_go_together() -> None:
    catalogue = Catalogue()
    parts = [Part(0, rank, 2) for rank in range(2)]
    for block in range(3):
        for part in parts:
            parent = name_of(f"{block - 1}").key if block else b""
            catalogue.add(name_of(f"{block}", part), 4096 + part.rank, block, parent)
    keys = b"".join(name_of(f"{block}").key for block in range(3))
    assert catalogue.expects(SCOPE, keys, parts) == 3
    assert {entry.name for entry in catalogue.take_oldest(1, 0)} == {name_of("2", part) for part in parts}
    assert catalogue.expects(SCOPE, keys, parts) == 2
    assert catalogue.drop(name_of("1", parts[0]))
    assert catalogue.expects(SCOPE, keys, parts) == 1
    assert catalogue.expects(SCOPE, keys, parts[1:]) == 2
    assert catalogue.size_bytes == 2 * 4096 + 1 + 4097


def test_the_time_to_live_of_a_block_ends_with_that_of_those_below_it() -> None:
    catalogue, names = Catalogue(), chain("a", 4)
    write(catalogue, names, used=0)
    catalogue.use_blocks(SCOPE, [Use(names[2].key)], None, 500)
    far = 1 << 40
    assert [entry.name for entry in catalogue.take_oldest(9, far, before=400)] == [names[3]]
    assert [entry.name for entry in catalogue.take_oldest(9, far, before=501)] == names[2::-1]


def test_what_is_held_stays_with_all_above_it_and_can_go_afterwards() -> None:
    catalogue, names, other = Catalogue(), chain("a", 3), chain("b", 3)
    write(catalogue, names, used=0)
    write(catalogue, other, used=100)
    catalogue.hold(names[2])
    assert gone(catalogue, 99) == other[::-1]
    catalogue.let_go(names[2])
    assert gone(catalogue, 99) == names[::-1]


def test_rows_are_used_again_for_others() -> None:
    catalogue = Catalogue()
    for turn in range(50):
        names = chain(f"{turn}", 10)
        write(catalogue, names, used=turn * 100)
        assert gone(catalogue, 10) == names[::-1]
        write(catalogue, names[:1], used=0)
        assert gone(catalogue, 1) == names[:1]


@pytest.mark.parametrize("policy", ["lru", "lfu", "deepest_first"])
def test_the_order_is_the_policy_s(policy: str) -> None:
    rank: Rank = EVICTION_POLICIES[policy].rank
    catalogue = Catalogue(rank)
    long, short, often = chain("long", 6), chain("short", 2), chain("often", 3)
    write(catalogue, often, used=0)
    write(catalogue, long, used=100)
    write(catalogue, short, used=50)
    for now in (10, 20):
        catalogue.use_blocks(SCOPE, [Use(often[-1].key)], None, now)
    first = {"lru": often[-1], "lfu": short[-1], "deepest_first": long[-1]}[policy]
    assert gone(catalogue, 1) == [first]


class TellsClasses:
    """Class 2 is worth nothing."""

    def choose(self, queues: Sequence[int], ages: Sequence[float]) -> int:
        return list(queues).index(2) if 2 in queues else max(range(len(ages)), key=ages.__getitem__)


def test_a_policy_that_knows_classes_chooses_among_their_oldest_blocks() -> None:
    catalogue = Catalogue(oldest_first, lambda: 10_000)
    old, worthless, other = chain("old", 2), chain("worthless", 2), [name_of("other", scope=OTHER)]
    write(catalogue, old, used=0)
    write(catalogue, worthless, used=1000)
    write(catalogue, other, used=500)
    chooser = TellsClasses()
    catalogue.use_blocks(SCOPE, [Use(old[-1].key, 1), Use(worthless[-1].key, 2)], chooser, 2000)
    assert gone(catalogue, 1) == other, "between scopes the oldest leaf says whose turn it is"
    assert gone(catalogue, 2) == worthless[::-1], "the block above inherits the class"
    assert gone(catalogue, 2) == old[::-1]


def test_what_was_used_is_to_be_saved_once() -> None:
    catalogue, names = Catalogue(), chain("a", 3)
    write(catalogue, names, used=0)
    assert catalogue.take_unsaved(9) == []
    catalogue.use_blocks(SCOPE, [Use(names[1].key)], None, 70)
    catalogue.use(names[1], 80)
    assert [(entry.name, entry.used) for entry in catalogue.take_unsaved(9)] == [(names[1], 80)]
    assert catalogue.take_unsaved(9) == []


def test_ends_of_paths_that_are_known_can_go_while_the_rest_is_read() -> None:
    catalogue = Catalogue()
    names = [ObjectName(SCOPE, bytes([at]) * 32, Part(0, 0, 1)) for at in range(4)]
    catalogue.add_all([Entry(name, 10, at, None) for at, name in enumerate(names)])
    assert catalogue.take_oldest(9, 0) == [], "nothing is known of what lies below"
    assert [catalogue.unlinked_at(row) for row in catalogue.unlinked_rows()] == names, "the longest unused first"
    assert catalogue.unlinked_at(catalogue.link(names[3], names[2].key)) == names[2]
    assert catalogue.link(names[2], b"") == -1
    assert [entry.name for entry in catalogue.take_oldest(9, 0)] == [names[3], names[2]]
    assert catalogue.unlinked == 2
    assert catalogue.unlinked_at(99) is None
