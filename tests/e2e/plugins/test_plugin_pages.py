"""The pages of vLLM's requests, kept with a real daemon: what vLLM relies on while it schedules."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import pytest
from cachesvc_client import CacheClient, Lease
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import RequestPages, Wish
from cachesvc_vllm.cache_groups import slab_layout
from cachesvc_vllm.plain import computed_blocks
from kvcache.v1 import lease_pb2, lease_pb2_grpc

from tests.e2e.rig import Node, running_node, wait_until
from tests.unit.rigs.vllm_rig import layers_outermost

PAGES = 64
USABLE = PAGES - 1
"""Page 0 is never granted."""


def hashes(seed: str, blocks: int) -> list[bytes]:
    """Keys as vLLM makes them: 32 bytes each."""
    return [hashlib.sha256(f"{seed}{at}".encode()).digest() for at in range(blocks)]


class Engine:
    """A lease and its book, driven as vLLM's scheduler drives it."""

    def __init__(self, node: Node, host_pages: int = 0) -> None:
        self.client = CacheClient(node.socket).connect()
        layout = slab_layout(layers_outermost(PAGES))
        registration = self.client.register(
            "m", layout, device_pages=[PAGES], host_pages=[host_pages], reserved_pages=1
        )
        self.lease: Lease = self.client.open_lease(registration)
        self.ahead_s = 0.0
        self.book = PageBook(self.lease, 2, clock=lambda: time.monotonic() + self.ahead_s)

    def admit(self, name: str, keys: list[bytes], blocks: int) -> RequestPages:
        """Match, reserve, and take everything."""
        request = self.book.begin(name, Wish(keys, len(keys), 0))
        assert self.book.reserve(request, blocks)
        self.book.use_hits(request)
        self.book.take(request, blocks - request.taken)
        return request

    def end(self, request: RequestPages) -> None:
        """vLLM frees all of it."""
        self.book.drop(request, request.held)
        self.book.flush()

    def compute(self, name: str, keys: list[bytes]) -> list[int]:
        """A whole request's life; its pages."""
        request = self.admit(name, keys, len(keys))
        self.book.seal(request, len(keys), keys)
        pages = list(request.pages)
        self.end(request)
        return pages

    def close(self) -> None:
        self.book.close()
        self.client.close()


@pytest.fixture
def engine(node: Node) -> Iterator[Engine]:
    """One engine."""
    made = Engine(node)
    yield made
    made.close()


@pytest.fixture
def other(node: Node) -> Iterator[Engine]:
    """Another one of the same model."""
    made = Engine(node)
    yield made
    made.close()


def test_page_0_is_never_a_request_s(engine: Engine) -> None:
    request = engine.admit("all", [], USABLE)
    assert sorted(request.pages) == list(range(1, PAGES))
    engine.end(request)


def test_what_one_has_sealed_the_other_has_in_place(engine: Engine, other: Engine, node: Node) -> None:
    keys = hashes("a", 5)
    pages = engine.compute("first", keys)
    wait_until(lambda: node.counters().get("published_blocks", 0) == 5, "they are sealed")
    request = other.admit("second", keys, 6)
    assert request.pages[:5] == pages
    other.end(request)


def test_a_pinned_hit_counts_as_free_until_vllm_takes_it(engine: Engine) -> None:
    keys = hashes("a", 5)
    engine.compute("first", keys)
    request = engine.book.begin("second", Wish(keys, 5, 0))
    assert request.hit_blocks == 5
    assert engine.book.free_blocks(USABLE, request) == USABLE
    assert engine.book.reserve(request, 6)
    engine.book.use_hits(request)
    assert engine.book.free_blocks(USABLE, request) == USABLE - 5
    engine.book.take(request, 1)
    assert engine.book.free_blocks(USABLE, request) == USABLE - 6
    engine.end(request)


def test_pages_go_back_with_the_last_that_vllm_frees(engine: Engine, node: Node) -> None:
    request = engine.admit("one", [], 10)
    engine.book.drop(request, 9)
    engine.book.flush()
    assert node.pages("private", "replica 0") >= 10
    engine.book.drop(request, 1)
    engine.book.flush()
    wait_until(lambda: node.pages("private", "replica 0") <= 2, "all but the stock came back")


