"""Refusal of arguments of a wrong type or out of range, by their names.

A message or an array that is built from a wrong argument fails with a TypeError or ValueError of its library, which
names neither the argument nor the remedy. ``explains_arguments`` compares the arguments with the annotations once that
has happened: a call with right arguments pays for no check. ``checks_arguments`` compares them before the call.
"""

from __future__ import annotations

import inspect
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}
WORDS: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "a number"),
    str: ("text", "texts"),
    NoneType: ("None", "None"),
}


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
            text = repr(value)
            shown = text if len(text) <= SHOWN_LETTERS else text[:SHOWN_LETTERS] + "..."
            kind = type(value).__name__
            raise InvalidRequest(f"{_name(call)}: {name} is {shown} ({kind}); it takes {_described(hint)}") from None
        takes = (hint, *get_args(hint))
        counts = [value] if int in takes and isinstance(value, Integral) else value if Sequence[int] in takes else None
        for number in map(int, cast("Sequence[int]", counts or ())) if _fits(counts, Sequence[int]) else ():
            if not 0 <= number <= (2**64 - 1 if name.endswith(("id", "launch")) else MOST):
                raise InvalidRequest(f"{_name(call)}: {name} is {number}; it counts from 0 to {MOST}") from None


@cache
def _annotations(call: Callable[..., object]) -> tuple[inspect.Signature, Mapping[str, Any]]:
    return inspect.signature(call), get_type_hints(call)


def _fits(value: Any, hint: Any) -> bool:
    """False where ``value`` is surely not what an annotation names; True for what is not known here."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if isinstance(kind, TypeVar):  # of a handle: it has what the bound has
        return all(hasattr(value, name) for name in vars(kind.__bound__ or object) if not name.startswith("_"))
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Sequence:
        is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray)
        return is_list and all(_fits(each, inner[0]) for each in value)
    if kind is Mapping:
        is_mapping = isinstance(value, Mapping)
        return is_mapping and all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items())
    if kind is memoryview:  # anything with contiguous bytes
        with suppress(TypeError):
            return memoryview(value) is not None
        return False
    if kind is str:
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    kind = NUMBERS.get(kind, kind)
    return not inspect.isclass(kind) or getattr(kind, "_is_protocol", False) or isinstance(value, kind)


def _described(hint: Any, number: int = 0) -> str:
    """Words for what an argument takes; ``number`` 1: in the plural."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(_described(each) for each in inner)
    if kind is Sequence:
        return f"a list of {_described(inner[0], 1)}"
    if kind is Mapping:
        return f"a mapping of {_described(inner[0], 1)} to {_described(inner[1], 1)}"
    return WORDS[kind][number] if kind in WORDS else str(getattr(kind, "__name__", kind))


def _name(call: Callable[..., object]) -> str:
    """Name by which callers know a call: that of the class for its constructor."""
    *_, owner, name = f".{call.__qualname__}".split(".")
    return owner if name == "__init__" else name.lstrip("_")


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
