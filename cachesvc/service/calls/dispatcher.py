"""The dispatcher: carries out every call, by whichever transport it came, in one order. Nothing here knows gRPC.

    caller and lease    the token still holds; the lease that is named is the caller's own. It counts as alive, whatever
                        becomes of the call
    admission           room among calls of its kind, the tenant's rates, limits of fields
    the call            its lease, model, replica and time, looked up once
    the operation       a request_id that was answered gets the same answer; any other is carried out by its row
    telemetry           one observation a call

``serve`` answers at once where the call does not wait, without a task or a future; else with a future. A refusal is a
value either way, an OperationError, which the transport turns into what it has for refusals. So is a defect of the
daemon's own, with the code INTERNAL: it is logged and counted, its model is taken out of service (``Node.run_of``), and
the same request_id gets the same INTERNAL, because what was done before it is not known.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, Union

from google.protobuf.message import Message
from kvcache.v1.cache_pb2 import OperationError

from cachesvc.flows.core import Call, Count, call_of
from cachesvc.ledger.ledger import Lease, LeaseState
from cachesvc.model.errors import CacheError, KeyReused, LimitExceeded, Unavailable
from cachesvc.model.numbers import Histogram, count_held
from cachesvc.service.access.admission import Admission, CallerKey, CallKind, Holder, Slot
from cachesvc.service.access.auth import Caller, no_lease
from cachesvc.service.access.quota import FREE_BYTES
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events
from cachesvc.telemetry.tracing import Span, Tracer, current_span
from cachesvc.wire.parse import check_fields
from cachesvc.wire.status import refusal

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

INTERNAL = "INTERNAL"
"""Code of an internal error: not caused by the caller, and not one of the API's codes."""
COPIES_HELD = 2
"""The transport keeps a message as it came until it is answered, beside what was read of it."""
TENANT_PROCESSES = 4
"""Number of processes' limits of bytes that the waiting calls of one tenant may hold."""
BROKEN = "the daemon failed to serve this call; its log says why"

Outcome: TypeAlias = Union[R, OperationError]  # noqa: UP007 - a generic alias
Served: TypeAlias = Union[R, OperationError, asyncio.Future[Any]]  # noqa: UP007
"""An answer or a refusal, or the future of one of them."""


@dataclass(slots=True)
class Ask:
    """One call of a known caller. ``lease``: one of the caller's own, by the id that the call names. ``call``: what a
    flow of that lease works on; None for an operation that is no such flow.

    ``began``: when it came, ``deadline``: when its caller gives it up; monotonic seconds. ``repeats``: the answers
    among which its own is kept, where it has a ``request_id``. ``goes_on``: a part of it is done for good, so it is
    carried through whatever becomes of its caller, and its answer is kept for a retry. ``size_bytes``: what it holds
    of memory while it goes on, and ``charged_bytes`` what of that is charged now.
    """

    dispatcher: Dispatcher
    who: Caller
    method: str
    holder: Holder
    began: float
    deadline: float
    lease_id: str
    lease: Lease | None
    request_id: int = 0
    repeats: Repeats | None = None
    is_retry: bool = False
    call: Call | None = None
    goes_on: bool = False
    size_bytes: int = 0
    charged_bytes: int = 0

    def renewed(self) -> Call:
        """The call as of now: its lease or replica may be lost since it came, or its model out of service.

        Raises NotFound, LeaseLost, Unavailable.
        """
        node = self.dispatcher.node
        if self.lease is None:
            raise no_lease(node.core, self.lease_id, node.epoch)
        return call_of(node.core.ledger, self.lease, node.now())


class CallTask(asyncio.Task[Any]):
    """A call that goes on beyond its first turn. Its caller may cancel it until a part of it is done for good."""

    def __init__(self, ask: Ask, work: Coroutine[Any, Any, Any]) -> None:
        super().__init__(work)
        self._ask = ask

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it; False where it goes on."""
        return not self._ask.goes_on and super().cancel(msg)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Operation(ABC, Generic[Q, R]):
    """One row of the table of calls. ``names_lease`` and ``is_repeatable``: its message has a ``lease_id``, and a
    ``request_id`` under which its answer is kept. ``is_of_lease``: it needs ``Ask.call``.
    """

    name: str
    kind: CallKind = CallKind.WORK
    names_lease: bool = True
    is_repeatable: bool = False
    is_of_lease: bool = False

    @abstractmethod
    def carry(self, ask: Ask, message: Q) -> R | asyncio.Future[Any]:
        """Answer, or have ``Dispatcher.later`` go on. May raise a CacheError as long as nothing was changed."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServiceCall(Operation[Q, R]):
    """An operation that a service carries out by a function of its own."""

    handle: Callable[[Ask, Q], R | asyncio.Future[Any]]

    def carry(self, ask: Ask, message: Q) -> R | asyncio.Future[Any]:
        return self.handle(ask, message)


