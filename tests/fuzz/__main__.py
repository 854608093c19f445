"""``python -m tests.fuzz``: try many messages, print what came of it, and exit 1 unless nothing broke.

In rounds, each with fresh daemons and seeds: handlers in process, a daemon without tokens under several client
processes, and one with tokens. With ``--json`` the counts are written after each round, and a run that finds a file
goes on from there: so a million messages can be tried in pieces, with ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.support.recording import write_result
from tests.fuzz.fuzzer import Findings
from tests.fuzz.runs import fuzz_in_process, fuzz_socket, verdict

PARTS = {"in_process": "in process", "without_tokens": "without tokens", "with_tokens": "with tokens"}
Parts = dict[str, Findings]


def main() -> None:
    """Exit codes: 0 nothing broke, 1 something did."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="in all, those of earlier runs included")
    parser.add_argument("--round", type=int, default=50_000, help="messages of a round (default 50000)")
    parser.add_argument("--wire-share", type=float, default=0.2, help="part that goes over sockets (default 0.2)")
    parser.add_argument("--clients", type=int, default=4, help="processes that share a daemon (default 4)")
    parser.add_argument("--jobs", type=int, default=1, help="processes for what is tried in process (default 1)")
    parser.add_argument("--seconds", type=float, help="begin no further round after that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    parts, rounds, wrong = load(given.json)
    began = time.monotonic()
    while not wrong and messages_of(parts) < given.messages:
        if given.seconds is not None and time.monotonic() - began > given.seconds:
            break
        size = min(given.round, given.messages - messages_of(parts))
        wrong += one_round(parts, size, given.seed + rounds, given.wire_share, given.clients, given.jobs)
        rounds += 1
        if given.json is not None:
            save(given.json, parts, rounds, wrong, clients=given.clients, seed=given.seed)
        print(f"{messages_of(parts):,} of {given.messages:,} messages, {len(wrong)} broke", file=sys.stderr, flush=True)
    print(table(parts))
    for line in wrong:
        print(f"BROKEN {line}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def one_round(parts: Parts, messages: int, seed: int, wire_share: float, clients: int, jobs: int) -> list[str]:
    """Adds to ``parts``; returns what broke."""
    on_wire = max(clients, int(messages * wire_share / 2))
    each = max(1, -(-(messages - 2 * on_wire) // jobs))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        inside, *others = pool.map(fuzz_in_process, [each] * jobs, range(seed * 100, seed * 100 + jobs))
    for other in others:
        inside.add(other)
    wrong = verdict(inside, [])
    parts["in_process"].add(inside)
    for name in ("without_tokens", "with_tokens"):
        found, broken = fuzz_socket(on_wire, seed, clients, guarded=name == "with_tokens")
        parts[name].add(found)
        wrong += [f"{line} ({PARTS[name]}, seed {seed})" for line in verdict(found, broken)]
    return wrong


def messages_of(parts: Parts) -> int:
    """Number of messages of all parts."""
    return sum(part.messages for part in parts.values())


def load(path: Path | None) -> tuple[Parts, int, list[str]]:
    """Result of an earlier run: its parts, how many rounds it made, and what broke."""
    if path is None or not path.exists():
        return {name: Findings() for name in PARTS}, 0, []
    known = json.loads(path.read_text(encoding="utf-8"))
    return {name: Findings(**known[name]) for name in PARTS}, known["rounds"], known["broken"]


def save(path: Path, parts: Parts, rounds: int, wrong: list[str], **about: int) -> None:
    """For people, for tables, and for the next run."""
    known: dict[str, Any] = {
        "messages": messages_of(parts),
        "rounds": rounds,
        "broken": wrong,
        "answered_internal": sum(part.statuses.get("INTERNAL", 0) for part in parts.values()),
        **about,
        **{name: part.shown() for name, part in parts.items()},
    }
    write_result(path, known)


def table(parts: Parts) -> str:
    """All parts side by side."""
    found = list(parts.values())
    rows: list[tuple[str, list[Any]]] = [
        (name.replace("_", " "), [getattr(each, name) for each in found])
        for name in ("messages", "sensible", "mutated", "random")
    ]
    rows += [("crashes and INTERNAL", [len(each.crashes) for each in found])]
    rows += [("accounting problems", [len(each.problems) for each in found])]
    rows += [("pages and leases held at the end", [sum(each.left.values()) for each in found])]
    rows += [("RPCs", [len(each.rpcs) for each in found])]
    rows += [("memory grown, KiB", [each.grown_kib for each in found])]
    for status in sorted({status for each in found for status in each.statuses}):
        rows.append((f"answered {status}", [each.statuses.get(status, 0) for each in found]))
    lines = [f"{'':36}" + "".join(f"{name:>18}" for name in PARTS.values())]
    lines += [f"{name:36}" + "".join(f"{value:>18,}" for value in values) for name, values in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
