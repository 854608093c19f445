"""Target daemon of a command, its credentials, and the message without an answer."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

import grpc
from cachesvc_client.wire.credentials import PATIENT_OPTIONS, Credentials, credentials_from, open_remote
from cachesvc_client.wire.settings import DEFAULT_SOCKET, ChannelOptions, as_path, default_target

STDIN = "-"
SILENT = ("SETTINGS frame", "Deadline Exceeded", "DEADLINE_EXCEEDED")
"""gRPC's words for a socket whose process takes connections and does not answer."""
PLAIN = {
    "No such file": "nothing listens there: no such file",
    "Connection refused": "nothing listens there: its daemon has ended",
    **dict.fromkeys(SILENT, "it takes connections and does not answer"),
}


@dataclass(frozen=True)
class Target:
    """A daemon: the path of its socket or HOST:PORT, and what its caller proves itself by."""

    address: str
    credentials: Credentials

    def open(self) -> grpc.Channel:
        """A channel that proves itself with every call. Raises InvalidRequest for files that cannot be read."""
        return open_remote(self.address, self.credentials)

    def make_channel(self, socket_path: str, options: ChannelOptions = PATIENT_OPTIONS) -> grpc.Channel:
        """Make a channel, for callers that do so by path and options."""
        return open_remote(socket_path, self.credentials, options)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the daemon, and those of the operator's credentials."""
    group = parser.add_argument_group("the daemon, and credentials")
    one = group.add_mutually_exclusive_group().add_argument
    one("--socket", metavar="PATH", help=f"its unix socket (else CACHESVC_SOCKET, else {DEFAULT_SOCKET})")
    one("--address", metavar="HOST:PORT", help="over TCP instead (else CACHESVC_ADDRESS)")
    add = group.add_argument
    add("--token-file", metavar="FILE", help="file with the token, or - (else CACHESVC_TOKEN, CACHESVC_TOKEN_FILE)")
    roots = "TLS for TCP: PEM roots that sign the daemon's certificate, or system (else CACHESVC_TLS_CA)"
    add("--tls-ca", default="", metavar="FILE", help=roots)
    add("--tls-certificate", default="", metavar="FILE", help="PEM certificate of one's own")
    add("--tls-key", default="", metavar="FILE", help="its key")


def target_of(arguments: argparse.Namespace) -> Target:
    """Target that those flags, or the environment, name. Raises InvalidRequest for files that do not go together."""
    found = credentials_from(*_said(arguments.token_file))
    roots = arguments.tls_ca or found.root_ca
    proof = replace(found, root_ca=roots, certificate=arguments.tls_certificate, key=arguments.tls_key)
    return Target(address_of(arguments), proof)


def _said(token_file: str | None) -> tuple[str | None, str | None]:
    """A token and a token file; one that comes by standard input is read here, since it can be read but once."""
    return (sys.stdin.read().strip(), None) if token_file == STDIN else (None, token_file)


def address_of(arguments: argparse.Namespace) -> str:
    """HOST:PORT or the path of a socket: as typed, else as the environment says."""
    address, path = getattr(arguments, "address", None), getattr(arguments, "socket", None)
    return str(address or (as_path(path) if path else default_target()))


def no_answer(failure: grpc.RpcError, arguments: argparse.Namespace) -> str:
    """Message for an operator where no daemon answers at ``arguments``' socket or address."""
    told = getattr(failure, "details", None)  # calls have it, mere errors of gRPC do not
    reason = str(told() if told is not None else failure).removeprefix(
        "failed to connect to all addresses; last error: "
    )
    address = address_of(arguments)
    is_tls = bool(getattr(arguments, "tls_ca", "") or getattr(arguments, "tls_certificate", ""))
    if not address.startswith(("/", ".")):
        return f"no answer from {address} ({reason}); {_address_hint(reason, is_tls)}"
    return f"no answer from {address} ({_plain(reason)}); {_socket_hint(reason)}"


def _plain(reason: str) -> str:
    """Reason that gRPC gives for a unix socket, without its codes and the path that it repeats."""
    for words, plain in PLAIN.items():
        if words in reason:
            return plain
    return reason


def _socket_hint(reason: str) -> str:
    if "Permission denied" in reason:
        return "that socket is closed to this user: be the daemon's user, or in its --socket-group"
    if any(words in reason for words in SILENT):
        return "the daemon is stopped or stuck: see the end of its log, and kill -CONT or restart it"
    return "is the daemon running on that --socket? start cachesvcd, or name its socket in CACHESVC_SOCKET"


def _address_hint(reason: str, is_tls: bool) -> str:
    said = reason.lower()
    if "ssl" in said or "tls" in said or "verification" in said:
        return "does it speak TLS, for that name, by a certificate of --tls-ca? see also --tls-certificate, --tls-key"
    if "socket closed" not in said and "reset" not in said:
        return "is the daemon running with that --listen?"
    # Something took the connection and hung up: what a TLS port does with plain text, and without a certificate.
    if is_tls:
        return "it hung up: does it ask for a client's TLS certificate (--tls-certificate, --tls-key)?"
    return "it hung up: a TLS port wants --tls-ca, and where it asks for them --tls-certificate and --tls-key"
