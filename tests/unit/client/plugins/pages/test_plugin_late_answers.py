"""A daemon that answers late, or refuses: nothing is asked for twice, and what was to be given back is, afterwards."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cachesvc_client import CacheClient, Lease, Timeouts
from cachesvc_client.layouts.families import opaque
from cachesvc_client.plugins import outbox
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import RequestPages, Wish
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.client_rig import FakeDaemon, cells, hang_until

LAYOUT = opaque(block_bytes=64, block_tokens=4)
Result = cache_pb2.OperationResult
NOT_NOW = cache_pb2.OperationError(code=ErrorCode.LIMIT.value, message="calls in flight")
FULL = cache_pb2.OperationError(code=ErrorCode.EXHAUSTED.value, message="no pages")
ALL_AT_ONCE = Wish((), 0, 40, takes_all=True)
MANY = 2 * outbox.MOST_UNDER_WAY
"""More than the client's 16 steps, with what each request sends."""


class Engine(deque[cache_pb2.StepResponse]):
    """A book, and the answers of its daemon, which has pages enough. ``refused``: steps to refuse; ``refuses_pages``:
    it has none."""

    def __init__(self, daemon: FakeDaemon, lease: Lease) -> None:
        super().__init__()
        self._steps = daemon.seen["Step"]
        self._lengths: dict[int, int] = {}
        self.refused = 0
        self.refuses_pages = False
        self.now_s = 1.0
        daemon.step_answers = self
        self.book = PageBook(lease, 1, 4, clock=lambda: self.now_s)

    def popleft(self) -> cache_pb2.StepResponse:
        """The answer to the step that has come last."""
        if self.refused:
            self.refused -= 1
            return cache_pb2.StepResponse(error=NOT_NOW)
        return cache_pb2.StepResponse(results=map(self._result_of, self._steps[-1].operations))

    def _result_of(self, operation: cache_pb2.StepOperation) -> cache_pb2.OperationResult:
        if operation.HasField("match"):
            return Result(match=cache_pb2.MatchResponse())
        if operation.HasField("release"):
            return Result(release=cache_pb2.ReleaseResponse())
        if self.refuses_pages:
            return Result(error=FULL)
        number, blocks = operation.allocate.sequence_id, operation.allocate.blocks
        first, self._lengths[number] = self._lengths.get(number, 0), blocks
        return Result(allocate=cache_pb2.AllocateResponse(tables=[cells(0, range(first, blocks), first_block=first)]))

    def asked(self, kind: str) -> int:
        """Operations of a kind that the daemon has carried out or refused."""
        return sum(each.HasField(kind) for step in self._steps for each in step.operations)

    def run(self, name: str) -> RequestPages:
        """Have a request of one block run."""
        request = self.book.begin(name, Wish((), 0, 1))
        assert self.book.reserve(request, 1)
        self.book.take(request, 1)
        return request

    def end(self, request: RequestPages) -> None:
        """vLLM frees what a request has."""
        self.book.finish(request, 1)
        self.book.drop(request, request.held)

    def settle(self) -> None:
        """Report what there is, until all of it has its answer."""
        while self.book.untold or not self.book.outbox.is_empty:
            self.book.outbox.wait()
            self.book.flush()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    fake.start()
    yield fake
    fake.close()


@pytest.fixture
def engine(daemon: FakeDaemon) -> Iterator[Engine]:
    with CacheClient(daemon.path, timeouts=Timeouts(step_s=10, close_s=0.2)) as client:
        made = Engine(daemon, client.open_lease(client.register("m", LAYOUT)))
        yield made
        made.book.close()


def id_of(request: RequestPages) -> int:
    """The daemon's number of a request."""
    assert request.sequence is not None
    return request.sequence.id


@contextmanager
def frozen(daemon: FakeDaemon, engine: Engine) -> Iterator[None]:
    """Freeze the daemon while requests run, which wait for no time; then take in what it answers."""
    goes_on = threading.Event()
    daemon.faults["Step"].append(hang_until(goes_on))
    engine.book.outbox.runs = lambda: True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "ANSWER_S", 0.0)
        yield
    goes_on.set()
    engine.settle()
    engine.now_s += 1


def test_a_request_whose_answer_is_late_is_asked_for_once_and_goes_on(daemon: FakeDaemon, engine: Engine) -> None:
    request = engine.run("a")
    asked = engine.asked("allocate")
    with frozen(daemon, engine):
        for _ in range(MANY):
            assert not engine.book.reserve(request, 3)
    assert engine.book.reserve(request, 3)
    assert engine.asked("allocate") == asked + 1


