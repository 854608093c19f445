"""Sharing between engines: one computes, the others find it in place, with the right bytes."""

from __future__ import annotations

import pytest

from tests.e2e.engine import BLOCK_TOKENS, PLAIN, WINDOW_TOKENS, WINDOWED, Engine, prompt
from tests.e2e.remote import RemoteEngine
from tests.e2e.rig import Node

pytestmark = pytest.mark.usefixtures("each_way")


def test_another_process_hits_in_place(node: Node) -> None:
    with RemoteEngine(node.socket, name="a") as a, Engine(node.socket, name="b") as b:
        a.ask("start")
        first = a.ask("serve", tokens=prompt(1, 8))
        assert (first["device"], first["computed"]) == (0, 8)

        keys = b.keys(prompt(1, 8))
        with b.lease.match(keys) as sequence:
            assert sequence.device_blocks == 8
            assert [table.tolist() for table in sequence.tables] == first["pages"]
            assert b.bad(sequence, keys, range(8)) == []
            assert sequence.sealed_blocks == 8

        longer = b.serve(prompt(1, 11))
        assert (longer.device, longer.computed, longer.bad) == (8, 3, [])
        back = a.ask("serve", tokens=prompt(1, 11))
        assert (back["device"], back["computed"], back["bad"]) == (11, 0, [])
        assert back["pages"] == longer.pages
    counters = node.counters()
    assert counters.get("h2d_bytes", 0) == 0
    assert counters.get("d2h_bytes", 0) == 0
    assert node.pages("sealed") == 11


def test_what_an_engine_computed_outlives_it(node: Node) -> None:
    with RemoteEngine(node.socket, name="first") as first:
        first.ask("start")
        first.ask("serve", tokens=prompt(2, 6))
    with RemoteEngine(node.socket, name="second") as second:
        assert second.ask("start")["existed"]
        served = second.ask("serve", tokens=prompt(2, 6))
    assert (served["device"], served["computed"], served["bad"]) == (6, 0, [])


def test_of_two_that_compute_the_same_the_first_wins_and_the_second_is_told(node: Node) -> None:
    with RemoteEngine(node.socket, name="a") as a, Engine(node.socket, name="b") as b:
        a.ask("start")
        tokens = prompt(3, 5)
        keys = b.keys(tokens)
        assert a.ask("match", name="s", tokens=tokens)["computing"] == 0
        a.ask("allocate", name="s", blocks=5)
        a.ask("fill", name="s", first=0, last=5)

        sequence = b.lease.match(keys)
        assert (sequence.hit_blocks, sequence.computing_blocks) == (0, 5)
        sequence.allocate(5)
        b.fill(sequence, keys, range(5))
        own = sequence.tables[0].tolist()

        won = a.ask("publish", name="s", blocks=3)
        assert won["duplicates"] == []
        told = sequence.publish(5)
        assert told.sealed_blocks == 5
        assert list(told.duplicate_positions) == [0, 1, 2]
        assert sequence.tables[0].tolist() == won["tables"][0][:3] + own[3:]
        assert b.bad(sequence, keys, range(5)) == []
        assert sequence.recycle(0).pages == 3

        late = a.ask("publish", name="s", blocks=5)
        assert late["duplicates"] == [3, 4]
        assert late["tables"][0] == sequence.tables[0].tolist()
        sequence.release()
        a.ask("release", name="s")
        assert node.counters()["duplicate_blocks"] == 5
        assert node.pages("sealed") == 5
        assert node.pages("private") == 0


def test_computing_blocks_are_told_only_while_somebody_computes_them(node: Node) -> None:
    with RemoteEngine(node.socket) as a, Engine(node.socket) as b:
        a.ask("start")
        keys = b.keys(prompt(4, 6))
        a.ask("match", name="s", tokens=prompt(4, 4))
        a.ask("allocate", name="s", blocks=4)
        with b.lease.match(keys) as sequence:
            assert sequence.computing_blocks == 4
        a.ask("fill", name="s", first=0, last=2)
        a.ask("publish", name="s", blocks=2)
        with b.lease.match(keys) as sequence:
            assert (sequence.device_blocks, sequence.computing_blocks) == (2, 2)
        a.ask("release", name="s")
        with b.lease.match(keys) as sequence:
            assert (sequence.device_blocks, sequence.computing_blocks) == (2, 0)


