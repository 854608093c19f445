"""Simulations of one trace: every combination of policies and pool sizes, run once each, in several processes."""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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

from cachesvc.model.answers import LINEAR_TOKENS, Ended
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import did_you_mean, parse_size
from cachesvc_lab.traces import SECONDS_A_TOKEN, Prompts

# The most that any cache of a size could hit on a trace: Belady's MIN, under the rule that a hit is a leading run.
#
# It knows the future: kept is what is used again soonest, of one prompt the blocks nearer its root. The blocks of the
# running prompt are in place, as in a device pool.


def optimal_hits(prompts: Prompts, device_blocks: int, host_blocks: int = 0) -> list[int]:
    """Largest number of hit blocks of each prompt, on a device and on its host together, for pools of these sizes.

    Exact for a device alone; with a host a bound that no policy passes. Of a prompt longer than the device only its
    first ``device_blocks`` are cached.
    """
    paths = [prompts.blocks(prompt)[:device_blocks] for prompt in range(len(prompts))]
    starts = [0, *accumulate(map(len, paths))]
    flat = np.concatenate(paths) if paths else np.empty(0, np.int64)
    # Position in ``flat`` of the next access to each access's block, -1 where there is none.
    order = np.argsort(flat, kind="stable")
    again = flat[order[1:]] == flat[order[:-1]]
    next_use = np.full(len(flat), -1, np.int64)
    next_use[order[:-1][again]] = order[1:][again]
    return _hits(flat.tolist(), starts, next_use.tolist(), device_blocks + host_blocks)


def _hits(flat: list[int], starts: list[int], next_use: list[int], capacity: int) -> list[int]:
    """A later position is a later prompt, or a deeper block of the same: the greatest goes first."""
    kept = [-1] * (max(flat, default=-1) + 1)  # of each block that is kept the position of its next use
    size, hits = 0, []
    farthest: list[int] = []  # negated; one whose block was dropped or used since is skipped
    for first, end in pairwise(starts):
        before = size
        for block in flat[first:end]:
            if kept[block] >= 0:
                size -= 1
                kept[block] = -1
        hits.append(before - size)
        while size > capacity - (end - first):
            position = -heapq.heappop(farthest)
            block = flat[position]
            if kept[block] == position:
                kept[block] = -1
                size -= 1
        for at in range(first, end):
            position = next_use[at]
            if position < 0:
                break  # nor are the blocks below it used again
            kept[flat[at]] = position
            heapq.heappush(farthest, -position)
            size += 1
    return hits


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(%?)", re.ASCII)


class Unit(Enum):
    BLOCKS = "blocks"
    PERCENT = "percent"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A size that is not known in blocks before the trace is."""

    number: float
    unit: Unit

    def blocks(self, distinct: int, block_bytes: int) -> int:
        """Size in blocks, rounded down, where a trace has ``distinct`` of them; but at least 1 for a share."""
        if self.unit is Unit.BYTES:
            return int(self.number) // block_bytes
        if self.unit is Unit.PERCENT and self.number:
            return max(1, int(distinct * self.number / 100))
        return int(self.number)


def pool_size(text: str) -> PoolSize:
    match = _NUMBER.fullmatch(text)
    if match is not None:
        return PoolSize(float(match[1]), Unit.PERCENT if match[2] else Unit.BLOCKS)
    try:
        return PoolSize(parse_size(text), Unit.BYTES)
    except InvalidRequest:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of blocks, such as 5000, a share, such as 10%, or a size, such as 64GiB"
        ) from None


def pool_sizes(text: str) -> tuple[PoolSize, ...]:
    return tuple(dict.fromkeys(map(pool_size, text.split(","))))


EVERY, ENDS = "every aligned block", "ends and branches"


# Token hits of two simple rules for the copies of a hybrid model, to compare policies with. No daemon works like this.
#
# All that is cached is one LRU, of blocks and copies alike; a prompt is used from its end to its root. EVERY keeps
# copies at every position at which there can be any. ENDS keeps them at the end of each prompt, and where one leaves
# what is cached, so that the next one that does so is served.


def reference_hits(
    prompts: Prompts, blocks: int, copies: Copies, *, keeps_every: bool, host_blocks: int = 0
) -> list[int]:
    """Hit blocks of each prompt on a device of ``blocks`` blocks, and on a host that has nothing of what it has."""
    cache = _Cache(blocks + host_blocks, copies)
    return [cache.serve(prompts.blocks(prompt).tolist(), keeps_every=keeps_every) for prompt in range(len(prompts))]


class _Cache:
    """``_used``: blocks and copies, least recently used first, with their pages; a copy's number is negative."""

    def __init__(self, capacity: int, copies: Copies) -> None:
        self._capacity = capacity
        self._pages = copies.state_pages or copies.window_pages
        self._between = copies.state_blocks if copies.state_pages else 1
        self._window = 1 if copies.state_pages else copies.window_blocks
        self._used: OrderedDict[int, int] = OrderedDict()
        self._taken = 0

    def serve(self, path: Sequence[int], *, keeps_every: bool) -> int:
        known = next((at for at, block in enumerate(path) if block not in self._used), len(path))
        branch = known - known % self._between
        hit = branch
        while hit and not all(~path[at] in self._used for at in self._needed(hit)):
            hit -= self._between
        end = len(path) - len(path) % self._between
        kept = range(hit + self._between, end + 1, self._between) if keeps_every else (branch, end)
        wanted = {at for position in kept if position > hit for at in self._needed(position)}
        for at in range(len(path) - 1, -1, -1):
            self._use(path[at], 1)
            if at in wanted:
                self._use(~path[at], self._pages)
        for at in self._needed(hit):
            self._use(~path[at], self._pages)
        while self._taken > self._capacity:
            self._taken -= self._used.popitem(last=False)[1]
        return hit

    def _needed(self, position: int) -> range:
        return range(max(0, position - self._window), position)

    def _use(self, number: int, pages: int) -> None:
        if number not in self._used:
            self._used[number] = pages
            self._taken += pages
        self._used.move_to_end(number)


