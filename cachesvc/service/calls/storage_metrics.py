"""Counts of the storage tiers as metrics, over all of them; zeros where there is none."""

from __future__ import annotations

from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import Outcome
from cachesvc.storage.tier.tiers import Tiers
from cachesvc.telemetry.metric_reader import Reading


def read_storage(reading: Reading, tiers: Tiers | None) -> None:
    """Costs nothing that grows with what is stored."""
    found = () if tiers is None else tiers.all
    totals = [tier.backend.totals() for tier in found]
    reading.put("storage_objects", sum(each.objects for each in totals))
    reading.put("storage_bytes", sum(each.size_bytes for each in totals))
    reading.put("storage_capacity_bytes", sum(each.capacity_bytes for each in totals))
    reading.put("storage_evicted_objects", sum(each.evicted_objects for each in totals))
    reading.put("storage_closed", int(bool(found) and all(tier.breaker.is_closed for tier in found)))
    reading.put("storage_given_up", sum(tier.breaker.opened for tier in found))
    reading.put("storage_items_under_way", sum(tier.store.out() for tier in found))
    counts = [tier.store.counts for tier in found]
    for verb in Verb:
        reading.put("storage_moved_bytes", sum(each.size_bytes[verb] for each in counts), verb.value)
        for outcome in Outcome:
            items = sum(each.items[verb, outcome] for each in counts)
            reading.put("storage_items", items, verb.value, outcome.value)
