"""Counts of transfers for operators: bytes, waits and times by direction; and how old is what waits now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from cachesvc.model.numbers.histogram import Histogram
from cachesvc.model.transfer import Direction, Transfer, Urgency

DIRECTIONS = ("h2d", "d2h", "p2p")


def direction_of(transfer: Transfer) -> str:
    """Direction of a transfer, one of DIRECTIONS."""
    if transfer.source_replica is not None:
        return "p2p"
    return "h2d" if transfer.direction is Direction.LOAD else "d2h"


class TransferTimes(NamedTuple):
    """Monotonic seconds: queued, its first slice started (None: it never was), ended."""

    submitted: float
    began: float | None
    ended: float


class TransferTrace(Protocol):
    """A transfer with a trace."""

    def ended(self, times: TransferTimes, error: Exception | None) -> None:
        """The transfer has ended; called once, from any thread."""


class TransferTracer(Protocol):
    """Traces transfers that traced calls begin."""

    def begin(self, transfer: Transfer, size_bytes: int) -> TransferTrace | None:
        """Begin a trace where the transfer is submitted; None: the running call has no trace."""


class Waiting(NamedTuple):
    """Transfers of one direction and urgency that have not ended. ``oldest_seconds``: of those not begun."""

    queued: int
    copying: int
    oldest_seconds: float


class TransferCounts:
    """Histograms of ended transfers. One thread at a time calls ``ended``; others may read."""

    def __init__(self) -> None:
        self.seconds = {direction: Histogram() for direction in DIRECTIONS}
        self.queued = {(direction, urgency): Histogram() for direction in DIRECTIONS for urgency in Urgency}
        self.failures = dict.fromkeys(DIRECTIONS, 0)
        self.device_bytes: dict[tuple[str, str], int] = {}

    def ended(
        self,
        transfer: Transfer,
        urgency: Urgency,
        times: TransferTimes,
        by_device: Iterable[tuple[str, int]],
        *,
        well: bool,
    ) -> None:
        """Count one transfer; ``by_device``: bytes that each device copied."""
        direction = direction_of(transfer)
        if not well:
            self.failures[direction] += 1
            return
        self.seconds[direction].observe(times.ended - times.submitted)
        began = times.ended if times.began is None else times.began
        self.queued[direction, urgency].observe(began - times.submitted)
        for device, size_bytes in by_device:
            key = (direction, device)
            self.device_bytes[key] = self.device_bytes.get(key, 0) + size_bytes
