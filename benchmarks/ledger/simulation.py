"""Hit rates of eviction policies on traces, and the speed of the simulation.

``python -m benchmarks.ledger.simulation TRACE... --json OUT``

Each trace is simulated with device pools of several shares of its distinct blocks and no host, in one process, under
least recently used, hazard, with and without cost, and the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachesvc_lab.grid import OPTIMUM, Cell, run_grid
from cachesvc_lab.traces import DEFAULT_BLOCK_TOKENS, Prompts, prompts_of, read_trace

from benchmarks.support.recording import parser_of, save

PERCENTS = (1, 2, 5, 10, 20, 50)
POLICIES = ("lru", "hazard", "hazard_cost", OPTIMUM)


def main() -> None:
    """Print each row and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--block-tokens", type=int, default=DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--limit", type=int, default=None, help="only the first N requests")
    arguments = parser.parse_args()
    traces = []
    for path in arguments.traces:
        requests = read_trace(path, block_tokens=arguments.block_tokens, limit=arguments.limit)
        traces.append(measure(prompts_of(path.name.split(".")[0], requests, arguments.block_tokens)))
    save(arguments, {"traces": traces})


def measure(
    prompts: Prompts, percents: Sequence[int] = PERCENTS, policies: Sequence[str] = POLICIES, processes: int = 1
) -> dict[str, Any]:
    """Hits by share and policy, and the requests a minute of each policy over all shares, one process."""
    sizes = [max(1, prompts.distinct_blocks * percent // 100) for percent in percents]
    cells = [Cell(policy, "write_back", size, 0) for size in sizes for policy in policies]
    found = {row.cell: row for row in run_grid(prompts, cells, processes, lambda *_: None)}
    rows = []
    for percent, size in zip(percents, sizes, strict=True):
        of_size = {policy: found[Cell(policy, "write_back", size, 0)] for policy in policies}
        hits = {policy: row.device_hits for policy, row in of_size.items()}
        saved = {policy: round(row.compute_saved, 5) for policy, row in of_size.items()}
        rows.append({"percent": percent, "device_blocks": size, "hits": hits, "compute_saved": saved})
        print(prompts.trace, rows[-1], flush=True)
    seconds = {policy: sum(row.seconds for row in found.values() if row.cell.policy == policy) for policy in policies}
    pace = {policy: round(len(prompts) * len(sizes) / each * 60) for policy, each in seconds.items()}
    print(prompts.trace, "requests a minute:", pace, flush=True)
    return {
        "trace": prompts.trace,
        "requests": len(prompts),
        "blocks": len(prompts.path),
        "rows": rows,
        "requests_per_minute": pace,
    }


if __name__ == "__main__":
    main()
