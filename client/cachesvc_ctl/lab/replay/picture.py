"""Draws a replay as one PNG: hit ratio by tier over time, latency of each RPC, bytes moved over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

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
from cachesvc_ctl.core.text import describe_bytes
from cachesvc_ctl.lab.replay.histogram import LOWEST_MS
from cachesvc_ctl.lab.replay.report import CONSERVED, ReplayReport, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

    # Both scales have their zero at one height, and a way with no traffic still gets a strip of its own.
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
