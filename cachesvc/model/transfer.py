"""Transfers in pages, and the timeline words by which a waiter learns that a layer has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Direction of a transfer, seen from the device."""

    LOAD = "load"  # host -> device, or from another replica's device
    STORE = "store"  # device -> host

    __hash__ = object.__hash__  # an Enum's own is written in Python


class Inward(Enum):
    """Ways to the host that no device has a part in."""

    FETCH = "fetch"  # from storage


class Urgency(Enum):
    """Urgency of a transfer: with a waiter or without."""

    AWAITED = "awaited"  # an engine waits for it
    BACKGROUND = "background"  # write-through backups and prefetches: no waiter yet

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer has ended: every byte has arrived."""


class CopiesHang(Exception):
    """Copies of a transfer hang, and may still write to their targets. Callers learn that the transfer failed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A transfer has ended, and nothing that it was to bring can be relied on. ``reason``: never empty. ``may_write``:
    its bytes may still come, for its copies hang."""

    reason: str
    may_write: bool = False


DONE = Done()
Outcome = Done | Failed


@dataclass(frozen=True, slots=True)
class PagePairs:
    """Pages of one group: ``device_pages[i]`` and ``host_pages[i]`` hold the same block.

    Thousands of pages are arrays. In a transfer from another replica ``host_pages`` are pages of that replica's device.
    """

    group: int
    device_pages: Sequence[int]
    host_pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer job between a replica's device pools and the host pool of one model.

    ``source_replica``: a load that reads from the device pools of that replica, rank by rank, and not from the host.
    ``layered``: a load whose waiters follow layer by layer; the timeline word then moves after each layer (or few).
    ``short_suffix``: they take less time for a layer than the link does: the first comes alone, all others together.
    ``urgency``: what it is at first; the mover's ``expedite`` makes a BACKGROUND transfer an AWAITED one.
    """

    ticket: int
    model: int
    replica: int
    direction: Direction
    pages: tuple[PagePairs, ...]
    layered: bool
    urgency: Urgency = Urgency.AWAITED
    source_replica: int | None = None
    short_suffix: bool = False

    def touches(self, model: int, replica: int) -> bool:
        """True where it reads or writes pages of a replica."""
        return self.model == model and replica in (self.replica, self.source_replica)


@dataclass(frozen=True, slots=True)
class TimelineSlot:
    """Where the progress of a transfer can be read: layer l is there once ``word`` has reached ``base + l + 1``.

    Comparison is cyclic over 32 bits: reached means ``(value - target) mod 2^32 < 2^31``. ``failed_word`` holds
    ``base + layers`` of the last transfer on this slot that failed; ``word`` reaches its end even then.
    """

    word: int
    failed_word: int
    base: int
    layers: int

    @property
    def end(self) -> int:
        """Value of ``word`` once the transfer has ended, well or not."""
        return (self.base + self.layers) & 0xFFFFFFFF


def has_reached(value: int, target: int) -> bool:
    """True when a 32-bit timeline value is at or past ``target``, cyclically."""
    return (value - target) & 0xFFFFFFFF < 1 << 31
