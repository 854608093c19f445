"""PeerService: Borrow, Beat, Return, on a listener of its own for other nodes alone."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from kvcache.v1 import peer_pb2, peer_pb2_grpc

from cachesvc.model.errors import CacheError, InvalidRequest, Unauthenticated, Unavailable
from cachesvc.peer.lender import Lender
from cachesvc.peer.wire import STREAMS
from cachesvc.service.access.admission import rude_options
from cachesvc.service.access.auth import credentials_of, refusing
from cachesvc.service.calls.digests import MOST_READERS, DigestFeed
from cachesvc.service.calls.lending import MOST_PATIENT, LendingDesk
from cachesvc.service.host.tls import add_port
from cachesvc.service.rpc.edge import Context, refuse
from cachesvc.storage.seam import LAYOUT_ID_BYTES, Part, Scope
from cachesvc.telemetry import events
from cachesvc.wire.parse import check_fields

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
    """Each call in some turns of the loop."""

    def __init__(self, desk: LendingDesk, lender: Lender, digests: DigestFeed) -> None:
        self._desk = desk
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
            return peer_pb2.BorrowResponse(epoch=self._desk.epoch, computing_blocks=computing, is_given_up=is_given_up)
        return peer_pb2.BorrowResponse(
            lease_id=lent.lease,
            epoch=self._desk.epoch,
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
        is_ours, desk = request.epoch == self._desk.epoch, self._desk.desk
        lost = [each for each in request.lease_ids if not is_ours or not desk.beat(each)]
        return peer_pb2.BeatResponse(lost_lease_ids=lost)

    async def Return(self, request: peer_pb2.ReturnRequest, context: Context) -> peer_pb2.ReturnResponse:
        del context
        if request.epoch == self._desk.epoch:
            self._desk.give_back(request.lease_id)
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