def test_a_request_that_ends_before_it_was_admitted_keeps_nothing(engine: Engine) -> None:
    keys = hashes("a", 5)
    engine.compute("first", keys)
    waiting = engine.book.begin("aborted", Wish(keys, 5, 0))
    assert engine.book.reserve(waiting, 20)
    engine.book.finish(waiting, 0)
    engine.book.flush()
    assert engine.book.find("aborted") is None
    engine.end(engine.admit("all", [], USABLE))


def test_a_block_that_another_sealed_first_keeps_its_own_page(engine: Engine, other: Engine, node: Node) -> None:
    keys = hashes("a", 4)
    mine, theirs = engine.admit("mine", keys, 4), other.admit("theirs", keys, 4)
    engine.book.seal(mine, 4, keys)
    engine.book.flush()
    wait_until(lambda: node.counters().get("published_blocks", 0) == 4, "they are sealed")
    before = list(theirs.pages)
    other.book.seal(theirs, 4, keys)
    other.book.flush()
    assert other.book.reserve(theirs, 30)
    assert theirs.pages[:4] == before
    assert len(set(theirs.pages) | set(mine.pages)) == 34
    engine.end(mine)
    other.end(theirs)


def test_where_there_is_no_room_nothing_is_taken_and_later_there_is(engine: Engine, other: Engine) -> None:
    large = other.admit("large", [], USABLE - 8)
    request = engine.book.begin("small", Wish([], 0, 0))
    assert not engine.book.reserve(request, 20)
    other.end(large)
    other.book.close()
    wait_until(lambda: engine.book.reserve(request, 20), "there is room")
    engine.book.take(request, 20)
    engine.end(request)


def test_the_last_pages_come_from_the_engine_s_own_stock_and_from_hits_of_requests_that_wait(engine: Engine) -> None:
    keys = hashes("a", 20)
    engine.compute("first", keys)
    waiting = engine.book.begin("waiting", Wish(keys, 20, 0))
    assert waiting.hit_blocks == 20
    request = engine.admit("all", [], USABLE)
    assert len(set(request.pages)) == USABLE
    assert engine.book.find("waiting") is None
    engine.end(request)


def test_what_is_computed_before_the_namespace_changes_is_not_found_after(engine: Engine, other: Engine) -> None:
    keys = hashes("a", 5)
    engine.compute("first", keys)
    engine.book.change_keys(b"a" * 32)
    engine.compute("second", keys)
    assert engine.book.begin("third", Wish(keys, 5, 0)).hit_blocks == 5
    other.book.change_keys(b"b" * 32)
    assert other.book.begin("fourth", Wish(keys, 5, 0)).hit_blocks == 0
    engine.book.forget("third")
    other.book.forget("fourth")


def test_what_is_computed_and_not_told_when_the_namespace_changes_is_not_found_after(engine: Engine) -> None:
    """It would be of the old weights, under the keys of the new ones."""
    keys = hashes("a", 5)
    request = engine.book.begin("first", Wish(keys, 0, 0))
    assert engine.book.reserve(request, 5)
    engine.book.take(request, 5)
    engine.book.seal(request, 5, keys)
    engine.book.drop(request, request.held)
    engine.book.change_keys(b"c" * 32)
    engine.book.flush()
    assert engine.book.begin("second", Wish(keys, 5, 0)).hit_blocks == 0
    engine.book.forget("second")


def test_requests_of_two_adapters_share_nothing(engine: Engine, other: Engine) -> None:
    keys, mine, theirs = hashes("a", 5), b"m" * 32, b"t" * 32
    request = engine.book.begin("first", Wish(keys, 5, 0, mine))
    assert engine.book.reserve(request, 5)
    engine.book.take(request, 5)
    engine.book.seal(request, 5, keys)
    engine.end(request)
    for number, (salt, blocks) in enumerate({mine: 5, theirs: 0, b"": 0}.items()):
        assert other.book.begin(f"{number}", Wish(keys, 5, 0, salt)).hit_blocks == blocks
        other.book.forget(f"{number}")


