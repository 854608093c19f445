"""The pages of a request in several groups over one pool, kept with a real daemon and without vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from cachesvc_client import CacheClient, Lease
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import GroupTable, RequestPages, Wish
from cachesvc_vllm.cache_groups import slab_layout

from cachesvc.model.words import NO_PAGE
from tests.e2e.plugins.test_plugin_pages import hashes
from tests.e2e.rig import Node, wait_until
from tests.unit.rigs.vllm_rig import FullAttentionSpec, MambaSpec, SlidingWindowSpec, overlaid

PAGES = 64
USABLE = PAGES - 1
WINDOW, STATE = 0, 1
"""Groups beside the leading one, which is the last. The window is two blocks."""


class Engine:
    """A lease and its book, driven as vLLM's managers drive them."""

    def __init__(self, node: Node, host_pages: int = 0) -> None:
        self.client = CacheClient(node.socket).connect()
        specs = SlidingWindowSpec(sliding_window=64), MambaSpec(), FullAttentionSpec()
        layout = slab_layout(overlaid(*specs, blocks=PAGES))
        registration = self.client.register(
            "m", layout, device_pages=[PAGES] * 3, host_pages=[host_pages] * 3, reserved_pages=1
        )
        self.lease: Lease = self.client.open_lease(registration)
        self.book = PageBook(self.lease, 2)

    def take(self, request: RequestPages, blocks: int) -> None:
        """A chunk up to ``blocks`` blocks."""
        states = {STATE: [blocks - 1]}
        assert self.book.reserve(request, blocks, states)
        window, state = self.tables(request)
        for table, first in ((window, window.taken), (state, blocks - 1)):
            pages = table.take(max(first, request.taken), blocks - max(first, request.taken))
            self.book.hold(request, len(pages))
        self.book.take(request, blocks - request.taken)

    def hit(self, name: str, keys: Sequence[bytes]) -> RequestPages:
        """A request that takes all of its hit."""
        request = self.book.begin(name, Wish(keys, len(keys), 0))
        for table in self.tables(request):
            cells = [at for at, page in enumerate(table.pages) if page != NO_PAGE]
            if cells:
                table.hold(cells[0], len(cells))
                self.book.hold(request, len(cells))
        self.book.use_hits(request)
        return request

    def free(self, request: RequestPages, table: GroupTable, end: int) -> None:
        """Free what lies before ``end``, and is read no more."""
        for position in range(table.first, end):
            if table.page_at(position) != NO_PAGE:
                table.free(position)
                self.book.drop(request, 1)
        self.book.move_windows(request)

    def tables(self, request: RequestPages) -> list[GroupTable]:
        """Tables beside the leading one."""
        return [request.table_of(group) for group in (WINDOW, STATE)]

    def end(self, request: RequestPages) -> None:
        """vLLM frees all of it."""
        self.book.drop(request, request.held)
        self.book.flush()

    def close(self) -> None:
        self.book.close()
        self.client.close()


@pytest.fixture
def engine(node: Node) -> Iterator[Engine]:
    """One engine."""
    made = Engine(node, host_pages=PAGES)
    yield made
    made.close()


def test_a_hit_has_the_cells_that_each_group_needs(engine: Engine, node: Node) -> None:
    keys = hashes("a", 6)
    first = engine.book.begin("first", Wish([], 0, 0))
    for blocks in (3, 6):
        engine.take(first, blocks)
        engine.book.seal(first, blocks, keys)
    window, state = engine.tables(first)
    tables = first.pages[:6], window.pages[4:6], state.pages[5]
    engine.end(first)
    wait_until(lambda: node.counters().get("published_blocks", 0) == 6, "they are sealed")
    second = engine.hit("second", keys)
    window, state = engine.tables(second)
    assert (second.hit_blocks, second.pages, window.pages, state.pages) == (
        6,
        tables[0],
        [NO_PAGE] * 4 + tables[1],
        [NO_PAGE] * 5 + [tables[2]],
    )
    engine.end(second)
    third = engine.hit("third", keys[:4])
    assert (third.hit_blocks, third.lost_blocks) == (3, 1), "the last chunk of the first request ended later"
    engine.end(third)


def test_what_has_left_a_window_is_free_while_its_request_runs(engine: Engine, node: Node) -> None:
    keys = hashes("a", 8)
    request = engine.book.begin("one", Wish([], 0, 0))
    engine.take(request, 8)
    engine.book.seal(request, 8, keys)
    engine.book.flush()
    held = engine.book.held_blocks
    wait_until(lambda: node.pages("private", "replica 0") <= 2 * 3, "all but the stock is sealed")
    engine.free(request, engine.tables(request)[0], 6)
    engine.book.flush()
    assert engine.book.held_blocks == held - 6
    more = engine.book.begin("two", Wish([], 0, 0))
    engine.take(more, (USABLE - (held - 6) - 1) // 2)
    engine.end(more)
    engine.end(request)


def test_a_window_that_another_engine_published_first_is_given_back_too(node: Node) -> None:
    """Else the own pages of a prompt that two engines compute at once would stay until the request ends."""
    keys, engines = hashes("a", 8), [Engine(node), Engine(node)]
    requests = []
    for each in engines:
        request = each.book.begin("same", Wish([], 0, 0))
        each.take(request, 8)
        requests.append(request)
    for each, request in zip(engines, requests, strict=True):
        each.book.seal(request, 8, keys)
        each.book.flush()
        each.book.ask_room()  # takes the answer in
    wait_until(lambda: node.counters().get("duplicate_blocks", 0) == 8, "the second one was later")
    late, request = engines[1], requests[1]
    late.book.flush()
    before = node.pages("free", "replica 0")
    late.free(request, late.tables(request)[0], 6)
    late.book.flush()
    late.book.ask_room()
    wait_until(lambda: node.pages("free", "replica 0") >= before + 6, "its own cells are free")
    for each, request in zip(engines, requests, strict=True):
        each.end(request)
        each.close()
