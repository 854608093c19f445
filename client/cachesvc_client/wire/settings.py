"""Settings of a caller about the daemon, time, retries and the connection: plain values, checked when made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum

from cachesvc.wire.status import LIFE_SUFFIX, MAX_MESSAGE_BYTES
from cachesvc_client.core.errors import InvalidRequest

MAX_SOCKET_PATH_BYTES = 107 - len(LIFE_SUFFIX)
"""The system takes 107 bytes, and the life socket beside it has a longer name."""
DEFAULT_SOCKET = "/run/cachesvc/cachesvc.sock"
SOCKET_VARIABLE = "CACHESVC_SOCKET"
ADDRESS_VARIABLE = "CACHESVC_ADDRESS"
TRANSPORT_VARIABLE = "CACHESVC_TRANSPORT"


class Transport(Enum):
    """Transport of the calls of CacheService. All others go by gRPC."""

    AUTO = "auto"
    """Use a lane where the daemon gives one, else gRPC."""
    GRPC = "grpc"


def default_transport(environment: Mapping[str, str] = os.environ) -> Transport:
    """Transport named by CACHESVC_TRANSPORT: auto or grpc; AUTO without one. Raises InvalidRequest."""
    said = environment.get(TRANSPORT_VARIABLE) or Transport.AUTO.value
    if said not in {each.value for each in Transport}:
        raise InvalidRequest(f"{TRANSPORT_VARIABLE} is {said!r}; it may be auto or grpc")
    return Transport(said)


def default_socket(environment: Mapping[str, str] = os.environ) -> str:
    """Path of the daemon's unix socket where none was given: CACHESVC_SOCKET, else /run/cachesvc/cachesvc.sock.

    The only way in for engines: memory and liveness go through the socket beside it, never over TCP.
    """
    return as_path(environment.get(SOCKET_VARIABLE) or DEFAULT_SOCKET)


def default_target(environment: Mapping[str, str] = os.environ) -> str:
    """Address at which operators and routers find the daemon by default: CACHESVC_ADDRESS (HOST:PORT), else
    ``default_socket``. What ``open_remote`` takes."""
    return environment.get(ADDRESS_VARIABLE) or default_socket(environment)


def as_path(socket_path: str) -> str:
    """Return the path so that it cannot be read as HOST:PORT: one without a slash at its head gets ``./``. A scheme
    ``unix:`` in front is taken off. Raises InvalidRequest for a path that no socket can have."""
    path = socket_path.removeprefix("unix://" if socket_path.startswith("unix:///") else "unix:")
    size_bytes = len(os.fsencode(path))
    if "\0" in path or not 0 < size_bytes <= MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(
            f"the path of a daemon's socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes and no NUL, not {size_bytes}: "
            f"{path[:40]!r}...; use a shorter path, or a symbolic link to its folder"
        )
    return path if path.startswith(("/", ".")) else f"./{path}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of each kind of call, in seconds. Raises InvalidRequest unless all are positive.

    ``register_s`` is long because a register may zero a whole device pool. A Match that waits for what another node
    computes has ten seconds more than ``call_s`` or ``step_s``: the daemon waits for no longer.
    """

    connect_s: float = 5.0
    register_s: float = 120.0
    attach_s: float = 10.0
    call_s: float = 5.0
    step_s: float = 5.0
    wait_s: float = 30.0
    close_s: float = 2.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise InvalidRequest(f"{each.name} must be more than 0 seconds, got {getattr(self, each.name)}")


@dataclass(frozen=True, slots=True)
class Retries:
    """Number of retries of a call whose connection broke, under the same request_id, while the daemon lives.

    ``pause_s`` doubles from one attempt to the next. A refusal that the daemon itself gave is never sent again.
    """

    attempts: int = 3
    pause_s: float = 0.05

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.pause_s < 0:
            raise InvalidRequest(f"retries need at least 1 attempt and no negative pause, got {self}")

    def pauses(self) -> Iterator[float]:
        """Pause before each further attempt of one call, seconds."""
        return (self.pause_s * 2**attempt for attempt in range(self.attempts - 1))


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """gRPC's own settings. ``connect_ms``: what one attempt to connect may take, on a busy node too; the pauses between
    attempts grow from ``first_reconnect_ms`` to ``longest_reconnect_ms``.

    ``keepalive_ms`` 0 sends no pings: the life socket tells at once when the daemon goes, deadlines when it hangs, and
    a server that does not expect pings hangs up on them.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    keepalive_ms: int = 0
    connect_ms: int = 2000
    first_reconnect_ms: int = 50
    longest_reconnect_ms: int = 1000

    def as_grpc(self) -> list[tuple[str, int]]:
        options = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),  # two clients of one process must not share a broken connection
            ("grpc.initial_reconnect_backoff_ms", self.first_reconnect_ms),
            ("grpc.min_reconnect_backoff_ms", self.connect_ms),  # an attempt's deadline, whatever its name
            ("grpc.max_reconnect_backoff_ms", self.longest_reconnect_ms),
            ("grpc.enable_retries", 0),  # retries are ours: they know the request_id and whether the daemon lives
        ]
        if self.keepalive_ms:
            options += [
                ("grpc.keepalive_time_ms", self.keepalive_ms),
                ("grpc.keepalive_timeout_ms", self.keepalive_ms),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        return options
