"""Callers and their rights: scopes, callers, and the interceptor that refuses calls without one.

A caller is found once for each RPC (for a stream: when it begins) and kept in a context variable, which the task that
serves the RPC shares with its interceptors. ``caller()`` is how servicers ask. RPCs that no rule names are for
operators alone, so that a new one is closed until a rule opens it.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, Protocol

import grpc

from cachesvc.flows.core import Core
from cachesvc.model.errors import CacheError, LeaseLost, NotFound, PermissionDenied, Unauthenticated
from cachesvc.questions.view import SHOWN_LETTERS, Sight, why_lost
from cachesvc.wire.parse import parse
from cachesvc.wire.status import (
    AUTHORIZATION_METADATA_KEY,
    BEARER,
    GRPC_CODES,
    PROCESS_METADATA_KEY,
    refusal,
    status_metadata,
)


class Scope(Enum):
    """Right of a caller. ADMIN includes the others, but for METRICS: the page of metrics, and no call at all."""

    ENGINE = "engine"
    READ = "read-only"
    ADMIN = "admin"
    METRICS = "metrics"


@dataclass(slots=True, eq=False)
class Caller:
    """A known caller. ``tenant`` None: of all tenants (operators, routers); ``expires``: seconds since 1970.

    ``revoked`` is set when the tokens' file no longer accepts the entry: streams that are open then end with their next
    message. ``digest``: of its token, where it has one. ``grace_ends``: monotonic seconds, until when a token that was
    replaced serves the leases of its engine (``tokens.py``); None: it was not. ``calls``: made since the entry left.
    """

    name: str
    scopes: frozenset[Scope]
    tenant: str | None = None
    expires: float = math.inf
    revoked: bool = False
    digest: str = ""
    grace_ends: float | None = None
    calls: int = 0
    acts_for: str = field(init=False)
    """The tenant whose models it registers and opens; the shared one where it has none of its own."""

    def __post_init__(self) -> None:
        self.acts_for = self.tenant or ""

    def may(self, scopes: Iterable[Scope]) -> bool:
        """True when it has one of the scopes."""
        return Scope.ADMIN in self.scopes or any(scope in self.scopes for scope in scopes)

    @property
    def sees_all(self) -> bool:
        """True when listings may show it every tenant."""
        return self.tenant is None or Scope.ADMIN in self.scopes

    def sees(self, tenant: str) -> bool:
        """True when listings may show it what belongs to ``tenant``."""
        return self.sees_all or tenant == self.tenant

    def check(self) -> None:
        """Raises Unauthenticated once the token has expired, was revoked, or has had its grace."""
        if self.revoked or self.grace_ends is not None:
            self.calls += 1
        if self.revoked:
            if self.grace_ends is not None:
                raise Unauthenticated(f"the token {self.name!r} was replaced, and its grace is over; {GIVE_NEW}")
            raise Unauthenticated(f"the token {self.name!r} is no longer accepted; ask the operator for a new one")
        if self.expires < math.inf and self.expires < time.time():
            raise Unauthenticated(f"the token {self.name!r} has expired; ask the operator for a new one")

    def require_current(self, what: str) -> None:
        """For ``what`` is beyond the leases that an engine has. Raises Unauthenticated as ``check``, and for a token
        that was replaced."""
        self.check()
        if self.grace_ends is not None:
            raise Unauthenticated(
                f"the token {self.name!r} was replaced: until its grace ends it serves the leases that its engine has, "
                f"and {what} needs the new one; {GIVE_NEW}"
            )


GIVE_NEW = "write the new token to the file that the client reads (token_file=, CACHESVC_TOKEN_FILE)"

EVERYONE = Caller("everyone", frozenset((Scope.ENGINE, Scope.READ, Scope.ADMIN)))
"""Caller where no tokens are configured: any process that may open the socket is an engine and an operator."""

LOOPBACK = Caller("loopback", frozenset({Scope.READ}))
"""Caller on TCP without TLS and without tokens: any user of the node can connect, so it may only read."""

UNPROVEN = (EVERYONE, LOOPBACK)
"""Callers without a proof. Namespaces of models with a salt are kept from them: engines prove themselves by these."""

_CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Caller of the RPC that the running task serves. Raises Unauthenticated outside of one."""
    found = _CALLER.get(None)
    if found is None:
        raise Unauthenticated("no caller is known; the call did not come through the server")
    return found


