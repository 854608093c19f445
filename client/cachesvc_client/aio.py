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
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from cachesvc.model.answers import (
    NO_POSITIONS,
    Allocated,
    Expected,
    Positions,
    Prefetched,
    Published,
    Recycled,
    Swapped,
    TicketView,
)
from cachesvc.model.layout import Layout
from cachesvc_client.client import DEFAULT_OPTIONS, DEFAULT_RETRIES, DEFAULT_TIMEOUTS, CacheClient
from cachesvc_client.core.arguments import Retention
from cachesvc_client.core.errors import CacheClientError, Maker, Registration
from cachesvc_client.core.keys import PackedKeys
from cachesvc_client.events import EventSubscriber
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.event_batch import Batch
from cachesvc_client.records.sequence_record import NO_DEAD, NO_STATES, States
from cachesvc_client.records.steps import Recorded, StepBatch
from cachesvc_client.records.views import LeaseView, SequenceView
from cachesvc_client.sequence import Sequence
from cachesvc_client.stepping import PendingStep, StepStream
from cachesvc_client.wire.connection import DEFAULT_OPTIONS as SUBSCRIBER_OPTIONS
from cachesvc_client.wire.settings import ChannelOptions, Retries, Timeouts, Transport
from cachesvc_client.wire.transports import ChannelMaker, open_channel

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
T = TypeVar("T")

log = logging.getLogger(__name__)


