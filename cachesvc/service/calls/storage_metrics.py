"""Counts of the storage tier as metrics; zeros where there is none."""

from __future__ import annotations

from cachesvc.storage.objects import Way
from cachesvc.storage.seam import Outcome
from cachesvc.storage.tier import Tier
from cachesvc.telemetry.metric_reader import Reading


def read_storage(reading: Reading, tier: Tier | None) -> None:
    """Costs nothing that grows with what is stored."""
    totals = None if tier is None else tier.backend.totals()
    reading.put("storage_objects", totals.objects if totals else 0)
    reading.put("storage_bytes", totals.size_bytes if totals else 0)
    reading.put("storage_capacity_bytes", totals.capacity_bytes if totals else 0)
    reading.put("storage_evicted_objects", totals.evicted_objects if totals else 0)
    reading.put("storage_closed", int(tier is not None and tier.breaker.is_closed))
    reading.put("storage_given_up", tier.breaker.opened if tier else 0)
    reading.put("storage_items_under_way", tier.store.out() if tier else 0)
    for way in Way:
        reading.put("storage_moved_bytes", tier.store.counts.size_bytes[way] if tier else 0, way.value)
        for outcome in Outcome:
            items = tier.store.counts.items[way, outcome] if tier else 0
            reading.put("storage_items", items, way.value, outcome.value)
