"""Sharing between replicas where a group keeps a window: what the window needs comes along, or nothing counts on it."""

from __future__ import annotations

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.words import DRAINING, NO_PAGE, READY, PageState
from tests.unit.rigs.ledger_rig import rig_of, serve, windowed
from tests.unit.rigs.peers_rig import asking, hit, only_transfer, rows, shared, waits_for


@pytest.mark.parametrize("sinks", [0, 4])
def test_windows_come_along(sinks: int) -> None:
    rig, _, b = shared("abcdef", layout=windowed(window_tokens=8, sink_tokens=sinks))
    ask = asking(rig, b, 1, "abcdef")
    waits_for(ask())
    kept = 3 if sinks else 2
    assert [len(pair.device_pages) for pair in only_transfer(rig).pages] == [6, kept]
    rig.settle()
    answer = ask()
    assert hit(answer) == (6, 0)
    assert isinstance(answer, Matched)
    assert sum(page != NO_PAGE for page in answer.tables[1].pages) == kept
    assert rig.place(1).pools[1].counts[PageState.SEALED] == kept


def test_windows_alone_come_where_the_blocks_are_there() -> None:
    rig, _, b = shared("abcdef", layout=windowed(window_tokens=8))
    serve(rig, b, 1, "abcdef")
    for row in rows(rig, "abcdef"):
        rig.model.blocks.drop_window(rig.place(1), 1, row)
    ask = asking(rig, b, 2, "abcdef")
    waits_for(ask())
    assert [(pair.group, len(pair.device_pages)) for pair in only_transfer(rig).pages] == [(1, 2)]
    rig.settle()
    assert hit(ask()) == (6, 0)


def test_a_source_without_its_windows_is_as_long_as_they_reach() -> None:
    rig, _, b = shared("abcdef", layout=windowed(window_tokens=8))
    path = rows(rig, "abcdef")
    rig.model.blocks.drop_window(rig.place(0), 1, path[4])
    ask = asking(rig, b, 1, "abcdef")
    waits_for(ask())
    assert [len(pair.device_pages) for pair in only_transfer(rig).pages] == [4, 2]
    rig.settle()
    assert hit(ask()) == (4, 0)
    for row in path[:4]:
        rig.model.blocks.drop_window(rig.place(0), 1, row)
    assert hit(asking(rig, b, 2, "abcdef")()) == (4, 0)


def test_windows_go_through_the_host_too() -> None:
    rig, _, b = shared("abcdef", layout=windowed(window_tokens=8), host=16, near=False)
    serve(rig, b, 1, "abcd")
    for row in rows(rig, "abcd"):
        rig.model.blocks.drop_window(rig.place(1), 1, row)
    ask = asking(rig, b, 2, "abcdef")
    rig.land(waits_for(ask()))
    assert sum(hit(ask())) == 6
    answer = rig.run(allocate, b, 2, 6)
    assert NO_PAGE not in answer.tables[1].pages[-2:]
    rig.settle()
    rig.run(publish, b, 2, 6, b"", 0)


def test_windows_do_not_come_to_a_block_that_drains_away() -> None:
    """Found by reading: with the block its page would go while the copy still writes it."""
    rig, _, b = shared("abcdef", layout=windowed(window_tokens=8), device=8, host=16)
    serve(rig, b, 1, "abcdefg")
    for row in rows(rig, "abcdef"):
        rig.model.blocks.drop_window(rig.place(1), 1, row)
    rig.run(match, b, 2, b"", 0)
    drain = rig.once(allocate, b, 2, 3)
    assert isinstance(drain, Wait)
    assert rig.place(1).states[0][rows(rig, "abcdef")[5]] == DRAINING
    ask = asking(rig, b, 3, "abcdef")
    assert waits_for(ask()) == drain.tickets[0]
    rig.land(drain.tickets[0])
    rig.run(release, b, 2)  # what drained was kept for its Allocate
    waits_for(ask())
    rig.settle()
    assert hit(ask()) == (6, 0)


def test_a_window_in_place_does_not_go_for_the_rest_of_it() -> None:
    """Then all that came from the other replica would have been for nothing."""
    rig = rig_of(windowed(window_tokens=8), device=(16, 6), replicas=2)
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    for lease in (a, b):
        serve(rig, lease, 1, "abcdef")
    path = rows(rig, "abcdef")
    for row in path[:5]:
        rig.model.blocks.drop_window(rig.place(1), 1, row)
    rig.run(match, b, 2, b"", 0)
    rig.run(allocate, b, 2, 5)
    assert rig.free(1)[1] == 0, "only the last block's window could go"
    assert hit(asking(rig, b, 3, "abcdef")()) == (0, 0)
    assert (rig.mover.all, rig.place(1).states[1][path[5]]) == ([], READY)
    rig.run(release, b, 2)
    ask = asking(rig, b, 4, "abcdef")
    waits_for(ask())
    assert [(pair.group, len(pair.device_pages)) for pair in only_transfer(rig).pages] == [(1, 1)]
    rig.settle()
    assert hit(ask()) == (6, 0)