class Dispatcher:
    """Carries out calls on the event loop. ``watch``: None counts nothing."""

    def __init__(self, node: Node, admission: Admission, watch: CallWatch | None = None) -> None:
        self.node = node
        self.admission = admission
        self._watch = watch
        self._repeats: dict[str, Repeats] = {}
        self._budgets: dict[str, AnswerBudget] = {}
        self._under_way: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Stop: calls that wait and calls that come are refused."""
        self._is_stopping = True
        self.node.stop_waiting()

    def serve(
        self,
        who: Caller,
        operation: Operation[Q, R],
        request: Q,
        *,
        process: Callable[[], CallerKey],
        contents: bytes | None = None,
        seconds: float | None = None,
        parent: Parent = None,
    ) -> Served[R]:
        """Carry out one call. ``process``: the caller where no lease names it; ``contents``: the request as it came,
        where that is at hand; ``seconds``: left of the caller's deadline.

        A future goes on where the caller is gone, unless it is cancelled.
        """
        began, watch, name = self.node.loop_watch.begin(), self._watch, operation.name
        span = None if watch is None or parent is None else watch.begin(name, parent)
        is_ours = contents is None
        came = contents if contents is not None else request.SerializeToString(deterministic=True)
        # One ``try`` around admission and operation: both refuse by raising, and a call without a task has no other
        # root. An answer is kept once it is known, a defect's too: what was done before it is not known, so a retry
        # must not carry it out again. A refusal in ``_admit`` leaves ``ask`` unset, and nothing is kept.
        served: Served[R]
        ask: Ask | None = None
        try:
            ask = self._admit(who, operation, request, len(came), process, seconds)
            if ask.is_retry:
                served = self._again(ask, mark_of(name, request, came, is_ours=is_ours))
            else:
                served = operation.carry(ask, request)
        except CacheError as error:
            served = refusal(error)
        except Exception:  # noqa: BLE001 - the root of a call
            served = self.broke(name, None if ask is None else ask.lease)
        if ask is not None and ask.repeats is not None and not ask.is_retry:
            mark = mark_of(name, request, came, is_ours=is_ours)
            if isinstance(served, asyncio.Future):
                ask.repeats.begin(ask.request_id, mark, served)
                served.add_done_callback(partial(_end_first, ask.repeats, ask.request_id, mark))
            elif type(served) is not OperationError or is_final(served):
                ask.repeats.keep(ask.request_id, mark, served)
        held = self.node.loop_watch.note(name, began)
        if watch is not None:
            if isinstance(served, asyncio.Future):
                served.add_done_callback(partial(_end_watching, watch, name, began, span))
            else:
                watch.end(name, held, served.code if isinstance(served, OperationError) else OK, span)
            if span is not None:
                watch.leave()
        return served

    def charge(self, who: Caller, size_bytes: int) -> None:
        """The bytes of a message, before it is parsed. Raises QuotaExceeded."""
        self.node.loop_watch.begin()
        if size_bytes > FREE_BYTES:
            self.admission.charge_bytes(who.acts_for, size_bytes - FREE_BYTES, self.node.now())

    def refuse(self, name: str, error: CacheError) -> OperationError:
        """Count a call that cannot be served because of the way that it came, and say so."""
        if self._watch is not None:
            self._watch.end(name, 0.0, error.code.value)
        return refusal(error)

    def later(
        self, ask: Ask, kind: CallKind, work: Callable[[Slot], Awaitable[R]], *, is_admitted: bool = False
    ) -> asyncio.Future[Any]:
        """Go on with a call beside others, in a task of its own that holds a place. Raises LimitExceeded, unless it
        ``is_admitted``: something was done already, or a call with a place does it.

        The future's result is an Outcome: ``work`` may raise as ``Operation.carry`` may.
        """
        if not is_admitted:
            self._require_bytes(ask)
        place = self.admission.take(kind, ask.holder, is_admitted=is_admitted)
        self.hold_bytes(ask)
        task = CallTask(ask, self._guarded(ask, work, place))
        self._under_way.add(task)  # the loop itself would let it go
        task.add_done_callback(partial(self._over, ask, place))
        return task

    def hold_bytes(self, ask: Ask) -> None:
        """Count the message of a call that goes on as held by its process and its tenant, until ``free_bytes``."""
        if not ask.charged_bytes:
            self._count_bytes(ask, ask.size_bytes)

    def free_bytes(self, ask: Ask) -> None:
        """The call is over, or about to become what counts by itself."""
        if ask.charged_bytes:
            self._count_bytes(ask, -ask.charged_bytes)

    def live_lease(self, ask: Ask) -> Lease:
        """The lease that the call names. Raises NotFound, LeaseLost."""
        core = self.node.core
        if ask.lease is None:
            raise no_lease(core, ask.lease_id, self.node.epoch)
        return core.ledger.lease(ask.lease_id)

    def until(self, ask: Ask) -> float:
        """Deadline of the call's waits for transfers, monotonic seconds."""
        return min(ask.deadline, ask.began + self.node.wait_seconds)

    def broke(self, method: str, lease: Lease | None) -> OperationError:
        """Log and count a defect, from within its ``except``."""
        events.failure("call_broke", method=method, model=0 if lease is None else lease.model)
        self.node.core.count(Count.CALLS_BROKEN)
        return OperationError(code=INTERNAL, message=BROKEN)

    # -- one call, step by step --------------------------------------------------------------------------------

    def _admit(
        self,
        who: Caller,
        operation: Operation[Q, R],
        request: Any,
        size_bytes: int,
        process: Callable[[], CallerKey],
        seconds: float | None,
    ) -> Ask:
        """Everything that is asked before an operation is carried out. Raises what refuses it."""
        node, now, tenant = self.node, self.node.now(), who.acts_for
        lease_id: str = request.lease_id if operation.names_lease else ""
        request_id: int = request.request_id if operation.is_repeatable else 0
        who.check()
        # A sign of life even where the call is refused below: its process is there, and a lease must not end because
        # the daemon is short of places.
        lease = node.core.ledger.hear(lease_id, tenant, now) if lease_id else None
        if self._is_stopping:
            raise Unavailable("the daemon stops; go on without the cache")
        caller = process() if lease is None else lease.opened_by[0] or lease_id
        quotas = self.admission.quotas  # as Admission.holder, without a call
        holder = Holder(caller, None if quotas is None else quotas.meter(tenant))
        repeats = self._repeats.get(lease_id) if request_id and lease is not None else None
        is_retry = repeats is not None and (request_id in repeats.given or request_id in repeats.under_way)
        # A retry takes no further place: its first call has one, or has been answered.
        self.admission.admit(CallKind.LIFE if is_retry else operation.kind, holder, now)
        check_fields(request, size_bytes)
        deadline = math.inf if seconds is None else now + seconds
        ask = Ask(self, who, operation.name, holder, now, deadline, lease_id, lease, request_id, repeats, is_retry)
        ask.size_bytes = COPIES_HELD * max(0, size_bytes - FREE_BYTES)
        if request_id and (repeats is None or (lease is not None and lease.state is not LeaseState.LIVE)):
            ask.repeats = self._repeats_of(ask)
        if operation.is_of_lease and not is_retry:
            if lease is None:
                raise no_lease(node.core, lease_id, node.epoch)
            ask.call = call_of(node.core.ledger, lease, now)
        return ask

    def _again(self, ask: Ask, mark: Mark) -> Served[Any]:
        """Answer of the operation under this id. Raises KeyReused, LimitExceeded."""
        repeats, request_id = ask.repeats, ask.request_id
        assert repeats is not None
        known = repeats.find(request_id, mark)
        if isinstance(known, asyncio.Future):
            repeats.retry(request_id)
            return self.later(ask, CallKind.WAITS, lambda _: _first_answer(known), is_admitted=True)
        return known

    def _require_bytes(self, ask: Ask) -> None:
        """Raises LimitExceeded where the process, or its tenant, holds too much for one message more."""
        if not ask.size_bytes:
            return
        core, meter, most = self.node.core, ask.holder.meter, self.node.core.limits.key_bytes_per_process
        if ask.lease is not None and (held := core.ledger.key_bytes.get(ask.lease.party, 0) + ask.size_bytes) > most:
            raise LimitExceeded("bytes of keys of this process's open sequences and calls that wait", held, most)
        most *= TENANT_PROCESSES
        if meter is not None and (held := meter.waiting_bytes + ask.size_bytes) > most:
            meter.refused += 1
            raise LimitExceeded("bytes of this tenant's calls that wait", held, most)

    def _count_bytes(self, ask: Ask, by: int) -> None:
        ask.charged_bytes += by
        if ask.lease is not None:
            count_held(self.node.core.ledger.key_bytes, ask.lease.party, by)
        if ask.holder.meter is not None:
            ask.holder.meter.waiting_bytes += by

    async def _guarded(self, ask: Ask, work: Callable[[Slot], Awaitable[R]], place: Slot) -> Outcome[R]:
        try:
            return await work(place)
        except CacheError as error:
            return refusal(error)
        except Exception:  # noqa: BLE001 - the root of a task
            return self.broke(ask.method, ask.lease)

    def _over(self, ask: Ask, place: Slot, task: asyncio.Task[Any]) -> None:
        place.leave()
        self.free_bytes(ask)
        self._under_way.discard(task)

    def _repeats_of(self, ask: Ask) -> Repeats:
        """The remembered answers of a live lease. Raises LeaseLost, NotFound."""
        lease_id, leases = self.live_lease(ask).id, self.node.core.ledger.leases
        known = self._repeats.get(lease_id)
        if known is None:
            for gone in [each for each in self._repeats if each not in leases]:
                self._repeats.pop(gone).forget()
            budget = self._budgets.setdefault(ask.who.acts_for, AnswerBudget())
            known = self._repeats[lease_id] = Repeats(budget)
        return known


