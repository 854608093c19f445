"""Calls that give a handle: awaited, or entered at once."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Handle(Protocol):
    """Handle that ends with an ``async with``."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


H = TypeVar("H", bound=Handle)


class Opening(Coroutine[Any, Any, H], Generic[H]):
    """A handle on its way: ``sequence = await lease.match(keys)``, or ``async with lease.match(keys) as sequence``."""

    def __init__(self, made: Coroutine[Any, Any, H]) -> None:
        self._made = made
        self._handle: H | None = None

    def send(self, value: Any) -> Any:
        """Send into the wrapped coroutine."""
        return self._made.send(value)

    def throw(self, *error: Any) -> Any:
        """Throw into the wrapped coroutine."""
        return self._made.throw(*error)

    def close(self) -> None:
        """Close the wrapped coroutine."""
        self._made.close()

    def __await__(self) -> Generator[Any, Any, H]:
        return self._made.__await__()

    async def __aenter__(self) -> H:
        self._handle = await self._made
        await self._handle.__aenter__()
        return self._handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._handle is not None
        await self._handle.__aexit__(kind, error, trace)
