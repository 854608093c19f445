"""Which daemon a command asks, what proves who asks, and what is said where none answers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import grpc
from cachesvc_client.wire.credentials import PATIENT_OPTIONS, Credentials, credentials_from, open_remote
from cachesvc_client.wire.settings import ChannelOptions

DEFAULT_SOCKET = "/run/cachesvc/cachesvc.sock"
MOST = 2**31 - 1
NO_WAY = "failed to connect to all addresses; last error: "


@dataclass(frozen=True)
class Target:
    """A daemon: the path of its socket or HOST:PORT, and what its caller proves itself by."""

    address: str
    credentials: Credentials

    def open(self) -> grpc.Channel:
        """A channel that proves itself with every call. Raises InvalidRequest for files that cannot be read."""
        return open_remote(self.address, self.credentials)

    def make_channel(self, socket_path: str, options: ChannelOptions = PATIENT_OPTIONS) -> grpc.Channel:
        """The same for whoever makes channels by path and options."""
        return open_remote(socket_path, self.credentials, options)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the daemon, and those by which an operator proves who calls."""
    add = parser.add_argument_group("which daemon, and who asks").add_argument
    add("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"default {DEFAULT_SOCKET}")
    add("--address", default="", metavar="HOST:PORT", help="over TCP instead of the socket")
    add("--token-file", metavar="FILE", help="file with the token (else CACHESVC_TOKEN, CACHESVC_TOKEN_FILE)")
    add("--tls-ca", default="", metavar="FILE", help="PEM roots that sign the daemon's certificate: TLS for --address")
    add("--tls-certificate", default="", metavar="FILE", help="PEM certificate of one's own")
    add("--tls-key", default="", metavar="FILE", help="its key")


def target_of(arguments: argparse.Namespace) -> Target:
    """What those flags, or the environment, say. Raises InvalidRequest for a socket that is no path."""
    found = credentials_from(None, arguments.token_file)
    proof = replace(found, root_ca=arguments.tls_ca, certificate=arguments.tls_certificate, key=arguments.tls_key)
    # A path without a slash in it would read as HOST:PORT.
    path = arguments.socket if arguments.socket.startswith(("/", ".")) else f"./{arguments.socket}"
    return Target(arguments.address or path, proof)


def count(text: str) -> int:
    """A number of lines, levels or blocks, or the number of a model, for argparse: 0 or more."""
    if not text.isdecimal() or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MOST}")
    return int(text)


def no_answer(failure: grpc.RpcError, arguments: argparse.Namespace) -> str:
    """What an operator reads where nobody answers at ``arguments``' socket or address."""
    told = getattr(failure, "details", None)  # calls have it, mere errors of gRPC do not
    reason = str(told() if told is not None else failure).removeprefix(
        "failed to connect to all addresses; last error: "
    )
    flag = "address" if getattr(arguments, "address", "") else "socket"
    if flag == "socket" and "Permission denied" in reason:
        hint = "that socket is closed to this user: be the daemon's user, or in its --socket-group"
    elif "ssl" in reason.lower() or "certificate" in reason.lower():
        hint = "see --tls-ca, --tls-certificate and --tls-key"
    else:
        hint = f"is the daemon running on that --{flag}?"
    return f"no answer from {getattr(arguments, flag, None) or 'the daemon'} ({reason}); {hint}"
