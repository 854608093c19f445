"""PeerService: Borrow, Beat, Return, on a listener of its own for other nodes alone."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from kvcache.v1 import peer_pb2, peer_pb2_grpc

from cachesvc.model.errors import CacheError, InvalidRequest, Unauthenticated, Unavailable
from cachesvc.model.text import MOST_PORT
from cachesvc.model.words import KEY_BYTES
from cachesvc.peer.fleet import Answered, DigestNews, Done, HandshakeFailed, Loan, PeerAbsent, PeerRefused
from cachesvc.peer.lender import Lender
from cachesvc.peer.reading import STREAMS
from cachesvc.service.access.admission import rude_options
from cachesvc.service.access.auth import credentials_of, refusing
from cachesvc.service.calls.lending import MOST_PATIENT, MOST_READERS, DigestFeed, LendingDesk
from cachesvc.service.host.tls import NodeCertificates, add_port
from cachesvc.service.rpc.edge import Context, refuse
from cachesvc.storage.seam import LAYOUT_ID_BYTES, Part, Scope
from cachesvc.storage.workers import nothing
from cachesvc.telemetry import events
from cachesvc.wire.parse import check_fields
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER, ERROR_METADATA_KEY

NAMESPACE_BYTES = 32
MIN_TOKEN_CHARACTERS = 22
MOST_CONNECTIONS = 320
SHORT_CALLS = 256
"""Places of calls that do not wait, which those that do leave free: without Beat, loans lapse."""
MOST_CALLS = MOST_READERS + MOST_PATIENT + SHORT_CALLS
MESSAGE_BYTES = 1 << 20


class PeerTokens:
    """A file of tokens, one a line: all of them are let in, the first is shown. Read again when it changes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None
        self._tokens: tuple[str, ...] = ()

    def current(self) -> tuple[str, ...]:
        """Raises Unavailable for a file that was never readable; later on the last good ones stand."""
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_size
            if seen != self._seen:
                self._tokens, self._seen = read_tokens(self._path), seen
        except (OSError, InvalidRequest) as error:
            if not self._tokens:
                raise Unavailable(f"peer_tokens: {error}") from error
        return self._tokens

    def knows(self, token: str) -> bool:
        """True for a known token; compared in constant time."""
        known = [hmac.compare_digest(token.encode(), each.encode()) for each in self.current()]
        return any(known)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Read the tokens of a file. Raises OSError, InvalidRequest."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens or any(len(token) < MIN_TOKEN_CHARACTERS for token in tokens):
        raise InvalidRequest(f"{path} has no tokens of {MIN_TOKEN_CHARACTERS} characters or more, one a line")
    return tokens


class PeerGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without a token, before anything of them is read. None: lets in all of loopback."""

    def __init__(self, tokens: PeerTokens | None) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or one that refuses it."""
        token, _ = credentials_of(handler_call_details.invocation_metadata)
        try:
            if self._tokens is not None and not self._tokens.knows(token):
                events.limited("peer_refused", handler_call_details.method, method=handler_call_details.method)
                raise Unauthenticated("this node lends to nodes that show one of its peer_tokens")
        except CacheError as error:
            return refusing(error)
        return await continuation(handler_call_details)


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """Serves other nodes on the ledger thread. ``epoch``: of this daemon's life."""

    def __init__(self, desk: LendingDesk, lender: Lender, digests: DigestFeed, epoch: int) -> None:
        self._desk = desk
        self._epoch = epoch
        self._digests = digests
        self._lender = lender

    async def Borrow(self, request: peer_pb2.BorrowRequest, context: Context) -> peer_pb2.BorrowResponse:
        try:
            check_fields(request, request.ByteSize())
            if len(request.namespace) != NAMESPACE_BYTES or len(request.layout_id) != LAYOUT_ID_BYTES:
                raise InvalidRequest("namespace has 32 bytes and layout_id 8")
            scope = Scope(request.namespace, request.layout_id)
            parts = [Part(part.group, part.rank, part.ranks) for part in request.parts]
            lent, computing, is_given_up = await self._desk.borrow(
                scope, request.keys, parts, request.patience_ms / 1000
            )
        except CacheError as error:
            await refuse(context, error)
        if lent is None:
            return peer_pb2.BorrowResponse(epoch=self._epoch, computing_blocks=computing, is_given_up=is_given_up)
        return peer_pb2.BorrowResponse(
            lease_id=lent.lease,
            epoch=self._epoch,
            secret=lent.secret,
            data_port=self._lender.port,
            silence_limit_ms=int(self._desk.lease_seconds * 1000),
            lent=bytes(each is not None for each in lent.objects),
            computing_blocks=computing,
            streams=STREAMS,
        )

    async def Beat(self, request: peer_pb2.BeatRequest, context: Context) -> peer_pb2.BeatResponse:
        try:
            check_fields(request, request.ByteSize())
        except CacheError as error:
            await refuse(context, error)
        is_ours = request.epoch == self._epoch
        lost = [each for each in request.lease_ids if not is_ours or not self._desk.loans.beat(each)]
        return peer_pb2.BeatResponse(lost_lease_ids=lost)

    async def Return(self, request: peer_pb2.ReturnRequest, context: Context) -> peer_pb2.ReturnResponse:
        del context
        if request.epoch == self._epoch:
            self._desk.loans.give_back(request.lease_id)
        return peer_pb2.ReturnResponse()

    async def News(self, request: peer_pb2.NewsRequest, context: Context) -> peer_pb2.NewsResponse:
        del context
        news = await self._digests.news(request.epoch, request.version, request.patience_ms / 1000)
        if news is None:
            return peer_pb2.NewsResponse(epoch=request.epoch, version=request.version)
        return peer_pb2.NewsResponse(epoch=news.epoch, version=news.version, bits=news.bits, flips=news.flips)


