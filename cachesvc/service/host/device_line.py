"""A device as operators see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Link(Protocol):
    """Measured figures of a device's link."""

    @property
    def load_bytes_per_us(self) -> float:
        """Host -> device."""

    @property
    def store_bytes_per_us(self) -> float:
        """Device -> host."""

    @property
    def both_bytes_per_us(self) -> float:
        """Rate of both directions at once, summed."""

    @property
    def per_copy_us(self) -> float:
        """Cost of a copy beside its rows and bytes."""

    @property
    def per_row_ns(self) -> float:
        """Cost of a row beside its bytes."""

    @property
    def per_step_us(self) -> float:
        """Cost of a step beside its copies."""

    @property
    def narrow_plane_bytes(self) -> int:
        """Planes narrower than this load at less than half of the link's speed."""


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device as operators see it. ``link`` is None where it was not measured."""

    uuid: str
    name: str
    pool_bytes: int
    context_bytes: int
    link: Link | None

    def logged(self) -> dict[str, object]:
        """Fields for the log, whose events have a name of their own."""
        known = self.shown()
        return {"device": known.pop("uuid"), "device_name": known.pop("name")} | known

    def shown(self) -> dict[str, object]:
        """Fields by the names of DeviceStatus."""
        known: dict[str, object] = {
            "uuid": self.uuid,
            "name": self.name,
            "pool_bytes": self.pool_bytes,
            "context_bytes": self.context_bytes,
        }
        if self.link is None:
            return known
        return known | {
            "load_gb_per_second": round(self.link.load_bytes_per_us / 1e3, 2),
            "store_gb_per_second": round(self.link.store_bytes_per_us / 1e3, 2),
            "both_gb_per_second": round(self.link.both_bytes_per_us / 1e3, 2),
            "copy_us": round(self.link.per_copy_us, 2),
            "row_ns": round(self.link.per_row_ns, 1),
            "step_us": round(self.link.per_step_us, 2),
            "narrow_plane_bytes": self.link.narrow_plane_bytes,
        }
