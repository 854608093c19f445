"""A mapping in parts is a mapping, and no part of it grows large."""

from __future__ import annotations

import random

from cachesvc.ledger.counted_tables import PARTS, KeyQueue, PartedDict
from cachesvc.ledger.reuse_stats import LEAST_REMEMBERED, Miss, Reuse
from cachesvc.model.words import KEY_BYTES


def test_it_does_what_a_dict_does() -> None:
    rng = random.Random(4)
    parted: PartedDict[int] = PartedDict()
    plain: dict[bytes, int] = {}
    keys = [rng.randbytes(KEY_BYTES) for _ in range(300)]
    for turn in range(3000):
        key = rng.choice(keys)
        if key in plain and rng.random() < 0.5:
            del parted[key], plain[key]
        else:
            parted[key] = plain[key] = turn
        assert parted.get(key) == plain.get(key)
        assert (key in parted) == (key in plain)
    assert dict(parted) == plain
    assert len(parted) == len(plain)
    assert sorted(parted.values()) == sorted(plain.values())
    assert parted.get(b"unknown", -1) == -1


def test_no_part_is_large() -> None:
    """Found by measuring: one insertion in a million moved all others, 64 ms of them."""
    rng = random.Random(5)
    parted: PartedDict[int] = PartedDict()
    for at in range(40_000):
        parted[rng.randbytes(KEY_BYTES)] = at
    assert max(map(len, parted.parts)) < 2 * len(parted) / PARTS


def test_a_queue_of_keys_keeps_their_order_and_no_part_is_large() -> None:
    """Found by measuring: a full list of 65,536 keys, of which the first went one by one, held the loop for 4 ms."""
    rng = random.Random(6)
    queue, plain = KeyQueue(), list[bytes]()
    for turn in range(40_000):
        more = [rng.randbytes(KEY_BYTES) for _ in range(2)]
        queue.extend([*more, more[0]])
        plain += more
        if turn % 3 == 0:
            assert queue.first == plain[0]
            queue.drop_first()
            assert plain.pop(0) not in queue
    assert list(queue) == plain
    assert len(queue) == len(plain)
    assert all(key in queue for key in plain[:100])
    assert max(map(len, queue.known.parts)) < 2 * len(queue) / PARTS


def test_a_generation_is_forgotten_little_by_little() -> None:
    rng = random.Random(6)
    reuse = Reuse()
    half = LEAST_REMEMBERED // 2
    keys = [rng.randbytes(KEY_BYTES) for _ in range(4 * half)]
    for count, key in enumerate(keys, start=1):
        reuse.dropped([(key, "device")], Miss.EVICTED, 0)
        assert reuse.remembered == (count if count < half else half + count % half)
        reuse.computed(key)
    assert reuse.recomputed == {("device", Miss.EVICTED): len(keys)}
