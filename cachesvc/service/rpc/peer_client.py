"""Another daemon's PeerService, called from threads that may block."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
from kvcache.v1 import peer_pb2, peer_pb2_grpc

from cachesvc.model.errors import Unavailable
from cachesvc.peer.control import Loan
from cachesvc.service.rpc.peer_service import PeerListening, PeerTokens
from cachesvc.storage.seam import Part, Scope
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class GrpcControl:
    """The peer at ``address``. ``files``: this node's own certificate and key, and the authority of the peer's."""

    def __init__(self, address: str, files: PeerListening, tokens: PeerTokens | None) -> None:
        self._address = address
        self._files = files
        self._tokens = tokens
        self._channel: grpc.Channel | None = None
        self._stub: peer_pb2_grpc.PeerServiceStub | None = None
        self._epochs: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._address

    def borrow(self, scope: Scope, keys: bytes, parts: Sequence[Part], seconds: float) -> Loan | None:
        """See PeerControl."""
        request = peer_pb2.BorrowRequest(namespace=scope.namespace, layout_id=scope.layout, keys=keys)
        for part in parts:
            request.parts.add(group=part.group, rank=part.rank, ranks=part.ranks)
        try:
            answer = self._connected().Borrow(request, timeout=seconds, metadata=self._metadata())
        except (grpc.RpcError, ValueError) as error:
            raise _failure(self._address, error) from error
        if not answer.lease_id:
            return None
        with self._lock:
            self._epochs[answer.lease_id] = answer.epoch
        host = self._address.rpartition(":")[0].strip("[]")
        lent = tuple(map(bool, answer.lent))
        seconds = answer.silence_limit_ms / 1000
        return Loan(answer.lease_id, answer.epoch, answer.secret, host, answer.data_port, seconds, lent)

    def beat(self, leases: Sequence[int], seconds: float) -> None:
        """See PeerControl."""
        by_epoch: dict[int, list[int]] = {}
        for lease in leases:
            by_epoch.setdefault(self._epochs.get(lease, 0), []).append(lease)
        for epoch, some in by_epoch.items():
            request = peer_pb2.BeatRequest(lease_ids=some, epoch=epoch)
            try:
                self._connected().Beat(request, timeout=seconds, metadata=self._metadata())
            except (grpc.RpcError, ValueError) as error:
                raise _failure(self._address, error) from error

    def give_back(self, lease: int, seconds: float) -> None:
        """See PeerControl."""
        with self._lock:
            epoch = self._epochs.pop(lease, 0)
        request = peer_pb2.ReturnRequest(lease_id=lease, epoch=epoch)
        try:
            self._connected().Return(request, timeout=seconds, metadata=self._metadata())
        except (grpc.RpcError, ValueError) as error:
            raise _failure(self._address, error) from error

    def close(self) -> None:
        """See PeerControl."""
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._tokens is None else ((AUTHORIZATION_METADATA_KEY, BEARER + self._tokens.current()[0]),)

    def _connected(self) -> peer_pb2_grpc.PeerServiceStub:
        """Raises Unavailable for certificates that cannot be read."""
        with self._lock:
            if self._stub is None:
                self._channel = self._open()
                self._stub = peer_pb2_grpc.PeerServiceStub(self._channel)
            return self._stub

    def _open(self) -> grpc.Channel:
        files = self._files
        if not files.authority:
            return grpc.insecure_channel(self._address, options=_OPTIONS)
        try:
            authority, key, chain = (
                Path(path).read_bytes() for path in (files.authority, files.key, files.certificate)
            )
        except OSError as error:
            raise Unavailable(f"the certificates for other nodes cannot be read: {error}") from error
        return grpc.secure_channel(self._address, grpc.ssl_channel_credentials(authority, key, chain), options=_OPTIONS)


def _failure(address: str, error: Exception) -> Unavailable:
    code = error.code() if isinstance(error, grpc.Call) else None
    said = error.details() if isinstance(error, grpc.Call) else str(error)
    return Unavailable(f"{address}: {code.name if code is not None else 'closed'}: {said}")