def is_final(outcome: Message) -> bool:
    """False for a refusal, which changed nothing: a retry starts anew. A defect is final."""
    return not isinstance(outcome, OperationError) or outcome.code == INTERNAL


async def _first_answer(first: asyncio.Future[Any]) -> Any:
    """Answer to the first call under a request_id. Raises Unavailable where it was given up."""
    await asyncio.wait((first,))
    if first.cancelled():
        raise Unavailable("the first call with this request_id was given up; send it again")
    return first.result()


def _end_first(repeats: Repeats, request_id: int, mark: Mark, first: asyncio.Future[Any]) -> None:
    repeats.end(request_id)
    if not first.cancelled() and is_final(first.result()):
        repeats.keep(request_id, mark, first.result())


def _end_watching(watch: CallWatch, name: str, began: float, span: Span | None, served: asyncio.Future[Any]) -> None:
    outcome = OperationError(code=CANCELLED) if served.cancelled() else served.result()
    code = outcome.code if isinstance(outcome, OperationError) else OK
    watch.end(name, time.perf_counter() - began, code, span)


KEEP_ANSWERS = 256
"""Answers of a lease that are kept, if they are small."""
KEEP_LEAST = 32
"""Answers that are kept beside large ones: more than a client has steps under way."""
KEEP_BYTES = 1 << 20
"""Bytes that further answers may take."""
KEEP_MOST_BYTES = 8 << 20
"""Bytes that all answers of a lease may take, but for the last: one message is no larger."""
TENANT_BYTES = 64 << 20
"""Bytes that the answers of all leases of one tenant may take. Beyond it each lease has its part of it, and beyond
twice as much not even its last answer for certain: a tenant with that many large answers pays for them with retries of
its own."""
MOST_RETRIES = 16
"""Calls that wait for the answer of one that is under way."""
KEEP_CONTENTS_BYTES = 128 << 10
"""Largest request that is kept itself beside its answer: that is cheaper than a hash. Match of 2,048 blocks is half."""