class AsyncCacheClient:
    """``CacheClient`` for one event loop."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        retries: Retries = DEFAULT_RETRIES,
        options: ChannelOptions = DEFAULT_OPTIONS,
        engine: str = "engine",
        make_channel: ChannelMaker = open_channel,
        token: str | None = None,
        token_file: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._client = CacheClient(
            socket_path,
            timeouts=timeouts,
            retries=retries,
            options=options,
            engine=engine,
            make_channel=make_channel,
            token=token,
            token_file=token_file,
            transport=transport,
        )
        self.socket_path = self._client.socket_path
        self.engine = engine
        self._threads = _Threads()
        self._opening = threading.Lock()
        self._leases: dict[Lease, AsyncLease] = {}
        self._ends: set[asyncio.Event] = set()
        self._client.on_lost(self._threads.on_loop(self._end))

    def __repr__(self) -> str:
        return f"<Async{repr(self._client)[1:]}"

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def epoch(self) -> int:
        return self._client.epoch

    @property
    def transport(self) -> str:
        return self._client.transport

    async def connect(self) -> AsyncCacheClient:
        await self._threads.run(self._client.connect)
        return self

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._client.on_lost(self._threads.on_loop(callback))

    async def register(
        self,
        model: str,
        layout: Layout,
        *,
        tenant_salt: bytes = b"",
        devices: Seq[str] = (),
        device_pages: Seq[int] | None = None,
        device_share: float | None = None,
        host_pages: Seq[int] | None = None,
        host_share: float | None = None,
        reserved_pages: int = 0,
        display_name: str = "",
        timeout_s: float | None = None,
    ) -> Registration:
        return await self._threads.run(
            lambda: self._client.register(
                model,
                layout,
                tenant_salt=tenant_salt,
                devices=devices,
                device_pages=device_pages,
                device_share=device_share,
                host_pages=host_pages,
                host_share=host_share,
                reserved_pages=reserved_pages,
                display_name=display_name,
                timeout_s=timeout_s,
            )
        )

    def open_lease(self, registration: Registration, *, instance: str = "") -> Opening[AsyncLease]:
        return Opening(self._open_lease(partial(self._client.open_lease, registration, instance=instance)))

    def attach(self, registration: Registration, lease_id: str, rank: int = 0) -> Opening[AttachedPool]:
        attach = partial(self._client.attach, registration, lease_id, rank)
        return Opening(self._threads.run(attach, undo=AttachedPool.close))

    async def reconnect(self) -> tuple[AsyncLease, ...]:
        leases = await self._threads.run(self._client.reconnect, self._opening)
        return tuple([self._show(lease) for lease in leases])

    async def wait_lost(self, timeout_s: float | None = None) -> bool:
        ended = asyncio.Event()
        self._ends.add(ended)  # no thread waits: one that did would outlive a cancelled call
        try:
            if self._client.wait_lost(0):
                return True
            async with asyncio.timeout(timeout_s):
                return await ended.wait()
        except TimeoutError:
            return False
        finally:
            self._ends.discard(ended)

    async def close(self, *, quiesced: bool | None = None) -> None:
        await self._threads.end(partial(self._client.close, quiesced=quiesced))
        self._end()

    async def __aenter__(self) -> AsyncCacheClient:
        await self._threads.run(self._client.connect, undo=CacheClient.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(quiesced=None if kind is None else False)

    async def _open_lease(self, open_lease: Callable[[], Lease]) -> AsyncLease:
        return self._show(await self._threads.run(open_lease, self._opening, self._close_unshown))

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


class AsyncLease(LeaseView):
    """``Lease`` for several tasks; each sequence and step stream is for one.

    The pools that it attaches wait in threads, not on the loop: ``await asyncio.to_thread(pool.wait_layer, ticket,
    layer, timeout_s)``. ``steps``: turn of calls that may send a step.
    """

    def __init__(self, lease: Lease, threads: _Threads) -> None:
        super().__init__(lease.record)
        self.calls = lease.calls
        self.threads = threads
        self.steps = threading.Lock()
        self._lease = lease

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        self._lease.on_lost(self.threads.on_loop(callback))

    def attach(self, rank: int = 0) -> Opening[AttachedPool]:
        return Opening(self.threads.run(partial(self._lease.attach, rank), undo=self._detach))

    def match(
        self,
        keys: PackedKeys,
        *,
        max_blocks: int = 0,
        sequence_id: int | None = None,
        waited_seconds: float = 0,
        expected: Expected | None = None,
        retention: Retention = Retention.DEFAULT,
    ) -> Opening[AsyncSequence]:
        return Opening(
            self._match(
                partial(
                    self._lease.match,
                    keys,
                    max_blocks=max_blocks,
                    sequence_id=sequence_id,
                    waited_seconds=waited_seconds,
                    expected=expected,
                    retention=retention,
                )
            )
        )

    async def prefetch(self, keys: PackedKeys) -> Prefetched:
        return await self.threads.run(partial(self._lease.prefetch, keys))

    async def pause_write_backs(self, seconds: float) -> None:
        self._lease.pause_write_backs(seconds)

    async def make_sure(self, timeout_s: float) -> None:
        if not self.is_sure:
            await self.threads.run(partial(self._lease.make_sure, timeout_s))

    def step(self, stock_pages: int | Seq[int] = 0) -> AsyncStepStream:
        return AsyncStepStream(self._lease.step(stock_pages), self)

    async def completed(self, launch: int) -> None:
        await self.threads.run(partial(self._lease.completed, launch), self.steps)

    async def wait_tickets(self, tickets: Seq[int], timeout_s: float | None = None) -> tuple[TicketView, ...]:
        return await self.threads.run(partial(self._lease.wait_tickets, tickets, timeout_s))

    async def close(self, *, quiesced: bool | None = None, for_all: bool = False) -> None:
        await self.threads.run(partial(self._lease.close, quiesced=quiesced, for_all=for_all), self.steps)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(quiesced=None if kind is None else False)

    async def _match(self, match: Callable[[], Sequence]) -> AsyncSequence:
        return AsyncSequence(await self.threads.run(match, undo=Sequence.release), self)

    def _detach(self, pool: AttachedPool) -> None:
        self.record.pools.remove(pool)
        pool.close()


class AsyncSequence(SequenceView):
    """``Sequence`` for one task."""

    def __init__(self, sequence: Sequence, lease: AsyncLease) -> None:
        super().__init__(sequence.record)
        self._sequence = sequence
        self._lease = lease
        self._turn = threading.Lock()

    async def allocate(
        self, upto_blocks: int, *, short_suffix: bool = False, positions: Positions = NO_POSITIONS
    ) -> Allocated:
        call = partial(self._sequence.allocate, upto_blocks, short_suffix=short_suffix, positions=positions)
        return await self._run(call)

    async def publish(self, upto_blocks: int, keys: PackedKeys = b"", *, states: States = NO_STATES) -> Published:
        return await self._run(partial(self._sequence.publish, upto_blocks, keys, states=states))

    async def recycle(
        self, computed_tokens: int, *, launch: int | None = None, dead: Mapping[int, int] = NO_DEAD
    ) -> Recycled:
        return await self._run(partial(self._sequence.recycle, computed_tokens, launch=launch, dead=dead))

    def grow_from_stock(self, blocks: int = 1, *, positions: Positions = NO_POSITIONS) -> None:
        self._sequence.grow_from_stock(blocks, positions=positions)

    async def swap_out(self, *, launch: int | None = None) -> Swapped:
        return await self._run(partial(self._sequence.swap_out, launch=launch))

    async def swap_in(self, *, short_suffix: bool = False) -> Swapped:
        return await self._run(partial(self._sequence.swap_in, short_suffix=short_suffix))

    async def wait_loaded(self, timeout_s: float | None = None) -> None:
        await self._lease.threads.run(partial(self._sequence.wait_loaded, timeout_s), self._turn)

    def lost_tokens(self) -> range:
        return self._sequence.lost_tokens()

    async def wait_swapped(self, timeout_s: float | None = None) -> None:
        await self._lease.threads.run(partial(self._sequence.wait_swapped, timeout_s), self._turn)

    async def release(self, *, launch: int | None = None, output_tokens: int | None = None) -> int:
        return await self._run(partial(self._sequence.release, launch=launch, output_tokens=output_tokens))

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(self, *left: object) -> None:
        await self._run(partial(self._sequence.__exit__, None, None, None))

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a call that sends growth from stock first, by a step."""
        steps = ANY_TIME if self._lease.calls.stream is None else self._lease.steps
        return await self._lease.threads.run(call, _both(self._turn, steps))


