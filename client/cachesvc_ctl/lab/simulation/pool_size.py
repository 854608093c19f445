"""Sizes of pools as people write them for a trace: blocks, a share of all that it has, or bytes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from enum import Enum

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text.sizes import parse_size

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(%?)", re.ASCII)


class Unit(Enum):
    """Units of a size."""

    BLOCKS = "blocks"
    PERCENT = "percent"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A size that is not known in blocks before the trace is."""

    number: float
    unit: Unit

    def blocks(self, distinct: int, block_bytes: int) -> int:
        """Size in blocks, rounded down, where a trace has ``distinct`` of them; but at least 1 for a share."""
        if self.unit is Unit.BYTES:
            return int(self.number) // block_bytes
        if self.unit is Unit.PERCENT and self.number:
            return max(1, int(distinct * self.number / 100))
        return int(self.number)


def pool_size(text: str) -> PoolSize:
    """Parse one size, for argparse."""
    match = _NUMBER.fullmatch(text)
    if match is not None:
        return PoolSize(float(match[1]), Unit.PERCENT if match[2] else Unit.BLOCKS)
    try:
        return PoolSize(parse_size(text), Unit.BYTES)
    except InvalidRequest:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of blocks, such as 5000, a share, such as 10%, or a size, such as 64GiB"
        ) from None


def pool_sizes(text: str) -> tuple[PoolSize, ...]:
    """Sizes with commas between, for argparse."""
    return tuple(dict.fromkeys(map(pool_size, text.split(","))))
