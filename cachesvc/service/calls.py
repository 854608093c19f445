"""What every RPC shares: errors become statuses, a repeated request_id gets its first answer, load is shed."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from cachesvc.model.errors import CacheError, KeyReused, LimitExceeded, QuotaExceeded, Unavailable
from cachesvc.service.access.auth import caller
from cachesvc.service.access.quota import Meter, Quotas
from cachesvc.service.access.undecodable import require_read
from cachesvc.telemetry import events
from cachesvc.wire.limits import check_fields
from cachesvc.wire.status import ERROR_METADATA_KEY, GRPC_CODES

Reply = TypeVar("Reply", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]


KEEP_LEAST = 32
"""Answers that are kept whatever their size: more than a client has steps under way."""
KEEP_BYTES = 1 << 20
"""What a lease's answers beyond those may take: large ones, of which the oldest are not asked for again."""


class Repeats:
    """The last ``keep`` answers of a lease by request_id, so that a retried call is not carried out twice."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._known: OrderedDict[int, tuple[bytes, asyncio.Future[Any]]] = OrderedDict()

    async def answer(self, request_id: int, contents: bytes, call: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to this id, from memory if it was given before. Id 0 is never remembered.

        A call that failed changed nothing and is forgotten. Raises KeyReused for an id with other contents.
        """
        if request_id == 0:
            return await call()
        known = self._known.get(request_id)
        if known is not None:
            if known[0] != contents:
                raise KeyReused(request_id)
            try:
                return await asyncio.shield(known[1])
            except asyncio.CancelledError:
                if not known[1].cancelled():
                    raise
                raise Unavailable("the first call with this request_id was given up; send it again") from None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._known[request_id] = (contents, future)
        while len(self._known) > self._keep or (self._bytes > KEEP_BYTES and len(self._known) > KEEP_LEAST):
            oldest, _ = self._known.popitem(last=False)
            self._bytes -= self._sizes.pop(oldest, 0)
        try:
            answer = await call()
        except BaseException:
            # Nothing was changed: a flow answers in one go or not at all, so whoever asks again starts anew.
            self._known.pop(request_id, None)
            future.cancel()
            raise
        future.set_result(answer)
        if request_id in self._known:  # not pushed out while it was carried out
            self._sizes[request_id] = size = len(contents) + answer.ByteSize()
            self._bytes += size
        return answer


class CallGate:
    """Counts calls in flight; one too many is refused at once instead of queueing without end.

    With ``quotas``, calls are counted for each tenant too. While others call, a tenant has its share of the limit and
    no more; alone it has three quarters, so that whoever comes next gets in.
    """

    def __init__(self, limit: int, quotas: Quotas | None = None) -> None:
        self.limit = limit
        self.in_flight = 0
        self._quotas = quotas
        self._callers = 0

    async def serve(
        self,
        context: Context,
        call: Callable[[], Awaitable[Reply]],
        request: Message | None = None,
        *,
        is_rated: bool = True,
    ) -> Reply:
        """Run one call and turn a CacheError into its status with ``kv-error-code`` in the trailing metadata.

        ``request``: held against the table of limits first. ``is_rated`` False: no quota on rates ends this call (a
        beat, or a step, which is refused by its own answer).
        """
        meter: Meter | None = None
        self.in_flight += 1
        try:
            if self.in_flight > self.limit:
                raise LimitExceeded("calls in flight", self.in_flight, self.limit)
            require_read()
            who = caller()
            who.check()
            if self._quotas is not None:
                meter = self._enter(self._quotas.meter(who.acts_for))
                if is_rated:
                    meter.admit(time.monotonic())
            if request is not None:
                check_fields(request)
            return await call()
        except CacheError as error:
            await refuse(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:  # noqa: BLE001 - the root of a call
            events.failure("call_broke")
            await context.abort(grpc.StatusCode.INTERNAL, "the daemon failed to serve this call; its log says why")
        finally:
            self.in_flight -= 1
            if meter is not None:
                self._leave(meter)

    def _enter(self, meter: Meter) -> Meter:
        """Count a call of a tenant in. Raises LimitExceeded, QuotaExceeded, with nothing counted."""
        busy = self._callers + (meter.in_flight == 0)
        share = max(1, self.limit * 3 // 4 if busy <= 1 else self.limit // busy)
        own = meter.quota.calls_in_flight
        if meter.in_flight >= (own or share):
            meter.refused += 1
            if own:
                raise QuotaExceeded(meter.tenant, "calls_in_flight", meter.in_flight + 1, own, "send fewer at a time")
            raise LimitExceeded("calls in flight of this tenant", meter.in_flight + 1, share)
        self._callers = busy
        meter.in_flight += 1
        return meter

    def _leave(self, meter: Meter) -> None:
        meter.in_flight -= 1
        self._callers -= meter.in_flight == 0


async def refuse(context: Context, error: CacheError) -> NoReturn:
    """End the call with the error's status."""
    context.set_trailing_metadata(((ERROR_METADATA_KEY, error.code.value),))
    await context.abort(GRPC_CODES[error.code], str(error))


def seconds_left(context: Context) -> float | None:
    """What is left of the caller's deadline; None when it set none."""
    left: float | None = context.time_remaining()
    return left