def test_when_the_daemon_has_gone_requests_get_pages_that_nobody_else_was_offered(engine: Engine, node: Node) -> None:
    keys = hashes("a", 4)
    sealed = engine.compute("sealed", keys)
    under_way = engine.admit("under way", hashes("b", 6), 6)
    engine.book.seal(under_way, 2, hashes("b", 6))  # may have reached the daemon, and another engine from there
    node.daemon.process.kill()
    node.daemon.process.wait()
    wait_until(lambda: engine.lease.is_lost, "the engine knows")
    assert engine.book.reserve(under_way, 7)  # decode goes on, from the stock
    engine.book.take(under_way, 1)
    offered = set(sealed) | set(under_way.pages[:2])
    own = set(under_way.pages[2:])
    engine.end(under_way)
    request = engine.book.begin("later", Wish(keys, 4, 0))
    assert request.hit_blocks == 0
    assert engine.book.reserve(request, 5)
    assert not set(request.pages) & offered
    assert set(request.pages) & own
    assert not engine.book.reserve(request, 20)
    assert engine.book.is_beyond(request, 20)
    engine.book.take(request, 5)
    engine.end(request)
    request = engine.book.begin("too long", Wish([], 0, 0))
    assert not engine.book.reserve(request, 20)
    assert engine.book.is_beyond(request, 20)
    assert engine.book.reserve(request, 4)
    assert not engine.book.is_beyond(request, 4)


def test_a_hit_that_was_to_come_from_the_host_is_nothing_once_the_daemon_has_gone(node: Node) -> None:
    engine, keys = Engine(node, host_pages=PAGES), hashes("a", 4)
    engine.compute("first", keys)
    engine.end(engine.admit("all", [], USABLE))  # drives them to the host
    request = engine.book.begin("second", Wish(keys, 4, 0))
    assert (request.hit_blocks, request.host_blocks) == (0, 4)
    node.daemon.process.kill()
    node.daemon.process.wait()
    wait_until(lambda: engine.lease.is_lost, "the engine knows")
    assert not engine.book.reserve(request, 4)
    engine.close()


def test_a_request_whose_load_failed_is_computed_and_not_loaded_again(node: Node) -> None:
    """A load that failed may fail each time: a request that came back to it would never be answered."""
    engine, keys = Engine(node, host_pages=PAGES), hashes("a", 4)
    engine.compute("first", keys)
    engine.end(engine.admit("all", [], USABLE))  # drives them to the host
    request = engine.book.begin("second", Wish(keys, 4, 0))
    assert (request.hit_blocks, request.host_blocks) == (0, 4)
    engine.book.without_host.add("second")
    request = engine.book.begin("second", Wish(keys, 4, 0))
    assert (request.hit_blocks, request.host_blocks) == (0, 0)
    assert engine.book.reserve(request, 4)
    assert engine.book.begin("other", Wish(keys, 4, 0)).host_blocks == 4
    engine.book.forget("second")
    engine.book.forget("other")
    engine.close()


def test_a_request_whose_load_failed_before_it_was_admitted_is_matched_again(node: Node) -> None:
    engine, keys = Engine(node, host_pages=PAGES), hashes("a", 4)
    engine.compute("first", keys)
    engine.end(engine.admit("all", [], USABLE))  # drives them to the host
    request = engine.book.begin("second", Wish(keys, 4, 0))
    assert engine.book.reserve(request, 4)
    assert engine.book.begin("second", Wish(keys, 4, 0)) is request
    assert request.sequence is not None
    request.sequence.record.has_failed_load = True  # its next pages were refused for it
    assert engine.book.begin("second", Wish(keys, 4, 0)) is not request
    engine.book.forget("second")
    engine.close()


def test_without_the_daemon_one_that_waits_gets_what_others_have_that_wait_behind_it(node: Node) -> None:
    """Or it would wait without end, and they behind it."""
    engine = Engine(node)
    book = engine.book
    behind = book.begin("behind", Wish(hashes("b", 9), 9, 0))
    assert book.reserve(behind, 9)
    node.daemon.process.kill()
    node.daemon.process.wait()
    wait_until(lambda: engine.lease.is_lost, "the engine knows")
    first = book.begin("first", Wish(hashes("a", 9), 9, 0))
    for _ in range(2):
        assert not book.reserve(first, 9)
        book.give_way(first)
        engine.ahead_s += 1
    assert book.reserve(first, 9)
    book.forget("first")
    engine.close()