def test_two_tenants_never_share(node: Node) -> None:
    tokens = prompt(5, 4)
    with (
        Engine(node.socket, salt=b"tenant a") as a,
        Engine(node.socket, salt=b"tenant b") as b,
        Engine(node.socket, salt=b"tenant a") as a2,
    ):
        a.serve(tokens)
        assert a.registration.namespace != b.registration.namespace
        assert b.serve(tokens).device == 0
        with b.lease.match(a.keys(tokens)) as guessed:  # not even with the other's keys
            assert guessed.hit_blocks == 0
        assert a2.serve(tokens).device == 4


def test_tenants_get_no_bytes_of_each_other_through_reused_memory(node: Node) -> None:
    with Engine(node.socket, salt=b"tenant a", device_pages=12_000) as a:  # most of the device pool
        a.serve(prompt(6, 64))
    with Engine(node.socket, salt=b"tenant b", device_pages=12_000) as b:  # the idle model is evicted
        assert not b.registration.existed
        assert not any(plane.any() for plane in b.pool.planes.values())
    assert node.counters()["models_dismissed"] == 1


def test_idle_models_leave_their_host_memory_to_new_ones(node: Node) -> None:
    """Found by reading: a second model had no host tier for its life, as long as the first one was known."""
    pools = []
    for salt in (b"tenant a", b"tenant b"):
        with Engine(node.socket, salt=salt, device_pages=16, host_pages=None) as engine:
            pools.append(engine.registration.host_pages)
            assert engine.serve(prompt(6, 8)).bad == []
    assert pools[0] == pools[1]
    assert min(pools[0]) > 1000
    assert node.counters()["models_dismissed"] == 1


def test_a_window_gives_pages_back_and_still_hits(node: Node) -> None:
    blocks, window_blocks = 10, WINDOWED.window_blocks(1)
    with RemoteEngine(node.socket, layout="windowed") as a, Engine(node.socket, layout=WINDOWED) as b:
        a.ask("start")
        keys = b.keys(prompt(7, blocks))
        with b.lease.match(keys) as sequence:
            sequence.allocate(blocks)
            free = node.pages("free", "replica 0")
            b.fill(sequence, keys, range(blocks))
            sequence.publish(blocks - 2)
            sequence.recycle(blocks * BLOCK_TOKENS)
            dead = (blocks * BLOCK_TOKENS - WINDOW_TOKENS + 1) // BLOCK_TOKENS
            assert dead > 0
            full, window = (table.tolist() for table in sequence.tables)
            assert min(full) >= 0
            assert window[:dead] == [-1] * dead
            assert min(window[dead:]) >= 0
            assert b.bad(sequence, keys, range(blocks)) == []
            sequence.publish(blocks)
        assert node.pages("free", "replica 0") >= free

        served = a.ask("serve", tokens=prompt(7, blocks + 2))
        assert (served["device"], served["computed"], served["bad"]) == (blocks, 2, [])
        full, window = served["pages"]
        assert min(full) >= 0
        assert window.count(-1) == blocks - len([page for page in window[:blocks] if page >= 0])
        assert len([page for page in window[:blocks] if page >= 0]) <= window_blocks


def test_private_window_pages_are_free_at_once(node: Node) -> None:
    with Engine(node.socket, layout=WINDOWED) as engine:
        keys = engine.keys(prompt(8, 12))
        with engine.lease.match(keys) as sequence:
            sequence.allocate(12)
            free = node.pages("free", "replica 0")
            dead = (12 * BLOCK_TOKENS - WINDOW_TOKENS + 1) // BLOCK_TOKENS
            assert sequence.recycle(12 * BLOCK_TOKENS).pages == dead
            assert node.pages("free", "replica 0") == free + dead
            assert sequence.recycle(12 * BLOCK_TOKENS).pages == 0


def test_a_share_of_the_pool_is_granted_in_full(node: Node) -> None:
    with Engine(node.socket, model="half", device_pages=None, host_pages=None) as engine:
        assert engine.registration.device_pages[0] > 1000
        assert engine.registration.host_pages[0] > 1000
        assert engine.pool.pages == engine.registration.device_pages
        assert engine.serve(prompt(9, 64)).bad == []
        assert PLAIN.page_bytes(0) * engine.registration.device_pages[0] <= 64 << 20
