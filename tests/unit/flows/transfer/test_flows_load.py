"""Loads from the host: joined, failed, held back until what lies above has come; windows; write policies."""

from __future__ import annotations

from itertools import permutations

import pytest

from cachesvc.flows import pinning
from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.leases import close_lease, pause_write_backs
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.flows.transfers import expedite
from cachesvc.model.answers import Wait
from cachesvc.model.errors import InvalidRequest, LeaseLost, LoadFailed, NotFound
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE, Direction, PageState, Urgency, WritePolicy
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, prefill, rig_of, serve, windowed


def hosted(prompt: str, *, device: int = 16, policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> Rig:
    """A rig whose host alone holds ``prompt``."""
    rig = rig_of(one_group(), device=(device,), host=(32,), policy=policy)
    serve(rig, rig.lease("first"), 1, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.check()
    assert rig.device_keys() == set()
    assert len(rig.host_keys()) == len(prompt)
    return rig


@pytest.mark.parametrize(("replicated", "stored"), [(False, 2), (True, 1)])
def test_bytes_are_those_of_all_ranks_and_the_host_has_replicated_ones_once(replicated: bool, stored: int) -> None:
    layout = Layout(16, 2, (PlaneGroup("full", replicated=replicated),), (Plane("k", 0, "full", (8,), "uint8"),))
    rig = rig_of(layout, device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, "abcd")
    rig.settle()
    assert rig.core.counters["d2h_bytes"] == 4 * 8 * stored
    pinning.evict(rig.core, 1, "device", 0)
    serve(rig, rig.lease(), 1, "abcd")
    assert rig.core.counters["h2d_bytes"] == 4 * 8 * 2


def test_a_load_brings_the_prefix_back_by_position() -> None:
    rig = hosted("abcd")
    a = rig.lease()
    hit = rig.run(match, a, 1, chain(*"abcde"), 0)
    assert (hit.device_blocks, hit.host_blocks) == (0, 4)
    answer = rig.run(allocate, a, 1, 5)
    assert answer.loading_blocks == 4
    [transfer] = rig.mover.transfers.values()
    assert transfer.direction is Direction.LOAD
    assert transfer.layered
    assert transfer.pages[0].device_pages == answer.tables[0].pages[:4]
    host = rig.host.pages[0]
    rows = [rig.model.blocks.index.rows[chain(*"abcd")[i * KEY_BYTES : (i + 1) * KEY_BYTES]] for i in range(4)]
    assert list(transfer.pages[0].host_pages) == [host[row] for row in rows]
    assert isinstance(rig.once(publish, a, 1, 4, b"", 1), Wait)
    assert (rig.host.counts.pinned, rig.place().counts.pinned) == (4, 0)
    rig.settle()
    assert (rig.host.counts.pinned, rig.place().counts.pinned) == (0, 4), "the host may let go of it now"
    assert rig.run(publish, a, 1, 4, b"", 1).sealed_blocks == 5
    assert len(rig.device_keys()) == 5


def test_a_failed_load_is_told_and_its_pages_are_free() -> None:
    rig = hosted("abcd")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcde"), 0)
    rig.run(allocate, a, 1, 5)
    rig.land(next(iter(rig.mover.transfers)), "broken link")
    for flow in ((publish, a, 1, 4, b"", 1), (allocate, a, 1, 6)):
        with pytest.raises(LoadFailed, match="broken link"):
            rig.run(*flow)
    assert rig.place().pools[0].counts[PageState.IN_FLIGHT] == 0
    rig.run(release, a, 1)
    assert rig.free() == [16]
    assert len(rig.host_keys()) == 4, "the host keeps its copy until then and after"


def test_a_refused_transfer_fails_like_any_other() -> None:
    rig = hosted("ab")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.mover.refusing = True
    [ticket] = rig.run(allocate, a, 1, 2).tickets
    assert ticket.slot is None
    assert rig.core.ledger.tickets.get(ticket.id).state.value == "failed"
    rig.mover.refusing = False
    with pytest.raises(LoadFailed, match="refuses by order"):
        rig.run(publish, a, 1, 2, b"", 0)
    rig.run(release, a, 1)


def joined_pair() -> tuple[Rig, str, int, int]:
    """Sequence 1 loads "ab", sequence 2 joins it and loads "cd" below."""
    rig = hosted("abcd")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(match, a, 2, chain(*"abcd"), 0)
    [first] = rig.run(allocate, a, 1, 2).tickets
    both = rig.run(allocate, a, 2, 4).tickets
    assert [ticket.id for ticket in both] == [first.id, first.id + 1]
    assert both[1].blocks == 2
    return rig, a, first.id, first.id + 1


def test_a_load_below_another_waits_for_it() -> None:
    rig, a, above, below = joined_pair()
    assert rig.land(below) == []
    assert rig.device_keys() == set()
    assert rig.land(above) == [above, below]
    assert len(rig.device_keys()) == 4
    assert rig.run(publish, a, 2, 4, b"", 0).sealed_blocks == 4


def test_a_load_below_a_failed_one_fails_with_it() -> None:
    rig, a, above, below = joined_pair()
    assert rig.land(above, "broken") == [], "it ends after what lies below"
    assert rig.land(below) == [below, above]
    assert rig.device_keys() == set()
    for sequence in (1, 2):
        with pytest.raises(LoadFailed):
            rig.run(publish, a, sequence, 2, b"", 0)
        rig.run(release, a, sequence)
    assert rig.free() == [16]


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("broken", range(3))
def test_a_chain_of_three_loads_always_ends(order: tuple[int, ...], broken: int) -> None:
    """Found by the simulation (seed 3552): the third waited for the second, which was to fail only after the third."""
    rig = hosted("abc")
    a = rig.lease()
    for sequence in (1, 2, 3):
        rig.run(match, a, sequence, chain(*"abc"[:sequence]), 0)
    for sequence in (1, 2, 3):
        rig.run(allocate, a, sequence, sequence)
    tickets = sorted(rig.mover.transfers)
    for at in order:
        rig.land(tickets[at], "broken" if at == broken else "")
    assert rig.core.ledger.tickets.running == {}
    assert len(rig.device_keys()) == broken


def test_a_load_that_fails_alone_leaves_what_lies_above() -> None:
    rig, a, above, below = joined_pair()
    assert rig.land(below, "broken") == [below]
    assert rig.land(above) == [above]
    assert len(rig.device_keys()) == 2
    rig.run(publish, a, 1, 2, b"", 0)
    with pytest.raises(LoadFailed):
        rig.run(publish, a, 2, 4, b"", 0)


def test_a_sequence_grows_while_its_loads_run() -> None:
    rig = hosted("abcd")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcdef"), 0)
    assert rig.run(allocate, a, 1, 4).loading_blocks == 4
    for blocks in (5, 6):
        answer = rig.run(allocate, a, 1, blocks)
        assert (answer.loading_blocks, answer.tickets) == (0, ())
        assert [cells.first_block for cells in answer.tables] == [blocks - 1]
    assert len(rig.mover.transfers) == 1
    rig.settle()
    assert rig.run(publish, a, 1, 4, b"", 2).sealed_blocks == 6
    rig.run(release, a, 1)
    assert rig.free() == [10]


def test_what_others_brought_since_match_is_used_in_place() -> None:
    rig = hosted("ab")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(prefetch, a, chain(*"ab"))
    rig.settle()
    assert rig.core.ledger.leases[a].prefetches == {}, "a prefetch holds nothing once it is there"
    assert rig.place().counts.pinned == 0
    answer = rig.run(allocate, a, 1, 2)
    assert (answer.tickets, answer.loading_blocks) == ((), 2)
    rig.run(publish, a, 1, 2, b"", 0)


@pytest.mark.parametrize("error", ["", "broken"])
def test_what_came_since_match_is_held_though_the_rest_of_the_hit_fails(error: str) -> None:
    """Its engine may be reading it for the layers that have come, until it has released the sequence."""
    rig = hosted("abcd")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abcd"), 0)
    rig.run(prefetch, a, chain(*"ab"))
    rig.settle()
    [ticket] = rig.run(allocate, a, 1, 4).tickets
    assert (ticket.blocks, rig.place().counts.pinned) == (2, 2)
    rig.land(ticket.id, error)
    assert rig.place().counts.pinned == (2 if error else 4)
    rig.run(release, a, 1)
    assert rig.place().counts.pinned == 0


def test_publishing_below_a_running_load_is_pending() -> None:
    rig = rig_of(one_group(), device=(16,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    rig.run(match, a, 1, chain(*"ab"), 0)
    rig.run(allocate, a, 1, 2)
    serve(rig, a, 2, "ab")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.run(prefetch, a, chain(*"ab"))
    answer = rig.run(publish, a, 1, 0, b"", 2)
    assert (answer.pending, answer.sealed_blocks) == (True, 0)
    rig.settle()
    assert rig.run(publish, a, 1, 0, b"", 2).duplicate_positions == (0, 1)


def windowed_on_host() -> tuple[Rig, str]:
    rig = rig_of(windowed(window_tokens=8), device=(16, 16), host=(16, 16), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, "abcdef")
    rig.settle()
    return rig, a


def test_a_windowed_load_brings_only_the_window() -> None:
    rig, a = windowed_on_host()
    pinning.evict(rig.core, 1, "device", 0)
    assert rig.run(match, a, 2, chain(*"abcdef"), 0).host_blocks == 6
    answer = rig.run(allocate, a, 2, 6)
    [transfer] = rig.mover.transfers.values()
    assert [len(pair.device_pages) for pair in transfer.pages] == [6, 2]
    window = answer.tables[1].pages
    assert [page == NO_PAGE for page in window] == [True] * 4 + [False] * 2
    rig.settle()
    rig.run(publish, a, 2, 6, b"", 0)


def test_a_shorter_hit_brings_the_windowed_pages_that_a_longer_one_left_out() -> None:
    """Found by reading: a sequence that joined a load got a table with a hole inside its window."""
    rig, a = windowed_on_host()
    pinning.evict(rig.core, 1, "device", 0)
    rig.run(match, a, 2, chain(*"abcdef"), 0)
    rig.run(match, a, 3, chain(*"abc"), 0)
    rig.run(allocate, a, 2, 6)
    waits = rig.once(allocate, a, 3, 3)
    assert isinstance(waits, Wait), "one transfer at a time fills copies of a block"
    rig.settle()
    answer = rig.run(allocate, a, 3, 3)
    assert answer.tickets[0].blocks == 2
    [transfer] = rig.mover.transfers.values()
    assert [(pair.group, len(pair.device_pages)) for pair in transfer.pages] == [(1, 2)]
    assert NO_PAGE not in answer.tables[1].pages[1:]
    rig.settle()
    rig.run(publish, a, 3, 3, b"", 0)


@pytest.mark.parametrize("error", ["", "broken"])
def test_windowed_pages_alone_come_back_from_the_host(error: str) -> None:
    """Found by reading: Match counted a window as whole that the device had dropped, and Allocate left it out."""
    rig, a = windowed_on_host()
    place = rig.place()
    for row in list(rig.model.blocks.index.rows.values()):
        rig.model.blocks.drop_window(place, 1, row)
    hit = rig.run(match, a, 2, chain(*"abcdef"), 0)
    assert (hit.device_blocks, hit.host_blocks) == (4, 2)
    answer = rig.run(allocate, a, 2, 6)
    assert NO_PAGE not in answer.tables[1].pages
    rig.land(answer.tickets[0].id, error)
    assert len(rig.device_keys()) == 6
    if error:
        with pytest.raises(LoadFailed):
            rig.run(publish, a, 2, 6, b"", 0)
    else:
        rig.run(recycle, a, 2, 24, ())
        rig.run(publish, a, 2, 6, b"", 0)
    rig.run(release, a, 2)
    assert rig.free()[1] == (16 if error else 14)


def test_a_load_that_fails_below_one_under_way_leaves_no_window_held() -> None:
    """Found by simulation: the windows of what did not come were held until the load above had ended too."""
    rig = rig_of(windowed(window_tokens=8), device=(16, 16), host=(32, 32), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, "abcd")
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    a, b = rig.lease(), rig.lease("b")
    for lease, prompt in ((a, "abc"), (b, "abcd")):
        rig.run(match, lease, 1, chain(*prompt), 0)
        rig.run(allocate, lease, 1, len(prompt))
    above, below = rig.mover.transfers
    rig.land(below, "broken")
    rig.land(above)
    with pytest.raises(LoadFailed):
        rig.run(allocate, b, 1, 5)
    rig.run(release, b, 1)
    assert rig.run(match, b, 2, chain(*"abcd"), 0).device_blocks == 3


# -- write policies ----------------------------------------------------------------------------------------------


def stores(rig: Rig) -> int:
    """Blocks that were sent to the host so far."""
    return sum(len(t.pages[0].device_pages) for t in rig.mover.all if t.direction is Direction.STORE)


def test_write_through_copies_when_sealed_and_no_duplicate() -> None:
    rig = rig_of(one_group(), device=(16,), host=(16,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    prefill(rig, a, 1, "abc")
    assert stores(rig) == 3
    assert rig.host_keys() == set(), "not before the bytes are there"
    rig.settle()
    assert len(rig.host_keys()) == 3
    serve(rig, a, 2, "abc")
    assert stores(rig) == 3
    serve(rig, a, 3, "abcd")
    assert stores(rig) == 4


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_selective_copies_at_the_threshold(threshold: int) -> None:
    policy = WritePolicy.WRITE_THROUGH_SELECTIVE
    rig = rig_of(one_group(), device=(16,), host=(16,), policy=policy, threshold=threshold)
    a = rig.lease()
    serve(rig, a, 1, "ab")
    for number in range(threshold - 1):
        serve(rig, a, 2 + number, "ab")
        assert stores(rig) == 0
    serve(rig, a, 99, "ab")
    assert stores(rig) == 2
    rig.settle()
    serve(rig, a, 100, "ab")
    assert stores(rig) == 2


def test_selective_remembers_the_counts_of_dropped_blocks() -> None:
    rig = rig_of(one_group(), device=(2,), host=(16,), policy=WritePolicy.WRITE_THROUGH_SELECTIVE, threshold=2)
    a = rig.lease()
    serve(rig, a, 1, "ab")
    serve(rig, a, 2, "ab")
    serve(rig, a, 3, "xy")
    assert stores(rig) == 0
    assert rig.model.remembered == {chain("a"): 1, chain(*"ab")[KEY_BYTES:]: 1}
    serve(rig, a, 4, "ab")
    serve(rig, a, 5, "ab")
    assert stores(rig) == 2
    assert rig.model.remembered == {}


def test_the_memory_of_counts_is_bounded() -> None:
    policy = WritePolicy.WRITE_THROUGH_SELECTIVE
    rig = rig_of(one_group(), device=(1,), host=(4,), policy=policy, threshold=9, remember=3)
    a = rig.lease()
    for number in range(10):
        serve(rig, a, 2 * number + 1, [number])
        serve(rig, a, 2 * number + 2, [number])
    assert list(rig.model.remembered) == [chain(number) for number in (6, 7, 8)]


def test_a_prefetch_that_waits_counts_no_reuse_twice() -> None:
    rig = hosted("ab", device=3, policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    rig.run(match, a, 1, b"", 0)
    rig.run(allocate, a, 1, 2)
    requests = rig.core.counters.get("match_requests", 0)
    rig.run(release, a, 1)
    rig.run(prefetch, a, chain(*"ab"))
    assert rig.core.counters["match_requests"] == requests, "a prefetch is no use of a block"


def test_write_back_copies_at_eviction_alone() -> None:
    rig = rig_of(one_group(), device=(4,), host=(16,), policy=WritePolicy.WRITE_BACK)
    a = rig.lease()
    for number in range(1, 4):
        serve(rig, a, number, "ab")
    assert stores(rig) == 0
    serve(rig, a, 9, "wxyz")
    assert stores(rig) == 2
    assert len(rig.host_keys()) == 2


def test_host_copies_of_blocks_in_place_make_room_for_others() -> None:
    """M14: backups of device-resident blocks must not fill the host for good, even while their blocks are in use."""
    rig = rig_of(one_group(), device=(16,), host=(2,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.settle()
    serve(rig, a, 2, "abx")
    rig.settle()
    assert chain(*"abx")[2 * KEY_BYTES :] in rig.host_keys()
    serve(rig, a, 3, "pq")
    rig.settle()
    assert {chain("p"), chain(*"pq")[KEY_BYTES:]} == rig.host_keys()


# Awaited transfers: backups and prefetches are background until a flow waits for them.

LOAD, STORE = Direction
AWAITED, BACKGROUND = Urgency


def with_host_copies(prompt: str, *, device: int = 16) -> Rig:
    """A rig whose host alone holds ``prompt``, with nothing under way."""
    rig = rig_of(one_group(), device=(device,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease("first"), 1, prompt)
    rig.settle()
    pinning.evict(rig.core, 1, "device", 0)
    rig.mover.all.clear()
    return rig


def sent(rig: Rig) -> list[tuple[Direction, Urgency]]:
    return [(transfer.direction, transfer.urgency) for transfer in rig.mover.all]


def test_backups_are_background_and_loads_of_an_allocate_are_awaited() -> None:
    rig = rig_of(one_group(), device=(16,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    serve(rig, rig.lease(), 1, "ab")
    assert sent(rig) == [(STORE, BACKGROUND)]
    rig = with_host_copies("ab")
    a = rig.lease()
    rig.run(match, a, 1, chain(*"abc"), 0)
    rig.run(allocate, a, 1, 3)
    assert sent(rig) == [(LOAD, AWAITED)]
    assert rig.mover.expedited == []


def test_swaps_and_evictions_are_awaited() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.run(allocate, a, 1, 3)
    rig.run(swap_out, a, 1)
    rig.settle()
    rig.run(swap_in, a, 1)
    rig.settle()
    assert sent(rig) == [(STORE, AWAITED), (LOAD, AWAITED)]
    rig = rig_of(one_group(), device=(4,), host=(32,))
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    rig.run(match, a, 2, chain(*"xyz"), 0)
    assert isinstance(rig.once(allocate, a, 2, 3), Wait)
    assert sent(rig) == [(STORE, AWAITED)]


def test_who_joins_a_prefetch_expedites_it_once_and_another_prefetch_does_not() -> None:
    rig = with_host_copies("abcd")
    a = rig.lease()
    rig.run(prefetch, a, chain(*"ab"))
    rig.run(prefetch, a, chain(*"abc"))
    assert sent(rig) == [(LOAD, BACKGROUND)] * 2
    first, second = (transfer.ticket for transfer in rig.mover.all)
    assert rig.mover.expedited == []
    rig.run(match, a, 1, chain(*"abcd"), 0)
    rig.run(allocate, a, 1, 4)
    assert rig.mover.expedited == [first, second]
    assert sent(rig)[2:] == [(LOAD, AWAITED)]
    rig.run(match, a, 2, chain(*"abcd"), 0)
    rig.run(allocate, a, 2, 4)
    assert rig.mover.expedited == [first, second]


def test_who_waits_for_a_ticket_waits_for_those_above_it() -> None:
    rig = with_host_copies("abc")
    a = rig.lease()
    rig.run(prefetch, a, chain(*"ab"))
    rig.run(prefetch, a, chain(*"abc"))
    first, second = (transfer.ticket for transfer in rig.mover.all)
    expedite(rig.core, [second, 999])
    assert rig.mover.expedited == [second, first]


def test_an_allocate_that_waits_for_a_backup_expedites_it() -> None:
    rig = rig_of(one_group(), device=(4,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    serve(rig, a, 1, "abcd")
    [backup] = rig.mover.all
    rig.run(match, a, 2, chain(*"xyz"), 0)
    assert isinstance(rig.once(allocate, a, 2, 3), Wait)
    assert rig.mover.expedited == [backup.ticket]
    assert rig.core.ledger.tickets.running[backup.ticket].urgency is AWAITED


def test_a_swap_that_waits_for_a_backup_expedites_it() -> None:
    rig = rig_of(one_group(), device=(8,), host=(32,), policy=WritePolicy.WRITE_THROUGH)
    a = rig.lease()
    prefill(rig, a, 1, "abcd")
    [backup] = rig.mover.all
    assert isinstance(rig.once(swap_out, a, 1), Wait)
    assert rig.mover.expedited == [backup.ticket]


def test_a_pause_is_for_the_devices_of_the_lease_alone_and_never_long() -> None:
    rig = rig_of(one_group(), device=(4,), replicas=2)
    a = rig.lease("a", replica=1)
    rig.once(pause_write_backs, a, 1000)
    assert rig.mover.pauses == [(("gpu-1",), 1.0)]
    with pytest.raises(InvalidRequest, match="at most 1000 ms at a time, not 1001"):
        rig.once(pause_write_backs, a, 1001)
    with pytest.raises(NotFound):
        rig.once(pause_write_backs, "unknown", 10)
    close_lease(rig.core, a, quiesced=False)
    with pytest.raises(LeaseLost):
        rig.once(pause_write_backs, a, 10)
    assert len(rig.mover.pauses) == 1
