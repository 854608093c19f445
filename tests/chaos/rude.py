"""Callers that do not keep to any manners, spoken in bare HTTP/2 where a gRPC library would keep to some."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, payload: bytes, said_bytes: int | None = None) -> bytes:
    """A frame, which may claim to be longer than it is."""
    size = len(payload) if said_bytes is None else said_bytes
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """A literal of HPACK that enters no table."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def half_message(path: str, method: bytes, said_bytes: int, sent: bytes) -> socket.socket:
    """A call whose message is promised at ``said_bytes`` and ends in the middle; keep the socket to keep it waiting."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    headers = b"".join(
        header(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    message = b"\x00" + struct.pack(">I", said_bytes) + sent
    connection.sendall(
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + frame(HEADERS, END_HEADERS, 1, headers)
        + frame(DATA, 0, 1, message[:-1], said_bytes=len(message))
    )
    return connection


def idle(path: str, kind: socket.SocketKind) -> socket.socket:
    """A connection on which nothing is ever said."""
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.connect(path)
    return connection
