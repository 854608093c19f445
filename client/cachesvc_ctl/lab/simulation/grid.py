"""Simulations of one trace: every combination of policies and pool sizes, run once each, in several processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.model.requests import LINEAR_TOKENS, Ended
from cachesvc.model.text.nearest import did_you_mean
from cachesvc_ctl.lab.simulation.hybrid import NO_COPIES, Copies
from cachesvc_ctl.lab.simulation.optimum import optimal_hits
from cachesvc_ctl.lab.simulation.references import ENDS, EVERY, reference_hits
from cachesvc_ctl.lab.traces.prompts import Prompts
from cachesvc_ctl.lab.traces.trace import SECONDS_A_TOKEN

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
