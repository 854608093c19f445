"""Writes the tables of figures from the files in benchmarks/results: ``python -m tools.tables [--check]``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` in README, docs/figures.md,
docs/simulating.md, docs/vllm.md, docs/sglang.md or docs/deploying.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from tools import (
    tables_compatibility,
    tables_eviction,
    tables_running,
    tables_sglang,
    tables_storage,
    tables_vllm,
    tables_vllm_runs,
)
from tools.results import RESULTS, ROOT
from tools.results import load as _load
from tools.results import rows as _rows

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "figures.md",
    tables_vllm.PAGE,
    tables_sglang.PAGE,
    tables_compatibility.PAGE,
    tables_eviction.PAGE,
)
TABLE = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
GIB, MIB = 1 << 30, 1 << 20


def main() -> None:
    """Rewrite the pages, or with ``--check`` fail when one is not what the files say."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = render(text)
        if "--check" in sys.argv[1:] and fresh != text:
            sys.exit(f"tables of {page.name} are stale: run python -m tools.tables")
        page.write_text(fresh, encoding="utf-8")


def render(text: str) -> str:
    """A page's text with every table made anew."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return TABLE.sub(table, text)


def headline() -> str:
    """The one table of the front page: what a prefix of 32k tokens costs where it lies."""
    files = [_load(f"{name}.json") for name in ("attach", "overlap", "vllm", "vllm-host")]
    attach, overlap, beside, in_vllm = files[0], files[1], files[2]["a"]["ours"], files[3]["b"]
    host = [row for row in attach["host"] if row["way"] == "by layer"]
    asked = max(row["tokens"] for row in in_vllm["ours-a"] if row["tokens"] % 64)
    first = {who: row["host_ms"] for who, rows in in_vllm.items() for row in rows if row["tokens"] == asked}
    longest = max((row for row in overlap["rows"] if row["pages"] == "runs"), key=lambda row: row["prefix_tokens"])
    other = max(beside, key=lambda row: row["tokens"])
    rows = [
        ["on the device, computed by another engine", f"{attach['hit']['median_ms']:.1f} ms, nothing copied"],
        [
            "in the host pool",
            f"{max(row['all_ms'] for row in host):.0f} ms, the first layer after {host[0]['first_layer_ms']:.1f} ms",
        ],
        [
            f"first token in vLLM, {other['tokens']:,} tokens that another process computed, against computing them",
            f"{other['other_ms']:.0f} ms against {other['computed_ms']:,.0f} ms",
        ],
        [
            f"first token in vLLM behind {asked:,} tokens in the host pool",
            f"{first['ours-a']:.0f} ms; its own offloading {first['offload']:.0f}, LMCache {first['lmcache']:.0f} ms",
        ],
        [
            f"first token behind {longest['prefix_tokens']:,} tokens in the host pool, against computing them",
            f"{longest['overlapped_ms']:.0f} ms against {longest['recompute_ms']:,.0f} ms",
        ],
    ]
    return _rows(["a prefix of 32k tokens, 8B model", "ready after"], rows, *(each["machine"] for each in files))


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
    by_way = {f"{way}: ": found[way] for way in ("lane", "grpc") if way in found} or {"": found}
    tables = [_round_trips(way, figures) for way, figures in by_way.items()]
    body = [row for _, rows in tables for row in rows]
    blank = ["-"] * (len(tables[0][0]) - 1)
    for other, look_ups in found.get("for_scale_ms", {}).items():
        for tokens, ms in look_ups.items():
            body.append([f"for scale: {other}, look-up of {int(tokens) // 1024}k tokens", f"{ms:.2f}", *blank])
    return _rows(["p50 / p99 ms", *tables[0][0]], body, found["machine"])


def _round_trips(way: str, found: Any) -> tuple[list[str], list[list[str]]]:
    """The columns, and a row for each kind of call."""
    columns = {"streams idle": found["without_swaps"]} if "without_swaps" in found else {}
    columns |= {f"swaps run, {n} client{'s' * (n != '1')}": each for n, each in found["by_clients"].items()}
    first = found["by_clients"][next(iter(found["by_clients"]))]
    picks: list[tuple[str, list[str]]] = [("ping", ["ping_ms"])]
    for tokens in first["match_ms"]:
        name = f"Match {int(tokens) // 1024}k tokens"
        picks.append((f"{name}, keys ready", ["match_ms", tokens, "keys_ready"]))
        picks.append((f"{name}, hashing", ["match_ms", tokens, "with_hashing"]))
    for tokens in first.get("match_window_ms", {}):
        name = f"Match {int(tokens) // 1024}k tokens, one window"
        picks.append((f"{name}, keys ready", ["match_window_ms", tokens, "keys_ready"]))
    picks += [(f"Step, {count} sequences", ["step_ms", count]) for count in first["step_ms"]]
    picks += [(f"Step, {count} grow and publish", ["step_publish_ms", count]) for count in first["step_publish_ms"]]
    picks += [(f"Step, {count} sent ahead", ["step_ahead_ms", count]) for count in first.get("step_ahead_ms", {})]
    body = [[way + label, *(_pair(each, path) for each in columns.values())] for label, path in picks]
    for engines, figures in found.get("step_paced_ms", {}).items():
        name = f"{way}Step, 32 grow and publish, {engines} engines each 10 ms"
        body.append([name, *["-"] * (len(columns) - 1), _pair(figures, [])])
    return list(columns), body


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
        found = _load(path.name)
        rows.append(
            [
                str(found["trace"]).removesuffix(".jsonl.zst"),
                str(found["settings"].get("backend", "shm")),
                str(found["settings"].get("eviction", "lru")),
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
    head = [
        "trace",
        "backend",
        "eviction",
        "engines",
        "device blocks",
        "host blocks",
        "requests",
        "device hits",
        "host hits",
        "hit ratio",
    ]
    return _rows([*head, "kills", "corrupt pages", "conservation"], rows)


def swap_cuda() -> str:
    """Scattered swaps on a GPU beside one call of the driver that copies one way."""
    return _swaps("swap-cuda.json", at_least=GIB)


def swap_tickets() -> str:
    """The same of tickets of several sizes, in single pages."""
    return _swaps("swap-tickets.json", at_least=0)


def _swaps(name: str, at_least: int) -> str:
    """Table of swaps. ``at_least``: smallest reported tickets, bytes each way."""
    found = _load(name)
    cells: dict[str, dict[int, str]] = {}
    for row in found["rows"]:
        ways = 2 if row["way"] == "both" else 1
        each_way = row["copy_bytes"] / ways
        if each_way < at_least:
            continue
        size = f"{each_way / GIB:g} GiB" if each_way >= GIB else f"{each_way / MIB:g} MiB"
        label = f"{row['way']}, {row['steps']}, {size}, runs of {row['run_blocks']}"
        ratio = f"{row['of_one_way']:.2f}x" if ways == 2 else f"{row['ratio']:.2f}"
        cells.setdefault(label, {})[row["plane_bytes"]] = f"{row['gb_per_s']:.1f} ({ratio})"
    widths = sorted({row["plane_bytes"] for row in found["rows"]})
    body = [[label, *(each.get(width, "-") for width in widths)] for label, each in cells.items()]
    head = ["GB/s (of one memcpy)", *(f"{width / 1024:g} KiB" for width in widths)]
    return _rows(head, body, found["machine"])


def fairness_cuda() -> str:
    """A short load behind long ones."""
    found = _load("fairness-cuda.json")
    short, long = (f"{found[name] / GIB:g} GiB" for name in ("short_bytes", "long_bytes"))
    body = [
        ["alone", f"{found['alone_ms']:.1f}", f"{found['alone_worst_ms']:.1f}", "1", ""],
        [
            f"behind four endless loads of {long}",
            f"{found['behind_ms']:.1f}",
            f"{found['behind_worst_ms']:.1f}",
            f"{found['ratio']:.2f} (worst {found['worst_ratio']:.2f}, budget {found['budget']:g})",
            f"{found['gb_per_s']:.1f}",
        ],
        ["first come, first served (computed)", "", "", f"{found['first_come_ratio']:g}", ""],
    ]
    return _rows([f"load of {short}", "median ms", "worst ms", "of alone", "GB/s in all"], body, found["machine"])


def interference() -> str:
    """Slowdown of an engine by swaps of another process."""
    found = _load("interference.json")
    modes = list(found["budgets"])
    by_kind: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        by_kind.setdefault((row["swapper"], row["way"]), {})[row["mode"]] = row
    body = []
    for (swapper, way), rows in by_kind.items():
        slower = [
            f"{row['slowdown']:.3f}, {row['slowdown_mean']:.2f} ({row['slowdown_p99']:.2f})"
            for row in (rows[mode] for mode in modes)
        ]
        rate = " / ".join(f"{rows[mode]['gb_per_s']:.0f}" for mode in modes)
        body.append([f"{swapper}, {way}", *slower, rate])
    heads = [f"{mode}: median x (budget {found['budgets'][mode]:g}), mean x (p99 x)" for mode in modes]
    return _rows(["swaps by", *heads, f"GB/s beside {' / '.join(modes)}"], body, found["machine"])


def attach() -> str:
    """Start cost of a daemon, and time to read a cached prefix."""
    found = _load("attach.json")
    start, memory, hit, budgets = (found[name] for name in ("start", "memory", "hit", "budgets"))
    taken, says = (f"{memory[name] / MIB:.0f} MiB" for name in ("taken_bytes", "context_bytes"))
    filled = f"{start['filled_s']:.1f} s ({start['gb_per_s']:.1f} GB/s)"
    body = [
        ["daemon starts until it serves", f"{start['serving_s']:.2f} s", ""],
        [f"its host pool of {start['host_gib']} GiB is whole and pinned", filled, ""],
        ["GPU memory beside the pools", f"{taken} (it says {says})", f"{budgets['context_bytes'] / MIB:.0f} MiB"],
    ]
    for row in found["restart"]:
        blocks, spawned = f"{row['blocks']:,}", f"{row['since_spawn_ms'] / 1e3:.1f} s"
        told = f"{row['usable_ms']:.0f} ms (all {blocks} blocks {row['whole_ms']:.0f} ms; from its start {spawned})"
        body.append(
            [f"engine restarts, pool of {row['pool_gib']} GiB: first page", told, f"{budgets['restart_ms']:g} ms"]
        )
    spread = f"{hit['median_ms']:.2f} ms (worst {hit['worst_ms']:.2f}; bytes copied: {_copied(hit)})"
    body.append(["32k tokens on the device, of another engine: first page", spread, f"{budgets['hit_ms']:g} ms"])
    for row in found["host"]:
        cited = found["cited"][row["order"]]
        first = "" if row["first_layer_ms"] is None else f", first layer {row['first_layer_ms']:.1f} ms"
        told = f"{row['all_ms']:.1f} ms, {row['gb_per_s']:.1f} GB/s{first}"
        theirs = f"{found['cited']['of']}: {cited['ms']} ms, {cited['gb_per_s']} GB/s"
        body.append([f"32k tokens on the host, {row['order']}, {row['way']}", told, theirs])
    return _rows(["", "measured", "budget, or for scale"], body, found["machine"])


def _copied(hit: dict[str, Any]) -> int:
    return sum(int(after) - int(before) for before, after in (hit["h2d_bytes"], hit["d2h_bytes"]))


def overlap() -> str:
    """Time to first token of prompts whose prefix lies on the host."""
    found = _load("overlap.json")
    columns = {
        "prefix is on the device": "compute_ms",
        "transfer alone": "transfer_ms",
        "layer by layer": "overlapped_ms",
        "load, then compute": "after_ms",
        "recompute": "recompute_ms",
    }
    body = [
        [
            f"{row['prefix_tokens']:,}",
            row["pages"],
            *(f"{row[name]:.1f}" for name in columns.values()),
            f"{row['of_the_larger']:.3f}",
            f"{row['speed_up']:.1f}x",
        ]
        for row in found["rows"]
    ]
    head = ["prefix, tokens", "device pages", *(f"{name}, ms" for name in columns)]
    return _rows([*head, "layer by layer / larger of the two", "over recompute"], body, found["machine"])


def windows() -> str:
    """Throughput with and without recycling behind windows."""
    found = _load("windows.json")
    body = []
    for row in found["rows"]:
        off, on = row["off"], row["on"]
        rates = [f"{each['output_tokens_per_s']:,.0f}" for each in (off, on)]
        running = f"{off['mean_running']:.1f} / {on['mean_running']:.1f}"
        told = [f"{row['gain_percent']:+.1f} %", running, f"{off['preemptions']} / {on['preemptions']}"]
        body.append([row["machine"], f"{row['prompts']:,}", f"{row['share']:.0%}", *rates, *told])
    head = ["modelled as", "prompts", "windowed heads", "tokens/s off", "on", "gain", "mean running off / on"]
    return _rows([*head, "preempted"], body, found["machine"])


def kernels() -> str:
    """Kernels that engines run beside a plain copy on the device."""
    found = _load("kernels.json")
    body = [
        [
            row["name"],
            f"{row['us']:.0f}",
            f"{row['gb_per_s']:,.0f} ({row['share_of_copy']:.2f} of a copy)",
            "bit for bit" if not row["wrong"] else f"{row['wrong']} bytes wrong",
        ]
        for row in found["moved"]
        if row["megabytes"] > 1
    ]
    for row in found["attention"]:
        shape = row["shape"]
        name = f"decode attention, {shape['batch']} x {shape['query_heads']} / {shape['kv_heads']} heads"
        of_torch = f"{row['gb_per_s']:,.0f} ({row['ratio']:.2f}x torch's time)"
        name += f", {shape['tokens']:,} tokens of {shape['width']}"
        body.append([name, f"{row['us']:.0f}", of_torch, f"{row['worst']:.1g} of {row['largest']:.2g}"])
    return _rows(["kernel", "us", "GB/s", "largest error"], body, found["machine"])


TABLES: dict[str, Callable[[], str]] = {
    "compatibility": tables_compatibility.compatibility,
    "headline": headline,
    "ledger": ledger,
    "rpc": rpc,
    "swap": swap,
    "replay": replay,
    "simulation": tables_eviction.simulation,
    "stress": tables_eviction.stress,
    "stress-traces": tables_eviction.stress_traces,
    "hybrid-states": tables_eviction.hybrid_states,
    "learning": tables_eviction.learning,
    "learning-sizes": tables_eviction.learning_sizes,
    "swap-cuda": swap_cuda,
    "swap-tickets": swap_tickets,
    "fairness-cuda": fairness_cuda,
    "interference": interference,
    "attach": attach,
    "overlap": overlap,
    "windows": windows,
    "kernels": kernels,
    "windows-real": tables_running.windows_real,
    "daemon-kills": tables_running.daemon_kills,
    "soak": tables_running.soak,
    "hostile": tables_running.hostile,
    "sick-party": tables_running.sick_party,
    "fuzz": tables_running.fuzz,
    "telemetry": tables_running.telemetry,
    "inspection": tables_running.inspection,
    **tables_storage.TABLES,
    "gpus": tables_running.gpus,
    "gpus-peers": tables_running.gpus_peers,
    "gpus-beside": tables_running.gpus_beside,
    "gpus-4": lambda: tables_running.gpus("gpus-4.json"),
    "gpus-8": lambda: tables_running.gpus("gpus-8.json"),
    "gpus-8-beside": lambda: tables_running.gpus_beside("gpus-8.json"),
    **tables_sglang.TABLES,
    **tables_vllm_runs.TABLES,
    **tables_vllm.TABLES,
}


if __name__ == "__main__":
    main()
