"""Credentials of a client: a token, or nothing but the process that the life socket knows; and TLS for TCP."""

from __future__ import annotations

import collections
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from cachesvc.model.text import unix_target
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER, PROCESS_METADATA_KEY
from cachesvc_client.core.errors import InvalidRequest, TokenFileUnreadable
from cachesvc_client.wire.life import may_show, require_private
from cachesvc_client.wire.settings import ChannelOptions, default_target

TOKEN_VARIABLE = "CACHESVC_TOKEN"  # noqa: S105 - a name, no secret
TOKEN_FILE_VARIABLE = "CACHESVC_TOKEN_FILE"  # noqa: S105
ROOTS_VARIABLE = "CACHESVC_TLS_CA"
SYSTEM_ROOTS = "system"
"""Value for the roots that this machine trusts, in place of a file."""
Metadata = tuple[tuple[str, str | bytes], ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credentials:
    """A token, or a file that holds one and may be replaced at any time. Never shown in a repr or a log.

    ``root_ca``, ``certificate``, ``key``: PEM files for TLS, for channels that ``open_remote`` makes. ``root_ca`` may
    be ``system``, and is where there is a certificate alone: the roots that this machine trusts.
    """

    token: str = ""
    token_file: str = ""
    root_ca: str = ""
    certificate: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise InvalidRequest("give a token or a token_file, not both")
        if bool(self.certificate) != bool(self.key):
            raise InvalidRequest("a client certificate and its key go together")

    def __repr__(self) -> str:
        return f"Credentials(token={'***' if self.token else ''!r}, token_file={self.token_file!r})"

    def read_token(self) -> str:
        """The token now; empty where there is none. Raises TokenFileUnreadable."""
        if not self.token_file:
            return self.token
        try:
            token = Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenFileUnreadable(f"cannot read the token file {self.token_file}: {error}") from error
        if not token:
            raise TokenFileUnreadable(f"the token file {self.token_file} is empty")
        return token

    def metadata(self, process_token: bytes = b"") -> Metadata:
        """Metadata of every call: the token, else the process's own."""
        token = self.read_token()
        if token:
            return ((AUTHORIZATION_METADATA_KEY, BEARER + token),)
        return ((PROCESS_METADATA_KEY, process_token),) if process_token else ()


def credentials_from(
    token: str | None, token_file: str | None, environment: Mapping[str, str] = os.environ
) -> Credentials:
    """Given credentials, else those of CACHESVC_TOKEN or CACHESVC_TOKEN_FILE; and the roots of CACHESVC_TLS_CA. Raises
    InvalidRequest for both at once."""
    if token is None and token_file is None:
        token, token_file = environment.get(TOKEN_VARIABLE, ""), environment.get(TOKEN_FILE_VARIABLE, "")
    return Credentials(token or "", token_file or "", root_ca=environment.get(ROOTS_VARIABLE, ""))


PATIENT_OPTIONS = ChannelOptions(connect_ms=5000, first_reconnect_ms=5000, longest_reconnect_ms=20_000)
"""An operator may look from afar, at a node that is busy."""


class Proof:
    """The metadata of one connection's calls; a token file is read again when the daemon refuses what it held.

    Safe to use from several threads, each of which says what its refused call was made with.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._process_token = b""
        self._warned_of: Metadata = ()
        self.metadata: Metadata = ()

    def start(self, process_token: bytes) -> None:
        """The connection is there. Raises InvalidRequest for a token file that cannot be read."""
        self._process_token = process_token
        self.metadata = self._credentials.metadata(process_token)

    def renew(self, failure: grpc.RpcError, used: Metadata) -> bool:
        """True when a call that was made with ``used`` was refused for its token, and the file now holds another one:
        worth another try. Raises InvalidRequest for a file that cannot be read."""
        is_refused = (
            isinstance(failure, grpc.Call | grpc.aio.AioRpcError)
            and failure.code() is grpc.StatusCode.UNAUTHENTICATED
            and bool(self._credentials.token_file)
        )
        return is_refused and self._read_anew(used)

    def renew_stream(self, failure: grpc.RpcError, used: Metadata) -> bool:
        """Call ``renew`` for a stream, whose thread has no caller to raise to: an unreadable file is no reason to open
        the stream again."""
        try:
            return self.renew(failure, used)
        except InvalidRequest as unreadable:
            log.warning("token_not_read why=%s", unreadable)
            return False

    def replace(self, used: Metadata, grace_s: float) -> bool:
        """The daemon accepts the token of ``used`` for ``grace_s`` more, because it was replaced: True when the file
        now holds another one, so that what was opened with ``used`` is opened again. Else a warning, once a token."""
        why = ""
        try:
            if self._read_anew(used):
                log.info("token_renewed")
                return True
        except InvalidRequest as unreadable:
            why = f"{unreadable}; "
        if self._warned_of != self.metadata:
            self._warned_of = self.metadata
            log.warning("token_replaced grace_s=%.0f todo=%s%s", grace_s, why, self._todo())
        return False

    def _read_anew(self, used: Metadata) -> bool:
        """True when another token than that of ``used`` is at hand. Raises InvalidRequest for a file that cannot be
        read."""
        shown = tuple(pair for pair in used if pair[0] in (AUTHORIZATION_METADATA_KEY, PROCESS_METADATA_KEY))
        if self.metadata == shown and self._credentials.token_file:
            self.metadata = self._credentials.metadata(self._process_token)
        return self.metadata != shown

    def _todo(self) -> str:
        if file := self._credentials.token_file:
            return f"write the new token to {file}, or the leases are lost"
        return "this client was given the token itself: restart it with the new one, and name a token_file"


def has_token(metadata: Metadata) -> bool:
    """True for metadata that shows a token."""
    return any(key == AUTHORIZATION_METADATA_KEY for key, _ in metadata)


class _Details(
    collections.namedtuple(
        "_Details", ("method", "timeout", "metadata", "credentials", "wait_for_ready", "compression")
    ),
    grpc.ClientCallDetails,
):
    """Call details that can be made anew."""


class _WithMetadata(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to every call of a channel that is not hot, once the reader of the socket is known."""

    def __init__(self, metadata: Metadata, address: str) -> None:
        self._metadata = metadata
        self._address = address

    def _intercept(self, continuation: Any, client_call_details: grpc.ClientCallDetails, request: Any) -> Any:
        """Call with the token. gRPC passes arguments by position: a request, or an iterator of them."""
        details = client_call_details
        shown = self._metadata if may_show(self._address) else ()
        metadata = (*(details.metadata or ()), *shown)
        known = (details.method, details.timeout, metadata, details.credentials)
        return continuation(_Details(*known, details.wait_for_ready, details.compression), request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


def open_remote(
    address: str | None = None, credentials: Credentials | None = None, options: ChannelOptions = PATIENT_OPTIONS
) -> grpc.Channel:
    """A channel for operators and routers that proves itself with every call.

    ``address``: HOST:PORT, with TLS where the credentials have a root or a certificate; or the path of the unix socket;
    left out, what CACHESVC_ADDRESS or CACHESVC_SOCKET say. ``credentials`` left out: the environment's. Raises
    InvalidRequest for files that cannot be read, and for a token that would leave this machine in plain text; calls
    raise UntrustedDaemon where another user serves the socket.
    """
    address = default_target() if address is None else address
    credentials = credentials_from(None, None) if credentials is None else credentials
    metadata = credentials.metadata()
    if address.startswith(("/", ".")):
        channel = grpc.insecure_channel(unix_target(address), options=options.as_grpc())
    elif credentials.root_ca or credentials.certificate:
        channel = grpc.secure_channel(address, _tls(credentials), options=options.as_grpc())
    else:
        if metadata:
            require_private(address)
        direct = [*options.as_grpc(), ("grpc.enable_http_proxy", 0)]  # the environment's proxy is not this machine
        channel = grpc.insecure_channel(address, options=direct)
    return grpc.intercept_channel(channel, _WithMetadata(metadata, address)) if metadata else channel


def _tls(credentials: Credentials) -> grpc.ChannelCredentials:
    """Use gRPC's roots without the machine's own: what Python would take has a file on all usual systems."""

    def read(path: str | None) -> bytes | None:
        return Path(path).read_bytes() if path else None

    named = credentials.root_ca
    roots = ssl.get_default_verify_paths().cafile if named in ("", SYSTEM_ROOTS) else named
    try:
        return grpc.ssl_channel_credentials(read(roots), read(credentials.key), read(credentials.certificate))
    except OSError as error:
        raise InvalidRequest(f"cannot read {error.filename}: {error.strerror}") from error