@dataclass(frozen=True, slots=True)
class PeerListening:
    """``address``: HOST:PORT. Files: certificate, key and the authority of other nodes' certificates; empty: plain
    text."""

    address: str
    certificate: str = ""
    key: str = ""
    authority: str = ""


class PeerServer:
    """Serves from ``start`` to ``close``. ``port``: where."""

    def __init__(self, service: PeerService, listening: PeerListening, tokens: PeerTokens | None) -> None:
        self.port = 0
        self._service = service
        self._listening = listening
        self._tokens = tokens
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Raises Unavailable where the address cannot be had, or a file cannot be read."""
        if self._tokens is not None:
            self._tokens.current()
        listening = self._listening
        server = grpc.aio.server(
            interceptors=[PeerGuard(self._tokens)],
            options=[*rude_options(MOST_CONNECTIONS), ("grpc.max_receive_message_length", MESSAGE_BYTES)],
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self._service, server)
        try:
            files = listening.certificate, listening.key, listening.authority
            self.port = add_port(server, listening.address, *files)
        except (RuntimeError, OSError) as error:
            raise Unavailable(f"cannot listen on {listening.address} for other nodes: {error}") from error
        await server.start()
        self._server = server

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)


_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # a new certificate is not for connections under the old one
)
PROBE_SECONDS = 0.5
PROBE_PAUSE_SECONDS = 30.0
"""A peer that cannot be reached is tried by hand so seldom, to tell whether it is for the certificates."""


_FULL = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED)


def _is_refusal(error: grpc.Call) -> bool:
    """True where the other daemon itself has refused the call, and would not refuse all calls."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # of its server too: it has too many calls
        return True
    names = {name for name, _ in error.trailing_metadata() or ()}
    return ERROR_METADATA_KEY in names and error.code() is not grpc.StatusCode.UNAUTHENTICATED


def _news(answer: peer_pb2.NewsResponse) -> DigestNews:
    return DigestNews(answer.epoch, answer.version, answer.bits, answer.flips)


