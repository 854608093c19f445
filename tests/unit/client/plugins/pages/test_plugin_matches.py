"""Requests that wait for another node's blocks: matched again together, waited for by nothing, in no other's way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from cachesvc_client import CacheClient, Expected, Lease, Timeouts
from cachesvc_client.layouts.families import opaque
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import COMING_HOLDS_S, MATCH_HOLDS_S, RequestPages, Tail, Wish
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import ErrorCode
from cachesvc.model.words import KEY_BYTES
from tests.unit.rigs.client_rig import FakeDaemon, cells

LAYOUT = opaque(block_bytes=64, block_tokens=4)
Result = cache_pb2.OperationResult
EXPECTED = Expected("10.0.0.1:7100", 4, 10.0, is_computed=False, waits=False)
HALF_S = COMING_HOLDS_S / 2
FIRST_BLOCKS = 5
ENDS_WITHIN = Wish(
    [b"x" * 32, b"y" * 32], 3, 3, expected=EXPECTED, whole_blocks=3, tail=Tail(b"z" * 32, 2), free_tokens=2
)
"""Two blocks and a tail."""
WITH_TAIL, UP_TO_TAIL = (3, 3, True), (2, 2, False)


class Engine(deque[cache_pb2.StepResponse]):
    """A book with a clock of its own, and the answers of its daemon: each match finds ``device_blocks`` in place, and
    ``coming_blocks`` are on their way. ``refuses``: the most blocks of a match that is refused once."""

    def __init__(self, daemon: FakeDaemon, lease: Lease) -> None:
        super().__init__()
        self.now_s = 0.0
        self.coming_blocks = 4
        self.device_blocks = self.refuses = 0
        self._steps = daemon.seen["Step"]
        daemon.step_answers = self
        self.book = PageBook(lease, 1, 2 * FIRST_BLOCKS, lambda: self.now_s)

    def popleft(self) -> cache_pb2.StepResponse:
        """The answer to the step that has come last."""
        return cache_pb2.StepResponse(results=map(self._result_of, self._steps[-1].operations))

    def _result_of(self, operation: cache_pb2.StepOperation) -> cache_pb2.OperationResult:
        if not operation.HasField("match"):
            return Result(release=cache_pb2.ReleaseResponse())
        if self.refuses == operation.match.max_blocks:
            self.refuses = 0
            return Result(error=cache_pb2.OperationError(code=ErrorCode.LIMIT.value, message="keys"))
        found = min(self.device_blocks, operation.match.max_blocks)
        hit = cache_pb2.MatchResponse(device_blocks=found, coming_blocks=self.coming_blocks)
        if found:
            hit.tables.append(cells(0, range(1, found + 1)))
        return Result(match=hit)

    def begin(self, name: str, expected: Expected | None = None, *, wish: Wish | None = None) -> RequestPages:
        """Have vLLM look at a request of four blocks, and take in every answer that is on its way."""
        wish = wish or Wish([name.encode() * 32] * 4, 4, FIRST_BLOCKS, expected=expected)
        self.book.begin(name, wish)
        self.take_answers()
        return self.book.begin(name, wish)

    def matched(self) -> list[tuple[int, int, bool]]:
        """Number of keys of each match, the most blocks, and whether it expects some."""
        matches = [each.match for step in self._steps for each in step.operations if each.HasField("match")]
        return [(len(each.keys) // KEY_BYTES, each.max_blocks, each.HasField("expected")) for each in matches]

    def released(self) -> int:
        """Number of sequences that were released."""
        return sum(each.HasField("release") for step in self._steps for each in step.operations)

    def take_answers(self) -> None:
        """Let time pass until every step has its answer: no wait of the engine's."""
        waits = self.book.outbox.waits
        counted = waits.running, waits.idle
        self.book.outbox.wait()
        waits.running, waits.idle = counted

    def iterate(self) -> list[list[str]]:
        """End an iteration; the steps that were sent for it, as the kinds of their operations."""
        first = len(self._steps)
        self.book.begin_step()
        self.book.flush()
        self.take_answers()
        kinds = [[str(each.WhichOneof("operation")) for each in step.operations] for step in self._steps[first:]]
        return [each for each in kinds if each]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    daemon = FakeDaemon(tmp_path)
    daemon.start()
    with CacheClient(daemon.path, timeouts=Timeouts(step_s=10, close_s=0.2)) as client:
        made = Engine(daemon, client.open_lease(client.register("m", LAYOUT)))
        yield made
        made.book.close()
    daemon.close()


@pytest.mark.parametrize("runs", [False, True])
def test_all_that_another_node_computes_is_matched_again_together_and_waited_for_by_nothing(
    engine: Engine, *, runs: bool
) -> None:
    engine.book.outbox.runs = lambda: runs
    assert engine.begin("a", EXPECTED).is_coming
    engine.now_s = HALF_S
    assert engine.begin("b", EXPECTED).is_coming
    assert engine.iterate() == []
    for _ in range(3):
        engine.now_s += COMING_HOLDS_S
        assert (known := engine.book.find("a")) is engine.begin("a", EXPECTED), "it is not matched alone"
        assert known is not None
        sent = engine.iterate()
        assert sent[0] == ["match", "match"]
        assert sent[1:] == [["release", "release"]], "the earlier sequences"
        assert engine.begin("a", EXPECTED).is_coming
    engine.coming_blocks, engine.device_blocks = 0, 4
    engine.now_s += COMING_HOLDS_S
    engine.iterate()
    pages = engine.begin("a", EXPECTED)
    assert (pages.is_coming, pages.hit_blocks) == (False, 4)
    assert engine.book.outbox.take_waits() == (0, 0)


