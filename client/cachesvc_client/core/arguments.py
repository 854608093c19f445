"""Refusal of arguments of a wrong type or out of range, by their names.

A message or an array that is built from a wrong argument fails with a TypeError or ValueError of its library, which
names neither the argument nor the remedy. ``explains_arguments`` compares the arguments with the annotations once that
has happened: a call with right arguments pays for no check. ``checks_arguments`` compares them before the call.
"""

from __future__ import annotations

import inspect
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from kvcache.v1 import cache_pb2

from cachesvc_client.core.errors import InvalidRequest

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY_ERRORS = (TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""Errors of protobuf, NumPy and Python for a wrong argument. No error of the client is among them."""
MOST = 2**32 - 1
"""Largest count that a message takes; ids may be larger."""
SHOWN_LETTERS = 60


def explains_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """Raise InvalidRequest instead of a library's error where an argument caused it."""

    @wraps(call)
    def called(*args: P.args, **named: P.kwargs) -> R:
        try:
            return call(*args, **named)
        except LIBRARY_ERRORS:
            _refuse(call, args, named)
            raise

    return called


def checks_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """Raise InvalidRequest before the call where an argument is of another type than annotated: for calls that are
    rare, or keep what they are given."""

    @wraps(call)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        _refuse(call, args, named)
        return call(*args, **named)

    return checked


def one_each(value: int | Sequence[int], count: int) -> list[int]:
    """A number for each of ``count``, from one for all or a list of them."""
    return [value] * count if isinstance(value, (int, np.integer)) else list(value)


def warn_renamed(earlier: str, name: str) -> None:
    """Warn the caller's caller that a name works for one release more."""
    warnings.warn(f"{earlier} is called {name} now", DeprecationWarning, stacklevel=3)


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Take arguments by their earlier names too (``earlier="name"``), with a DeprecationWarning."""

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @wraps(call)
        def translated(*args: P.args, **named: P.kwargs) -> R:
            for earlier in names.keys() & named.keys():
                name = names[earlier]
                warn_renamed(f"{_name(call)}: {earlier}", name)
                named[name] = named.pop(earlier)
            return call(*args, **named)

        return translated

    return decorate


def _refuse(call: Callable[..., object], args: tuple[object, ...], named: Mapping[str, object]) -> None:
    """Raises InvalidRequest for the first argument that is wrong; returns where none is, or the call's form is."""
    signature, hints = _annotations(call)
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError:  # a missing or an unknown argument: Python's error names it
        return
    for name, value in given.items():
        hint = hints.get(name)
        if hint is None or name == "self":
            continue
        if not _fits(value, hint):
            raise InvalidRequest(f"{_name(call)}: {name} is {_shown(value)}; it takes {_described(hint)}") from None
        for number in _numbers(value, hint):
            if not 0 <= number <= (2**64 - 1 if name.endswith(("id", "launch")) else MOST):
                raise InvalidRequest(f"{_name(call)}: {name} is {number}; it counts from 0 to {MOST}") from None


@cache
def _annotations(call: Callable[..., object]) -> tuple[inspect.Signature, Mapping[str, Any]]:
    return inspect.signature(call), get_type_hints(call)


def _fits(value: object, hint: Any) -> bool:
    """False where ``value`` is surely not what an annotation names; True for what is not known here."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return all(hasattr(value, name) for name in vars(hint.__bound__ or object) if not name.startswith("_"))
    if origin in (Union, UnionType):
        return (memoryview in inner and _has_bytes(value)) or any(_fits(value, each) for each in inner)
    if hint is None or hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, Real)
    if hint is int:
        return isinstance(value, Integral)
    if hint is str:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    if origin is Sequence:
        return _is_list(value) and all(_fits(each, inner[0]) for each in cast("Sequence[object]", value))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items()
        )
    kind = hint if origin is None else origin
    if inspect.isclass(kind) and not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    return True


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray)


def _has_bytes(value: object) -> bool:
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _numbers(value: object, hint: Any) -> Iterator[int]:
    """Whole numbers of an argument that is a count or a list of counts."""
    wanted = [hint, *get_args(hint)]
    if int in wanted and isinstance(value, Integral):
        yield int(value)
    elif Sequence[int] in wanted and _is_list(value):
        yield from (int(each) for each in cast("Sequence[int]", value))


def _described(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_described(each) for each in inner)
    if origin is Sequence:
        return f"a list of {_plural(inner[0])}"
    if origin is Mapping:
        return f"a mapping of {_plural(inner[0])} to {_plural(inner[1])}"
    return {int: "a whole number", float: "a number", str: "text", NoneType: "None"}.get(hint) or _plain(hint)


def _plural(hint: Any) -> str:
    return {int: "whole numbers", str: "texts"}.get(hint) or _described(hint)


def _name(call: Callable[..., object]) -> str:
    """Name by which callers know a call: that of the class for its constructor."""
    *_, owner, name = f".{call.__qualname__}".split(".")
    return owner if name == "__init__" else name.lstrip("_")


def _plain(hint: Any) -> str:
    return str(getattr(get_origin(hint) or hint, "__name__", hint))


def _shown(value: object) -> str:
    text = repr(value)
    short = text if len(text) <= SHOWN_LETTERS else text[:SHOWN_LETTERS] + "..."
    return f"{short} ({type(value).__name__})"


class Retention(Enum):
    """Expectation of an engine for the blocks that a request uses and computes. A hint moves blocks within the order of
    their own model; a false one costs only the model's own hits.

    ``ONCE``: they will not be asked for again (evaluation, batch jobs). They go before all others, and are not
    copied to the host when they are sealed. ``KEEP``: they will come back (a conversation's next turn, a tool's
    answer). They stay for one more turn of the pool.
    """

    DEFAULT = "default"
    ONCE = "once"
    KEEP = "keep"

    @property
    def number(self) -> cache_pb2.Retention.ValueType:
        return _NUMBERS[self]


_NUMBERS = {
    Retention.DEFAULT: cache_pb2.RETENTION_UNSPECIFIED,
    Retention.ONCE: cache_pb2.RETENTION_ONCE,
    Retention.KEEP: cache_pb2.RETENTION_KEEP,
}
