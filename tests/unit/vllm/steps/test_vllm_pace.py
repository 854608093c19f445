"""Reports of decoding gather over a few iterations; what others wait for goes at once."""

from __future__ import annotations

from cachesvc_client.plugins.matches import Sealing, Untold
from cachesvc_client.plugins.request_pages import RequestPages
from cachesvc_vllm.plain import MOST_GATHERED, Pace


def test_decoding_is_reported_once_in_a_few_iterations() -> None:
    pace = Pace()
    reported = [pace.is_due(is_urgent=False) for _ in range(2 * MOST_GATHERED)]
    assert reported == 2 * ([False] * (MOST_GATHERED - 1) + [True])


def test_what_is_urgent_is_reported_at_once_with_all_that_has_gathered() -> None:
    pace = Pace()
    assert not pace.is_due(is_urgent=False)
    assert pace.is_due(is_urgent=True)
    assert [pace.is_due(is_urgent=False) for _ in range(MOST_GATHERED)].index(True) == MOST_GATHERED - 1


def urgent(untold: Untold) -> bool:
    """Return whether what is ready goes at once."""
    return untold.ready.is_urgent


def test_prompts_and_ends_are_urgent_and_the_next_block_of_an_answer_is_not() -> None:
    untold, request = Untold(), RequestPages("r", 0)
    untold.seal(request, Sealing(5, [b"k"] * 5))
    assert not urgent(untold)
    untold.seal(request, Sealing(9, [b"k"] * 9), is_prompt=True)
    assert urgent(untold)
    untold.clear()
    assert not urgent(untold)
    untold.end(request)
    assert urgent(untold)


def test_a_prompt_stays_urgent_where_a_drafter_holds_its_blocks_back() -> None:
    untold = Untold()
    untold.is_late = True
    untold.seal(RequestPages("r", 0), Sealing(9, [b"k"] * 9), is_prompt=True)
    untold.end_output(computes=True)
    assert not urgent(untold)
    untold.begin_output()
    assert urgent(untold)
