"""The pages of vLLM's requests, without vLLM: one message matches all that may run next, and one reserves for them."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cachesvc_client import CacheClient, Expected
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import RequestPages, Wish

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from tests.e2e.rig import Node, running_node, wait_until

PAGES = 256
LAYOUT = Layout(64, 1, (PlaneGroup("full"),), (Plane("kv", 0, "full", (64,), "uint8"),))


@contextmanager
def book_of(node: Node, ahead_blocks: int = 32, clock: Callable[[], float] = time.monotonic) -> Iterator[PageBook]:
    """A book of a lease; at its end nothing is held."""
    with CacheClient(node.socket, engine="book") as client:
        model = client.register("book", LAYOUT, device_pages=[PAGES], host_pages=[0], reserved_pages=1)
        with client.open_lease(model) as lease:
            book = PageBook(lease, 4, ahead_blocks, clock)
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
        node.daemon.process.send_signal(signal.SIGSTOP)  # the first match has no answer before all have come
        for request_id, hashes in coming.items():
            book.expect(request_id, wish(hashes))
        node.daemon.process.send_signal(signal.SIGCONT)
        first = book.begin("r0", wish(coming["r0"]))
        book.begin("r1", wish(coming["r1"]))
        after = book.find("r2")
        assert after is not None
        assert not after.is_matching
        assert book.find("r4") is None
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


def test_nothing_is_waited_for_while_requests_run(node: Node) -> None:
    """The match, pages beyond the stock, and the report of an iteration."""
    with book_of(node) as book:
        hashes = some_hashes(3)
        compute(book, book.begin("a", wish(hashes)), hashes)
        book.outbox.runs = lambda: True
        book.outbox.take_waits()
        matching = book.begin("b", wish(hashes))
        assert not book.is_ready(matching, 40)
        wait_until(lambda: book.begin("b", wish(hashes)).hit_blocks == 3, "the answer has come")
        request = book.begin("b", wish(hashes))
        assert not book.is_ready(request, 40), "the stock has no such number: they are asked for"
        assert not book.reserve(request, 40)
        wait_until(lambda: is_there(book, request), "they were granted")
        assert book.reserve(request, 40)
        book.use_hits(request)
        book.take(request, 37)
        book.finish(request, 1)
        book.drop(request, 40)
        book.flush()
        assert book.outbox.take_waits() == (0, 0)


def test_a_request_whose_match_is_old_gets_pages_that_another_has_freed(node: Node) -> None:
    """Others are matched again meanwhile; its own sequence stays."""
    ahead_s = 0.0
    with book_of(node, clock=lambda: time.monotonic() + ahead_s) as book:
        large, waiting = book.begin("a", wish(some_hashes(PAGES - 40))), book.begin("b", wish(some_hashes(3)))
        assert book.reserve(large, PAGES - 40)
        book.take(large, PAGES - 40)
        for _ in range(2):
            book.begin_step()
        ahead_s = 1.0
        book.finish(large, 1)
        book.drop(large, PAGES - 40)
        assert book.reserve(waiting, 100)
        assert book.find("b") is waiting
        book.forget("b")


def is_there(book: PageBook, request: RequestPages) -> bool:
    """Return whether the pages have come."""
    book.top_up()
    return not request.is_growing


@contextmanager
def stopped_until(node: Node, holds: Callable[[], bool]) -> Iterator[None]:
    """Stop the daemon, and have it go on once the block has come to what ``holds``."""
    process = node.daemon.process

    def resume() -> None:
        try:
            wait_until(holds, "the daemon is waited for")
        finally:
            process.send_signal(signal.SIGCONT)

    process.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=resume)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_running_request_without_a_page_waits_and_that_is_counted(node: Node) -> None:
    """Otherwise vLLM would preempt one."""
    with book_of(node) as book:
        request = book.begin("a", wish(some_hashes(3)))
        assert book.reserve(request, 4)
        book.take(request, 4)
        book.outbox.runs = lambda: True
        book.outbox.take_waits()
        with stopped_until(node, lambda: book.outbox.waits.running > 0):
            while not book.reserve(request, 60):  # a machine with much else to do answers late
                book.outbox.wait()
        running, idle = book.outbox.take_waits()
        assert running >= 1
        assert idle == 0
        book.finish(request, 1)
        book.drop(request, 4)


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
        book.outbox.wait()  # because it is matched again later: nothing waits for what another node computes
        assert begun.is_coming
        assert begun.hit_blocks == 3
        book.forget("b")
        assert book.begin("c", wish(hashes)).hit_blocks == 2
        book.forget("c")


def test_what_a_request_expects_that_ends_is_not_fetched_any_more_and_nothing_is_held_for_it() -> None:
    with running_node(["--peer-allow", "127.0.0.0/8"]) as node, book_of(node) as book:
        nowhere = Expected("127.0.0.1:1", patience=60.0, waits=False)
        begun = book.begin("a", replace(wish(some_hashes(6)), expected=nowhere))
        book.outbox.wait()
        assert begun.is_coming
        book.finish(begun, 0)
        book.outbox.wait()
        assert node.counters()["expectations_ended_other"] == 1, "the engine has no iteration after that"
        early = book.begin("b", replace(wish(some_hashes(6)), expected=nowhere))
        book.finish(early, 0)
        book.outbox.wait()
        book.flush()
        book.outbox.wait()
        assert node.counters()["expectations_ended_other"] == node.counters()["expectations"]
        assert (book.find("a"), book.find("b")) == (None, None)
        compute(book, book.begin("c", wish(hashes := some_hashes(3))), hashes)
