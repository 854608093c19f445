"""Counts of the storage tiers as metrics, of each by its name."""

from __future__ import annotations

from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import Outcome
from cachesvc.storage.tier.tiers import Tiers
from cachesvc.telemetry.metric_reader import Reading


def read_storage(reading: Reading, tiers: Tiers | None) -> None:
    """Costs nothing that grows with what is stored."""
    found = () if tiers is None else tiers.all
    reading.put("storage_tiers", len(found))
    for tier in found:
        totals, counts, name = tier.backend.totals(), tier.store.counts, tier.name
        reading.put("storage_objects", totals.objects, name)
        reading.put("storage_bytes", totals.size_bytes, name)
        reading.put("storage_capacity_bytes", totals.capacity_bytes, name)
        reading.put("storage_evicted_objects", totals.evicted_objects, name)
        reading.put("storage_closed", int(tier.breaker.is_closed), name)
        reading.put("storage_writable", int(not totals.problem), name)
        reading.put("storage_given_up", tier.breaker.opened, name)
        reading.put("storage_items_under_way", tier.store.out(), name)
        for verb in Verb:
            reading.put("storage_moved_bytes", counts.size_bytes[verb], verb.value, name)
            for outcome in Outcome:
                reading.put("storage_items", counts.items[verb, outcome], verb.value, outcome.value, name)