Mark = tuple[str, type[Message], bytes | int]
"""Mark that distinguishes requests under one id: the call, its message, and their bytes or 64 bits of a hash over
them."""


def mark_of(name: str, request: Message, came: bytes, *, is_ours: bool = False) -> Mark:
    """The mark of a request. ``came``: its bytes, as its caller has written them, or (``is_ours``) the daemon,
    deterministically."""
    if len(came) > KEEP_CONTENTS_BYTES and not is_ours:
        came = _as_we_write(request)  # which is no longer
    return name, type(request), came if len(came) <= KEEP_CONTENTS_BYTES else hash(came)


def are_same(one: Mark, other: Mark) -> bool:
    """True for marks of equal requests, however each of them was written."""
    if one == other:
        return True
    (name, kind, first), (other_name, other_kind, second) = one, other
    if isinstance(first, int) or isinstance(second, int) or (name, kind) != (other_name, other_kind):
        return False
    return _as_we_write(kind.FromString(first)) == _as_we_write(kind.FromString(second))


def _as_we_write(request: Message) -> bytes:
    return request.SerializeToString(deterministic=True)


class AnswerBudget:
    """Bytes of the answers of one tenant's leases."""

    __slots__ = ("held", "leases")

    def __init__(self) -> None:
        self.held = 0
        self.leases = 0


