"""Results of a replay: the numbers, and their two written forms, an aligned table and JSON."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cachesvc_ctl.core.command import describe_bytes
from cachesvc_ctl.core.figure import (
    BLUE,
    COMPUTED,
    DEVICE,
    FAINT_INK,
    GREEN,
    GRID,
    HOST,
    INK,
    MOVED_IN,
    MOVED_OUT,
    RED,
    STORAGE,
    YELLOW,
    add_legend,
    empty_figure,
    make_plain,
    shortened,
    write_titles,
)

from cachesvc.model.numbers import Histogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CONSERVED = "ok"
KEYS = """
trace engines pool_blocks host_blocks policy block_bytes settings requests blocks hits hit_ratio computed evictions
bytes rpc_ms seconds verified_pages corrupt_pages kills conservation samples
"""
"""Order of the report's keys in its JSON."""


class Sample(NamedTuple):
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
        return Sample(self.t_seconds, *map(add, self[1:], other[1:]))

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


def report_json(report: ReplayReport) -> str:
    """The report as one JSON object; its keys are stable, for programs that compare runs. Samples are columns."""
    made = {
        "settings": dict(report.settings),
        "hits": {"device": report.device_hits, "host": report.host_hits, "storage": report.storage_hits},
        "bytes": {"h2d": report.h2d_bytes, "d2h": report.d2h_bytes},
        "rpc_ms": {name: _percentiles(histogram) for name, histogram in sorted(report.rpc.items())},
        "samples": {name: [getattr(sample, name) for sample in report.samples] for name in Sample._fields},
    }
    document = {key: made[key] if key in made else getattr(report, key) for key in KEYS.split()}
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


LOWEST_MS = 1e-3
"""Upper edge of the first bucket: one microsecond."""

BUCKETS_PER_DECADE = 50
"""A bucket is 4.7 % wide, so a percentile is right to 2.4 %: closer than two runs of one machine agree."""

DECADES = 9
"""Decades up to 1e6 ms, a quarter of an hour: beyond every deadline."""

EDGES_MS = tuple(LOWEST_MS * 10 ** (step / BUCKETS_PER_DECADE) for step in range(BUCKETS_PER_DECADE * DECADES + 1))


class LatencyHistogram(Histogram):
    """Latencies in ms, for one writer at a time. All have the same buckets, so any two merge.

    A value beyond the buckets counts in the first or the last one; ``min_ms`` and ``max_ms`` are exact.
    """

    __slots__ = ("max_ms", "min_ms")

    def __init__(self) -> None:
        super().__init__(EDGES_MS)
        self.min_ms = math.inf
        self.max_ms = 0.0

    def record(self, latency_ms: float) -> None:
        """Count one. Raises ValueError for what cannot be a latency: negative, infinite, or not a number."""
        if not 0 <= latency_ms < math.inf:
            raise ValueError(f"a latency must be finite and not negative, not {latency_ms} ms")
        self.observe(latency_ms)
        self.min_ms = min(self.min_ms, latency_ms)
        self.max_ms = max(self.max_ms, latency_ms)

    def merge(self, other: LatencyHistogram) -> None:
        """Add the counts of ``other`` to this one; ``other`` does not change."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.min_ms = min(self.min_ms, other.min_ms)
        self.max_ms = max(self.max_ms, other.max_ms)

    def percentile_ms(self, percent: float) -> float:
        """The latency that ``percent`` of the values do not pass (nearest rank), to within half a bucket.

        Raises ValueError where nothing is recorded, or for a percent outside of (0, 100].
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent must be above 0 and at most 100, not {percent}")
        if not self.count:
            raise ValueError("an empty histogram has no percentiles")
        rank = math.ceil(self.count * percent / 100)
        bucket = bisect_left(list(accumulate(self.counts)), rank)
        middle = LOWEST_MS * 10 ** ((bucket - 0.5) / BUCKETS_PER_DECADE)
        return min(max(middle, self.min_ms), self.max_ms)

    def cumulative(self) -> list[tuple[float, float]]:
        """(upper edge in ms, share of the values up to it) of each bucket in use, up to share 1."""
        points: list[tuple[float, float]] = []
        passed, whole = 0, self.count
        for edge_ms, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            if count:
                passed += count
                points.append((min(edge_ms, self.max_ms), passed / whole))
        return points


MAX_COLUMNS = 120
"""Most columns of a picture: seconds are merged into this number, since narrower columns are below the noise between
them."""

MAX_RPC_CURVES = 10
"""Number of curves, for the most called RPCs; the table has them all, and more curves are hard to distinguish."""

MAX_TRACE_LETTERS = 38
"""Most letters of a trace's name: the rest of the head is for a warning."""

MAX_RPC_LETTERS = 15
"""Most letters of an RPC's name: the rest of the legend is for its numbers."""

