"""Certificates of listeners, and of calls to other nodes, read again when their files change: new connections get the
new ones."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc

from cachesvc.model.errors import Unavailable
from cachesvc.telemetry import events

Signature = tuple[tuple[int, int, int], ...]
"""By which files that have changed are known."""
HTTP2 = "h2"
NOT_THERE = "this node's certificate is not accepted there"


class Certificates:
    """A certificate chain with its key, and the authority of clients' certificates (``client_ca`` empty: none are asked
    for).

    gRPC asks at every handshake, from threads of its own. Files that do not fit each other, as in the middle of being
    replaced, change nothing: the last good ones go on.
    """

    def __init__(self, certificate: str, key: str, client_ca: str = "") -> None:
        self._paths = [Path(path) for path in (certificate, key, client_ca) if path]
        self._asks_clients = bool(client_ca)
        self._lock = threading.Lock()
        self._seen: Signature = ()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of the listener. Raises Unavailable for files that cannot be used."""
        try:
            self._seen = _signature(self._paths)
            first = self._read()
        except OSError as error:  # SSLError among them
            raise Unavailable(f"the certificate cannot be used: {error}; see --tls-certificate, --tls-key") from error
        fetch: Any = self._fetch  # its stubs do not know that None means no change
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=self._asks_clients)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before a handshake; None: go on with what there is."""
        with self._lock:
            try:
                seen = _signature(self._paths)
                if seen == self._seen:
                    return None
                configuration = self._read()
                self._seen = seen
            except OSError as error:
                events.warning("certificate_not_read", reason=str(error))
                return None
        events.event("certificate_read", certificate=str(self._paths[0]))
        return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError (SSLError) unless the key belongs to the certificate and the roots are certificates."""
        chain, key, *roots = _read(self._paths, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots[0] if roots else None)


def add_port(server: grpc.aio.Server, address: str, certificate: str, key: str, authority: str) -> int:
    """Have a server listen on ``address``, by TLS where there is a ``key``; returns the port. Raises Unavailable for
    files that cannot be used, RuntimeError and OSError for an address that cannot be had."""
    if not key:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, Certificates(certificate, key, authority).credentials()))


class NodeCertificates:
    """Certificate that this node shows to other nodes that it calls, and ``authority``, which signs theirs.
    Thread-safe.

    Files that do not fit each other change nothing but the log, once a change: the last good ones go on.
    """

    def __init__(self, certificate: str, key: str, authority: str) -> None:
        self._paths = [Path(path) for path in (certificate, key, authority)]
        self._lock = threading.Lock()
        self._looked: Signature = ()
        self._number = 0
        self._credentials: grpc.ChannelCredentials | None = None

    def current(self) -> tuple[int, grpc.ChannelCredentials]:
        """Credentials by the files as they are now, and a number that rises with each change. Raises Unavailable where
        they never could be used."""
        with self._lock:
            try:
                seen = _signature(self._paths)
                if seen != self._looked:
                    self._looked = seen
                    chain, key, authority = _read(self._paths, self._client_context())
                    self._credentials = grpc.ssl_channel_credentials(authority, key, chain)
                    self._number += 1
                    if self._number > 1:
                        events.event("certificate_read", certificate=str(self._paths[0]))
            except OSError as error:
                if self._credentials is None:
                    self._looked = ()
                    raise Unavailable(f"the certificates for other nodes cannot be read: {error}") from error
                if self._looked:
                    events.warning("certificate_not_read", reason=str(error))
                    self._looked = () if isinstance(error, FileNotFoundError) else self._looked
            assert self._credentials is not None
            return self._number, self._credentials

    def why_refused(self, address: str, seconds: float, name: str = "") -> str:
        """Error of a new TLS connection to ``address``, whose certificate is for ``name`` where that is another. Empty
        where the certificates are not its cause: no answer, or success."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            with socket.create_connection((host, int(port)), timeout=seconds) as plain:
                context = self._client_context()
                context.set_alpn_protocols([HTTP2])
                _read(self._paths, context)
                with context.wrap_socket(plain, server_hostname=name or host) as stream:
                    return _hear(stream)
        except ssl.SSLError as error:
            return _describe(error)
        except OSError:
            return ""

    @staticmethod
    def _client_context() -> ssl.SSLContext:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _describe(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted here ({error.verify_message})"
    reason = error.reason or str(error)
    return f"{NOT_THERE} ({reason})" if "ALERT" in reason else reason


def _hear(stream: ssl.SSLSocket) -> str:
    """A listener that refuses our certificate ends the connection after the handshake, before its first word."""
    try:
        return "" if stream.recv(1) else NOT_THERE
    except TimeoutError:
        return ""
    except ConnectionError:
        return NOT_THERE


def _signature(paths: list[Path]) -> Signature:
    return tuple((status.st_mtime_ns, status.st_ino, status.st_size) for status in map(Path.stat, paths))


def _read(paths: list[Path], check: ssl.SSLContext) -> list[bytes]:
    """A certificate chain, its key, and roots where they are named. Raises OSError (SSLError) unless the key belongs to
    the certificate and the roots are certificates; ``check`` has them then."""
    check.load_cert_chain(paths[0], paths[1])
    for roots in paths[2:]:
        check.load_verify_locations(roots)
    return [path.read_bytes() for path in paths]
