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
from contextlib import AbstractAsyncContextManager
from enum import Flag
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from cachesvc.model.answers import TicketView
from cachesvc_client.client import CacheClient
from cachesvc_client.core.errors import CacheClientError, Maker, Registration
from cachesvc_client.events import Batch, EventSubscriber
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import Pages, SequenceRecord
from cachesvc_client.records.steps import StepBatch
from cachesvc_client.sequence import PendingStep, Sequence, StepStream

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


class Locks(Flag):
    """Locks of a handle within which a call runs; it waits for cancelled calls that still have them."""

    NONE = 0
    OWN = 1
    STEPS = 2
    """The lease's lock of calls that send a step, or of a sequence's calls, which send growth first by a step."""


class _Threads:
    """Threads of one client, in which its blocking calls run."""

    def __init__(self) -> None:
        self._maker = Maker()
        self._pool = ThreadPoolExecutor(MOST_THREADS, "kvcache-call")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self,
        call: Callable[[], T],
        locks: Seq[threading.Lock] = (),
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Run ``call`` in a thread, within ``locks``. ``undo``: gives back the result of a cancelled call."""
        self._maker.check()  # a child of the process has none of the threads
        self._loop = asyncio.get_running_loop()

        def within() -> T:
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                return call()

        def give_back(ended: Future[T]) -> None:
            try:
                if undo is not None and not ended.cancelled() and ended.exception() is None:
                    undo(ended.result())
            except CacheClientError as gone:  # it goes with its lease
                log.debug("result_not_given_back why=%s", gone)

        running = self._pool.submit(contextvars.copy_context().run, within)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda ended: self._pool.submit(give_back, ended))
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


class _Handle:
    """Handle over a blocking one, under a lease but for the client's. Handles of one lease share the lock of steps."""

    def __init__(self, blocking: Any, threads: _Threads, lease: LeaseRecord | None, steps: threading.Lock) -> None:
        self._blocking = blocking
        self._threads = threads
        self._lease = lease
        self._own = threading.Lock()
        self._steps = steps

    def __repr__(self) -> str:
        return f"<Async{repr(self._blocking)[1:]}"

    def _under_lease(self) -> tuple[_Threads, LeaseRecord, threading.Lock]:
        """Arguments of a further handle under the same lease."""
        assert self._lease is not None
        return self._threads, self._lease, self._steps

    def _read(self, name: str) -> Any:
        return getattr(self._blocking, name)

    def _call(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        return call(self._blocking, *args, **named)

    async def _run(
        self, call: Callable[[Any], T], locks: Locks = Locks.NONE, undo: Callable[[T], object] | None = None
    ) -> T:
        taken = [self._own] if Locks.OWN in locks else []
        is_stepping = self._lease is not None and self._lease.stock is not None
        if Locks.STEPS in locks and (is_stepping or not taken):
            taken.append(self._steps)
        return await self._threads.run(partial(call, self._blocking), taken, undo)


class _Shown(Generic[T]):
    """Attribute that the blocking handle has under the same name."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, handle: Any, _: type | None = None) -> T:
        return cast("T", handle._read(self._name))  # noqa: SLF001


def _same(call: Callable[Concatenate[Q, P], T]) -> Callable[Concatenate[Any, P], T]:
    """``call`` of the blocking handle, on the loop: it waits for nothing."""

    @wraps(call)
    def method(self: _Handle, /, *args: P.args, **named: P.kwargs) -> T:
        return self._call(call, *args, **named)

    return method


def _awaited(
    call: Callable[Concatenate[Q, P], T], locks: Locks = Locks.NONE
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """``call`` of the blocking handle, in a thread."""

    @wraps(call)
    async def method(self: _Handle, /, *args: P.args, **named: P.kwargs) -> T:
        return await self._run(lambda blocking: call(blocking, *args, **named), locks)

    return method


def _opening(
    call: Callable[Concatenate[Q, P], T],
    show: Callable[[Any, T], H],
    undo: Callable[[Any, T], object],
    locks: Locks = Locks.NONE,
) -> Callable[Concatenate[Any, P], Opening[H]]:
    """``call``, whose result becomes the handle that ``show`` gives. ``undo``: gives back that of a cancelled call."""

    @wraps(call)
    def method(self: _Handle, /, *args: P.args, **named: P.kwargs) -> Opening[H]:
        async def made() -> H:
            opened = self._run(lambda blocking: call(blocking, *args, **named), locks, partial(undo, self))
            return show(self, await opened)

        return Opening(made())

    return method


def _signed(call: Callable[Concatenate[Q, P], T]) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a constructor the arguments of the blocking one, ``call``."""
    return cast("Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]", wraps(call))


class AsyncCacheClient(_Handle):
    connected = _Shown[bool]()
    epoch = _Shown[int]()
    transport = _Shown[str]()

    @_signed(CacheClient.__init__)
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(CacheClient(*args, **named), _Threads(), None, threading.Lock())
        self.socket_path: str = self._blocking.socket_path
        self.engine: str = self._blocking.engine
        self._leases: dict[Lease, AsyncLease] = {}
        self._ends: set[asyncio.Event] = set()
        self._blocking.on_lost(self._threads.on_loop(self._end))

    async def connect(self) -> AsyncCacheClient:
        await self._run(CacheClient.connect)
        return self

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._blocking.on_lost(self._threads.on_loop(callback))

    register = _awaited(CacheClient.register)

    async def reconnect(self) -> tuple[AsyncLease, ...]:
        leases = await self._run(CacheClient.reconnect, Locks.OWN)
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
        await self._run(CacheClient.connect, undo=CacheClient.close)
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
            self._leases[lease] = AsyncLease(lease, self._threads, lease.record, threading.Lock())
        return self._leases[lease]

    def _end(self) -> None:
        for ended in self._ends:
            ended.set()

    open_lease = _opening(CacheClient.open_lease, _show, _close_unshown, Locks.OWN)
    attach = _opening(CacheClient.attach, lambda _, pool: pool, lambda _, pool: pool.close())


class AsyncLease(_Handle):
    """``Lease`` for several tasks; each sequence and step stream is for one.

    The pools that it attaches wait in threads, not on the loop: ``await asyncio.to_thread(pool.wait_layer, ticket,
    layer, timeout_s)``.
    """

    record = _Shown[LeaseRecord]()
    id = _Shown[str]()
    instance = _Shown[str]()
    joined = _Shown[bool]()
    registration = _Shown[Registration]()
    is_lost = _Shown[bool]()
    is_sure = _Shown[bool]()
    is_draining = _Shown[bool]()
    pools = _Shown[tuple[AttachedPool, ...]]()
    hasher = _same(Lease.hasher)
    launch = _same(Lease.launch)
    prefetch = _awaited(Lease.prefetch)
    pause_write_backs = _awaited(Lease.pause_write_backs)
    make_sure = _awaited(Lease.make_sure)
    completed = _awaited(Lease.completed, Locks.STEPS)
    wait_tickets = _awaited(Lease.wait_tickets)
    close = _awaited(Lease.close, Locks.STEPS)
    __aexit__ = _awaited(Lease.__exit__, Locks.STEPS)

    async def __aenter__(self) -> AsyncLease:
        return self

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        self._blocking.on_lost(self._threads.on_loop(callback))

    def step(self, stock_pages: int | Seq[int] = 0) -> AsyncStepStream:
        return AsyncStepStream(self._blocking.step(stock_pages), *self._under_lease())

    def _show_sequence(self, sequence: Sequence) -> AsyncSequence:
        return AsyncSequence(sequence, *self._under_lease())

    def _detach(self, pool: AttachedPool) -> None:
        self.record.pools.remove(pool)
        pool.close()

    match = _opening(Lease.match, _show_sequence, lambda _, sequence: sequence.release())
    attach = _opening(Lease.attach, lambda _, pool: pool, _detach)


class AsyncSequence(_Handle):
    record = _Shown[SequenceRecord]()
    id = _Shown[int]()
    device_blocks = _Shown[int]()
    host_blocks = _Shown[int]()
    storage_blocks = _Shown[int]()
    hit_blocks = _Shown[int]()
    full_blocks = _Shown[int]()
    computing_blocks = _Shown[int]()
    coming_blocks = _Shown[int]()
    blocks = _Shown[int]()
    sealed_blocks = _Shown[int]()
    tables = _Shown[tuple[Pages, ...]]()
    tickets = _Shown[tuple[TicketView, ...]]()
    is_swapped_out = _Shown[bool]()
    is_released = _Shown[bool]()
    grow_from_stock = _same(Sequence.grow_from_stock)
    lost_tokens = _same(Sequence.lost_tokens)
    allocate = _awaited(Sequence.allocate, Locks.OWN | Locks.STEPS)
    publish = _awaited(Sequence.publish, Locks.OWN | Locks.STEPS)
    recycle = _awaited(Sequence.recycle, Locks.OWN | Locks.STEPS)
    swap_out = _awaited(Sequence.swap_out, Locks.OWN | Locks.STEPS)
    swap_in = _awaited(Sequence.swap_in, Locks.OWN | Locks.STEPS)
    wait_loaded = _awaited(Sequence.wait_loaded, Locks.OWN)
    wait_swapped = _awaited(Sequence.wait_swapped, Locks.OWN)
    release = _awaited(Sequence.release, Locks.OWN | Locks.STEPS)
    __aexit__ = _awaited(Sequence.__exit__, Locks.OWN | Locks.STEPS)

    async def __aenter__(self) -> AsyncSequence:
        return self


class AsyncPendingStep(_Handle):
    is_answered = _Shown[bool]()
    poll = _awaited(PendingStep.poll, Locks.STEPS)
    results = _awaited(PendingStep.results, Locks.STEPS)


class AsyncStepStream(_Handle):
    free_pages = _Shown[tuple[int, ...]]()
    evictable_pages = _Shown[tuple[int, ...]]()
    is_silent = _Shown[bool]()
    resize = _same(StepStream.resize)
    grow_all = _same(StepStream.grow_all)
    tell = _awaited(StepStream.tell, Locks.STEPS)
    close = _awaited(StepStream.close, Locks.STEPS)
    __aexit__ = _awaited(StepStream.__exit__, Locks.STEPS)

    async def __aenter__(self) -> AsyncStepStream:
        return self

    def batch(self) -> StepBatch[AsyncSequence]:
        threads, lease, steps = self._under_lease()
        return StepBatch(lease, lambda record: AsyncSequence(Sequence(record, lease), threads, lease, steps))

    async def submit(self, batch: StepBatch[Any] | None = None, timeout_s: float | None = None) -> list[Any]:
        return await self._run(lambda stream: stream.submit(batch, timeout_s), Locks.STEPS, self._release_opened)

    async def send(self, batch: StepBatch[Any] | None = None) -> AsyncPendingStep:
        sent: PendingStep = await self._run(lambda stream: stream.send(batch), Locks.STEPS)
        return AsyncPendingStep(sent, *self._under_lease())

    def _release_opened(self, results: list[Any]) -> None:
        """Release the sequences that a cancelled step opened."""
        for each in results:
            if isinstance(each, AsyncSequence):
                with contextlib.suppress(CacheClientError):  # it goes with its lease
                    Sequence.release(each._blocking)  # noqa: SLF001


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