SIZE_INCHES = (12.0, 11.5)
LEFT, RIGHT = 0.075, 0.975

SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)

CURVES = (BLUE, RED, GREEN, YELLOW, "#7a5195", "#2f4858", "#8ab17d", "#d66ba0", "#8d6e63", FAINT_INK)


def draw_picture(report: ReplayReport, path: Path | str) -> None:
    """Writes the picture to `path` as PNG. Raises MissingExtraError (no matplotlib) and OSError."""
    figure = empty_figure(SIZE_INCHES, "drawing the picture of a replay")
    ratio_axes, rpc_axes, bytes_axes = figure.subplots(3, 1)
    figure.subplots_adjust(left=LEFT, right=0.75, top=0.868, bottom=0.055, hspace=0.42)
    for axes in (ratio_axes, rpc_axes, bytes_axes):
        make_plain(axes)
    _write_head(figure, report)
    columns, column_seconds = gather_columns(report.samples)
    _draw_ratios(ratio_axes, columns, column_seconds, report)
    _draw_latencies(rpc_axes, report)
    _draw_bytes(bytes_axes, columns, column_seconds, report)
    figure.savefig(path, format="png")


def gather_columns(samples: Sequence[Sample], max_columns: int = MAX_COLUMNS) -> tuple[list[Sample], int]:
    """The samples in at most `max_columns` columns of equal width, and that width in seconds.

    A column's `t_seconds` is its left edge; one in which nothing happened is all zeros.
    """
    if not samples:
        return [], 1
    first = min(sample.t_seconds for sample in samples)
    last = max(sample.t_seconds for sample in samples)
    width_seconds = -(-(last - first + 1) // max_columns)
    columns = [Sample(t_seconds) for t_seconds in range(first, last + 1, width_seconds)]
    for sample in samples:
        index = (sample.t_seconds - first) // width_seconds
        columns[index] = columns[index].plus(sample)
    return columns, width_seconds


def _write_head(figure: Figure, report: ReplayReport) -> None:
    engines = "1 engine" if report.engines == 1 else f"{report.engines} engines"
    pool_bytes = report.pool_blocks * report.block_bytes
    run = f"{engines},  device pool {report.pool_blocks:,} blocks ({describe_bytes(pool_bytes)})"
    if report.host_blocks:
        run += f",  host pool {report.host_blocks:,} blocks"
    run += f",  policy {report.policy}"
    facts = f"{report.requests:,} requests,  {report.blocks:,} block accesses,  "
    facts += f"hit ratio {report.hit_ratio:.1%},  {report.evictions:,} evictions,  "
    facts += f"{report.kills:,} kills,  {report.seconds:,.1f} s"
    title = f"Replay of {shortened(report.trace, MAX_TRACE_LETTERS)}"
    figure.text(LEFT, 0.972, title, size=16, weight="bold", color=INK, va="center", parse_math=False)
    figure.text(LEFT, 0.945, run, size=10.5, color=FAINT_INK, va="center", parse_math=False)
    figure.text(LEFT, 0.925, facts, size=10.5, color=FAINT_INK, va="center")
    if not report.is_sound:
        broken = f"{report.corrupt_pages:,} corrupt pages"
        if report.conservation != CONSERVED:
            broken = "conservation broken"
        words = f"NOT SOUND: {broken}"
        figure.text(RIGHT, 0.972, words, size=12, weight="bold", color=RED, va="center", ha="right")


def _draw_ratios(axes: Axes, columns: Sequence[Sample], column_seconds: int, report: ReplayReport) -> None:
    write_titles(axes, "What became of each block access", _time_label(column_seconds))
    if not any(column.accesses for column in columns):
        _say_empty(axes, "no block was accessed")
        return
    kinds = (
        ("device hit", DEVICE, report.device_hits, [column.device_hits for column in columns]),
        ("host hit", HOST, report.host_hits, [column.host_hits for column in columns]),
        ("storage hit", STORAGE, report.storage_hits, [column.storage_hits for column in columns]),
        ("computed", COMPUTED, report.computed, [column.computed for column in columns]),
    )
    edges = [column.t_seconds for column in columns]
    floors = [0.0] * len(columns)
    handles, labels = [], []
    for name, color, total, counts in kinds:
        heights = [count / (column.accesses or 1) for count, column in zip(counts, columns, strict=True)]
        bars = axes.bar(edges, heights, column_seconds, bottom=floors, align="edge", color=color, linewidth=0)
        floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
        handles.append(bars)
        labels.append(f"{name}  {total / (report.blocks or 1):.1%}")
    add_legend(axes, handles[::-1], labels[::-1])
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlim(edges[0], edges[-1] + column_seconds)


def _draw_latencies(axes: Axes, report: ReplayReport) -> None:
    write_titles(axes, "Latency of each RPC: share of the calls that were done", "within this number of milliseconds")
    called = [(name, histogram) for name, histogram in report.rpc.items() if histogram.count]
    if not called:
        _say_empty(axes, "no RPC was timed")
        return
    called.sort(key=lambda item: -item[1].count)
    shown = called[:MAX_RPC_CURVES]
    handles, labels = [], []
    for (name, histogram), color in zip(shown, CURVES, strict=False):
        points = histogram.cumulative()
        latencies = [histogram.min_ms, *(edge_ms for edge_ms, _ in points)]
        heights = [0.0, *(_nines(share, histogram.count) for _, share in points)]
        handles += axes.plot([max(ms, LOWEST_MS) for ms in latencies], heights, color=color, linewidth=1.8)
        p50, p99 = histogram.percentile_ms(50), histogram.percentile_ms(99)
        labels.append(f"{shortened(name, MAX_RPC_LETTERS)}  {p50:.3g} / {p99:.3g}")
    if len(called) > len(shown):
        handles += axes.plot([], [], linewidth=0)
        labels.append(f"and {len(called) - len(shown)} more")
    add_legend(axes, handles, labels, title="p50 / p99 ms")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    most_calls = max(histogram.count for _, histogram in shown)
    marks = [share for share in SHARES if share == 0 or share < 1 - 1 / most_calls]
    axes.set_yticks([_nines(share) for share in marks], [f"{share * 100:g} %" for share in marks])
    axes.set_ylim(0, _nines(1.0, most_calls) * 1.04)


def _nines(share: float, count: int = 10**9) -> float:
    """The height of a share on a scale where 90, 99 and 99.9 % are equal steps, so that slow calls show.

    Such a scale has no 100 %: all of `count` calls stand half a call below it.
    """
    return -math.log10(1 - min(share, 1 - 0.5 / count))


def _draw_bytes(axes: Axes, columns: Sequence[Sample], column_seconds: int, report: ReplayReport) -> None:
    """Draw bytes: up to the device, down from it. Columns have the left scale, lines the right."""
    write_titles(axes, "Bytes moved: rate (columns) and sum (lines)", _time_label(column_seconds))
    loads = [column.h2d_bytes for column in columns]
    stores = [column.d2h_bytes for column in columns]
    if not any(loads) and not any(stores):
        _say_empty(axes, "no bytes were moved")
        return
    rate_unit, rate_name = _byte_unit(max(loads + stores) / column_seconds)
    sum_unit, sum_name = _byte_unit(max(sum(loads), sum(stores)))
    edges = [column.t_seconds for column in columns]
    sum_axes = axes.twinx()
    make_plain(sum_axes)
    sum_axes.grid(visible=False)
    ways = (
        ("host to device", MOVED_IN, 1, loads, report.h2d_bytes),
        ("device to host", MOVED_OUT, -1, stores, report.d2h_bytes),
    )
    handles, labels = [], []
    for name, color, sign, moved, total_bytes in ways:
        rates = [sign * count / column_seconds / rate_unit for count in moved]
        axes.bar(edges, rates, column_seconds, align="edge", color=color, alpha=0.35, linewidth=0)
        sums = [sign * total / sum_unit for total in accumulate(moved, initial=0)]
        handles += sum_axes.plot([*edges, edges[-1] + column_seconds], sums, color=color, linewidth=1.8)
        labels.append(f"{name}  {describe_bytes(total_bytes)}")
    add_legend(axes, handles, labels)
    axes.axhline(0, color=FAINT_INK, linewidth=0.8)
    axes.set_xlim(edges[0], edges[-1] + column_seconds)

    # Both scales have their zero at one height, and a direction without traffic still gets a strip.
    up, down = max(loads) / column_seconds / rate_unit, max(stores) / column_seconds / rate_unit
    up, down = 1.08 * max(up, 0.15 * down), 1.08 * max(down, 0.15 * up)
    sum_per_rate = 1.08 * max(sum(loads) / up, sum(stores) / down) / sum_unit
    axes.set_ylim(-down, up)
    sum_axes.set_ylim(-down * sum_per_rate, up * sum_per_rate)
    for side, unit in ((axes, f"{rate_name}/s"), (sum_axes, f"{sum_name} in all")):
        side.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        side.set_ylabel(unit, fontsize=9.5, color=FAINT_INK)


def _byte_unit(largest: float) -> tuple[int, str]:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024**power, name
    return 1, "B"


def _time_label(column_seconds: int) -> str:
    return f"seconds of the replay (columns of {column_seconds} s)"


def _say_empty(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=FAINT_INK, fontsize=11)
    axes.set_xlabel("")
    axes.set_xticks([])
    axes.set_yticks([])
