"""Token hits of a hybrid model on traces: which states a policy keeps, beside two simple rules and blocks alone.

``python -m benchmarks.ledger.hybrid_states TRACE... --json OUT``

Cells are those of ``cachesvc simulate --layout``. Each is written once it is measured, and cells that the file has
already are not run again: a run can be cut off, and goes on where it ended. Small pools take longest: they come last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachesvc_ctl.lab.simulation.grid import hybrid_grid, run_cell
from cachesvc_ctl.lab.simulation.hybrid import NO_COPIES, hybrid_model
from cachesvc_ctl.lab.traces.prompts import Prompts, prompts_of
from cachesvc_ctl.lab.traces.trace import DEFAULT_BLOCK_TOKENS, read_trace

from benchmarks.support.machine import describe_machine
from benchmarks.support.recording import write_result

PERCENTS = (50, 20, 10, 5, 2)
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
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    arguments = parser.parse_args()
    found = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {"traces": {}}
    for path in arguments.traces:
        requests = read_trace(path, block_tokens=DEFAULT_BLOCK_TOKENS, limit=arguments.limit)
        prompts = prompts_of(path.name.split(".")[0], requests, DEFAULT_BLOCK_TOKENS)
        known = {"requests": len(prompts), "blocks": len(prompts.path), "layout": arguments.layout, "rows": {}}
        trace = found["traces"].setdefault(prompts.trace, known)
        for percent in arguments.percents:
            for _ in measure(prompts, trace, percent, arguments.policies):
                write_result(arguments.json, {**found, "machine": describe_machine()})


def measure(prompts: Prompts, trace: dict[str, Any], percent: int, policies: list[str]) -> Iterator[None]:
    """Add the cells of one size that ``trace`` has not; yields after each."""
    blocks = max(1, prompts.distinct_blocks * percent // 100)
    row = trace["rows"].setdefault(str(percent), {"device_blocks": blocks})
    copies = hybrid_model(trace["layout"]).copies(prompts.block_tokens)
    for cell in hybrid_grid(policies, [blocks], copies):
        is_alone = cell.policy in policies and cell.copies == NO_COPIES
        name = f"{cell.policy}{ALONE}" if is_alone else cell.policy
        if name in row:
            continue
        row[name] = round(run_cell(prompts, cell).hit_ratio, 5)
        print(prompts.trace, percent, name, row[name], flush=True)
        yield


if __name__ == "__main__":
    main()