def test_a_request_is_not_given_what_another_adapter_computed(engine: Engine) -> None:
    """Its files changed after it was matched."""
    keys, mine, theirs = hashes("a", 5), b"m" * 32, b"t" * 32
    engine.book.expect("first", Wish(keys, 5, 0, mine))
    engine.book.begin("first", Wish(keys, 5, 0, mine))
    assert engine.book.begin("first", Wish(keys, 5, 0, theirs)).salt == theirs
    engine.book.forget("first")


def test_a_match_that_was_made_ahead_is_no_longer_than_what_vllm_takes(engine: Engine) -> None:
    keys = hashes("a", 5)
    engine.compute("first", keys)
    engine.book.expect("second", Wish(keys, 5, 0))
    assert engine.book.begin("second", Wish(keys, 3, 0)).hit_blocks == 3
    engine.book.forget("second")


def test_pages_of_a_preempted_request_are_there_for_whom_it_was_preempted_for(engine: Engine) -> None:
    large, small = engine.admit("large", [], 40), engine.admit("small", [], 10)
    assert not engine.book.reserve(small, 30)
    engine.book.drop(large, large.held)
    assert engine.book.reserve(small, 30)
    engine.end(small)


def test_a_lease_that_the_living_daemon_took_away_leaves_nothing_to_go_on_with() -> None:
    with running_node(["--lease-seconds", "1"]) as node:
        engine = Engine(node)
        request = engine.admit("one", [], 4)
        closing = lease_pb2.CloseRequest(lease_id=engine.lease.id)
        lease_pb2_grpc.LeaseServiceStub(node.channel).Close(closing)
        wait_until(lambda: engine.lease.is_lost, "the engine knows")
        assert not engine.book.reserve(request, 4)
        assert engine.book.is_beyond(request, 4)
        engine.close()


def test_only_blocks_that_no_step_under_way_writes_are_computed() -> None:
    assert computed_blocks(computed_tokens=100, in_flight_tokens=0, block_tokens=32, keys=9) == 3
    assert computed_blocks(computed_tokens=100, in_flight_tokens=5, block_tokens=32, keys=9) == 2
    assert computed_blocks(computed_tokens=100, in_flight_tokens=0, block_tokens=32, keys=2) == 2
    assert computed_blocks(computed_tokens=0, in_flight_tokens=40, block_tokens=32, keys=2) == 0


def test_only_the_keys_of_new_blocks_are_handed_over_to_be_published(engine: Engine, other: Engine) -> None:
    """A publish in each iteration of a long answer costs what it adds."""
    keys = hashes("long", 6)
    request = engine.book.begin("a", Wish(keys[:1], 1, 0))
    assert engine.book.reserve(request, 6)
    engine.book.use_hits(request)
    engine.book.take(request, 6)
    handed: list[int] = []

    class Hashes(list[bytes]):
        def __getitem__(self, at: object) -> object:  # type: ignore[override]
            part = super().__getitem__(at)  # type: ignore[call-overload]
            handed.append(len(part))
            return part

    for blocks in range(2, 7):
        engine.book.seal(request, blocks, Hashes(keys))
        engine.book.flush()
    assert handed == [2, 1, 1, 1, 1]
    engine.end(request)
    engine.book.flush(is_last=True)
    assert other.book.begin("b", Wish(keys, 6, 0)).hit_blocks == 6


def test_what_another_connector_has_loaded_is_not_published(engine: Engine, other: Engine) -> None:
    keys = hashes("foreign", 3)
    request = engine.admit("a", keys, 3)
    request.is_foreign = True
    engine.book.seal(request, 3, keys)
    engine.end(request)
    engine.book.flush()
    assert other.book.begin("b", Wish(keys, 3, 0)).hit_blocks == 0