class GrpcControl:
    """The peer at ``address``. ``files``: this node's own certificate and key, and the authority of the peer's.
    ``name``: that the peer's certificate is for, where that is not its address.

    News and probes have a connection of their own: they are asked of peers that are not there yet, and while gRPC waits
    to connect again, it fails every other call on that connection."""

    def __init__(self, address: str, files: PeerListening, tokens: PeerTokens | None, name: str = "") -> None:
        self.address = address
        self._name = name
        self._options = (*_OPTIONS, *((("grpc.ssl_target_name_override", name),) if name else ()))
        self._tokens = tokens
        self._open_news = partial(GrpcControl, address, files, tokens, name)
        self._news: GrpcControl | None = None
        self._certificates = (
            NodeCertificates(files.certificate, files.key, files.authority) if files.authority else None
        )
        self._number = 0
        self._probe_at = 0.0
        self._channel: grpc.Channel | None = None
        self._before: grpc.Channel | None = None
        self._stub: peer_pb2_grpc.PeerServiceStub | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def borrow_later(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, seconds: float, answered: Answered
    ) -> None:
        objects = len(keys) // KEY_BYTES * len(parts)
        request = peer_pb2.BorrowRequest(
            namespace=scope.namespace,
            layout_id=scope.layout,
            keys=keys,
            parts=[peer_pb2.PeerPart(**part._asdict()) for part in parts],
            patience_ms=round(patience * 1000),
        )
        self._ask(self.stub().Borrow, request, seconds, lambda answer: self._loan(answer, objects), answered)

    def news_later(
        self, epoch: int, version: int, patience: float, answered: Callable[[DigestNews | CacheError], None]
    ) -> None:
        request = peer_pb2.NewsRequest(epoch=epoch, version=version, patience_ms=round(patience * 1000))
        self._ask(self._beside().stub().News, request, 2 * patience, _news, answered, self._unavailable)

    def beat_later(self, loans: Sequence[Loan], seconds: float, done: Done) -> None:
        epoch = loans[-1].epoch if loans else 0
        leases = [loan.lease for loan in loans if loan.epoch == epoch]  # others ended with an older life of the peer
        stub = self.stub() if leases else self._beside().stub()
        self._ask(stub.Beat, peer_pb2.BeatRequest(lease_ids=leases, epoch=epoch), seconds, nothing, done)

    def give_back_later(self, loan: Loan, seconds: float, done: Done) -> None:
        request = peer_pb2.ReturnRequest(lease_id=loan.lease, epoch=loan.epoch)
        self._ask(self.stub().Return, request, seconds, nothing, done)

    def _ask(
        self,
        call: Any,
        request: Any,
        seconds: float,
        read: Callable[[Any], Any],
        answered: Callable[[Any], None],
        failure: Callable[[Exception], CacheError] | None = None,
    ) -> None:
        """Begin a call. ``answered`` is called once, with what ``read`` makes of the answer, or the ``failure``."""
        failure = failure or self._failure
        try:
            asked = call.future(request, timeout=seconds, metadata=self._metadata())
        except (grpc.RpcError, ValueError) as error:
            raise failure(error) from error

        def done(call: grpc.Future[Any]) -> None:
            try:
                said = read(call.result())
            except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
                said = failure(error)
            answered(said)

        asked.add_done_callback(done)

    def _unavailable(self, error: Exception) -> CacheError:
        """Failure of a question for news. Its cause is not looked for: probes do that."""
        return Unavailable(f"{self.address}: {error}")

    def _beside(self) -> GrpcControl:
        with self._lock:
            self._require_open()
            self._news = self._news or self._open_news()
            return self._news

    def _loan(self, answer: peer_pb2.BorrowResponse, objects: int) -> Loan:
        """The loan that answers a question for ``objects``. Raises ValueError for one of more."""
        if not answer.lease_id:
            return Loan(epoch=answer.epoch, computing=answer.computing_blocks, is_given_up=answer.is_given_up)
        if len(answer.lent) > objects or not 0 < answer.data_port <= MOST_PORT:
            raise ValueError(
                f"it lends {len(answer.lent)} objects at port {answer.data_port}, and was asked for {objects}; see "
                "that both nodes have one release"
            )
        return Loan(
            lease=answer.lease_id,
            epoch=answer.epoch,
            secret=answer.secret,
            host=self.address.rpartition(":")[0].strip("[]"),
            port=answer.data_port,
            lent=tuple(map(bool, answer.lent)),
            streams=max(1, answer.streams),
            computing=answer.computing_blocks,
        )

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels, news = (self._channel, self._before), self._news
            self._channel = self._before = self._stub = self._news = None
        if news is not None:
            news.close()
        for channel in channels:
            if channel is not None:
                channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._tokens is None else ((AUTHORIZATION_METADATA_KEY, BEARER + self._tokens.current()[0]),)

    def stub(self) -> peer_pb2_grpc.PeerServiceStub:
        """Return the stub, by the certificates as they are now. Raises Unavailable where they cannot be read, and after
        ``close``: a late heartbeat opens no connection that nothing closes."""
        number, credentials = (0, None) if self._certificates is None else self._certificates.current()
        with self._lock:
            self._require_open()
            if self._stub is None or number != self._number:
                if self._before is not None:
                    self._before.close()
                self._before = self._channel  # calls of other threads may be under way there
                self._channel = self._open(credentials)
                self._number = number
                self._stub = peer_pb2_grpc.PeerServiceStub(self._channel)
            return self._stub

    def _require_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"{self.address}: the connection was closed")

    def _open(self, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        if credentials is None:
            return grpc.insecure_channel(self.address, options=self._options)
        return grpc.secure_channel(self.address, credentials, options=self._options)

    def _failure(self, error: Exception) -> Unavailable:
        code = error.code() if isinstance(error, grpc.Call) else None
        if self._certificates is not None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            with self._lock:
                is_due = time.monotonic() >= self._probe_at
                self._probe_at = time.monotonic() + PROBE_PAUSE_SECONDS if is_due else self._probe_at
            if is_due and (why := self._certificates.why_refused(self.address, PROBE_SECONDS, self._name)):
                return HandshakeFailed(f"{self.address}: the TLS handshake fails: {why}")
        said = error.details() if isinstance(error, grpc.Call) else str(error)
        if isinstance(error, grpc.Call) and _is_refusal(error):
            refused = PeerRefused(f"{self.address}: {said}")
            refused.is_full = code in _FULL
            return refused
        kind = PeerAbsent if code is grpc.StatusCode.UNAVAILABLE else Unavailable
        return kind(f"{self.address}: {code.name if code is not None else 'closed'}: {said}")
