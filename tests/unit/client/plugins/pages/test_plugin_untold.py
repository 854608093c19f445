"""Blocks of an output reach the daemon after the next output with a drafter, at once without one."""

from __future__ import annotations

from cachesvc_client.plugins.matches import Sealing, Untold
from cachesvc_client.plugins.request_pages import RequestPages

KEYS = [b"a", b"b"]


def said(untold: Untold) -> tuple[list[int], list[str]]:
    """Blocks that may be sealed, and requests that may be released."""
    ready = untold.ready
    return [each.blocks for each in ready.sealing.values()], [each.request_id for each in ready.ended]


def output(untold: Untold, *requests: RequestPages, computes: bool = True) -> None:
    """An output that ends these, each of which has two blocks."""
    for request in requests:
        untold.seal(request, Sealing(2, KEYS))
        untold.end(request)
    untold.begin_output()
    untold.end_output(computes=computes)


def late() -> Untold:
    """Reports of an engine with a drafter."""
    untold = Untold()
    untold.is_late = True
    return untold


def test_without_a_drafter_all_is_told_at_once() -> None:
    untold = Untold()
    output(untold, RequestPages("r", 0))
    assert said(untold) == ([2], ["r"])
    assert untold
    assert not untold.has_late_pages


def test_a_drafter_has_ended_when_the_next_output_has_come() -> None:
    untold = late()
    output(untold, RequestPages("r", 0))
    assert (said(untold), bool(untold), untold.has_late_pages) == (([], []), False, True)
    output(untold, RequestPages("s", 0))
    assert said(untold) == ([2], ["r"])
    untold.ready.clear()
    output(untold)
    assert said(untold) == ([2], ["s"])


def test_a_step_that_computes_nothing_leaves_nothing_untold() -> None:
    untold = late()
    output(untold, RequestPages("r", 0))
    output(untold, RequestPages("s", 0), computes=False)
    assert said(untold) == ([2, 2], ["r", "s"])


def test_what_is_preempted_for_a_step_is_free_with_its_output() -> None:
    untold = late()
    output(untold)
    untold.end(RequestPages("r", 0))
    untold.begin_step()
    output(untold)
    assert said(untold) == ([], ["r"])


def test_a_later_count_of_blocks_does_not_hasten_an_earlier_one() -> None:
    untold, request = late(), RequestPages("r", 0)
    for blocks in (1, 2):
        untold.seal(request, Sealing(blocks, KEYS))
        untold.begin_output()
        untold.end_output(computes=True)
    assert said(untold) == ([1], [])


def test_blocks_and_requests_are_forgotten_wherever_they_wait() -> None:
    untold = late()
    for _ in range(3):
        output(untold, RequestPages("r", 0))
    untold.forget_blocks()
    untold.settle()
    assert said(untold) == ([], ["r", "r", "r"])
    untold.clear()
    assert said(untold) == ([], [])


def test_cells_that_are_read_no_more_come_with_the_blocks_of_their_output() -> None:
    untold, request = late(), RequestPages("r", 0)
    untold.recycle(request, {1: 3})
    untold.begin_output()
    untold.end_output(computes=True)
    assert not untold.ready.dead
    untold.recycle(request, {1: 5})
    untold.recycle(request, {2: 4})
    untold.begin_output()
    assert untold.ready.dead == {request: {1: 3}}
    untold.settle()
    assert untold.ready.dead == {request: {1: 5, 2: 4}}


def test_states_of_several_outputs_are_sealed_in_one_report() -> None:
    untold, request = Untold(), RequestPages("r", 0)
    untold.seal(request, Sealing(2, KEYS, {1: {1: 7}}))
    untold.seal(request, Sealing(4, KEYS * 2, {1: {3: 8}, 2: {3: 9}}))
    assert untold.ready.sealing == {request: Sealing(4, KEYS * 2, {1: {1: 7, 3: 8}, 2: {3: 9}})}