# Hybrid models for simulations: what a model keeps beside the KV of full attention, by name or from a JSON file.
#
# A file has one object with the fields of ``HybridModel`` but for ``name``; sizes in bytes, distances in tokens.

MAX_FILE_BYTES = 1 << 20
MAX_PAGES = 12
"""Pages of a state, or windowed pages of a block, that a layout has groups for."""


class Copies(NamedTuple):
    """See ``cachesvc.simulation``: pages of the size of a trace's block, and distances in its blocks."""

    state_pages: int
    state_blocks: int
    window_pages: int
    window_blocks: int


NO_COPIES = Copies(0, 1, 0, 1)


class HybridRejected(Exception):
    """A hybrid model cannot be simulated; the message says what to do."""


@dataclass(frozen=True, slots=True)
class HybridModel:
    """``kv_bytes``: of a token in full attention. ``state_bytes``: of one recurrent state, which the engine offers
    every ``state_tokens`` tokens. ``window_bytes``: of a token in layers with a window of ``window_tokens``."""

    name: str
    kv_bytes: int
    state_bytes: int = 0
    state_tokens: int = 0
    window_bytes: int = 0
    window_tokens: int = 0

    def copies(self, block_tokens: int) -> Copies:
        """Pages and distances for a trace with blocks of that size. Raises HybridRejected."""
        states = -(-self.state_bytes // (self.kv_bytes * block_tokens))
        windows = -(-self.window_bytes // self.kv_bytes)
        if max(states, windows) > MAX_PAGES:
            raise HybridRejected(
                f"{self.name}: a state takes {states} blocks of {block_tokens} tokens and a block {windows} windowed "
                f"pages; at most {MAX_PAGES} can be simulated: take a trace with larger blocks"
            )
        between = max(1, round(self.state_tokens / block_tokens)) if states else 1
        return Copies(states, between, windows, max(1, -(-self.window_tokens // block_tokens)))


HYBRID_MODELS = {
    model.name: model
    for model in (
        HybridModel("qwen3-next", kv_bytes=24 << 10, state_bytes=36 << 20, state_tokens=1536),
        HybridModel("gemma-3", kv_bytes=80 << 10, window_bytes=416 << 10, window_tokens=1024),
    )
}
"""Qwen3-Next 80B: 12 layers of full attention, 36 of gated delta rule. Gemma 3 27B: 10 layers of full attention, 52
with a window. Both in bfloat16, all ranks together."""


def hybrid_model(text: str) -> HybridModel:
    """The model of that name, or of a file that ends in ``.json``. Raises HybridRejected."""
    known = HYBRID_MODELS.get(text)
    if known is not None:
        return known
    if not text.endswith(".json"):
        raise HybridRejected(f"there is no layout {text!r}; choose {', '.join(HYBRID_MODELS)} or name a .json file")
    path = Path(text)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HybridRejected(f"{path} has more than {MAX_FILE_BYTES} bytes: that is no layout")
        said = json.loads(path.read_bytes())
    except OSError as error:
        raise HybridRejected(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise HybridRejected(f"{path} is no JSON: {error}") from error
    return _checked(path.stem, said)


def _checked(name: str, said: object) -> HybridModel:
    known = [field.name for field in fields(HybridModel) if field.name != "name"]
    if not isinstance(said, Mapping) or not all(key in known for key in said):
        raise HybridRejected(f"layout {name}: give one object with the fields {', '.join(known)} alone")
    for key, value in said.items():
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise HybridRejected(
                f"layout {name}: {key} is {value!r:.40}; give a whole number of bytes or tokens from 0"
            )
    model = HybridModel(name, **{"kv_bytes": 0, **said})
    if not model.kv_bytes or not (model.state_bytes or model.window_bytes):
        raise HybridRejected(f"layout {name}: kv_bytes and one of state_bytes and window_bytes must be above 0")
    if bool(model.state_bytes) != bool(model.state_tokens) or bool(model.window_bytes) != bool(model.window_tokens):
        raise HybridRejected(f"layout {name}: state_bytes goes with state_tokens, window_bytes with window_tokens")
    return model


OPTIMUM = "opt"
"""The policy that knows the future."""
HINTED = "+"
"""Between a policy's name and the hints that engines give: ``lru+truthful``."""
HINTS = ("truthful", "lying")
"""Hints of engines that know whether a prompt comes back, and say so, or say the opposite."""


class SimulationFailed(Exception):
    """A simulation cannot be run; the message says what to do."""


class Cell(NamedTuple):
    """Parameters of one simulation; pools in blocks. ``restart_every``: requests after which the daemon is started
    anew, with its disk alone; 0: never. ``copies``: what a hybrid model keeps in the same pools."""

    policy: str
    write_policy: str
    device_blocks: int
    host_blocks: int
    disk_blocks: int = 0
    restart_every: int = 0
    copies: Copies = NO_COPIES


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one cell, in blocks. ``compute_saved``: the share of the prompts' prefill that hits spared, with the
    attention of an 8B model. ``seconds``: duration of the simulation."""

    trace: str
    cell: Cell
    requests: int
    blocks: int
    device_hits: int
    host_hits: int
    compute_saved: float
    seconds: float
    disk_hits: int = 0

    @property
    def hit_ratio(self) -> float:
        """Hits of all tiers over block accesses; 0 where nothing was accessed."""
        return (self.device_hits + self.host_hits + self.disk_hits) / self.blocks if self.blocks else 0.0


def check_names(policies: Sequence[str], write_policies: Sequence[str]) -> None:
    """Raises SimulationFailed for a name that there is not, with those that there are."""
    from cachesvc.simulation import EVICTIONS, WRITE_POLICIES

    for flag, given, known in (
        ("--policies", policies, (*EVICTIONS, OPTIMUM)),
        ("--write-policies", write_policies, WRITE_POLICIES),
    ):
        for name in given:
            plain, _, hints = name.partition(HINTED)
            if plain not in known or (hints and (hints not in HINTS or plain == OPTIMUM)):
                hint = did_you_mean(name, known, f"choose among {', '.join(known)}")
                raise SimulationFailed(f"{flag}: there is no {name!r}; {hint}")


def grid(
    policies: Sequence[str],
    write_policies: Sequence[str],
    device_blocks: Sequence[int],
    host_blocks: Sequence[int],
    disk_blocks: Sequence[int] = (0,),
    restart_every: int = 0,
) -> list[Cell]:
    """All combinations, the policies side by side."""
    combinations = product(device_blocks, host_blocks, disk_blocks, write_policies, policies)
    return [
        Cell(policy, writes, device, host, disk, restart_every) for device, host, disk, writes, policy in combinations
    ]


def hybrid_grid(
    policies: Sequence[str],
    device_blocks: Sequence[int],
    copies: Copies,
    host_blocks: Sequence[int] = (0,),
    write_policies: Sequence[str] = ("write_back",),
) -> list[Cell]:
    """For each pair of sizes the reference rules, then each policy with the copies of a hybrid model, and without
    any."""
    cells = []
    for blocks, host in product(device_blocks, host_blocks):
        cells += [Cell(rule, "write_back", blocks, host, copies=copies) for rule in (EVERY, ENDS)]
        cells += [
            Cell(policy, writes, blocks, host, copies=kept)
            for writes, policy, kept in product(write_policies, policies, (copies, NO_COPIES))
        ]
    return cells


def run_grid(prompts: Prompts, cells: Sequence[Cell], processes: int, tell: Callable[[int, int], None]) -> list[Row]:
    """A row for each cell, in their order. Cells that cannot differ are run once. ``tell``: runs that are done, of all.

    Raises SimulationFailed where a process has died.
    """
    runs = list(dict.fromkeys(map(_decisive, cells)))
    rows: dict[Cell, Row] = {}
    for row in _run_all(prompts, runs, processes):
        rows[row.cell] = row
        tell(len(rows), len(runs))
    return [replace(rows[_decisive(cell)], cell=cell) for cell in cells]


def run_cell(prompts: Prompts, cell: Cell) -> Row:
    """Simulate one cell. Raises InvalidRequest, ValueError for what cannot be simulated."""
    began = time.perf_counter()
    if cell.policy == OPTIMUM:
        tiers = [optimal_hits(prompts, cell.device_blocks, more) for more in (0, cell.host_blocks)]
        tiers.append(optimal_hits(prompts, cell.device_blocks, cell.host_blocks + cell.disk_blocks))
    elif cell.policy in (EVERY, ENDS):
        keeps_every, device = cell.policy == EVERY, cell.device_blocks
        tiers = [reference_hits(prompts, device, cell.copies, keeps_every=keeps_every)] * 3
        if cell.host_blocks:
            both = reference_hits(prompts, device, cell.copies, keeps_every=keeps_every, host_blocks=cell.host_blocks)
            tiers[1:] = both, both
    else:
        tiers = _serve_all(prompts, cell)
    seconds = time.perf_counter() - began
    device, host, disk = map(sum, tiers)
    saved = compute_saved(prompts, tiers[-1])
    blocks = len(prompts.path)
    return Row(prompts.trace, cell, len(prompts), blocks, device, host - device, saved, seconds, disk - host)


def compute_saved(prompts: Prompts, hits: Sequence[int]) -> float:
    """Share of prefill that ``hits`` spare, blocks of each prompt; 0 without prompts."""

    def cost(blocks: npt.NDArray[np.float64]) -> float:
        return float((blocks + blocks * blocks * prompts.block_tokens / LINEAR_TOKENS / 2).sum())

    whole = cost(np.diff(prompts.starts).astype(np.float64))
    return cost(np.array(hits, np.float64)) / whole if whole else 0.0


def _serve_all(prompts: Prompts, cell: Cell) -> list[list[int]]:
    """Serve all prompts; of each prompt the hits on the device, those on the host too, and all hits."""
    from cachesvc.simulation import Copies, SimulatedPools, Simulation

    policy, _, hints = cell.policy.partition(HINTED)
    given = retentions(prompts, hints)
    pools = SimulatedPools(policy, *cell[1:-1], Copies(*cell.copies))
    simulation = Simulation(pools, prompts.block_tokens)
    tiers: list[list[int]] = [[], [], []]
    for number, (now, output) in enumerate(zip(prompts.seconds.tolist(), prompts.output_tokens.tolist(), strict=True)):
        if cell.restart_every and number and number % cell.restart_every == 0:
            simulation = simulation.restarted()
        keys = prompts.keys(number)
        ended = Ended(output, now + output * SECONDS_A_TOKEN)
        hits = simulation.serve(keys, now, ended, given[number]) if keys else (0, 0, 0)
        for tier, upto in zip(tiers, accumulate(hits), strict=True):
            tier.append(upto)
    return tiers


def retentions(prompts: Prompts, hints: str) -> list[int]:
    """Hints on each prompt, by whether a later one goes through its last block: 1 it does not, 2 it does, 0 none."""
    if not hints:
        return [0] * len(prompts)
    later: set[int] = set()
    out = [0] * len(prompts)
    for number in range(len(prompts) - 1, -1, -1):
        path = prompts.path[prompts.starts[number] : prompts.starts[number + 1]].tolist()
        if path:
            returns = path[-1] in later
            out[number] = 2 if returns == (hints == "truthful") else 1
            later.update(path)
    return out


def _decisive(cell: Cell) -> Cell:
    """The cell with all that decides something: without a host nothing is written to it, and the optimum knows what to
    write."""
    if cell.policy == OPTIMUM or not cell.host_blocks:
        return cell._replace(write_policy="write_back")
    return cell


def _run_all(prompts: Prompts, runs: Sequence[Cell], processes: int) -> Iterator[Row]:
    if min(processes, len(runs)) <= 1:
        yield from (run_cell(prompts, cell) for cell in runs)
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(runs)), fresh, _keep, (prompts,)) as pool:
        try:
            for done in as_completed([pool.submit(_run_kept, cell) for cell in runs]):
                yield done.result()
        except BrokenProcessPool as error:
            raise SimulationFailed("a process of the simulation has died; take fewer --processes") from error


_KEPT: list[Prompts] = []
"""Trace of a process of the pool, which was started with it."""


def _keep(prompts: Prompts) -> None:
    _KEPT.append(prompts)


def _run_kept(cell: Cell) -> Row:
    return run_cell(_KEPT[0], cell)


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
                **row.cell._asdict(),
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
