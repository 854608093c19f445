"""The client for engines that run on an event loop: the calls of ``cachesvc_client``, awaited.

Each call runs in a thread of its client's: effect, result and errors are those of the blocking call of that name. After
a call is cancelled, its thread goes on: a handle that it opens is closed again, and the next call on the same sequence
or step stream waits for its end. Callbacks run on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

from cachesvc.model.answers import (
    NO_POSITIONS,
    Positions,
)
from cachesvc_client.client import CacheClient
from cachesvc_client.core.errors import CacheClientError, Maker
from cachesvc_client.events import EventSubscriber
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.event_batch import Batch
from cachesvc_client.records.steps import Recorded, StepBatch
from cachesvc_client.records.views import LeaseView, SequenceView
from cachesvc_client.sequence import LeaseCalls, PendingStep, Sequence, StepStream

__all__ = [
    "AsyncCacheClient",
    "AsyncEventSubscriber",
    "AsyncLease",
    "AsyncPendingStep",
    "AsyncSequence",
    "AsyncStepStream",
]

MOST_THREADS = 128
"""Calls of one client that may block at once; further ones wait for a thread. A thread is made when it is needed."""

ANY_TIME = nullcontext()
"""Turn of calls that may run beside each other."""
P = ParamSpec("P")
T = TypeVar("T")
Q = TypeVar("Q")
H = TypeVar("H", bound=AbstractAsyncContextManager[Any])

log = logging.getLogger(__name__)


class Opening(Coroutine[Any, Any, H], Generic[H]):
    """A handle on its way: ``sequence = await lease.match(keys)``, or ``async with lease.match(keys) as sequence``."""

    def __init__(self, made: Coroutine[Any, Any, H]) -> None:
        self._made = made
        self._handle: H | None = None

    def send(self, value: Any) -> Any:
        return self._made.send(value)

    def throw(self, *error: Any) -> Any:
        return self._made.throw(*error)

    def close(self) -> None:
        self._made.close()

    def __await__(self) -> Generator[Any, Any, H]:
        return self._made.__await__()

    async def __aenter__(self) -> H:
        self._handle = await self._made
        await self._handle.__aenter__()
        return self._handle

    async def __aexit__(self, *left: Any) -> None:
        assert self._handle is not None
        await self._handle.__aexit__(*left)


class _Threads:
    """Threads of one client, in which its blocking calls run."""

    def __init__(self) -> None:
        self._maker = Maker()
        self._pool = ThreadPoolExecutor(MOST_THREADS, "kvcache-call")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        call: Callable[[], T],
        turn: AbstractContextManager[Any] = ANY_TIME,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Run ``call`` in a thread, within ``turn``. ``undo``: gives back the result of a cancelled call."""
        self._maker.check()  # a child of the process has none of the threads
        self._loop = asyncio.get_running_loop()
        running = self._pool.submit(contextvars.copy_context().run, _in_turn, call, turn)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if undo is not None:
                running.add_done_callback(lambda ended: self._pool.submit(_give_back, ended, undo))
            raise

    async def end(self, close: Callable[[], None]) -> None:
        """Run the client's ``close`` in a new thread: all others may be waiting. Calls after it get new threads too."""
        pool, self._pool = self._pool, ThreadPoolExecutor(MOST_THREADS, "kvcache-call")
        pool.shutdown(wait=False)
        await self.run(close)

    def on_loop(self, callback: Callable[..., object]) -> Callable[..., None]:
        """``callback``, to be called from any thread and run on the loop."""

        def tell(*args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(callback, *args)

        return tell


def _in_turn(call: Callable[[], T], turn: AbstractContextManager[Any]) -> T:
    with turn:
        return call()


@contextlib.contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _give_back(ended: Future[T], undo: Callable[[T], object]) -> None:
    if ended.cancelled() or ended.exception() is not None:
        return
    try:
        undo(ended.result())
    except CacheClientError as gone:  # it goes with its lease
        log.debug("result_not_given_back why=%s", gone)


class _Shared(NamedTuple):
    """Handles of one lease share these. ``steps``: turn of calls that may send a step."""

    threads: _Threads
    calls: LeaseCalls
    steps: threading.Lock


def _any_time(_: Any) -> AbstractContextManager[Any]:
    return ANY_TIME


def _between_steps(self: Any) -> AbstractContextManager[Any]:
    shared: _Shared = self._shared
    return shared.steps


def _signed(call: Callable[Concatenate[Q, P], T]) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a method the arguments of a blocking handle's ``call``."""
    return cast("Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]", wraps(call))


def _awaited(
    call: Callable[Concatenate[Q, P], T], turn: Callable[[Any], AbstractContextManager[Any]] = _any_time
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """``call`` of a handle's blocking twin, in a thread."""

    @wraps(call)
    async def method(self: Any, /, *args: P.args, **named: P.kwargs) -> T:
        threads: _Threads = self._threads
        return await threads.run(partial(call, self._blocking, *args, **named), turn(self))

    return method


def _opening(
    call: Callable[Concatenate[Q, P], T],
    show: Callable[[Any, T], H],
    undo: Callable[[Any, T], object],
    turn: Callable[[Any], AbstractContextManager[Any]] = _any_time,
) -> Callable[Concatenate[Any, P], Opening[H]]:
    """``call``, whose result becomes the handle that ``show`` gives. ``undo``: gives back that of a cancelled call."""

    @wraps(call)
    def method(self: Any, /, *args: P.args, **named: P.kwargs) -> Opening[H]:
        async def made() -> H:
            threads: _Threads = self._threads
            opening = partial(call, self._blocking, *args, **named)
            return show(self, await threads.run(opening, turn(self), partial(undo, self)))

        return Opening(made())

    return method


class AsyncCacheClient:
    @_signed(CacheClient.__init__)
    def __init__(self, *args: Any, **named: Any) -> None:
        self._blocking = CacheClient(*args, **named)
        self.socket_path = self._blocking.socket_path
        self.engine = self._blocking.engine
        self._threads = _Threads()
        self._opening = threading.Lock()
        self._leases: dict[Lease, AsyncLease] = {}
        self._ends: set[asyncio.Event] = set()
        self._blocking.on_lost(self._threads.on_loop(self._end))

    def __repr__(self) -> str:
        return f"<Async{repr(self._blocking)[1:]}"

    @property
    def connected(self) -> bool:
        return self._blocking.connected

    @property
    def epoch(self) -> int:
        return self._blocking.epoch

    @property
    def transport(self) -> str:
        return self._blocking.transport

    async def connect(self) -> AsyncCacheClient:
        await self._threads.run(self._blocking.connect)
        return self

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._blocking.on_lost(self._threads.on_loop(callback))

    register = _awaited(CacheClient.register)

    async def reconnect(self) -> tuple[AsyncLease, ...]:
        leases = await self._threads.run(self._blocking.reconnect, self._opening)
        return tuple([self._show(lease) for lease in leases])

    async def wait_lost(self, timeout_s: float | None = None) -> bool:
        ended = asyncio.Event()
        self._ends.add(ended)  # no thread waits: one that did would outlive a cancelled call
        try:
            if self._blocking.wait_lost(0):
                return True
            async with asyncio.timeout(timeout_s):
                return await ended.wait()
        except TimeoutError:
            return False
        finally:
            self._ends.discard(ended)

    async def close(self, *, quiesced: bool | None = None) -> None:
        try:
            await self._threads.end(partial(self._blocking.close, quiesced=quiesced))
        finally:
            self._end()

    async def __aenter__(self) -> AsyncCacheClient:
        await self._threads.run(self._blocking.connect, undo=CacheClient.close)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(quiesced=None if kind is None else False)

    def _close_unshown(self, lease: Lease) -> None:
        """Close a lease that a cancelled call opened, unless it is an instance's and another call has it."""
        if lease not in self._leases:
            lease.close()

    def _show(self, lease: Lease) -> AsyncLease:
        """Handle of a lease, one for each."""
        if lease not in self._leases:
            self._leases = {known: shown for known, shown in self._leases.items() if not known.record.is_closed}
            self._leases[lease] = AsyncLease(lease, self._threads)
        return self._leases[lease]

    def _end(self) -> None:
        for ended in self._ends:
            ended.set()

    open_lease = _opening(CacheClient.open_lease, _show, _close_unshown, lambda self: self._opening)
    attach = _opening(CacheClient.attach, lambda _, pool: pool, lambda _, pool: pool.close())


class AsyncLease(LeaseView):
    """``Lease`` for several tasks; each sequence and step stream is for one.

    The pools that it attaches wait in threads, not on the loop: ``await asyncio.to_thread(pool.wait_layer, ticket,
    layer, timeout_s)``.
    """

    def __init__(self, lease: Lease, threads: _Threads) -> None:
        super().__init__(lease.record)
        self.calls = lease.calls
        self._blocking = lease
        self._threads = threads
        self._shared = _Shared(threads, lease.calls, threading.Lock())

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        self._blocking.on_lost(self._threads.on_loop(callback))

    prefetch = _awaited(Lease.prefetch)
    pause_write_backs = _awaited(Lease.pause_write_backs)
    make_sure = _awaited(Lease.make_sure)
    completed = _awaited(Lease.completed, _between_steps)
    wait_tickets = _awaited(Lease.wait_tickets)
    close = _awaited(Lease.close, _between_steps)

    def step(self, stock_pages: int | Seq[int] = 0) -> AsyncStepStream:
        return AsyncStepStream(self._blocking.step(stock_pages), self._shared)

    async def __aenter__(self) -> AsyncLease:
        return self

    __aexit__ = _awaited(Lease.__exit__, _between_steps)

    def _show_sequence(self, sequence: Sequence) -> AsyncSequence:
        return AsyncSequence(sequence, self._shared)

    def _detach(self, pool: AttachedPool) -> None:
        self.record.pools.remove(pool)
        pool.close()

    match = _opening(Lease.match, _show_sequence, lambda _, sequence: sequence.release())
    attach = _opening(Lease.attach, lambda _, pool: pool, _detach)


class AsyncSequence(SequenceView):
    def __init__(self, sequence: Sequence, shared: _Shared) -> None:
        super().__init__(sequence.record)
        self._blocking = sequence
        self._threads = shared.threads
        self._shared = shared
        self._lock = threading.Lock()

    def _own_turn(self) -> AbstractContextManager[Any]:
        return self._lock

    def _turn(self) -> AbstractContextManager[Any]:
        """Turn of a call that sends growth from stock first, by a step."""
        return self._lock if self._shared.calls.stream is None else _both(self._lock, self._shared.steps)

    allocate = _awaited(Sequence.allocate, _turn)
    publish = _awaited(Sequence.publish, _turn)
    recycle = _awaited(Sequence.recycle, _turn)
    swap_out = _awaited(Sequence.swap_out, _turn)
    swap_in = _awaited(Sequence.swap_in, _turn)
    wait_loaded = _awaited(Sequence.wait_loaded, _own_turn)
    wait_swapped = _awaited(Sequence.wait_swapped, _own_turn)
    release = _awaited(Sequence.release, _turn)

    def grow_from_stock(self, blocks: int = 1, *, positions: Positions = NO_POSITIONS) -> None:
        self._blocking.grow_from_stock(blocks, positions=positions)

    def lost_tokens(self) -> range:
        return self._blocking.lost_tokens()

    async def __aenter__(self) -> AsyncSequence:
        return self

    __aexit__ = _awaited(Sequence.__exit__, _turn)


class AsyncPendingStep:
    def __init__(self, step: PendingStep, shared: _Shared) -> None:
        self._blocking = step
        self._threads = shared.threads
        self._shared = shared

    @property
    def is_answered(self) -> bool:
        return self._blocking.is_answered

    poll = _awaited(PendingStep.poll, _between_steps)
    results = _awaited(PendingStep.results, _between_steps)


class AsyncStepStream:
    def __init__(self, stream: StepStream, shared: _Shared) -> None:
        self._blocking = stream
        self._threads = shared.threads
        self._shared = shared

    @property
    def free_pages(self) -> tuple[int, ...]:
        return self._blocking.free_pages

    @property
    def evictable_pages(self) -> tuple[int, ...]:
        return self._blocking.evictable_pages

    @property
    def is_silent(self) -> bool:
        return self._blocking.is_silent

    def batch(self) -> StepBatch[AsyncSequence]:
        calls, shared = self._shared.calls, self._shared
        return StepBatch(calls.record, lambda record: AsyncSequence(Sequence(record, calls), shared))

    def resize(self, stock_pages: int | Seq[int], due_blocks: int = 0) -> None:
        self._blocking.resize(stock_pages, due_blocks)

    def grow_all(self, sequences: Seq[Recorded], blocks: int | Seq[int] = 1) -> None:
        self._blocking.grow_all(sequences, blocks)

    async def submit(self, batch: StepBatch[Any] | None = None, timeout_s: float | None = None) -> list[Any]:
        submit = partial(self._blocking.submit, batch, timeout_s)
        return await self._threads.run(submit, self._shared.steps, self._release_opened)

    async def send(self, batch: StepBatch[Any] | None = None) -> AsyncPendingStep:
        sent = await self._threads.run(partial(self._blocking.send, batch), self._shared.steps)
        return AsyncPendingStep(sent, self._shared)

    tell = _awaited(StepStream.tell, _between_steps)
    close = _awaited(StepStream.close, _between_steps)

    async def __aenter__(self) -> AsyncStepStream:
        return self

    __aexit__ = _awaited(StepStream.__exit__, _between_steps)

    def _release_opened(self, results: list[Any]) -> None:
        """Release the sequences that a cancelled step opened."""
        for each in results:
            if isinstance(each, AsyncSequence):
                with contextlib.suppress(CacheClientError):  # it goes with its lease
                    Sequence(each.record, self._shared.calls).release()


class AsyncEventSubscriber:
    """``EventSubscriber`` for an event loop; a thread waits for each subscription."""

    @_signed(EventSubscriber.__init__)
    def __init__(self, *args: Any, **named: Any) -> None:
        self._make = partial(EventSubscriber, *args, **named)
        self._make()  # raises for wrong arguments now, not at the first subscription
        self._open: set[EventSubscriber] = set()
        self._is_closed = False
        self._maker = Maker()

    def subscribe(self, *, snapshot: bool = True, epoch: int = 0, after: int | None = None) -> AsyncIterator[Batch]:
        return self._iterate(lambda one: one.subscribe(snapshot=snapshot, epoch=epoch, after=after))

    def follow(self) -> AsyncIterator[Batch]:
        return self._iterate(EventSubscriber.follow)

    async def close(self) -> None:
        self._maker.check()
        self._is_closed = True
        for each in list(self._open):
            each.close()

    async def __aenter__(self) -> AsyncEventSubscriber:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _iterate(self, subscribe: Callable[[EventSubscriber], Iterator[Batch]]) -> AsyncIterator[Batch]:
        self._maker.check()
        if self._is_closed:
            return
        subscriber = self._make()
        batches = subscribe(subscriber)
        self._open.add(subscriber)
        thread = ThreadPoolExecutor(1, "kvcache-events")
        try:
            while (batch := await asyncio.wrap_future(thread.submit(next, batches, None))) is not None:
                yield batch
        finally:
            self._open.discard(subscriber)
            subscriber.close()  # ends the thread's wait too
            thread.shutdown(wait=False)
