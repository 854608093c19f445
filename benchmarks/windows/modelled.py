"""Throughput gain of recycling behind windows: ``python -m benchmarks.windows --json OUT``. Needs no GPU.

After the head-wise window benchmark of the source system: 128 and 1,024 prompts of about 10.6k tokens in and 4k out,
8 a second, seed 42, equal totals. The ledger and its flows are the daemon's; time is a model (``capacity_plan``), and
the engine a discrete-event one (``capacity_engine``). With and without recycling the windowed heads read no more than
their window, the pool has the same bytes, and prefix caching is on.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from benchmarks.support.recording import parser_of, save
from benchmarks.windows.capacity_engine import Engine, Outcome, Rules
from benchmarks.windows.capacity_node import Node
from benchmarks.windows.capacity_plan import (
    ERNIE_A800,
    LLAMA_H100,
    Machine,
    layout_of,
    pools_shared,
    pools_split,
    requests_of,
)

SEED = 42
RATE = 8.0
MEAN_IN, MEAN_OUT = 1_356_656 / 128, 518_946 / 128
WINDOW_TOKENS, SINK_TOKENS, BLOCK_TOKENS = 4096, 0, 64
STEP_TOKENS = 8192
SHARED_TOKENS = 1024
RESERVE_TOKENS = round(MEAN_OUT / 2)
SHARES = (0.25, 0.5, 0.75, 1.0)
PROMPTS = {ERNIE_A800: (128, 1024), LLAMA_H100: (1024,)}
SOURCE = {"128": [706.29, 1107.98], "1024": [722.93, 1270.87]}
TARGET_PERCENT = 75.0


class Case(NamedTuple):
    """One run: ``share`` of the kv heads have a window."""

    machine: Machine
    prompts: int
    share: float
    recycles: bool


def main() -> None:
    """Print the table and write JSON."""
    parser = parser_of(__doc__, "python -m benchmarks.windows")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    cases = [
        Case(machine, prompts, share, recycles)
        for machine, counts in PROMPTS.items()
        for prompts, share, recycles in itertools.product(counts, SHARES, (False, True))
    ]
    began = time.perf_counter()
    found: dict[Case, dict[str, float]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for case, row in zip(cases, pool.map(measure, cases), strict=True):
            found[case] = row
            note = f"{len(found)}/{len(cases)} {case.machine.name}, {case.prompts} prompts, {case.share:g}"
            print(f"{note}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    rows = [joined(case, found[case], found[case._replace(recycles=True)]) for case in cases if not case.recycles]
    show(rows)
    save(arguments, result_of(rows))


def measure(case: Case) -> dict[str, float]:
    """One run, on pools made for it out of the machine's bytes. Raises ValueError where the ledger does not add up."""
    machine = case.machine
    heads = round(case.share * machine.kv_heads)
    layout = layout_of(machine, heads, WINDOW_TOKENS, SINK_TOKENS, BLOCK_TOKENS)
    if case.recycles:
        pages = pools_split(layout, machine.pool_bytes, round(MEAN_IN + MEAN_OUT / 2), STEP_TOKENS)
    else:
        pages = pools_shared(layout, machine.pool_bytes)
    node = Node(layout, pages, machine.pool_bytes)
    requests = requests_of(case.prompts, RATE, SEED, MEAN_IN, MEAN_OUT)
    rules = Rules(case.recycles, STEP_TOKENS, SHARED_TOKENS, RESERVE_TOKENS)
    outcome = Engine(machine, node, rules, requests).run()
    problems = node.problems()
    if problems or outcome.done != case.prompts:
        raise ValueError(f"{case}: {outcome.done} done, {problems[:3]}")
    return {**_figures(outcome), "full_pages": pages[0], "window_pages": pages[1]}


def _figures(outcome: Outcome) -> dict[str, float]:
    return {
        "output_tokens_per_s": outcome.output_tokens / outcome.seconds,
        "mean_running": outcome.running_seconds / outcome.seconds,
        "most_running": outcome.most_running,
        "preemptions": outcome.preemptions,
        "mean_ttft_s": sum(outcome.first_token_s) / len(outcome.first_token_s),
        "seconds": outcome.seconds,
        "steps": outcome.steps,
        "output_tokens": outcome.output_tokens,
        "prefill_tokens": outcome.prefill_tokens,
        "hit_tokens": outcome.hit_tokens,
    }


def joined(case: Case, off: dict[str, float], on: dict[str, float]) -> dict[str, object]:
    """A row: the same requests without and with recycling."""
    gain = (on["output_tokens_per_s"] / off["output_tokens_per_s"] - 1) * 100
    return {
        "machine": case.machine.name,
        "prompts": case.prompts,
        "share": case.share,
        "gain_percent": gain,
        "off": off,
        "on": on,
    }


def show(rows: list[dict[str, object]]) -> None:
    """The table."""
    print(f"{'':30}{'prompts':>8}{'windowed':>9}{'tok/s off':>11}{'on':>9}{'gain':>9}{'running':>16}{'preempted':>12}")
    for row in rows:
        off, on = row["off"], row["on"]
        assert isinstance(off, dict)
        assert isinstance(on, dict)
        running = f"{off['mean_running']:.1f} -> {on['mean_running']:.1f}"
        preempted = f"{off['preemptions']} -> {on['preemptions']}"
        print(
            f"{row['machine']:30}{row['prompts']:8}{row['share']:9.0%}{off['output_tokens_per_s']:11.1f}"
            f"{on['output_tokens_per_s']:9.1f}{row['gain_percent']:+8.1f}%{running:>16}{preempted:>12}"
        )


def result_of(rows: list[dict[str, object]]) -> dict[str, object]:
    """Contents of the result file: the rows, their parameters, and the headline against its target."""
    headline = next(row for row in rows if row["prompts"] == 1024 and row["share"] == 1.0)
    return {
        "rows": rows,
        "gain_percent": headline["gain_percent"],
        "target_percent": TARGET_PERCENT,
        "source_tokens_per_s": SOURCE,
        "settings": {
            "seed": SEED,
            "rate": RATE,
            "mean_in": MEAN_IN,
            "mean_out": MEAN_OUT,
            "window_tokens": WINDOW_TOKENS,
            "sink_tokens": SINK_TOKENS,
            "block_tokens": BLOCK_TOKENS,
            "step_tokens": STEP_TOKENS,
            "shared_tokens": SHARED_TOKENS,
            "reserve_tokens": RESERVE_TOKENS,
            "preemption": "recompute",
        },
        "models": {
            machine.name: {
                "pool_bytes": machine.pool_bytes,
                "fixed_ms": machine.fixed_s * 1e3,
                "token_us": machine.token_s * 1e6,
                "kv_read_bytes_per_s": machine.bytes_per_s,
                "kv_token_bytes": machine.head_token_bytes * machine.kv_heads,
                "source": machine.source,
            }
            for machine in PROMPTS
        },
    }


if __name__ == "__main__":
    main()
