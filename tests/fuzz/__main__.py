"""``python -m tests.fuzz``: try many messages, print what came of it, and exit 1 unless nothing broke."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.fuzz.fuzzer import Findings
from tests.fuzz.runs import fuzz_in_process, fuzz_socket, verdict

WIRE_SHARE = 0.03


def main() -> None:
    """Exit codes: 0 nothing broke, 1 something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes to share what is tried in process (default 1)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    on_wire = int(arguments.messages * WIRE_SHARE)
    each = -(-(arguments.messages - on_wire) // arguments.jobs)
    with ProcessPoolExecutor(arguments.jobs + 1, mp_context=get_context("spawn")) as pool:
        remote = pool.submit(fuzz_socket, on_wire, arguments.seed)
        seeds = range(arguments.seed + 1, arguments.seed + 1 + arguments.jobs)
        inside, *others = pool.map(fuzz_in_process, [each] * arguments.jobs, seeds)
        outside, broken = remote.result()
    for other in others:
        inside.add(other)
    wrong = verdict(inside, []) + verdict(outside, broken)
    result: dict[str, Any] = {
        "seeds": [arguments.seed, arguments.seed + arguments.jobs],
        "messages": inside.messages + outside.messages,
        "crashes": len(wrong),
        "answered_internal": inside.statuses.get("INTERNAL", 0) + outside.statuses.get("INTERNAL", 0),
        "in_process": inside.shown(),
        "over_the_socket": outside.shown(),
    }
    print(table(inside, outside))
    for line in wrong:
        print(f"BROKEN {line}", file=sys.stderr)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if wrong else 0)


def table(inside: Findings, outside: Findings) -> str:
    """Both halves side by side."""
    rows: list[tuple[str, Any, Any]] = [
        (name.replace("_", " "), getattr(inside, name), getattr(outside, name))
        for name in ("messages", "sensible", "mutated", "random")
    ]
    rows += [("crashes", len(inside.crashes), len(outside.crashes))]
    rows += [("conservation problems", len(inside.problems), len(outside.problems))]
    rows += [("pages and leases held at the end", sum(inside.left.values()), sum(outside.left.values()))]
    rows += [("memory grown, KiB", inside.grown_kib, outside.grown_kib)]
    rows += [("seconds", inside.seconds, outside.seconds)]
    for status in sorted({*inside.statuses, *outside.statuses}):
        rows.append((f"answered {status}", inside.statuses.get(status, 0), outside.statuses.get(status, 0)))
    lines = [f"{'':36}{'in process':>12}{'over the socket':>18}"]
    lines += [f"{name:36}{left:>12,}{right:>18,}" for name, left, right in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
