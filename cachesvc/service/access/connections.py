"""Limits of connections for each way in, and time limits of silent ones.

File descriptors are the daemon's own, for any peer, and gRPC ends the process where it gets none. So each
way in has a part of what the process may open, and what memory, GPUs and the daemon's own files need is kept.
"""

from __future__ import annotations

import resource
from typing import NamedTuple

from cachesvc.wire.status import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, MAX_STREAMS

MOST_FILES = 1 << 20
"""Number of files that an unlimited process counts on."""
HANDSHAKE_SECONDS = 5
IDLE_SECONDS = 300
"""A client connects again by itself when it calls again."""
TCP_CONNECTIONS, TCP_STREAMS, TCP_MESSAGE_BYTES = 64, 16, 320 << 10
"""Connections of readers from elsewhere: a few routers and operators, whose longest question asks for 4,096 blocks.
What one more connection could hold in unfinished messages is their product."""

Option = tuple[str, int]


class Ways(NamedTuple):
    """Connections of each way in, at most. A life connection takes two descriptors, with that of its process."""

    life: int
    lanes: int
    local: int
    tcp: int
    probes: int


def ways_in(files: int | None = None) -> Ways:
    """Ways into a process that may open ``files`` files; by default this one, once it has raised its limit."""
    if files is None:
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MOST_FILES if files == resource.RLIM_INFINITY else files
    part = files // 16
    return Ways(min(4096, 2 * part), 2 * part, min(4096, 4 * part), min(TCP_CONNECTIONS, part), min(1024, part))


def local_options(ways: Ways) -> list[Option]:
    """Options of the server on the unix socket."""
    return [*_options(ways.local, MAX_STREAMS), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]


def tcp_options(ways: Ways) -> list[Option]:
    """Options of the server on TCP."""
    return [*_options(ways.tcp, TCP_STREAMS), ("grpc.max_receive_message_length", TCP_MESSAGE_BYTES)]


def rude_options(connections: int) -> list[Option]:
    """Options of any listener against callers that connect and say nothing."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ("grpc.so_reuseport", 0),
    ]


def _options(connections: int, streams: int) -> list[Option]:
    return [
        *rude_options(connections),
        ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
        ("grpc.max_concurrent_streams", streams),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]
