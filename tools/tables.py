"""Writes README's tables of figures from the files in benchmarks/results: ``python -m tools.tables [--check]``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


def main() -> None:
    """Rewrite README, or with ``--check`` fail when it is not what the files say."""
    text = README.read_text(encoding="utf-8")
    fresh = render(text)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if fresh == text else "README's tables are stale: run python -m tools.tables")
    README.write_text(fresh, encoding="utf-8")


def render(text: str) -> str:
    """README's text with every table made anew."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _load(name: str) -> dict[str, Any]:
    loaded = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def _rows(head: list[str], rows: list[list[str]], machine: dict[str, Any] | None = None) -> str:
    lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
    if machine:
        said = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {machine['date']}"
        lines += ["", f"<sub>{said}</sub>"]
    return "\n".join(lines)


def ledger() -> str:
    """Costs of the ledger by number of resident blocks."""
    found = _load("ledger.json")
    sizes = list(found["match_pin_us"])
    names = {
        "match_pin_us": "match + pin of a 2,048-block prompt, us",
        "publish_us_per_block": "publish, us a block",
        "evict_us_per_block": "evict, us a block",
        "allocate_us_per_page": "allocate, us a page",
        "bytes_per_block_by_size": "memory, bytes a block",
    }
    rows = [[label, *(f"{found[name][size]:.1f}" for size in sizes)] for name, label in names.items()]
    return _rows(["resident blocks", *(f"{int(size):,}" for size in sizes)], rows, found["machine"])


def rpc() -> str:
    """Round trips, p50 / p99 in milliseconds."""
    found = _load("rpc.json")
    columns = {"streams idle": found["without_swaps"]} if "without_swaps" in found else {}
    columns |= {f"swaps run, {n} client{'s' * (n != '1')}": each for n, each in found["by_clients"].items()}
    first = found["by_clients"][next(iter(found["by_clients"]))]
    picks: list[tuple[str, list[str]]] = [("ping", ["ping_ms"])]
    for tokens in first["match_ms"]:
        name = f"Match {int(tokens) // 1024}k tokens"
        picks.append((f"{name}, keys ready", ["match_ms", tokens, "keys_ready"]))
        picks.append((f"{name}, hashing", ["match_ms", tokens, "with_hashing"]))
    picks += [(f"Step, {count} sequences", ["step_ms", count]) for count in first["step_ms"]]
    picks += [(f"Step, {count} grow and publish", ["step_publish_ms", count]) for count in first["step_publish_ms"]]
    body = [[label, *(_pair(each, path) for each in columns.values())] for label, path in picks]
    return _rows(["p50 / p99 ms", *columns], body, found["machine"])


def _pair(figures: Any, path: list[str]) -> str:
    for key in path:
        figures = figures[key]
    return f"{figures['p50']:.2f} / {figures['p99']:.1f}"


def swap() -> str:
    """Scattered swaps beside one plain copy of the same bytes in the same run."""
    found = _load("swap-shm.json")
    kinds = {(row["way"], row["steps"], row["run_blocks"]): None for row in found["rows"]}
    widths = sorted({row["plane_bytes"] for row in found["rows"]})
    by_kind = {(row["way"], row["steps"], row["run_blocks"], row["plane_bytes"]): row for row in found["rows"]}
    rows = []
    for way, steps, run in kinds:
        picked = [by_kind.get((way, steps, run, width)) for width in widths]
        cells = [f"{row['gb_per_s']:.1f} ({row['ratio']:.2f})" if row else "-" for row in picked]
        rows.append([f"{way}, {steps}, runs of {run}", *cells])
    return _rows(["GB/s (of a plain copy)", *(f"{width >> 10} KiB" for width in widths)], rows, found["machine"])


def replay() -> str:
    """Replays of the real traces."""
    rows = []
    for path in sorted(RESULTS.glob("replay-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows.append(
            [
                str(found["trace"]).removesuffix(".jsonl.zst"),
                str(found["engines"]),
                f"{found['pool_blocks']:,}",
                f"{found['host_blocks']:,}",
                f"{found['requests']:,}",
                f"{found['hits']['device']:,}",
                f"{found['hits']['host']:,}",
                f"{found['hit_ratio']:.1%}",
                str(found["kills"]),
                f"{found['corrupt_pages']} of {found['verified_pages']:,}",
                str(found["conservation"]),
            ]
        )
    head = ["trace", "engines", "device blocks", "host blocks", "requests", "device hits", "host hits", "hit ratio"]
    return _rows([*head, "kills", "corrupt pages", "conservation"], rows)


TABLES: dict[str, Callable[[], str]] = {"ledger": ledger, "rpc": rpc, "swap": swap, "replay": replay}

if __name__ == "__main__":
    main()
