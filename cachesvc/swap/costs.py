"""Costs of copies on a link, for the planner: measured by calibration, or these defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

SINGLE_LOST_US = 0.08
"""Link time lost with each of a call's single rows, where nothing was measured: 1D batches reach 0.87 of it at 32 KiB,
0.96 at 64 (H100, 2026-11)."""
LEAST_LOST_US = 0.02
"""Least loss where it was measured and too small to see: 0.95 at 32 KiB, 0.99 at 64 (H200, 2026-11)."""
PROCESSOR_US = 0.7
"""Processor time of one of a call's single rows: planning, and 0.4 to 0.6 in the driver (H200, 2026-11)."""
HOST_BYTES_PER_US = 54_700.0
"""Rate of a link from the host, where nothing was measured: an H100's on PCIe 5 x16 (2026-11)."""
PEER_BYTES_PER_US = 375_000.0
"""Rate of one copy between two H100s by NVLink (2026-11)."""
PEER_RATE = PEER_BYTES_PER_US / HOST_BYTES_PER_US
"""Rate of copies between devices in units of the host's."""
KEPT_FIGURES = 1 << 12
ByWidth = tuple[tuple[int, float], ...]
"""A figure for rows of each of some widths in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkCosts:
    """Costs of copies on a link; compared by identity, for choices are remembered by it. The defaults fit an H100 on
    PCIe 5 x16, measured 2026-11.

    ``per_single_us``: what the processor takes to submit a copy of one row, where a call takes thousands of these; the
    link copies meanwhile, so only what is longer than the row itself is lost (and ``SINGLE_LOST_US`` in any case).
    Infinite: it is a copy like others, as those of less than ``narrowest_single`` bytes are: the link's other end
    limits these, the more so the more memory they lie in (16 KiB took 1.1 us over 16 GiB; H200, 2026-11).
    ``singles_us``: what each was measured to take, bytes and all. ``min_efficiency``: a layered load takes the smallest
    step that is estimated to reach this part of what the best one would; ``least_efficiency``: with the smaller steps
    that lead up to it too, or all behind the first layer is one step. ``row_ns``: nanoseconds of measured rows.
    ``per_slice_us``: what the processor takes for a step beside its copies; a shorter step keeps the link waiting.
    """

    per_copy_us: float = 3.1
    per_row_ns: float = 30.0
    bytes_per_us: float = HOST_BYTES_PER_US
    per_step_us: float = 2.6
    max_pitch_bytes: int = (1 << 31) - 1
    min_efficiency: float = 0.90
    least_efficiency: float = 0.75
    per_single_us: float = math.inf
    narrowest_single: int = 32 << 10
    row_ns: ByWidth = ()
    singles_us: ByWidth = ()
    per_slice_us: float = 100.0

    def row_us(self, width: int) -> float:
        """Cost of a row beside its bytes: as was measured for the next width, or ``per_row_ns``."""
        return _next_width(self.row_ns or ((width, self.per_row_ns),), width)[1] / 1e3

    def single_us(self, width: int) -> float:
        """Cost of a copy of one row beside its bytes' own time."""
        if math.isinf(self.per_single_us) or width < self.narrowest_single:
            return self.per_copy_us + self.row_us(width)
        if not self.singles_us:
            return max(SINGLE_LOST_US, self.per_single_us - width / self.bytes_per_us)
        measured, taken_us = _next_width(self.singles_us, width)
        lost_us = taken_us - min(width, measured) / self.bytes_per_us
        return max(LEAST_LOST_US, lost_us, PROCESSOR_US - width / self.bytes_per_us)

    @property
    def processor_us(self) -> float:
        """Processor time of a copy of one row."""
        return self.per_copy_us if math.isinf(self.per_single_us) else PROCESSOR_US


class Figures(Protocol):
    """Figures of calibration, by the names of ``LinkCosts``."""

    @property
    def load_bytes_per_us(self) -> float:
        """Host -> device."""

    @property
    def per_copy_us(self) -> float:
        """See LinkCosts."""

    @property
    def per_row_ns(self) -> float:
        """See LinkCosts."""

    @property
    def per_step_us(self) -> float:
        """See LinkCosts."""

    @property
    def max_pitch_bytes(self) -> int:
        """See LinkCosts."""

    @property
    def per_single_us(self) -> float:
        """See LinkCosts."""

    @property
    def row_ns(self) -> ByWidth:
        """See LinkCosts."""

    @property
    def singles_us(self) -> ByWidth:
        """See LinkCosts."""


def costs_of(figures: Figures) -> LinkCosts:
    """Costs of plans on a link that was measured."""
    return LinkCosts(
        per_copy_us=figures.per_copy_us,
        per_row_ns=figures.per_row_ns,
        bytes_per_us=figures.load_bytes_per_us,
        per_step_us=figures.per_step_us,
        max_pitch_bytes=figures.max_pitch_bytes,
        per_single_us=figures.per_single_us,
        row_ns=figures.row_ns,
        singles_us=figures.singles_us,
    )


def costs_told(told: Mapping[str, Any]) -> LinkCosts:
    """Costs like ``costs_of``, from figures by name that went as JSON, which has lists for tuples."""
    by_width = {name: tuple((width, figure) for width, figure in told[name]) for name in ("row_ns", "singles_us")}
    return costs_of(SimpleNamespace(**{**told, **by_width}))


def peer_costs(costs: LinkCosts) -> LinkCosts:
    """Costs of plans on the links from other devices, for a device with these costs to the host: its processor takes
    the same time, and bytes take less."""
    return replace(costs, bytes_per_us=PEER_BYTES_PER_US, singles_us=())


@lru_cache(maxsize=KEPT_FIGURES)
def _next_width(figures: ByWidth, width: int) -> tuple[int, float]:
    return min(figures, key=lambda figure: abs(math.log(figure[0] / width)))


H100_COSTS = LinkCosts(per_single_us=0.65)
"""Costs with the driver's call for single rows (CUDA 12.8 and later), where nothing was measured."""
