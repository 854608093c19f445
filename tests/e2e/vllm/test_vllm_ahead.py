"""The pages of vLLM's requests, without vLLM: one message matches all that may run next, and one reserves for them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cachesvc_client import CacheClient, Expected
from cachesvc_vllm.pages.page_book import PageBook
from cachesvc_vllm.pages.request_pages import RequestPages, Wish

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from tests.e2e.rig import Node, running_node, wait_until

PAGES = 256
LAYOUT = Layout(64, 1, (PlaneGroup("full"),), (Plane("kv", 0, "full", (64,), "uint8"),))


@contextmanager
def book_of(node: Node, ahead_blocks: int = 32) -> Iterator[PageBook]:
    """A book of a lease; at its end nothing is held."""
    with CacheClient(node.socket, engine="book") as client:
        model = client.register("book", LAYOUT, device_pages=[PAGES], host_pages=[0], reserved_pages=1)
        with client.open_lease(model) as lease:
            book = PageBook(lease, 4, ahead_blocks)
            try:
                yield book
            finally:
                book.close()
    wait_until(lambda: not any(node.held().values()), f"all pages came back: {node.held()}")


def wish(hashes: list[bytes]) -> Wish:
    """For one that has a token behind its blocks."""
    return Wish(hashes, len(hashes), len(hashes) + 1)


def some_hashes(blocks: int) -> list[bytes]:
    """Hashes of blocks that no other request has."""
    return [secrets.token_bytes(32) for _ in range(blocks)]


def compute(book: PageBook, request: RequestPages, hashes: list[bytes]) -> None:
    """All of a request in one iteration, as vLLM does it; and its end."""
    if request.hit_blocks:
        book.use_hits(request)
    assert book.reserve(request, len(hashes) + 1)
    book.take(request, len(hashes) + 1 - request.taken)
    book.seal(request, len(hashes), hashes)
    book.finish(request, 1)
    book.drop(request, request.held)
    book.flush()


def test_what_ends_in_its_first_iteration_is_found_by_the_next(node: Node) -> None:
    with book_of(node) as book:
        hashes = some_hashes(3)
        compute(book, book.begin("a", wish(hashes)), hashes)
        again = book.begin("b", wish(hashes))
        assert again.hit_blocks == 3
        compute(book, again, hashes)


def test_all_that_may_run_next_are_matched_and_reserved_with_the_first(node: Node) -> None:
    with book_of(node, ahead_blocks=32) as book:
        coming = {f"r{each}": some_hashes(9) for each in range(5)}
        for request_id, hashes in coming.items():
            book.expect(request_id, wish(hashes))
        first = book.begin("r0", wish(coming["r0"]))
        assert book.find("r1") is None  # the first was sent alone, as it came
        book.begin("r1", wish(coming["r1"]))
        others = [book.find(f"r{each}") for each in range(2, 5)]
        assert [other is not None and not other.is_matching for other in others] == [True, True, False]
        assert book.reserve(first, 10)
        for request_id in ("r1", "r2", "r3"):
            request = book.begin(request_id, wish(coming[request_id]))
            assert book.reserve(request, 10)
            assert len(request.pages) == 10
            compute(book, request, coming[request_id])
        assert book.begin("r2", wish(coming["r2"])).hit_blocks == 9
        compute(book, first, coming["r0"])
        for request_id in ("r2", "r4"):
            book.forget(request_id)


def test_a_request_that_goes_before_its_match_has_come_holds_nothing(node: Node) -> None:
    with book_of(node) as book:
        hashes = some_hashes(4)
        compute(book, book.begin("a", wish(hashes)), hashes)
        book.expect("b", wish(hashes))
        assert book.find("b") is not None
        book.forget("b")
        assert book.find("b") is None
        compute(book, book.begin("c", wish(hashes)), hashes)  # takes the abandoned answer in
        book.flush()


def test_what_waits_is_given_back_where_somebody_else_has_no_room(node: Node) -> None:
    with book_of(node, ahead_blocks=PAGES) as book:
        large, waiting = some_hashes(PAGES - 40), some_hashes(60)
        first = book.begin("a", wish(some_hashes(9)))
        waits = book.begin("b", wish(waiting))
        assert book.reserve(first, 10)
        assert book.reserve(waits, 61)
        assert waits.is_ahead
        last = book.begin("c", wish(large))
        assert book.reserve(last, len(large) + 1)
        assert (book.find("a"), book.find("b")) == (None, None)
        compute(book, last, large)


def test_a_request_waits_for_what_is_coming_though_its_last_block_will_be_left_out() -> None:
    with running_node(["--peer-allow", "127.0.0.0/8"]) as node, book_of(node) as book:
        hashes = some_hashes(6)
        compute(book, book.begin("a", wish(hashes[:3])), hashes[:3])
        book.drops_last = True
        nowhere = Expected("127.0.0.1:1", patience=60.0, waits=False)
        begun = book.begin("b", replace(wish(hashes), expected=nowhere))
        assert begun.is_coming
        assert begun.hit_blocks == 3
        book.forget("b")
        assert book.begin("c", wish(hashes)).hit_blocks == 2
        book.forget("c")
