"""Certificates of the TCP listener, read again when their files change: new connections get the new ones."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path
from typing import Any

import grpc

from cachesvc.model.errors import Unavailable
from cachesvc.telemetry import events


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
        self._seen: list[tuple[int, int, int]] = []

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of the listener. Raises Unavailable for files that cannot be used."""
        try:
            self._seen = self._signature()
            first = self._read()
        except OSError as error:  # SSLError among them
            raise Unavailable(f"the certificate cannot be used: {error}; see --tls-certificate, --tls-key") from error
        fetch: Any = self._fetch  # its stubs do not know that None means no change
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=self._asks_clients)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before a handshake; None: go on with what there is."""
        with self._lock:
            try:
                seen = self._signature()
                if seen == self._seen:
                    return None
                configuration = self._read()
                self._seen = seen
            except OSError as error:
                events.warning("certificate_not_read", reason=str(error))
                return None
        events.event("certificate_read", certificate=str(self._paths[0]))
        return configuration

    def _signature(self) -> list[tuple[int, int, int]]:
        return [(status.st_mtime_ns, status.st_ino, status.st_size) for status in map(Path.stat, self._paths)]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError (SSLError) unless the key belongs to the certificate and the roots are certificates."""
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        check.load_cert_chain(self._paths[0], self._paths[1])
        if self._asks_clients:
            check.load_verify_locations(self._paths[2])
        chain, key, *roots = [path.read_bytes() for path in self._paths]
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots[0] if roots else None)
