"""Results of a replay: the numbers, and their two written forms, an aligned table and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from cachesvc_ctl.core.text import describe_bytes
from cachesvc_ctl.lab.replay.histogram import LatencyHistogram

CONSERVED = "ok"


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of one second of the replay: block accesses by result, and bytes moved."""

    t_seconds: int
    device_hits: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    computed: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0

    def plus(self, other: Sample) -> Sample:
        """Sum of this sample and another one, at this one's second."""
        return Sample(
            self.t_seconds,
            self.device_hits + other.device_hits,
            self.host_hits + other.host_hits,
            self.storage_hits + other.storage_hits,
            self.computed + other.computed,
            self.h2d_bytes + other.h2d_bytes,
            self.d2h_bytes + other.d2h_bytes,
        )

    @property
    def accesses(self) -> int:
        return self.device_hits + self.host_hits + self.storage_hits + self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """One replay. `conservation` is "ok" or says what broke; `settings` is what else identifies the run.

    `pool_blocks` and `host_blocks` are pool sizes. Hits and `computed` count blocks, `verified_pages` and
    `corrupt_pages` pages whose bytes were compared, `kills` engines that were killed on purpose. Raises
    ValueError for a number that is negative or not finite.
    """

    trace: str
    engines: int
    pool_blocks: int
    host_blocks: int = 0
    policy: str
    block_bytes: int
    requests: int
    blocks: int
    device_hits: int
    host_hits: int = 0
    storage_hits: int = 0
    computed: int
    evictions: int
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    seconds: float
    verified_pages: int = 0
    corrupt_pages: int = 0
    kills: int = 0
    conservation: str = CONSERVED
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    rpc: Mapping[str, LatencyHistogram] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{item.name} must be finite and not negative, but is {value}")

    @property
    def hits(self) -> int:
        return self.device_hits + self.host_hits + self.storage_hits

    @property
    def hit_ratio(self) -> float:
        """Hits of any tier over block accesses; 0 where nothing was accessed."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def lost_blocks(self) -> int:
        """Accesses that ended neither as a hit nor computed: of requests that a kill cut off."""
        return self.blocks - self.hits - self.computed

    @property
    def is_sound(self) -> bool:
        """True where nothing was lost from the pools, and no page held other bytes than it should."""
        return self.conservation == CONSERVED and self.corrupt_pages == 0


def merge_samples(*series: Iterable[Sample]) -> tuple[Sample, ...]:
    """The series of several processes as one, ascending, with equal seconds added up."""
    merged: dict[int, Sample] = {}
    for samples in series:
        for sample in samples:
            known = merged.get(sample.t_seconds)
            merged[sample.t_seconds] = sample if known is None else known.plus(sample)
    return tuple(merged[t_seconds] for t_seconds in sorted(merged))


def report_json(report: ReplayReport) -> str:
    """The report as one JSON object; its keys are stable, for programs that compare runs. Samples are columns."""
    names = [item.name for item in fields(Sample)]
    document = {
        "trace": report.trace,
        "engines": report.engines,
        "pool_blocks": report.pool_blocks,
        "host_blocks": report.host_blocks,
        "policy": report.policy,
        "block_bytes": report.block_bytes,
        "settings": dict(report.settings),
        "requests": report.requests,
        "blocks": report.blocks,
        "hits": {"device": report.device_hits, "host": report.host_hits, "storage": report.storage_hits},
        "hit_ratio": report.hit_ratio,
        "computed": report.computed,
        "evictions": report.evictions,
        "bytes": {"h2d": report.h2d_bytes, "d2h": report.d2h_bytes},
        "rpc_ms": {name: _percentiles(histogram) for name, histogram in sorted(report.rpc.items())},
        "seconds": report.seconds,
        "verified_pages": report.verified_pages,
        "corrupt_pages": report.corrupt_pages,
        "kills": report.kills,
        "conservation": report.conservation,
        "samples": {name: [getattr(sample, name) for sample in report.samples] for name in names},
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def report_table(report: ReplayReport) -> str:
    """The report for a terminal: plain text, columns aligned, one idea a line."""
    parts = [_run_lines(report), _block_lines(report), _other_lines(report), _rpc_lines(report)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _percentiles(histogram: LatencyHistogram) -> dict[str, float | int | None]:
    if histogram.count == 0:
        return {"p50": None, "p99": None, "count": 0}
    p50, p99 = histogram.percentile_ms(50), histogram.percentile_ms(99)
    return {"p50": round(p50, 6), "p99": round(p99, 6), "count": histogram.count}


def _run_lines(report: ReplayReport) -> list[str]:
    rows = [
        ("trace", report.trace),
        ("engines", f"{report.engines:,}"),
        ("device pool", _pool(report.pool_blocks, report.block_bytes)),
        ("host pool", _pool(report.host_blocks, report.block_bytes)),
        ("policy", report.policy),
        *((name, str(value)) for name, value in report.settings.items()),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _pool(blocks: int, block_bytes: int) -> str:
    if blocks == 0:
        return "none"
    return f"{blocks:,} blocks of {describe_bytes(block_bytes)} ({describe_bytes(blocks * block_bytes)})"


def _block_lines(report: ReplayReport) -> list[str]:
    rows = [
        ("blocks", report.blocks),
        ("  hit on device", report.device_hits),
        ("  hit on host", report.host_hits),
        *([("  hit in storage", report.storage_hits)] if report.storage_hits else []),
        ("  computed", report.computed),
    ]
    if report.lost_blocks:
        rows.append(("  neither (cut off)", report.lost_blocks))
    total = report.blocks or 1
    lines = [f"{name:<20}{count:>14,}{count / total:>9.2%}" for name, count in rows]
    return [*lines, f"{'hit ratio':<20}{'':>14}{report.hit_ratio:>9.2%}"]


def _other_lines(report: ReplayReport) -> list[str]:
    rate = report.requests / report.seconds if report.seconds else 0.0
    rows = [
        ("requests", f"{report.requests:,}", f"{rate:,.1f}/s in {report.seconds:,.1f} s"),
        ("evictions", f"{report.evictions:,}", ""),
        ("host to device", describe_bytes(report.h2d_bytes), ""),
        ("device to host", describe_bytes(report.d2h_bytes), ""),
        ("kills", f"{report.kills:,}", ""),
        ("verified pages", f"{report.verified_pages:,}", ""),
        ("corrupt pages", f"{report.corrupt_pages:,}", "NOT SOUND" if report.corrupt_pages else ""),
        ("conservation", CONSERVED if report.conservation == CONSERVED else "BROKEN", ""),
    ]
    lines = [f"{name:<20}{value:>14}  {note}".rstrip() for name, value, note in rows]
    return lines if report.conservation == CONSERVED else [*lines, f"  {report.conservation}"]


def _rpc_lines(report: ReplayReport) -> list[str]:
    if not report.rpc:
        return []
    width = max(20, *(len(name) + 2 for name in report.rpc))
    lines = [f"{'RPC':<{width}}{'count':>14}{'p50 ms':>11}{'p99 ms':>11}{'max ms':>11}"]
    for name, histogram in sorted(report.rpc.items()):
        if histogram.count == 0:
            lines.append(f"{name:<{width}}{0:>14}{'-':>11}{'-':>11}{'-':>11}")
            continue
        latencies = (histogram.percentile_ms(50), histogram.percentile_ms(99), histogram.max_ms)
        lines.append(f"{name:<{width}}{histogram.count:>14,}" + "".join(f"{ms:>11,.3f}" for ms in latencies))
    return lines
