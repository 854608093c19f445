"""Checks of a request's bytes, before it is a message: its size is charged, and bytes that are no
message, or one beyond all limits, are refused by name. gRPC would answer INTERNAL and log a traceback for each."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from cachesvc.model.errors import CacheError
from cachesvc.wire.parse import parse

_UNREAD: ContextVar[CacheError | None] = ContextVar("unread", default=None)


def readable(handler: Any, charge: Callable[[int], None]) -> Any:
    """``handler`` with a deserializer that never raises: what it does not read becomes an empty message and is
    remembered for ``unread``. gRPC reads requests in the task that serves them. Answers that are bytes already are sent
    as they are.

    ``charge(bytes)``: to the caller of the running task. Raises QuotaExceeded.
    """
    if handler is None or handler.request_deserializer is None:
        return handler
    careful, serializer = _careful(handler.request_deserializer, charge), handler.response_serializer

    def sent(answer: Any) -> bytes:
        packed: bytes = answer if isinstance(answer, bytes) else serializer(answer)
        return packed

    return handler._replace(request_deserializer=careful, response_serializer=sent)


def unread() -> CacheError | None:
    """Error of the request at hand where it could not be read."""
    error = _UNREAD.get()
    if error is not None:
        _UNREAD.set(None)
    return error


def require_read() -> None:
    """Raises InvalidRequest, LimitExceeded or QuotaExceeded where the request at hand could not be read."""
    if (error := unread()) is not None:
        raise error


def _careful(from_string: Any, charge: Callable[[int], None]) -> Callable[[bytes], Any]:
    kind = from_string.__self__

    def careful(raw: bytes) -> Any:
        try:
            charge(len(raw))
            return parse(kind, raw)
        except CacheError as error:
            _UNREAD.set(error.with_traceback(None))  # whose frames would keep the bytes
            return kind()

    return careful
