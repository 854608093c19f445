"""EventService on the wire: each subscriber follows a journal at its own pace, and is cut off when it falls too far
behind.

Nothing is queued for a subscriber. It has a cursor and at most one answer on its way, so a slow one costs a fast one
and the daemon nothing, however long it stalls.
"""

from __future__ import annotations

import asyncio

import grpc
from kvcache.v1 import event_pb2, event_pb2_grpc

from cachesvc.flows.core import Count
from cachesvc.model.errors import CacheError, LimitExceeded, NotFound, OtherEpoch, SubscriberTooSlow, Unavailable
from cachesvc.model.numbers import share_of
from cachesvc.questions.explanation import Feed, find_model
from cachesvc.questions.view import View
from cachesvc.service.access.auth import caller, require_read, sight
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.edge import Context, refuse
from cachesvc.telemetry import events
from cachesvc.wire.parse import check_fields

LINGER_SECONDS = 0.005
"""Changes of this long travel together: an answer costs 0.1 ms, and there may be hundreds of changes in it."""
GOODBYE_SECONDS = 1.0
"""Time that a subscriber that was cut off has to take its error, seconds. It takes nothing off its stream, or it would
not be slow."""


class _Subscriber:
    """A feed of what it may see, when to look at it again, and why it ends, once it has to."""

    def __init__(self, view: View, feed: Feed) -> None:
        self.view = view
        self.feed = feed
        self.wake = asyncio.Event()
        self.cut: asyncio.Future[CacheError] = asyncio.get_running_loop().create_future()

    def end(self, why: CacheError) -> None:
        """Cut the stream off, even in the midst of an answer."""
        if not self.cut.done():
            self.cut.set_result(why)
        self.wake.set()


class EventService(event_pb2_grpc.EventServiceServicer):
    """Subscribe: to a model of the caller's tenant by its namespace; to any model for a token that sees all tenants."""

    def __init__(self, node: Node, limit: int) -> None:
        self._node = node
        self._limit = limit
        self._subscribers: set[_Subscriber] = set()
        self._is_due = False
        self._is_started = False

    def start(self) -> None:
        """Follow changes from now on, while there are subscribers."""
        self._is_started = True
        self._hear()

    def close(self) -> None:
        self._is_started = False
        self._hear()
        for subscriber in self._subscribers:
            subscriber.end(Unavailable("the daemon stops; subscribe anew when it is back, with a snapshot"))

    async def Subscribe(  # type: ignore[override]  # written, not yielded: an answer may be given up half way
        self, request: event_pb2.SubscribeRequest, context: Context
    ) -> None:
        try:
            await self._serve(self._begin(request), context)
        except CacheError as error:
            await refuse(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 - the root of a call
            events.failure("call_broke", method="EventService/Subscribe", model=0)
            await context.abort(grpc.StatusCode.INTERNAL, "the daemon failed to serve this call; its log says why")

    async def _serve(self, subscriber: _Subscriber, context: Context) -> None:
        """Follow until the caller hangs up, or has to be told why its stream ends."""
        counters = self._node.core.counters
        self._subscribers.add(subscriber)
        self._hear()
        self._node.core.count(Count.EVENT_SUBSCRIPTIONS)
        counters["event_subscribers"] = len(self._subscribers)
        try:
            await self._follow(subscriber, context)
            return
        except CacheError as error:
            why = error.with_traceback(None)  # it would keep the feed and its model for as long as the caller hangs
        finally:
            self._subscribers.discard(subscriber)
            self._hear()
            counters["event_subscribers"] = len(self._subscribers)
        if isinstance(why, SubscriberTooSlow):
            self._node.core.count(Count.EVENT_SUBSCRIBERS_CUT_OFF)
            events.warning("subscriber_cut_off", behind=why.behind, kept=why.keep)
        await _say_goodbye(context, why)

    def _begin(self, request: event_pb2.SubscribeRequest) -> _Subscriber:
        require_read()
        check_fields(request)
        view = self._node.view(sight())
        self._require_room(view.sight.tenant)
        return _Subscriber(view, self._feed_of(view, request))

    def _require_room(self, tenant: str | None) -> None:
        """Check a tenant's share of the limit: equal parts while others follow, three quarters alone. Raises
        LimitExceeded."""
        following = [each.view.sight.tenant for each in self._subscribers]
        if len(following) >= self._limit:
            raise LimitExceeded("event subscribers", len(following) + 1, self._limit)
        if tenant is None:
            return
        own, busy = following.count(tenant), len({*following, tenant})
        share = share_of(self._limit, busy)
        if own >= share:
            raise LimitExceeded("event subscribers of this tenant", own + 1, share)

    def _feed_of(self, view: View, request: event_pb2.SubscribeRequest) -> Feed:
        model = find_model(view, request.model_id, request.namespace)
        after = request.after_sequence_number if request.HasField("after_sequence_number") else None
        if request.snapshot:
            return Feed(model, snapshot=True, storage=request.storage)
        if after is not None and request.epoch != self._node.epoch:
            raise OtherEpoch(request.epoch, self._node.epoch)
        return Feed(model, snapshot=False, after=after, storage=request.storage)

    async def _follow(self, subscriber: _Subscriber, context: Context) -> None:
        who = caller()
        while True:
            if subscriber.cut.done():
                raise subscriber.cut.result()
            _require_there(subscriber)
            who.require_current("Subscribe")
            subscriber.wake.clear()
            began = self._node.loop_watch.begin()
            changes = subscriber.feed.next()
            self._node.loop_watch.note("EventService/Subscribe", began)
            if changes is None:
                await subscriber.wake.wait()
                continue
            who.require_current("Subscribe")  # its token may have been taken back since
            changes.epoch = self._node.epoch
            await _send(subscriber, context, changes)

    def _hear(self) -> None:
        """Follow changes while there are subscribers: without any it costs no flow a call."""
        self._node.on_change = self._changed if self._is_started and self._subscribers else None

    def _changed(self) -> None:
        """A flow has run: inform subscribers in a moment, together with what follows."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._tell)

    def _tell(self) -> None:
        self._is_due = False
        self._node.loop_watch.begin()
        for subscriber in self._subscribers:
            feed = subscriber.feed
            try:
                _require_there(subscriber)  # one that hangs in an answer would keep all of it in memory
            except NotFound as gone:
                subscriber.end(gone)
            if feed.is_overrun:
                subscriber.end(SubscriberTooSlow(feed.behind, feed.model.blocks.journal.keep))
            else:
                subscriber.wake.set()


def _require_there(subscriber: _Subscriber) -> None:
    model = subscriber.feed.model
    if not subscriber.view.has(model):
        raise NotFound("model", model.id, "it was evicted for another one, and its blocks with it; forget them")


async def _send(subscriber: _Subscriber, context: Context, message: event_pb2.SubscribeResponse) -> None:
    """Write one answer, unless the subscriber is cut off before it has gone out."""
    sending = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.wait((sending, subscriber.cut), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            await sending
    finally:
        sending.cancel()


async def _say_goodbye(context: Context, error: CacheError) -> None:
    """``refuse`` a subscriber that may never take its error."""
    try:
        async with asyncio.timeout(GOODBYE_SECONDS):
            await refuse(context, error)
    except TimeoutError:
        events.event("subscriber_hung", reason=error.code.value)