def set_caller(found: Caller) -> None:
    """The running task serves ``found`` from now on."""
    _CALLER.set(found)


_PREFIX = "/kvcache.v1."
_ENGINES = (Scope.ENGINE,)
_READERS = (Scope.READ,)
_OPERATORS = (Scope.ADMIN,)
_SERVICES: dict[str, tuple[Scope, ...]] = {
    "EngineService": _ENGINES,
    "LeaseService": _ENGINES,
    "CacheService": _ENGINES,
    "EventService": (Scope.ENGINE, Scope.READ),
}
_READING = ("Get", "List", "Verify")
"""Beginnings of the names of AdminService's RPCs that change nothing."""
_FOR_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.")
_OF_LEASES = (
    *("/kvcache.v1.LeaseService/KeepAlive", "/kvcache.v1.LeaseService/Close", "/kvcache.v1.CacheService/"),
    *("/kvcache.v1.EngineService/Attach", "/kvcache.v1.EngineService/Detach", "/grpc.health.v1.Health/"),
)
"""Beginnings of the calls that a replaced token serves: each names a lease, which its engine opened before, or
nothing."""


def scopes_of(method: str) -> tuple[Scope, ...]:
    """Scopes that may call ``/package.Service/Method``: one of them is enough. No scope, no call: the daemon would have
    to hold whatever such a caller sent."""
    if method.startswith(_FOR_ALL):
        return (Scope.ENGINE, Scope.READ, Scope.ADMIN)
    if not method.startswith(_PREFIX):
        return _OPERATORS
    service, _, name = method.removeprefix(_PREFIX).partition("/")
    if service == "AdminService":
        return _READERS if name.startswith(_READING) else _OPERATORS
    return _SERVICES.get(service, _OPERATORS)


class Doorkeeper(Protocol):
    """Finds the caller behind the metadata of a call."""

    def find(self, token: str, process: bytes, names: Iterable[str]) -> Caller | None:
        """The caller with this token, life-socket token or certificate; None where nothing of that was given.

        Raises Unauthenticated for a token that is not known.
        """


class Unlocked:
    """A doorkeeper where no tokens are configured: any caller is ``who``."""

    def __init__(self, who: Caller) -> None:
        self._who = who

    def find(self, token: str, process: bytes, names: Iterable[str]) -> Caller:
        return self._who


Charge = Callable[[Caller, int], None]
"""``charge(caller, bytes)`` of a message that is not parsed yet. Raises QuotaExceeded."""


def free(_caller: Caller, _size_bytes: int) -> None:
    """Charge nothing, where there are no quotas."""


