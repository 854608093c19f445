"""Value of ``--storage``: an engine, where it keeps things, and how the tier uses it.

    KIND:WHERE?option=value&option=value      file:/var/cache/cachesvc?capacity=200GiB&write=through

Options of the tier are read here; all others are the engine's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import did_you_mean, parse_amount

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_SECONDS = 3650 * 86400.0
"""Longest time of an option, seconds: waits of threads and timeouts of libraries can be so long."""


class WriteWhen(Enum):
    """Host pages to write: none, those that were used again, or all."""

    NEVER = "never"
    SELECTIVE = "selective"
    THROUGH = "through"


def _policy(name: str, text: str) -> WriteWhen:
    try:
        return WriteWhen(text)
    except ValueError:
        raise InvalidRequest(f"storage: {name}={text} is not one of never, selective, through") from None


def size_option(name: str, text: str) -> int:
    """Bytes, such as 200GiB. Raises InvalidRequest."""
    try:
        return parse_amount(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"storage: {name}: {error}") from error


def seconds_option(name: str, text: str) -> float:
    """Seconds, such as 250ms, 10s, 5m, 12h or 7d. Raises InvalidRequest."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise InvalidRequest(f"storage: {name}={text} is not a time such as 250ms, 10s, 5m, 12h or 7d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > MOST_SECONDS:
        raise InvalidRequest(f"storage: {name}={text} is longer than {MOST_SECONDS / _UNITS['d']:.0f}d")
    return seconds


def count_option(name: str, text: str) -> int:
    """A whole number that is not negative. Raises InvalidRequest."""
    value = number_option(name, text)
    if value != int(value):
        raise InvalidRequest(f"storage: {name}={text} is not a whole number")
    return int(value)


def number_option(name: str, text: str) -> float:
    """A number that is not negative. Raises InvalidRequest."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise InvalidRequest(f"storage: {name}={text} is not a number of 0 or more")
    return value


def text_option(_: str, text: str) -> str:
    return text


Options = TypeVar("Options", bound="DataclassInstance")
Read = Callable[[str, str], object]
"""``(name, text)``: reads an option. Raises InvalidRequest."""


def option(read: Read, default: object) -> Any:
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True, slots=True)
class TierOptions:
    """``write``: which host pages are kept. ``write_rate``: bytes a second at most, over a second.
    ``wait``: seconds that a Match waits at most. ``deadline``: seconds after which the wait for a call ends.
    ``recompute``: tokens a second that engines prefill; where the store is slower than that it is not used; 0: use it.
    """

    write: WriteWhen = field(default=WriteWhen.SELECTIVE, metadata={"read": _policy})
    write_rate: int = option(size_option, 256 << 20)
    wait: float = option(seconds_option, 0.25)
    deadline: float = option(seconds_option, 5.0)
    recompute: float = option(number_option, 0.0)


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """``text``: as it was given. ``options``: of the engine, as texts."""

    text: str
    kind: str
    where: str
    tier: TierOptions = TierOptions()
    options: Mapping[str, str] = field(default_factory=dict)

    def check_options(self, known: Collection[str]) -> None:
        """Raises InvalidRequest for an option that neither the tier nor the engine knows."""
        for name in self.options:
            if name not in known:
                every = {*known, *(each.name for each in fields(TierOptions))}
                hint = did_you_mean(name, every, f"there are {', '.join(sorted(every))}")
                raise InvalidRequest(f"storage: unknown option {name!r} of {self.kind}; {hint}")

    def read_options(self, known: type[Options], **given: object) -> Options:
        """The engine's options, each read as ``option`` says, and those ``given``. Raises InvalidRequest, as
        ``check_options`` too."""
        readers = {each.name: each.metadata["read"] for each in fields(known) if each.metadata}
        self.check_options(readers)
        return known(**given, **{name: readers[name](name, text) for name, text in self.options.items()})


def parse_storage(text: str, kinds: tuple[str, ...]) -> StorageSpec:
    """Raises InvalidRequest that names what is wrong."""
    address, _, query = text.partition("?")
    kind, colon, where = address.partition(":")
    if not colon or kind not in kinds:
        raise InvalidRequest(f"storage: {text!r} is not KIND:WHERE?option=value with a KIND of {', '.join(kinds)}")
    options: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        name, equals, value = pair.partition("=")
        if not equals or not value or name in options:
            raise InvalidRequest(f"storage: {pair!r} is not one option=value, or is given twice")
        options[name] = value
    own = {each.name: options.pop(each.name) for each in fields(TierOptions) if each.name in options}
    tier = StorageSpec(text, kind, where, options=own).read_options(TierOptions)
    return StorageSpec(text, kind, where, tier, options)
