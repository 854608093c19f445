"""Token hits of a hybrid model on traces: which states a policy keeps, beside two simple rules and blocks alone.

``python -m benchmarks.ledger.hybrid_states TRACE... --json OUT``

Cells are those of ``cachesvc simulate --layout``. Each is written once it is measured, and cells that the file has
already are not run again: a run can be cut off, and goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from cachesvc_lab.grid import NO_COPIES, Cell, hybrid_grid, hybrid_model, run_cell
from cachesvc_lab.traces import DEFAULT_BLOCK_TOKENS, Prompts, prompts_of, read_trace

from benchmarks.support.machine import describe_machine
from benchmarks.support.recording import write_result

PERCENTS = (2, 5, 10, 20, 50)
POLICIES = ("lru", "hazard")
ALONE = ", KV alone"


def main() -> None:
    """Print each cell and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--layout", default="qwen3-next")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--percents", type=lambda text: list(map(int, text.split(","))), default=list(PERCENTS))
    parser.add_argument("--limit", type=int, default=None, help="only the first N requests")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    given = parser.parse_args()
    read = {path.name.split(".")[0]: read_trace(path, limit=given.limit) for path in given.traces}
    traces = {name: prompts_of(name, requests, DEFAULT_BLOCK_TOKENS) for name, requests in read.items()}
    found = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {"traces": {}}
    for name, prompts in traces.items():
        known = {"requests": len(prompts), "blocks": len(prompts.path), "layout": given.layout, "rows": {}}
        found["traces"].setdefault(name, known)
    cells = missing(found["traces"], traces, given.percents, given.policies)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, fresh, _keep, (traces,)) as pool:
        running = {pool.submit(_hits, trace, cell): (row, name) for trace, cell, row, name in cells}
        for done in as_completed(running):
            row, name = running[done]
            row[name] = round(done.result(), 5)
            print(row["percent"], name, row[name], flush=True)
            write_result(given.json, {**found, "machine": describe_machine()})


def missing(
    known: dict[str, Any], traces: Mapping[str, Prompts], percents: Sequence[int], policies: Sequence[str]
) -> list[tuple[str, Cell, dict[str, Any], str]]:
    """Cells that are not known yet: their trace, the row that they belong to, and their name in it."""
    cells = []
    for percent in percents:
        for trace, prompts in traces.items():
            blocks = max(1, prompts.distinct_blocks * percent // 100)
            row = known[trace]["rows"].setdefault(str(percent), {"percent": percent, "device_blocks": blocks})
            copies = hybrid_model(known[trace]["layout"]).copies(prompts.block_tokens)
            for cell in hybrid_grid(policies, [blocks], copies):
                name = f"{cell.policy}{ALONE}" if cell.copies == NO_COPIES else cell.policy
                if name not in row:
                    cells.append((trace, cell, row, name))
    return cells


_TRACES: dict[str, Prompts] = {}
"""Traces of a process of the pool, which was started with them."""


def _keep(traces: Mapping[str, Prompts]) -> None:
    _TRACES.update(traces)


def _hits(trace: str, cell: Cell) -> float:
    return run_cell(_TRACES[trace], cell).hit_ratio


if __name__ == "__main__":
    main()