class Guard(grpc.aio.ServerInterceptor):
    """Stands before every RPC of one listener.

    A caller that ``keeper`` does not find is refused. ``by_certificate``: the transport has asked for a certificate,
    whose names count. ``refused(method, code)`` is called for each refused call; the method is the
    caller's text. ``charge``: what a message's bytes cost its caller, before they are parsed.
    """

    def __init__(
        self,
        keeper: Doorkeeper,
        *,
        by_certificate: bool = False,
        refused: Callable[[str, str], None] = lambda _method, _code: None,
        charge: Charge = free,
    ) -> None:
        self._keeper = keeper
        self._by_certificate = by_certificate
        self._refused = refused
        self._charge = charge
        self._handlers: dict[str, Any] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or one that refuses it."""
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata
        try:
            found = self._keeper.find(*credentials_of(metadata), ())
            if found is None and self._by_certificate:
                handler = readable(await continuation(handler_call_details), self._charge_caller)
                return self._ask_certificate(handler, method, metadata)
            set_caller(allow(found, method))
        except CacheError as refusal:
            self._refused(method, refusal.code.value)
            return refusing(refusal)
        handler = self._handlers.get(method)
        if handler is None:
            handler = readable(await continuation(handler_call_details), self._charge_caller)
            if handler is not None:
                self._handlers[method] = handler
        return handler

    def _charge_caller(self, size_bytes: int) -> None:
        found = _CALLER.get(None)
        if found is not None:  # the caller of a certificate is known only with the message
            self._charge(found, size_bytes)

    def _ask_certificate(self, handler: Any, method: str, metadata: Any) -> Any:
        """``handler`` behind a look at the certificate, which is known only once the call has its context."""

        def enter(context: Any) -> None:
            try:
                names = names_of(context.auth_context())
                set_caller(allow(self._keeper.find(*credentials_of(metadata), names), method))
            except CacheError as refusal:
                self._refused(method, refusal.code.value)
                raise

        return None if handler is None else _wrap(handler, enter)


def allow(found: Caller | None, method: str) -> Caller:
    """Return ``found``, if it may call ``method``. Raises Unauthenticated without a caller, PermissionDenied."""
    if found is None:
        raise Unauthenticated(
            f"{method.rpartition('/')[2]} needs a token: send it as the metadata 'authorization: Bearer TOKEN' "
            "(the client takes token=, token_file= or CACHESVC_TOKEN)"
        )
    if method.startswith(_OF_LEASES):
        found.check()
    else:
        found.require_current(method.rpartition("/")[2])
    if not found.may(scopes := scopes_of(method)):
        needed = " or ".join(scope.value for scope in scopes)
        raise PermissionDenied(f"{found.name!r} may not call {method.rpartition('/')[2]}: that takes scope {needed}")
    return found


def credentials_of(metadata: Any) -> tuple[str, bytes]:
    """The bearer token and the life-socket token of a call's metadata; empty where there is none."""
    token, process = "", b""
    for key, value in metadata or ():
        if key == AUTHORIZATION_METADATA_KEY and isinstance(value, str) and value.startswith(BEARER):
            token = value[len(BEARER) :]
        elif key == PROCESS_METADATA_KEY and isinstance(value, bytes):
            process = value
    return token, process


def names_of(auth_context: Any) -> list[str]:
    """Names that a checked client certificate carries: its DNS names and URIs. The common name counts for one without
    alternative names alone, and those of other kinds (mail, addresses) not at all: they are checked by other rules."""
    keys = ("peer_dns", "peer_uri") if auth_context.get("x509_subject_alternative_name") else ("x509_common_name",)
    return [value.decode(errors="replace") for key in keys for value in auth_context.get(key, ())]


async def _abort(context: Any, error: CacheError) -> None:
    context.set_trailing_metadata(status_metadata(refusal(error)))
    await context.abort(GRPC_CODES[error.code], str(error))


def refusing(error: CacheError) -> Any:
    """A handler for a call of any shape that ends it with the error's status."""

    async def refuse(_: Any, context: Any) -> AsyncIterator[bytes]:
        await _abort(context, error)
        yield b""  # not reached: it makes this a stream

    return grpc.stream_stream_rpc_method_handler(refuse)


