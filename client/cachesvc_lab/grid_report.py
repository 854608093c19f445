"""Results of simulations as a table, as JSON and as a picture of hits against the size of a pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cachesvc_ctl.core.command import describe_bytes, table
from cachesvc_ctl.core.figure import (
    BLUE,
    FAINT_INK,
    GREEN,
    INK,
    RED,
    YELLOW,
    add_legend,
    empty_figure,
    make_plain,
    shortened,
    write_titles,
)

from cachesvc_lab.grid import ENDS, EVERY, NO_COPIES, OPTIMUM, Row

PANEL_INCHES = (10.0, 4.2)
LOG_FROM = 20
"""A scale of sizes is logarithmic where the greatest is this number of times the smallest, or more."""
MAX_TRACE_LETTERS = 60
FIXED_COLORS = {"lru": FAINT_INK, OPTIMUM: INK}
COLORS = (BLUE, RED, GREEN, YELLOW, "#7a5195", "#2f4858")
RULES = (EVERY, ENDS)
ALONE = ", KV alone"
MARKERS = "osD^vPX"


def rows_json(rows: Sequence[Row], block_bytes: int) -> str:
    """One JSON object; ``rows`` is stable, for programs that compare runs. ``block_bytes`` 0: unknown."""
    document = {
        "block_bytes": block_bytes,
        "rows": [
            {
                "trace": row.trace,
                "policy": row.cell.policy,
                "write_policy": row.cell.write_policy,
                "device_blocks": row.cell.device_blocks,
                "host_blocks": row.cell.host_blocks,
                "disk_blocks": row.cell.disk_blocks,
                "restart_every": row.cell.restart_every,
                "copies": row.cell.copies._asdict(),
                "requests": row.requests,
                "blocks": row.blocks,
                "hits": {"device": row.device_hits, "host": row.host_hits, "disk": row.disk_hits},
                "compute_saved": row.compute_saved,
                "seconds": row.seconds,
            }
            for row in rows
        ],
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def rows_table(rows: Sequence[Row], block_bytes: int, name: str = "") -> str:
    """Table for a terminal: shares of all block accesses, a trace after another. ``name``: of a hybrid model."""
    parts = []
    for trace in dict.fromkeys(row.trace for row in rows):
        of_trace = [row for row in rows if row.trace == trace]
        has_disk = any(row.cell.disk_blocks for row in of_trace)
        pools: tuple[str, ...] = ("device", "host")
        tiers: tuple[str, ...] = ("hits on device", "on host")
        if has_disk:
            pools, tiers = (*pools, "disk"), (*tiers, "on disk")
        head = (*pools, "writes", "policy", *tiers, "together", "compute saved")
        cells = [_cells(row, block_bytes, has_disk=has_disk, alone=ALONE if name else "") for row in of_trace]
        about = f"{trace}: {of_trace[0].requests:,} requests, {of_trace[0].blocks:,} block accesses"
        about += f" of {name}" if name else ""
        parts.append(f"{about}\n\n{table(head, cells)}")
    return "\n\n".join(parts)


def hybrid_table(rows: Sequence[Row], name: str, block_bytes: int) -> str:
    """Table for a terminal of what ``hybrid_grid`` has run: token hits by size of the device and policy."""
    parts = []
    for trace in dict.fromkeys(row.trace for row in rows):
        of_trace = [row for row in rows if row.trace == trace]
        ratios = {(row.cell.device_blocks, row.cell.policy, row.cell.copies): row.hit_ratio for row in of_trace}
        copies = next(row.cell.copies for row in of_trace if row.cell.policy == EVERY)
        policies = [policy for policy in dict.fromkeys(row.cell.policy for row in of_trace) if policy not in RULES]
        head = ["device", *RULES, *(f"{policy}{kind}" for policy in policies for kind in ("", ALONE))]
        cells = []
        for blocks in dict.fromkeys(row.cell.device_blocks for row in of_trace):
            shown = [ratios[blocks, rule, copies] for rule in RULES]
            shown += [ratios[blocks, policy, kept] for policy in policies for kept in (copies, NO_COPIES)]
            cells.append((_size(blocks, block_bytes), *(f"{ratio:8.2%}" for ratio in shown)))
        about = f"{trace}: token hits of {name}, {of_trace[0].requests:,} requests"
        parts.append(f"{about}\n\n{table(head, cells)}")
    return "\n\n".join(parts)


def _cells(row: Row, block_bytes: int, *, has_disk: bool, alone: str) -> tuple[str, ...]:
    """``alone``: behind the policy of a row of blocks without copies."""
    cell, whole = row.cell, row.blocks or 1
    hits = (row.device_hits, row.host_hits, *((row.disk_hits,) if has_disk else ()))
    ratios = (*(each / whole for each in hits), row.hit_ratio, row.compute_saved)
    pools = (cell.device_blocks, cell.host_blocks, *((cell.disk_blocks,) if has_disk else ()))
    sizes = (_size(blocks, block_bytes) for blocks in pools)
    writes = cell.write_policy if cell.host_blocks and cell.policy not in RULES else "-"
    policy = cell.policy + (alone if cell.copies == NO_COPIES else "")
    return (*sizes, writes, policy, *(f"{r:8.2%}" for r in ratios))


def _size(blocks: int, block_bytes: int) -> str:
    return f"{blocks:,} ({describe_bytes(blocks * block_bytes)})" if blocks and block_bytes else f"{blocks:,}"


class _Curve(NamedTuple):
    """Constant parameters of a curve. ``policy``: with what is in its pools beside blocks. ``other``: blocks of the
    pool that is not along it."""

    policy: str
    write_policy: str
    other: int


def draw_rows(rows: Sequence[Row], block_bytes: int, path: Path | str) -> None:
    """Write the picture as PNG, a panel for each trace: hits of both tiers against the pool that has more sizes.

    Raises MissingExtraError (no matplotlib) and OSError.
    """
    traces = list(dict.fromkeys(row.trace for row in rows))
    width, height = PANEL_INCHES
    figure = empty_figure((width, height * len(traces)), "drawing the picture of a simulation")
    panels = figure.subplots(len(traces), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.08, right=0.72, top=1 - 0.5 / height / len(traces), bottom=0.6 / height / len(traces))
    figure.subplots_adjust(hspace=0.4)
    scale, unit = (block_bytes / 2**30, "GiB") if block_bytes else (1.0, "blocks")
    for axes, trace in zip(panels, traces, strict=True):
        make_plain(axes)
        of_trace = [row for row in rows if row.trace == trace]
        pool, along, other = _axis(of_trace)
        write_titles(axes, f"Hits on {shortened(trace, MAX_TRACE_LETTERS)}", f"{pool} pool, {unit}")
        tells_writes = len({row.cell.write_policy for row in of_trace}) > 1
        is_hybrid = any(row.cell.copies != NO_COPIES for row in of_trace)
        curves: dict[_Curve, list[Row]] = {}
        for row in of_trace:
            writes = row.cell.write_policy if tells_writes and row.cell.policy != OPTIMUM else ""
            alone = ALONE if is_hybrid and row.cell.copies == NO_COPIES else ""
            curves.setdefault(_Curve(row.cell.policy + alone, writes, other(row)), []).append(row)
        others = sorted({curve.other for curve in curves})
        colors = _colors([curve.policy for curve in curves])
        handles, labels = [], []
        for curve, points in curves.items():
            points.sort(key=along)
            handles += axes.plot(
                [along(row) * scale for row in points],
                [row.hit_ratio for row in points],
                color=colors[curve.policy],
                linestyle="--" if curve.policy == OPTIMUM else "-",
                marker=MARKERS[others.index(curve.other) % len(MARKERS)],
                markersize=4.5,
                linewidth=1.8,
            )
            labels.append(_label(curve, "host" if pool == "device" else "device", len(others) > 1, scale, unit))
        sizes = [along(row) for row in of_trace if along(row)]
        if sizes and max(sizes) >= LOG_FROM * min(sizes) and len(sizes) == len(of_trace):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        add_legend(axes, handles, labels)
    figure.savefig(path, format="png")


def _axis(rows: Sequence[Row]) -> tuple[str, Callable[[Row], int], Callable[[Row], int]]:
    """The pool with more sizes, and how a row tells its size and that of the other one."""

    def device(row: Row) -> int:
        return row.cell.device_blocks

    def host(row: Row) -> int:
        return row.cell.host_blocks

    if len(set(map(host, rows))) > len(set(map(device, rows))):
        return "host", host, device
    return "device", device, host


def _colors(policies: Sequence[str]) -> dict[str, str]:
    free = iter(COLORS * len(policies))
    return {policy: FIXED_COLORS.get(policy) or next(free) for policy in dict.fromkeys(policies)}


def _label(curve: _Curve, pool: str, tells_other: bool, scale: float, unit: str) -> str:
    words = [curve.policy, curve.write_policy]
    if tells_other:
        words.append(f"{pool} {curve.other * scale:,.4g} {unit}" if curve.other else f"no {pool}")
    return ", ".join(filter(None, words))