class AsyncPendingStep:
    """``PendingStep`` for one task."""

    def __init__(self, step: PendingStep, lease: AsyncLease) -> None:
        self._step = step
        self._lease = lease

    @property
    def is_answered(self) -> bool:
        return self._step.is_answered

    async def poll(self) -> bool:
        return await self._lease.threads.run(self._step.poll, self._lease.steps)

    async def results(self, timeout_s: float | None = None) -> list[Any]:
        return await self._lease.threads.run(partial(self._step.results, timeout_s), self._lease.steps)


class AsyncStepStream:
    """``StepStream`` for one task."""

    def __init__(self, stream: StepStream, lease: AsyncLease) -> None:
        self._stream = stream
        self._lease = lease

    @property
    def free_pages(self) -> tuple[int, ...]:
        return self._stream.free_pages

    @property
    def evictable_pages(self) -> tuple[int, ...]:
        return self._stream.evictable_pages

    @property
    def is_silent(self) -> bool:
        return self._stream.is_silent

    def batch(self) -> StepBatch[AsyncSequence]:
        lease = self._lease
        return StepBatch(lease.record, lambda record: AsyncSequence(Sequence(record, lease.calls), lease))

    def resize(self, stock_pages: int | Seq[int], due_blocks: int = 0) -> None:
        self._stream.resize(stock_pages, due_blocks)

    def grow_all(self, sequences: Seq[Recorded], blocks: int | Seq[int] = 1) -> None:
        self._stream.grow_all(sequences, blocks)

    async def submit(self, batch: StepBatch[Any] | None = None, timeout_s: float | None = None) -> list[Any]:
        submit = partial(self._stream.submit, batch, timeout_s)
        return await self._lease.threads.run(submit, self._lease.steps, self._release_opened)

    async def send(self, batch: StepBatch[Any] | None = None) -> AsyncPendingStep:
        sent = await self._lease.threads.run(partial(self._stream.send, batch), self._lease.steps)
        return AsyncPendingStep(sent, self._lease)

    async def tell(self) -> None:
        await self._lease.threads.run(self._stream.tell, self._lease.steps)

    async def close(self) -> None:
        await self._lease.threads.run(self._stream.close, self._lease.steps)

    async def __aenter__(self) -> AsyncStepStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _release_opened(self, results: list[Any]) -> None:
        """Release the sequences that a cancelled step opened."""
        for each in results:
            if isinstance(each, AsyncSequence):
                Sequence(each.record, self._lease.calls).release()


class AsyncEventSubscriber:
    """``EventSubscriber`` for an event loop; a thread waits for each subscription."""

    def __init__(
        self,
        socket_path: str | None,
        namespace: bytes,
        *,
        options: ChannelOptions = SUBSCRIBER_OPTIONS,
        make_channel: ChannelMaker = open_channel,
        token: str | None = None,
        token_file: str | None = None,
        storage: bool = False,
    ) -> None:
        self._make = partial(
            EventSubscriber,
            socket_path,
            namespace,
            options=options,
            make_channel=make_channel,
            token=token,
            token_file=token_file,
            storage=storage,
        )
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


class Handle(Protocol):
    """Handle that ends with an ``async with``."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


H = TypeVar("H", bound=Handle)


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None
        await self._handle.__aexit__(kind, error, trace)


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
