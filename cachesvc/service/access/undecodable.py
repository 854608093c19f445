"""Bytes that are no message: refused by name, where gRPC would answer INTERNAL and log a traceback for each."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from google.protobuf.message import DecodeError

from cachesvc.model.errors import InvalidRequest

_UNREAD: ContextVar[str] = ContextVar("unread", default="")


def readable(handler: Any, kind: str) -> Any:
    """``handler`` with a deserializer that never raises: what it cannot read becomes an empty message and is remembered
    for ``unread``. gRPC reads requests in the task that serves them."""
    if handler is None or handler.request_deserializer is None:
        return handler
    return handler._replace(request_deserializer=_careful(handler.request_deserializer, kind))


def unread() -> InvalidRequest | None:
    """What is wrong where the request at hand could not be read."""
    kind = _UNREAD.get()
    if not kind:
        return None
    _UNREAD.set("")
    return InvalidRequest(f"the bytes are not a message of {kind}; encode it with the stubs of this release")


def require_read() -> None:
    """Raises InvalidRequest where the request at hand could not be read."""
    if (error := unread()) is not None:
        raise error


def _careful(read: Callable[[bytes], Any], kind: str) -> Callable[[bytes], Any]:
    def careful(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError:
            _UNREAD.set(kind)
            return read(b"")

    return careful
