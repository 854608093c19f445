"""Groups of one pool: one slab and one numbering of pages, of which each has a range; shared and swapped as ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cachesvc_client import InvalidRequest

from tests.e2e.engine import BLOCK_TOKENS, WINDOWED, Engine, prompt
from tests.e2e.rig import Node

pytestmark = pytest.mark.usefixtures("each_way")

PAGES = 16
ONE = replace(WINDOWED, groups=tuple(replace(group, pool="kv") for group in WINDOWED.groups))


def test_groups_of_one_pool_share_a_slab_and_never_a_page(node: Node) -> None:
    with Engine(node.socket, layout=ONE, device_pages=PAGES, host_pages=PAGES) as first:
        assert (first.registration.device_pages, first.registration.first_pages) == ((PAGES, PAGES), (0, PAGES))
        assert first.pool.pages == (2 * PAGES, 2 * PAGES)
        full, window = (first.pool.slab(name) for name in ("full", "window"))
        assert (full.ctypes.data, full.nbytes) == (window.ctypes.data, window.nbytes)
        assert full.nbytes == 2 * PAGES * ONE.page_bytes(0), "the group with most planes decides"
        assert full.ctypes.data == min(plane.ctypes.data for plane in first.pool.group_planes("window").values())
        with Engine(node.socket, layout=ONE, device_pages=PAGES, name="second") as second:
            for seed in range(4):  # evicts, to the host and for good
                served = first.serve(prompt(seed, 9))
                assert (served.computed, served.bad) == (9, [])
                assert {page // PAGES for page in served.pages[0] if page >= 0} == {0}
                assert {page // PAGES for page in served.pages[1] if page >= 0} == {1}
                again = second.serve(prompt(seed, 10))
                assert (again.device, again.computed, again.bad) == (9, 1, [])
            back = second.serve(prompt(2, 9))
            assert (back.device + back.host, back.bad) == (9, [])
            keys = first.keys(prompt(9, 4))
            sequence = first.lease.match(keys)
            sequence.allocate(4)
            first.fill(sequence, keys, range(4))
            first.lease.wait_tickets([ticket.id for ticket in sequence.swap_out().tickets])
            assert second.serve(prompt(10, 12)).bad == []
            sequence.swap_in()
            sequence.wait_loaded(30)
            assert first.bad(sequence, keys, range(4)) == []
            sequence.release()
        assert node.problems() == []
        del full, window
    assert not any(node.held().values())


def test_reserved_pages_are_the_first_of_the_slab(node: Node) -> None:
    with Engine(node.socket) as engine:
        model = engine.client.register("one@1", ONE, device_pages=[4, 6], host_pages=[0, 0], reserved_pages=1)
        assert model.first_pages == (0, 4)
        with engine.client.open_lease(model) as lease, lease.match(b"") as sequence:
            sequence.allocate(3)
            assert sorted(sequence.tables[0].tolist()) == [1, 2, 3]
            assert {page // 4 for page in sequence.tables[1].tolist()} == {1}
        assert node.problems() == []


def test_planes_that_cannot_lie_over_one_another_are_refused(node: Node) -> None:
    narrow = tuple(replace(p, page_shape=(1, BLOCK_TOKENS, 8)) if p.group == "window" else p for p in ONE.planes)
    with Engine(node.socket) as engine, pytest.raises(InvalidRequest, match="not as wide as those of pool 'kv'"):
        engine.client.register("narrow@1", replace(ONE, planes=narrow))
