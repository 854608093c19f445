"""Metrics of the cache beside SGLang's own: SGLang's counters of load backs, and what it has no counter for.

Hits by tier are SGLang's ``cached_tokens_total``. Evictions are the daemon's, over all engines, and its metrics.
"""

from __future__ import annotations

from typing import Any

POOL = "kv"
"""SGLang's name of the pool."""


class CacheMetrics:
    """``collector``: SGLang's of radix caches, whose labels these have. ``block_tokens`` and ``block_bytes``: of a
    block in the KV pool. Used from SGLang's scheduler thread."""

    def __init__(self, collector: Any, block_tokens: int, block_bytes: int) -> None:
        from prometheus_client import Counter, Gauge  # once SGLang has chosen the folder of its processes' values

        self._collector = collector
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        names = list(collector.labels)
        self._loads = Counter(
            "sglang:cachesvc_loads_total", "Loads from the host pool that ended.", labelnames=[*names, "outcome"]
        )
        self._waits = Counter(
            "sglang:cachesvc_waits_total",
            "Answers of the daemon that SGLang's scheduler waited for.",
            labelnames=names,
        )
        self._shares = Gauge(
            "sglang:cachesvc_shares",
            "1 while the engine shares its cache with others.",
            labelnames=names,
            multiprocess_mode="mostrecent",
        )

    def end_load(self, blocks: int, seconds: float, *, has_come: bool) -> None:
        """Count a load of this number of blocks, from its begin until the engine saw its end."""
        labels = self._collector.labels
        self._loads.labels(**labels, outcome="came" if has_come else "failed").inc()
        if has_come:
            self._collector.increment_load_back_num_tokens(blocks * self._block_tokens, POOL)
            self._collector.increment_load_back_num_bytes(blocks * self._block_bytes)
            self._collector.observe_load_back_duration(seconds)

    def end_step(self, waits: int, *, is_shared: bool) -> None:
        """Count waits since the last step."""
        labels = self._collector.labels
        self._waits.labels(**labels).inc(waits)
        self._shares.labels(**labels).set(int(is_shared))
