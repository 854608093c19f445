"""Sizes as people write them: one grammar for flags, files, quotas and the command line."""

from __future__ import annotations

import re
from fractions import Fraction

from cachesvc.model.errors import InvalidRequest

MOST_BYTES = 1 << 60
"""1 EiB: beyond any memory, and far below where a number of bytes no longer fits 64 bits."""

LEAST_AMOUNT_BYTES = 1 << 20
MOST_LIKELY_GIB = 4096
"""Numbers above it are likelier of MiB."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b?)|b)?\s*", re.IGNORECASE | re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_LONGEST = 64


def parse_size(text: object) -> int:
    """Bytes of a size, rounded down. Raises InvalidRequest.

    ``4096`` and ``4096B`` are bytes; ``2k``, ``2Ki`` (as in Kubernetes) and ``2KiB`` are 2048, ``2KB`` 2000 of them;
    likewise M, G and T. A fraction may come before a unit, and capitals do not matter.
    """
    written = str(text)
    match = _SIZE.fullmatch(written) if len(written) <= _LONGEST else None
    if match is None:
        shown = repr(text if len(written) <= _LONGEST else f"{written[:_LONGEST]}...")
        raise InvalidRequest(
            f"{shown} is not a size; write a number of bytes, or one with KiB, MiB, GiB or TiB, e.g. 8GiB"
        )
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    size = Fraction(match[1]) * base ** _POWERS.get((match[2] or "").lower(), 0)
    if size > MOST_BYTES:
        raise InvalidRequest(f"{written} is more than memory can have: at most {MOST_BYTES} bytes (1 EiB)")
    return int(size)


def parse_amount(text: object) -> int:
    """Bytes of a memory, a disk or a second, as ``parse_size``: a bare number below 1 MiB is no such amount, but one
    whose unit was left out. Raises InvalidRequest."""
    size = parse_size(text)
    if 0 < size < LEAST_AMOUNT_BYTES and str(text).strip().isdecimal():
        raise InvalidRequest(f"{size} is {size} bytes; did you mean {size}{_probable_unit(size)}? Bytes are {size}B")
    return size


def describe_bytes(count: float) -> str:
    """A number of bytes with a binary unit, four digits at most before the point: ``12 B``, ``3.42 GiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:,.2f} TiB"


def _probable_unit(number: int) -> str:
    return "GiB" if number < MOST_LIKELY_GIB else "MiB"