class Repeats:
    """The last answers of one lease by request_id (never 0), in ``given``, and the calls that are ``under_way``.
    ``budget``: its tenant's.

    Those under way are not pushed out by answers: there are at most as many as a process may have waiting.
    """

    def __init__(self, budget: AnswerBudget) -> None:
        self._bytes = 0
        self._budget = budget
        budget.leases += 1
        self.given: OrderedDict[int, tuple[Mark, Message, int]] = OrderedDict()
        self.under_way: dict[int, tuple[Mark, asyncio.Future[Any]]] = {}
        self._retries: dict[int, int] = {}

    def find(self, request_id: int, mark: Mark) -> Any:
        """The answer to this id, or the future of a call that is under way; None for a new id.

        Raises KeyReused for an id with other contents.
        """
        given = self.given.get(request_id) or self.under_way.get(request_id)
        if given is None:
            return None
        if not are_same(given[0], mark):
            raise KeyReused(request_id)
        return given[1]

    def begin(self, request_id: int, mark: Mark, future: asyncio.Future[Any]) -> None:
        """The first call under this id is under way, until ``end``."""
        self.under_way[request_id] = mark, future

    def end(self, request_id: int) -> None:
        """End the first call. Unless its answer is kept, a retry starts anew."""
        del self.under_way[request_id]
        self._retries.pop(request_id, None)

    def retry(self, request_id: int) -> None:
        """Count one more call that waits for the answer of the first. Raises LimitExceeded for more than a client would
        send."""
        retries = self._retries.get(request_id, 0) + 1
        if retries > MOST_RETRIES:
            raise LimitExceeded(f"retries of request {request_id}, which is under way", retries, MOST_RETRIES)
        self._retries[request_id] = retries

    def keep(self, request_id: int, mark: Mark, answer: Message) -> None:
        """Remember an answer; the oldest go where all are too many or too large."""
        contents = mark[2]
        size_bytes = answer.ByteSize() + (len(contents) if isinstance(contents, bytes) else 0)
        self.given[request_id] = mark, answer, size_bytes
        self._bytes += size_bytes
        self._budget.held += size_bytes
        while self._is_too_much():
            _, (_, _, size_bytes) = self.given.popitem(last=False)
            self._bytes -= size_bytes
            self._budget.held -= size_bytes

    def forget(self) -> None:
        """Take the lease's answers out of its tenant's account."""
        self._budget.held -= self._bytes
        self._budget.leases -= 1

    def _is_too_much(self) -> bool:
        count, budget = len(self.given), self._budget
        if budget.held > TENANT_BYTES and self._bytes > TENANT_BYTES // budget.leases:
            return count > 1 or (count == 1 and budget.held > 2 * TENANT_BYTES)
        if count <= 1:
            return False
        return count > KEEP_ANSWERS or self._bytes > (KEEP_BYTES if count > KEEP_LEAST else KEEP_MOST_BYTES)


OK = "OK"
OTHER = "other"
CANCELLED = "CANCELLED"
Parent = dict[str, str] | None
"""Headers that say whose child a call's span is; None: the call is not traced."""


class CallWatch:
    """Counts by ``Service/Method``; used on the event loop alone. ``tracer``: None traces nothing."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.seconds: dict[str, Histogram] = {}
        self.codes: dict[tuple[str, str], int] = {}
        self.tracer = tracer

    def know(self, names: Iterable[str]) -> None:
        """Known methods: shown before their first call, and counted apart in refusals."""
        for name in names:
            self.seconds.setdefault(name, Histogram())

    def refused(self, path: str, code: str) -> None:
        """Count a call that no service got. Its caller chooses ``path``: unknown ones count together."""
        name = path.removeprefix("/kvcache.v1.")
        key = (name if name in self.seconds else OTHER, code)
        self.codes[key] = self.codes.get(key, 0) + 1

    def begin(self, name: str, headers: dict[str, str]) -> Span | None:
        """A call begins that is traced, unless it is not sampled; the running task works for it until ``leave``."""
        span = None if self.tracer is None else self.tracer.begin_call(name, headers)
        if span is not None:
            current_span.set(span)
        return span

    def leave(self) -> None:
        """The running task turns to other calls; a task of the call's own keeps its span."""
        current_span.set(None)

    def end(self, name: str, seconds: float, code: str, span: Span | None = None) -> None:
        """Observe a call that was answered, refused, or given up."""
        key = (name, code)
        self.codes[key] = self.codes.get(key, 0) + 1
        self.seconds[name].observe(seconds)
        if span is not None:
            span.end(code)