def _wrap(handler: Any, enter: Callable[[Any], None]) -> Any:
    """Wrap a handler, so that it begins with ``enter(context)``."""

    async def admit(context: Any) -> None:
        try:
            enter(context)
        except CacheError as error:
            await _abort(context, error)

    shape = "_".join("stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming))
    serve = getattr(handler, shape)

    async def one(request: Any, context: Any) -> Any:
        await admit(context)
        return await serve(request, context)

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        await admit(context)
        answers = serve(request, context)
        if inspect.isawaitable(answers):  # it writes its answers itself, and yields none
            await answers
            return
        async for answer in answers:
            yield answer

    return handler._replace(**{shape: many if handler.response_streaming else one})


MODEL_BITS, TICKET_BITS = 30, 40
"""Bits of the numbers of models (uint32 on the wire) and of tickets (exact in JSON)."""
_ROUNDS = 4

_NAMED = re.compile("[0-9a-f]{32}-([0-9a-f]{1,16})")


def lease_name(epoch: int) -> str:
    """A new lease's id: 128 random bits, and the daemon's epoch behind them, by which a later daemon knows it."""
    return f"{secrets.token_hex(16)}-{epoch:x}"


def unordered_numbers(bits: int) -> Iterator[int]:
    """Numbers from 1 to 2**``bits`` - 1 (``bits`` is even), each once, in an order of this daemon's own: who gets some
    cannot know how many others were given out between them. It is a permutation of 1, 2, ... under a secret key."""
    key, half = secrets.token_bytes(16), bits // 2
    mask = (1 << half) - 1
    for number in itertools.count(1):
        high, low = number >> half & mask, number & mask
        for turn in range(_ROUNDS):
            mixed = blake2b(low.to_bytes(8, "little") + bytes((turn,)), key=key, digest_size=8).digest()
            high, low = low, high ^ int.from_bytes(mixed, "little") & mask
        if shuffled := high << half | low:
            yield shuffled


def shown_id(lease_id: str) -> str:
    """A lease's id as the log may have it: the whole one is a key to the lease."""
    return lease_id[:SHOWN_LETTERS]


def no_lease(core: Core, lease_id: str, epoch: int) -> NotFound | LeaseLost:
    """Error for a lease that ``Ledger.hear`` does not find."""
    if (why := why_lost(core, lease_id)) is not None:
        return LeaseLost(lease_id, why)
    if is_of_another_epoch(lease_id, epoch):
        return LeaseLost(lease_id, "it was opened with an earlier daemon, and its pages went with that one")
    return NotFound("lease", lease_id, "open one first")


def is_of_another_epoch(lease_id: str, epoch: int) -> bool:
    """True for a lease that another life of the daemon opened."""
    named = _NAMED.fullmatch(lease_id)
    return named is not None and int(named[1], 16) != epoch


def sight() -> Sight:
    """Limits of the running RPC's caller. The whole id of a lease is a key to it, so those who may only read get its
    beginning; callers without a proof get neither ids nor namespaces of models with a salt."""
    who = caller()
    return Sight(
        tenant=None if who.sees_all else who.tenant,
        whole_ids=who is EVERYONE or Scope.ADMIN in who.scopes,
        salted=who not in UNPROVEN,
    )


# Checks of a request's bytes, before it is a message: its size is charged, and bytes that are no message, or one beyond
# all limits, are refused by name. gRPC would answer INTERNAL and log a traceback for each.

_UNREAD: ContextVar[CacheError | None] = ContextVar("unread", default=None)


def readable(handler: Any, charge: Callable[[int], None]) -> Any:
    """``handler`` with a deserializer that never raises: what it does not read becomes an empty message and is
    remembered for ``unread``. gRPC reads requests in the task that serves them. Answers that are bytes already are sent
    as they are.

    ``charge(bytes)``: to the caller of the running task. Raises QuotaExceeded.
    """
    if handler is None or handler.request_deserializer is None:
        return handler
    careful, serializer = _careful(handler.request_deserializer, charge), handler.response_serializer

    def sent(answer: Any) -> bytes:
        packed: bytes = answer if isinstance(answer, bytes) else serializer(answer)
        return packed

    return handler._replace(request_deserializer=careful, response_serializer=sent)


def unread() -> CacheError | None:
    """Error of the request at hand where it could not be read."""
    error = _UNREAD.get()
    if error is not None:
        _UNREAD.set(None)
    return error


def require_read() -> None:
    """Raises InvalidRequest, LimitExceeded or QuotaExceeded where the request at hand could not be read."""
    if (error := unread()) is not None:
        raise error


def _careful(from_string: Any, charge: Callable[[int], None]) -> Callable[[bytes], Any]:
    kind = from_string.__self__

    def careful(raw: bytes) -> Any:
        try:
            charge(len(raw))
            return parse(kind, raw)
        except CacheError as error:
            _UNREAD.set(error.with_traceback(None))  # whose frames would keep the bytes
            return kind()

    return careful
