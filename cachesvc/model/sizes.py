"""Sizes as people write them."""

from __future__ import annotations

import math
import re

from cachesvc.model.errors import InvalidRequest

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}
_UNITS |= {"t": 1 << 40, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(text: str | int) -> int:
    """Bytes of ``8GiB``, ``512MiB``, ``1e9`` is not one. Raises InvalidRequest."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidRequest(f"{text!r} is no size; write a number with B, KiB, MiB, GiB or TiB, e.g. 8GiB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size == math.inf:
        raise InvalidRequest(f"{str(text)[:32]}... is no size that memory can have")
    return int(size)
