"""The last block of a request that is all a hit: it has a page of its own in the kernels' table alone."""

from __future__ import annotations

import pytest
from cachesvc_client.plugins.page_book import PrivatePages
from cachesvc_client.plugins.request_pages import PageCopy, RequestPages, Tail, Wish

BLOCK = 16
KEYS = [bytes([each]) * 32 for each in range(3)]


def made(hit_blocks: int, host_blocks: int, *, tail: RequestPages | None) -> RequestPages:
    """A request of three blocks, with the pages of its hit and one more."""
    return RequestPages(
        "r",
        0,
        pages=[7, 8, 9, 10],
        hit_blocks=hit_blocks,
        host_blocks=host_blocks,
        wish=Wish(KEYS, 3, 3, whole_blocks=3),
        tail=tail,
    )


@pytest.mark.parametrize(
    ("hit_blocks", "shown", "offered", "taken"),
    [(3, 2, BLOCK - 1, 1), (1, 1, 2 * BLOCK - 1, 2), (0, 0, 3 * BLOCK - 1, 3)],
)
def test_all_but_one_token_of_a_whole_hit_is_offered(hit_blocks: int, shown: int, offered: int, taken: int) -> None:
    request = made(hit_blocks, 3 - hit_blocks, tail=RequestPages("r", 0, pages=[20]))
    assert request.shown_blocks == shown
    assert request.offer(shown * BLOCK, BLOCK) == offered
    assert request.blocks_of(shown * BLOCK + offered, BLOCK) == 3
    if shown:
        assert request.take_hits() == shown
    pages = request.take(taken)
    assert (pages[-1], request.copy) == (20, PageCopy(9, 20)), "kernels write into no sealed page"
    assert request.take(1) == [10]


def test_the_page_counts_among_those_that_are_missing_until_it_is_there() -> None:
    request = made(3, 0, tail=RequestPages("r", 0))
    assert not request.has_pages(3, {})
    assert [request.missing_pages(request.growth(each, {})) for each in (3, 4, 5)] == [1, 1, 2]
    private = PrivatePages()
    private.add([30])
    assert private.lengthen(request, 4, {})
    assert request.has_pages(4, {})
    assert request.private_pages() == [10, 30], "its own once it has ended, and never sealed"


def test_a_hit_that_ends_before_has_no_use_for_it() -> None:
    request, tail = made(2, 0, tail=None), RequestPages("r", 0)
    assert not request.take_tail(tail)
    assert request.offer(2 * BLOCK, BLOCK) == 0
    assert not request.is_without_tail


def test_a_whole_hit_is_shortened_where_the_pool_has_no_page_for_it() -> None:
    assert made(3, 0, tail=None).is_without_tail
    request = made(3, 0, tail=RequestPages("r", 0))
    assert not request.is_without_tail
    request.was_refused = True
    assert request.is_without_tail


def ended_within(hit_blocks: int, host_blocks: int, *, beside: RequestPages) -> RequestPages:
    """A request of three blocks whose third one has five tokens, and a lent tail; its own page is the third."""
    wish = Wish(KEYS[:2], 3, 3, whole_blocks=3, tail=Tail(b"t" * 32, 5), free_tokens=BLOCK - 5)
    return RequestPages(
        "r", 0, pages=[7, 8, 10, 11], hit_blocks=hit_blocks, host_blocks=host_blocks, wish=wish, tail=beside
    )


def lent(pages: list[int], hit_blocks: int) -> RequestPages:
    """A match beside the request's, with the sealed page of its tail."""
    return RequestPages("r", 0, pages=pages, hit_blocks=hit_blocks, host_blocks=3 - hit_blocks)


@pytest.mark.parametrize(
    ("hit_blocks", "shown", "offered", "taken"),
    [(3, 2, 4, 1), (2, 2, 4, 1), (1, 1, BLOCK + 4, 2), (0, 0, 2 * BLOCK + 4, 3)],
)
def test_a_lent_tail_is_copied_into_the_page_that_the_request_fills(
    hit_blocks: int, shown: int, offered: int, taken: int
) -> None:
    request = ended_within(hit_blocks, 3 - hit_blocks, beside=lent([7, 8, 9], hit_blocks))
    assert request.shown_blocks == shown
    assert request.offer(shown * BLOCK, BLOCK) == offered
    assert request.blocks_of(shown * BLOCK + offered, BLOCK) == 3
    assert request.blocks_of(2 * BLOCK, BLOCK) == 2, "vLLM may leave it out"
    if shown:
        assert request.take_hits() == shown
    pages = request.take(taken)
    assert (pages[-1], request.copy) == (10, PageCopy(9, 10)), "nothing writes into the sealed page"


def test_a_lent_tail_is_no_page_of_an_engine_without_its_daemon() -> None:
    request = ended_within(3, 0, beside=lent([7, 8, 9], 3))
    assert request.private_pages() == [10, 11]
    private = PrivatePages()
    private.add([30])
    assert private.lengthen(request, 5, {})
    lacking = ended_within(2, 1, beside=lent([7, 8], 2))
    assert lacking.lacks_tail
    assert not private.lengthen(lacking, 4, {}), "it will not come any more"
    assert lacking.missing_pages(lacking.growth(4, {})) == 1


def test_a_request_with_its_match_alone_is_matched_again_while_it_waits() -> None:
    request = ended_within(3, 0, beside=lent([7, 8, 9], 3))
    assert not request.wants_match
    del request.pages[2:]
    assert request.wants_match
