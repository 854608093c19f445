"""Blocks that one replica has and another one wants: device to device, through the host, or not at all, without
errors."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Limits
from cachesvc.flows.leases import close_lease
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import DRAINING, NO_PAGE, READY, Direction, PageState, Urgency
from tests.unit.rigs.ledger_rig import Rig, chain, prefill, rig_of, serve, windowed
from tests.unit.rigs.peers_rig import asking, hit, only_transfer, rows, shared, waits_for

LOAD, STORE = Direction
AWAITED, BACKGROUND = Urgency


def test_what_another_replica_has_comes_device_to_device() -> None:
    rig, _, b = shared("abcd")
    ask = asking(rig, b, 1, "abcde")
    ticket = waits_for(ask())
    transfer = only_transfer(rig)
    assert (transfer.direction, transfer.replica, transfer.source_replica) == (LOAD, 1, 0)
    assert (transfer.urgency, transfer.layered) == (AWAITED, False)
    path = rows(rig, "abcd")
    [pair] = transfer.pages
    assert list(pair.host_pages) == [rig.place(0).pages[0][row] for row in path]
    assert list(pair.device_pages) == [rig.place(1).pages[0][row] for row in path]
    assert rig.core.ledger.tickets.running[ticket].waiters == []
    assert rig.core.ledger.leases[b].sequences == {}, "nothing is open while it waits"
    rig.land(ticket)
    answer = ask()
    assert hit(answer) == (4, 0)
    assert isinstance(answer, Matched)
    assert answer.tables[0].pages == pair.device_pages
    counters = rig.core.counters
    assert (counters["peer_loads"], counters["peer_blocks"], counters["p2p_bytes"]) == (1, 4, 32)
    assert "h2d_bytes" not in counters
    assert counters["match_requests"] == 2, "however often it ran"
    rig.run(release, b, 1)
    pinning.evict(rig.core, 1, "device", 0)
    assert rig.free(0) == rig.free(1) == [16], "nothing is pinned any more"


def test_only_what_is_missing_is_copied_and_the_rest_is_kept() -> None:
    rig, _, b = shared("abcd")
    serve(rig, b, 1, "ab")
    ask = asking(rig, b, 2, "abcd")
    waits_for(ask())
    assert [len(pair.device_pages) for pair in only_transfer(rig).pages] == [2]
    rig.settle()
    assert hit(ask()) == (4, 0)


def test_through_the_host_where_devices_do_not_reach_each_other() -> None:
    rig, _, b = shared("abcd", host=16, near=False)
    ask = asking(rig, b, 1, "abcd")
    ticket = waits_for(ask())
    transfer = only_transfer(rig)
    assert (transfer.direction, transfer.replica, transfer.source_replica) == (STORE, 0, None)
    assert transfer.urgency is AWAITED
    rig.land(ticket)
    assert hit(ask()) == (0, 4)
    assert rig.core.counters["relayed_blocks"] == 4
    [load] = rig.run(allocate, b, 1, 4).tickets
    assert only_transfer(rig).layered
    rig.land(load.id)
    rig.run(publish, b, 1, 4, b"", 0)
    assert len(rig.device_keys(1)) == 4
    assert "p2p_bytes" not in rig.core.counters


def on_both(prompt: str, host: int = 128) -> tuple[Rig, str]:
    """Replica 0 and the host have ``prompt``; a lease on replica 1, to which devices copy."""
    rig, _, b = shared(prompt, host=host, device=host, near=False)
    ask = asking(rig, b, 1, prompt)
    rig.land(waits_for(ask()))
    assert hit(ask()) == (0, len(prompt))
    rig.mover.reachable = True
    return rig, b


def test_what_the_host_has_too_comes_from_the_nearer_device() -> None:
    """Bytes of a prefix that another GPU had all came over PCIe, for the host had them as well."""
    rig, b = on_both("abcd")
    rig.run(allocate, b, 1, 5)
    transfer = only_transfer(rig)
    assert (transfer.direction, transfer.source_replica, transfer.layered) == (LOAD, 0, False)
    [pair] = transfer.pages
    assert list(pair.host_pages) == [rig.place(0).pages[0][row] for row in rows(rig, "abcd")]
    rig.settle()
    counters = rig.core.counters
    assert (counters["peer_loads"], counters["peer_blocks"]) == (1, 4)
    assert "h2d_bytes" not in counters
    rig.run(publish, b, 1, 4, b"", 0)
    rig.run(release, b, 1)
    pinning.evict(rig.core, 1, "device", 0)
    assert rig.free(0) == rig.free(1), "nothing is pinned any more"


@pytest.mark.parametrize(("reachable", "rate"), [(False, 7.0), (True, 0.5)])
def test_the_host_is_the_source_where_the_other_device_is_farther(reachable: bool, rate: float) -> None:
    rig, b = on_both("abcd")
    rig.mover.reachable, rig.mover.rate = reachable, rate
    rig.run(allocate, b, 1, 4)
    assert only_transfer(rig).source_replica is None
    rig.settle()


def test_of_many_blocks_the_last_ones_come_from_the_host_meanwhile() -> None:
    prompt = "".join(map(chr, range(200, 240)))
    rig, b = on_both(prompt)
    rig.mover.rate = 3.0
    tickets = rig.run(allocate, b, 1, 40).tickets
    assert len(tickets) == 2
    parts = [
        (rig.mover.transfers[each.id].source_replica, len(rig.mover.transfers[each.id].pages[0].device_pages))
        for each in tickets
    ]
    assert parts == [(0, 30), (None, 10)]
    rig.land(tickets[1].id)
    rig.land(tickets[0].id)
    rig.run(publish, b, 1, 40, b"", 0)
    assert len(rig.device_keys(1)) == 40


def test_with_one_transfer_left_a_load_is_not_parted() -> None:
    prompt = "".join(map(chr, range(200, 240)))
    rig, b = on_both(prompt)
    rig.mover.rate, rig.mover.slots = 3.0, 1
    rig.run(allocate, b, 1, 40)
    assert only_transfer(rig).source_replica == 0
    rig.settle()


@pytest.mark.parametrize(("host", "reach"), [(0, 0), (2, 2)])
def test_the_host_takes_what_it_can(host: int, reach: int) -> None:
    rig, _, b = shared("abcd", host=host, near=False)
    ask = asking(rig, b, 1, "abcd")
    if reach:
        rig.land(waits_for(ask()))
    assert hit(ask()) == (0, reach)


def test_what_the_host_has_of_the_path_makes_no_room_for_the_rest() -> None:
    rig, a, b = shared("abcd", host=2, near=False)
    serve(rig, a, 2, "xy")
    rig.run(match, b, 1, b"", 0)
    ask = asking(rig, b, 2, "abcd", 2)
    rig.land(waits_for(ask()))
    assert hit(ask()) == (0, 2)
    rig.run(release, b, 2)
    ask = asking(rig, b, 3, "abcd")
    assert hit(ask()) == (0, 2), "it would only have lost its own beginning"


def test_a_store_that_is_under_way_is_waited_for() -> None:
    rig, _, b = shared("abcd", host=16, near=False)
    first, second = asking(rig, b, 1, "abcd"), asking(rig, b, 2, "abcd")
    ticket = waits_for(first())
    assert waits_for(second()) == ticket
    rig.land(ticket)
    assert hit(second()) == hit(first()) == (0, 4)
    assert len(rig.mover.all) == 1


def test_without_room_the_hit_is_what_it_was() -> None:
    rig, _, b = shared("abcd", device=4)
    rig.run(match, b, 1, b"", 0)
    rig.run(allocate, b, 1, 1)
    assert hit(asking(rig, b, 2, "abcd")()) == (0, 0)
    assert rig.mover.all == []
    waits_for(asking(rig, b, 3, "abcd", 3)())


def test_room_is_made_as_for_any_load() -> None:
    rig, _, b = shared("abcd", device=4, host=16)
    serve(rig, b, 1, "xyz")
    ask = asking(rig, b, 2, "abcd")
    drain = waits_for(ask())
    assert only_transfer(rig).direction is STORE
    rig.land(drain)
    load = waits_for(ask())
    assert only_transfer(rig).source_replica == 0
    rig.land(load)
    assert hit(ask()) == (4, 0)
    assert len(rig.host_keys()) == 3


def test_a_failed_load_is_not_tried_again_in_the_same_call() -> None:
    rig, _, b = shared("abcd")
    ask = asking(rig, b, 1, "abcd")
    rig.land(waits_for(ask()), "the link broke")
    assert hit(ask()) == (0, 0)
    assert rig.free(1) == [16]
    assert len(rig.device_keys(0)) == 4
    assert rig.core.counters["peer_blocks"] == 0
    assert len(rig.mover.all) == 1
    again = asking(rig, b, 2, "abcd")
    rig.land(waits_for(again()))
    assert hit(again()) == (4, 0), "another call may"


def test_a_mover_that_refuses_costs_nothing_but_the_hit() -> None:
    for near in (True, False):
        rig, _, b = shared("abcd", host=16, near=near)
        rig.mover.refusing = True
        ask = asking(rig, b, 1, "abcd")
        assert not rig.core.ledger.tickets.is_running(waits_for(ask()))
        assert hit(ask()) == (0, 0)
        assert rig.free(1) == [16]


def test_a_second_call_joins_the_load_of_the_first() -> None:
    rig, _, b = shared("abcd")
    first, second, other = (asking(rig, b, number, "abcd"[:length]) for number, length in ((1, 4), (2, 3), (3, 4)))
    ticket = waits_for(first())
    assert waits_for(second()) == waits_for(other()) == ticket
    rig.land(ticket)
    assert [hit(ask()) for ask in (second, first, other)] == [(3, 0), (4, 0), (4, 0)]
    assert len(rig.mover.all) == 1


def test_a_call_that_was_held_up_for_long_enough_goes_on_without() -> None:
    rig, _, b = shared("abcd")
    ask = asking(rig, b, 1, "abcd")
    ticket = waits_for(ask())
    assert hit(ask()) == (0, 0), "asked again although nothing has ended"
    rig.run(allocate, b, 1, 4)
    assert rig.run(publish, b, 1, 0, b"", 4).pending
    rig.land(ticket)
    assert rig.run(publish, b, 1, 0, b"", 4).duplicate_positions == (0, 1, 2, 3)


def test_a_call_waits_a_few_times_at_most() -> None:
    rig, _, b = shared("abcd", device=4, host=16)
    rig.core.limits = Limits(peer_waits=1)
    serve(rig, b, 1, "xyz")
    ask = asking(rig, b, 2, "abcd")
    rig.land(waits_for(ask()))
    assert hit(ask()) == (0, 0), "room was all that it waited for"
    assert rig.mover.transfers == {}


def test_no_more_is_shared_than_was_asked_for_and_than_pays() -> None:
    rig, _, b = shared("abcd")
    ask = asking(rig, b, 1, "abcd", 2)
    waits_for(ask())
    assert [len(pair.device_pages) for pair in only_transfer(rig).pages] == [2]
    rig.settle()
    assert hit(ask()) == (2, 0)
    rig.core.limits = Limits(peer_blocks_min=3)
    assert hit(asking(rig, b, 2, "abcd")()) == (2, 0)
    rig.core.limits = Limits(peer_blocks_min=2)
    waits_for(asking(rig, b, 3, "abcd")())
    rig.settle()
    assert hit(rig.run(match, b, 4, chain("q"), 0)) == (0, 0)
    assert hit(rig.run(match, rig.lease("a", 0), 5, chain(*"abcd"), 0)) == (4, 0)


def test_the_longest_is_taken_and_of_equal_ones_one_that_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _, b = shared("abcd", replicas=4, host=16)
    serve(rig, rig.lease("c", 2), 1, "abcde")
    serve(rig, rig.lease("d", 3), 1, "abcde")
    near = {(0, 1), (3, 1)}
    monkeypatch.setattr(rig.mover, "can_reach", lambda _, source, target: (source, target) in near)
    waits_for(asking(rig, b, 1, "abcdef")())
    assert only_transfer(rig).source_replica == 3


# -- the source ------------------------------------------------------------------------------------------------------


def test_nothing_leaves_the_source_while_it_is_read() -> None:
    rig, a, b = shared("abcd", device=6)
    waits_for(asking(rig, b, 1, "abcd")())
    pinning.evict(rig.core, 1, "device", 0)
    close_lease(rig.core, a, quiesced=True)
    rig.check()
    assert len(rig.device_keys(0)) == 4
    c = rig.lease("c", 0)
    rig.run(match, c, 1, b"", 0)
    blocked = rig.once(allocate, c, 1, 5)
    assert isinstance(blocked, Wait), "the pages come back with the end of the load"
    with pytest.raises(PoolExhausted):
        rig.once(allocate, c, 1, 7)
    rig.settle()
    assert rig.run(allocate, c, 1, 5).loading_blocks == 0
    assert len(rig.device_keys(1)) == 4


@pytest.mark.parametrize("error", ["", "broken"])
def test_a_source_that_drains_keeps_what_is_read(error: str) -> None:
    rig, a, b = shared("abcd", device=4, host=16)
    rig.run(match, a, 2, b"", 0)
    drain = rig.once(allocate, a, 2, 2)
    assert isinstance(drain, Wait)
    ask = asking(rig, b, 1, "abcd")
    load = waits_for(ask())
    assert load not in drain.tickets
    rig.land(drain.tickets[0])
    assert len(rig.device_keys(0)) == 4, "what drained is needed again"
    rig.land(load, error)
    assert len(rig.device_keys(1)) == (0 if error else 4)
    assert hit(ask()) == (0 if error else 4, 0)
    rig.run(allocate, a, 2, 2)


def test_an_engine_of_the_source_goes_on_while_it_is_read() -> None:
    rig, a, b = shared("abcd")
    prefill(rig, a, 2, "abcdef")
    ticket = waits_for(asking(rig, b, 1, "abcd")())
    serve(rig, a, 3, "abx")
    rig.run(release, a, 2)
    rig.land(ticket)
    assert len(rig.device_keys(1)) == 4


def test_an_allocate_may_rely_on_a_load_from_a_peer() -> None:
    rig, _, b = shared("abcd", host=16)
    rig.mover.reachable = False
    ask = asking(rig, b, 1, "abcd")
    rig.land(waits_for(ask()))
    assert hit(ask()) == (0, 4)
    serve(rig, rig.lease("a", 0), 2, "abcdef")
    rig.mover.reachable = True
    ticket = waits_for(asking(rig, b, 2, "abcdef")())
    answer = rig.run(allocate, b, 1, 4)
    assert [one.id for one in answer.tickets] == [ticket]
    rig.land(ticket)
    rig.run(publish, b, 1, 4, b"", 0)


# -- prefetch --------------------------------------------------------------------------------------------------------


def test_a_prefetch_waits_for_no_peer() -> None:
    rig, _, b = shared("abcd")
    answer = rig.run(partial(prefetch, sharing=Sharing(BACKGROUND)), b, chain(*"abcd"))
    [ticket] = answer.tickets
    assert (answer.device_blocks, ticket.direction, only_transfer(rig).urgency) == (4, "load", BACKGROUND)
    assert rig.mover.expedited == []
    ask = asking(rig, b, 1, "abcd")
    assert waits_for(ask()) == ticket.id
    assert rig.mover.expedited == [ticket.id]
    rig.land(ticket.id)
    assert hit(ask()) == (4, 0)


def test_a_prefetch_brings_through_the_host_what_is_far() -> None:
    rig, _, b = shared("abcd", host=16, near=False)
    answer = rig.run(partial(prefetch, sharing=Sharing(BACKGROUND)), b, chain(*"abcd"))
    assert [transfer.direction for transfer in rig.mover.all] == [STORE, LOAD]
    rig.land(answer.tickets[0].id)
    assert len(rig.device_keys(1)) == 4
    assert rig.core.ledger.leases[b].sequences == {}


# Sharing between replicas where a group keeps a window: what the window needs comes along, or nothing counts on it.


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
