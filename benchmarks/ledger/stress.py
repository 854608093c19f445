"""Hit rates of eviction policies on other kinds of traffic, and on traffic that floods or changes.

``python -m benchmarks.ledger.stress [TRACE...] --json OUT``

Each of ``WORKLOADS``; each TRACE with as many prompts of its lengths that come but once; and all of them in turn, the
first once more at the end, at one size. As ``benchmarks.ledger.simulation``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cachesvc_lab.grid import OPTIMUM
from cachesvc_lab.traces import TraceRequest, prompts_of, read_trace

from benchmarks.ledger.simulation import PERCENTS, measure
from benchmarks.ledger.workloads import BLOCK_TOKENS, WORKLOADS, in_turn, once_more, workload
from benchmarks.support.recording import parser_of, save

TRACE_PERCENTS = (5,)
POLICIES = ("lru", "hazard", OPTIMUM)


def main() -> None:
    """Print each row and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    processes = len(os.sched_getaffinity(0))
    measured = []
    for name, requests in traffic(arguments.traces, arguments.only, arguments.seed):
        percents = PERCENTS if name in WORKLOADS else TRACE_PERCENTS
        measured.append(measure(prompts_of(name, requests, BLOCK_TOKENS), percents, POLICIES, processes))
    save(arguments, {"traces": measured})


def traffic(traces: list[Path], names: list[str], seed: int) -> Iterator[tuple[str, list[TraceRequest]]]:
    """Label and requests of each workload, in order of time."""
    for name in names:
        yield name, workload(name, seed)
    read = [list(read_trace(path, block_tokens=BLOCK_TOKENS)) for path in traces]
    for path, requests in zip(traces, read, strict=True):
        yield f"{path.name.split('.')[0]}, as many prompts that come once", once_more(requests, seed)
    if len(read) > 1:
        yield "these traces in turn, then the first again", in_turn([*read, read[0]])


if __name__ == "__main__":
    main()
