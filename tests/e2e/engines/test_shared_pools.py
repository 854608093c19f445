"""Groups of one pool: one free list, from which each group takes what it needs; full attention, a window and states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cachesvc_client import (
    KEY_BYTES,
    NO_PAGE,
    InvalidRequest,
    Layout,
    NotOwned,
    Plane,
    PlaneGroup,
    PoolExhausted,
)
from cachesvc_client.layouts.families import Parts, part_group

from tests.e2e.engine import BLOCK_TOKENS, WINDOWED, Engine, prompt
from tests.e2e.hybrid import FULL, HYBRID, STATE, WINDOW, serve_hybrid
from tests.e2e.rig import Node

pytestmark = pytest.mark.usefixtures("each_way")

PAGES = 24

FULL_PLANE = Plane("k", 0, "full", (2, BLOCK_TOKENS, 4), "float16")


def parted(name: str, window_tokens: int, part_tokens: int, layer: int) -> tuple[list[PlaneGroup], list[Plane]]:
    """A window with pages of ``part_tokens``."""
    plane = Plane("k", layer, name, (2, part_tokens, 4), "float16")
    group = PlaneGroup(name, window_tokens, pool="kv")
    return part_group(group, [plane], block_tokens=BLOCK_TOKENS, part_tokens=part_tokens)


ONE = replace(WINDOWED, groups=tuple(replace(group, pool="kv") for group in WINDOWED.groups))


def test_groups_of_one_pool_take_the_pages_that_they_need(node: Node) -> None:
    with Engine(node.socket, layout=ONE, device_pages=PAGES, host_pages=PAGES) as first:
        assert first.registration.device_pages == (PAGES, PAGES)
        assert first.pool.pages == (PAGES, PAGES)
        full, window = (first.pool.slab(name) for name in ("full", "window"))
        assert (full.ctypes.data, full.nbytes) == (window.ctypes.data, window.nbytes)
        assert full.nbytes == PAGES * ONE.page_bytes(0), "the group with most planes decides"
        with Engine(node.socket, layout=ONE, device_pages=PAGES, name="second") as second:
            for seed in range(4):  # evicts, to the host and for good
                served = first.serve(prompt(seed, 9))
                assert (served.computed, served.bad) == (9, [])
                mine = [{page for page in pages if page >= 0} for pages in served.pages]
                assert mine[0].isdisjoint(mine[1])
                assert len(mine[0]) == 9
                again = second.serve(prompt(seed, 10))
                assert (again.device, again.computed, again.bad) == (9, 1, [])
            back = second.serve(prompt(3, 9))
            assert (back.device + back.host, back.bad) == (9, [])
            keys = first.keys(prompt(9, 4))
            sequence = first.lease.match(keys)
            sequence.allocate(4)
            first.fill(sequence, keys, range(4))
            first.lease.wait_tickets([ticket.id for ticket in sequence.swap_out().tickets])
            assert second.serve(prompt(10, 11)).bad == []
            sequence.swap_in()
            sequence.wait_loaded(30)
            assert first.bad(sequence, keys, range(4)) == []
            sequence.release()
        assert node.problems() == []
        del full, window
    assert not any(node.held().values())


def test_a_long_prompt_takes_all_of_the_pool_and_a_fixed_split_could_not(node: Node) -> None:
    with Engine(node.socket, layout=ONE, device_pages=PAGES) as engine:
        keys = engine.keys(prompt(1, PAGES - 6))
        with engine.lease.match(keys) as sequence:
            for blocks in range(2, PAGES - 5, 2):
                sequence.allocate(blocks)
                engine.fill(sequence, keys, range(blocks - 2, blocks))
                sequence.publish(blocks)
                sequence.recycle(blocks * BLOCK_TOKENS)
            with pytest.raises(PoolExhausted):
                sequence.allocate(PAGES)
            assert engine.bad(sequence, keys, range(PAGES - 6)) == []
        assert engine.serve(prompt(1, PAGES - 6)).device == PAGES - 6
        assert node.problems() == []


def test_reserved_pages_are_the_first_of_the_pool(node: Node) -> None:
    with Engine(node.socket) as engine:
        model = engine.client.register("one@1", ONE, device_pages=[7, 7], host_pages=[0, 0], reserved_pages=1)
        with engine.client.open_lease(model) as lease, lease.match(b"") as sequence:
            sequence.allocate(3)
            assert sorted(sequence.tables[0].tolist() + sequence.tables[1].tolist()) == [1, 2, 3, 4, 5, 6]
        with pytest.raises(InvalidRequest, match=r"share one pool.*got \[4, 6\]"):
            engine.client.register("other@1", ONE, device_pages=[4, 6], host_pages=[0, 0])
        assert node.problems() == []


def test_a_hit_needs_the_state_at_its_end(node: Node) -> None:
    with Engine(node.socket, layout=HYBRID, device_pages=64, host_pages=64) as first:
        strides = {span.strides[0] for span in first.pool.group_planes("state").values()}
        strides |= {span.strides[0] for span in first.pool.group_planes("full").values()}
        assert len(strides) == 1, "a page lies in a row"
        served = serve_hybrid(first, prompt(1, 12))
        assert (served.computed, served.bad) == (12, [])
        with Engine(node.socket, layout=HYBRID, device_pages=64, name="second") as second:
            for asked, found in ((12, 12), (11, 8), (9, 8), (7, 4), (3, 0)):
                with second.lease.match(second.keys(prompt(1, asked))) as sequence:
                    assert (sequence.device_blocks, sequence.full_blocks) == (found, asked)
            again = serve_hybrid(second, prompt(1, 15))
            assert (again.device, again.computed, again.bad) == (12, 3, [])
        assert node.problems() == []
    assert not any(node.held().values())


def test_states_and_windows_go_to_the_host_and_come_back(node: Node) -> None:
    with Engine(node.socket, layout=HYBRID, device_pages=32, host_pages=96) as engine:
        for seed in range(5):
            assert serve_hybrid(engine, prompt(seed, 12)).bad == []
        back = [serve_hybrid(engine, prompt(seed, 12)) for seed in range(5)]
        assert [served.bad for served in back] == [[]] * 5
        assert sum(served.host for served in back) > 0
        assert node.problems() == []
    assert not any(node.held().values())


def test_a_state_is_sealed_at_the_callers_word_alone(node: Node) -> None:
    with Engine(node.socket, layout=HYBRID, device_pages=64) as engine:
        keys = engine.keys(prompt(1, 4))
        with engine.lease.match(keys) as sequence, engine.lease.match(keys) as other:
            for each in (sequence, other):
                each.allocate(4, positions={STATE: [1, 3]})
                assert [int(page != NO_PAGE) for page in each.tables[STATE]] == [0, 1, 0, 1]
                engine.fill(each, keys, range(4))
            sequence.publish(4)
            with engine.lease.match(keys) as none:
                assert (none.hit_blocks, none.full_blocks) == (0, 4)
            early, late = (int(sequence.tables[STATE][position]) for position in (1, 3))
            assert not sequence.publish(4, states={STATE: {1: early}}).kept, "one step later"
            with engine.lease.match(keys) as some:
                assert some.hit_blocks == 2
            other.publish(4)
            mine = int(other.tables[STATE][1])
            assert [(cells.group, list(cells.pages)) for cells in other.publish(4, states={STATE: {1: mine}}).kept] == [
                (STATE, [mine])
            ]
            for wrong, error in (({FULL: {3: late}}, InvalidRequest), ({STATE: {4: late}}, InvalidRequest)):
                with pytest.raises(error):
                    sequence.publish(4, states=wrong)
            with pytest.raises(NotOwned):
                sequence.publish(4, states={STATE: {3: early}})
            assert not sequence.publish(4, states={STATE: {3: late}}).kept
        assert engine.lease.match(keys).release() == 0
        assert serve_hybrid(engine, prompt(1, 4)).device == 4
        assert node.problems() == []
    assert not any(node.held().values())


def test_the_stock_is_the_pools(node: Node) -> None:
    with Engine(node.socket, layout=HYBRID, device_pages=64) as engine, engine.lease.step([2, 1, 1]) as steps:
        keys = engine.keys(prompt(1, 8))
        steps.submit()
        with engine.lease.match(keys) as sequence:
            sequence.grow_from_stock(1, positions={WINDOW: [], STATE: [0]})
            sequence.grow_from_stock(1)
            assert [[int(page != NO_PAGE) for page in table] for table in sequence.tables] == [[1, 1], [0, 1], [1, 0]]
            steps.submit()
            assert node.problems() == []
            engine.fill(sequence, keys, range(2))
            sequence.publish(2, states={STATE: {0: int(sequence.tables[STATE][0])}})
            assert node.problems() == []
        with engine.lease.match(keys[:KEY_BYTES]) as sequence:
            assert sequence.hit_blocks == 0, "the window has a hole there"
        assert node.problems() == []
    assert not any(node.held().values())


def test_groups_with_smaller_blocks_have_the_pages_that_their_windows_reach(node: Node) -> None:
    """Windows of 20 and 6 tokens in pages of 8 and 4 beside blocks of 16, in place for a second engine and from the
    host."""
    wide, near = parted("wide", 20, 8, 1), parted("near", 6, 4, 2)
    groups = (PlaneGroup("full", pool="kv"), *wide[0], *near[0])
    layout = Layout(BLOCK_TOKENS, 1, groups, (FULL_PLANE, *wide[1], *near[1]))
    assert layout.scratch_groups == (3, 4)
    tables = Parts((1, 2)), Parts((3, 4, 5, 6))
    with Engine(node.socket, layout=layout, device_pages=80, host_pages=80) as first:
        assert first.serve(prompt(0, 4)).bad == []
        with Engine(node.socket, layout=layout, device_pages=80, name="second") as second:
            keys = second.keys(prompt(0, 5))
            with second.lease.match(keys) as sequence:
                assert sequence.device_blocks == 4
                held = [[page != NO_PAGE for page in parts.pages(sequence.tables, 0)] for parts in tables]
                assert held[0] == [False] * 4 + [False, True] + [True] * 2
                assert held[1] == [False] * 14 + [True] * 2
                assert second.bad(sequence, keys, range(4)) == []
            for seed in range(1, 5):  # drives it to the host
                assert second.serve(prompt(seed, 8)).bad == []
            back = second.serve(prompt(0, 5))
            assert (back.device + back.host, back.bad) == (4, [])
            assert back.host
    assert node.problems() == []