def test_while_its_match_is_under_way_a_request_is_neither_without_a_hit_nor_matched_twice(engine: Engine) -> None:
    first = engine.book.begin("a", Wish([b"a" * 32] * 4, 4, FIRST_BLOCKS, expected=EXPECTED))
    assert first.is_coming
    assert engine.book.begin("a", Wish([b"a" * 32] * 4, 4, FIRST_BLOCKS, expected=EXPECTED)) is first
    engine.take_answers()
    assert engine.book.outbox.take_waits() == (0, 0)


def test_what_another_node_computes_leaves_others_their_room_ahead(engine: Engine) -> None:
    for name in "ab":
        engine.begin(name, EXPECTED)
    engine.coming_blocks = 0
    engine.book.outbox.runs = lambda: True
    for name in "cd":
        engine.book.expect(name, Wish([name.encode() * 32] * 4, 4, FIRST_BLOCKS))
    engine.iterate()
    assert all(engine.book.find(name) is not None for name in "cd"), "both are matched ahead of their turn"


def test_a_hit_whose_last_block_was_left_out_loses_no_further_one_while_it_waits(engine: Engine) -> None:
    engine.book.drops_last = True
    engine.coming_blocks, engine.device_blocks = 0, 4
    assert engine.begin("a").hit_blocks == 3
    engine.book.outbox.runs = lambda: True
    for _ in range(4):
        engine.now_s += MATCH_HOLDS_S
        engine.iterate()
        engine.begin("a")
        engine.take_answers()
    assert engine.begin("a").hit_blocks == 3


def test_a_drafter_s_last_block_is_left_out_once_all_has_come(engine: Engine) -> None:
    engine.book.drops_last = True
    engine.device_blocks = 2
    pages = engine.begin("a", EXPECTED)
    assert (pages.is_coming, pages.hit_blocks) == (True, 2)
    engine.coming_blocks, engine.device_blocks = 0, 4
    engine.now_s += COMING_HOLDS_S
    engine.iterate()
    assert engine.begin("a", EXPECTED).hit_blocks == 3


def test_a_prompt_with_a_tail_is_matched_up_to_it_once_the_tail_has_come(engine: Engine) -> None:
    engine.coming_blocks, engine.device_blocks = 1, 2
    pages = engine.begin("a", wish=ENDS_WITHIN)
    assert pages.is_coming
    assert set(engine.matched()) == {WITH_TAIL}, "what is on its way is matched once"
    engine.coming_blocks, engine.device_blocks = 0, 3
    engine.now_s += COMING_HOLDS_S
    engine.iterate()
    pages = engine.begin("a", wish=ENDS_WITHIN)
    assert engine.matched()[-2:] == [WITH_TAIL, UP_TO_TAIL]
    assert (pages.is_coming, pages.hit_blocks, pages.shown_blocks, pages.rows) == (False, 3, 2, 2)
    assert pages.tail is not None
    assert pages.tail.pages == [1, 2, 3]
    engine.book.forget("a")
    engine.iterate()
    assert engine.released() == len(engine.matched()), "with what has the tail"


def test_a_prompt_whose_tail_does_not_come_goes_on_without(engine: Engine) -> None:
    engine.coming_blocks, engine.device_blocks = 0, 2
    pages = engine.begin("a", wish=ENDS_WITHIN)
    assert engine.matched() == [WITH_TAIL, UP_TO_TAIL], "its sequence is to have the key of the full block"
    assert (pages.hit_blocks, pages.tail) == (2, None)
    engine.iterate()
    assert engine.released() == 1


def test_a_request_that_ends_between_its_two_matches_gives_both_back(engine: Engine) -> None:
    engine.coming_blocks, engine.device_blocks = 0, 3
    pages = engine.book.begin("a", ENDS_WITHIN)
    engine.book.outbox.wait(lambda: pages.tail is not None)
    assert (pages.is_matching, pages.is_coming) == (True, True)
    engine.book.forget("a")
    engine.take_answers()
    engine.iterate()
    assert engine.released() == 2


def test_a_prompt_that_cannot_be_matched_beside_its_tail_goes_on_without(engine: Engine) -> None:
    engine.coming_blocks, engine.device_blocks, engine.refuses = 0, 3, 2
    engine.begin("a", wish=ENDS_WITHIN)
    pages = engine.begin("a", wish=ENDS_WITHIN)
    assert engine.matched() == [WITH_TAIL, UP_TO_TAIL, (*UP_TO_TAIL[:2], True)]
    assert (pages.hit_blocks, pages.tail) == (2, None)
    engine.iterate()
    assert engine.released() == 1


@pytest.mark.parametrize("wish", [Wish([b"a" * 32] * 4, 4, FIRST_BLOCKS, expected=EXPECTED), ENDS_WITHIN])
def test_an_engine_whose_turns_take_longer_than_a_match_holds_gets_what_has_come(engine: Engine, wish: Wish) -> None:
    engine.coming_blocks, engine.device_blocks = 0, wish.most_blocks
    engine.begin("a", wish=wish)
    engine.now_s += 2 * MATCH_HOLDS_S
    pages = engine.book.begin("a", wish)
    assert (pages.is_coming, pages.hit_blocks) == (False, wish.most_blocks)
    engine.now_s += 2 * MATCH_HOLDS_S
    engine.iterate()
    assert not engine.book.begin("a", wish).is_coming, "nor is it matched for more while it waits for its turn"