def test_no_request_waits_for_good_nor_is_one_kept_after_a_late_answer(daemon: FakeDaemon, engine: Engine) -> None:
    """Each ends with a step of its own while others ask for pages: more than may be under way."""
    requests = [engine.run(f"{number}") for number in range(MANY)]
    growing = [engine.run(f"growing-{number}") for number in range(MANY)]
    with frozen(daemon, engine):
        for ends, grows in zip(requests, growing, strict=True):
            engine.end(ends)
            assert not engine.book.reserve(grows, 2)
    assert engine.asked("release") == MANY
    assert all(engine.book.reserve(each, 2) for each in growing)


def test_a_request_whose_release_was_refused_is_released_by_the_next_step(engine: Engine) -> None:
    """Its pages would be this engine's until its lease ends."""
    first, second = engine.run("a"), engine.run("b")
    engine.book.flush()  # asks for a stock, and not again at once
    engine.settle()
    engine.refused = 2
    for each in (first, second):
        engine.end(each)
        engine.book.flush()
        engine.book.outbox.wait()
    for _ in range(2):
        engine.book.flush()
        engine.book.outbox.wait()
    for each in (first, second):
        assert each.sequence is not None
        assert each.sequence.is_released


def test_a_request_that_runs_does_not_wait_for_pages_of_those_that_wait(daemon: FakeDaemon, engine: Engine) -> None:
    """Theirs may have to be saved first, and a step is answered as a whole."""
    runs, waits = engine.run("runs"), engine.book.begin("waits", Wish((), 0, 2))
    assert waits.wants_pages
    assert engine.book.reserve(runs, 2)
    assert [each.allocate.sequence_id for each in daemon.seen["Step"][-1].operations] == [id_of(runs)]


def test_pages_that_vllm_freed_are_given_back_before_others_are_asked_for(daemon: FakeDaemon, engine: Engine) -> None:
    """Also where no step could be sent when they were freed."""
    ends, grows = engine.run("ends"), engine.run("grows")
    engine.settle()
    engine.book.outbox.runs = lambda: True
    goes_on = threading.Event()
    daemon.faults["Step"].append(hang_until(goes_on))
    while engine.book.outbox.has_room:
        engine.book.outbox.send(engine.book.outbox.stream.batch(), lambda _: None)
    engine.end(ends)
    goes_on.set()
    assert engine.book.reserve(grows, 2)
    assert ends.sequence is not None
    assert ends.sequence.is_released, "steps are answered in order"


@pytest.mark.parametrize("follows_layers", [False, True])
def test_a_load_comes_layer_by_layer_where_the_engine_follows_it(
    daemon: FakeDaemon, engine: Engine, follows_layers: bool
) -> None:
    request = engine.book.begin("a", Wish((), 0, 40, follows_layers=follows_layers))
    assert engine.book.reserve(request, 40)
    (asked,) = (each.allocate for step in daemon.seen["Step"] for each in step.operations if each.HasField("allocate"))
    assert asked.short_suffix is not follows_layers


def operations(daemon: FakeDaemon) -> list[list[str]]:
    """Kinds of the operations of each step that has some."""
    kinds = ([str(each.WhichOneof("operation")) for each in step.operations] for step in daemon.seen["Step"])
    return [each for each in kinds if each]


def test_a_request_that_is_alone_is_matched_and_given_its_pages_in_one_message(
    daemon: FakeDaemon, engine: Engine
) -> None:
    engine.book.expect("a", ALL_AT_ONCE)
    request = engine.book.begin("a", ALL_AT_ONCE)
    assert engine.book.reserve(request, 40)
    assert operations(daemon) == [["match", "allocate"]]
    assert sum(engine.book.outbox.take_waits()) <= 1
    assert len(request.pages) == 40


def test_requests_that_wait_beside_others_are_given_their_pages_later(daemon: FakeDaemon, engine: Engine) -> None:
    for name in "ab":
        engine.book.expect(name, ALL_AT_ONCE)
    first = engine.book.begin("a", ALL_AT_ONCE)
    assert engine.book.reserve(first, 40)
    engine.book.take(first, 40)
    engine.book.begin("b", ALL_AT_ONCE)
    assert operations(daemon) == [["match", "allocate"], ["match"]]


def test_a_request_that_is_refused_its_pages_with_its_match_asks_for_them_when_it_is_scheduled(
    daemon: FakeDaemon, engine: Engine
) -> None:
    engine.refuses_pages = True
    request = engine.book.begin("a", ALL_AT_ONCE)
    engine.refuses_pages = False
    assert engine.book.reserve(request, 40)
    assert operations(daemon) == [["match", "allocate"], ["allocate"]]


def test_of_a_request_that_ends_before_it_has_its_match_and_pages_nothing_stays(
    daemon: FakeDaemon, engine: Engine
) -> None:
    engine.book.expect("a", ALL_AT_ONCE)
    engine.book.forget("a")
    engine.settle()
    assert operations(daemon) == [["match", "allocate"], ["release"]]
