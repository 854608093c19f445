"""Requests that wait for another node are matched again, and not all of them in one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from cachesvc_client import Expected, Sequence
from cachesvc_client.layouts.families import Parts
from cachesvc_client.plugins.matches import MOST_AGAIN, coming_again, next_wish
from cachesvc_client.plugins.request_pages import RequestPages, Wish


@dataclass
class Coming:
    """A sequence of which blocks are on their way."""

    coming_blocks: int


def waiting(name: str, begun_s: float, blocks: int, coming: int = 1) -> RequestPages:
    wish = Wish([], most_blocks=blocks, first_blocks=1)
    sequence = cast("Sequence", Coming(coming))
    return RequestPages(name, begun_s, lead=0, lead_parts=Parts((0,)), others=[], wish=wish, sequence=sequence)


def test_those_that_were_matched_longest_ago_come_first_up_to_a_bound() -> None:
    requests = [waiting(str(number), float(100 - number), MOST_AGAIN // 2) for number in range(5)]
    assert list(coming_again(requests, 1000.0)) == ["4", "3"]


def test_one_that_is_larger_than_the_bound_is_matched_again_too() -> None:
    assert list(coming_again([waiting("a", 0.0, 2 * MOST_AGAIN), waiting("b", 1.0, 1)], 1000.0)) == ["a"]


def test_what_is_recent_or_has_come_is_not_matched_again() -> None:
    assert coming_again([waiting("new", 999.999, 1), waiting("here", 0.0, 1, coming=0)], 1000.0) == {}


EXPECTS = Wish([], most_blocks=4, first_blocks=1, expected=Expected("10.0.0.1:7100", waits=False))
EXPECTS_NOTHING = Wish([], most_blocks=4, first_blocks=1)


@pytest.mark.parametrize(
    ("last", "following"),
    [
        (None, EXPECTS),
        (waiting("a", 0.0, 4), EXPECTS),
        (waiting("a", 0.0, 4, coming=0), EXPECTS_NOTHING),
        (RequestPages("noted", 0.0), EXPECTS),
        (RequestPages("refused", 0.0, wish=EXPECTS), EXPECTS),
        (RequestPages("not sent, or refused", 0.0, wish=EXPECTS_NOTHING), EXPECTS_NOTHING),
    ],
)
def test_a_request_expects_more_until_nothing_more_was_coming(last: RequestPages | None, following: Wish) -> None:
    assert next_wish(last, EXPECTS) == following
