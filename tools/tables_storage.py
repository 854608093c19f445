"""Tables of what storage costs, and of what the daemon adds to it."""

from __future__ import annotations

from typing import Any

from tools.results import RESULTS, load, rows

MIB = 1 << 20
CALLS = {"match": "Match, resident", "match_absent": "Match, absent", "step": "Step of 32"}


def storage_calls() -> str:
    """Calls beside storage and peers, whole and broken, as multiples of those without."""
    found = load("storage_calls.json")
    cases = found["cases"] | load("storage_calls_s3.json")["cases"]
    body = [[name, *(_call(calls[call]) for call in CALLS)] for name, calls in cases.items()]
    return rows(["p50, p99 ms (of those without storage)", *CALLS.values()], body, found["machine"])


def _call(row: dict[str, Any]) -> str:
    return f"{row['p50_ms']:.2f} ({row['p50_ratio']:.2f}), {row['p99_ms']:.2f} ({row['p99_ratio']:.2f})"


def storage_engines() -> str:
    """Reads and writes of verified objects, as shares of what there is without the daemon."""
    body = []
    kinds = {
        "file": ("storage.json", "file"),
        "mooncake": ("storage_mooncake.json", "rows"),
        "s3": ("storage_s3.json", "rows"),
    }
    machines = []
    for kind, (name, key) in kinds.items():
        found = load(name)
        machines.append(found["machine"])
        for row in found[key]:
            cells = []
            for way in ("read", "write"):
                cells.append(f"{row[f'{way}_gb_s']:.2f} ({row[f'{way}_ratio']:.2f})")
                cells.append(f"{row[f'{way}_cpu_s_gb']:.2f} / {row[f'raw_{way}_cpu_s_gb']:.2f}")
            body.append([f"{kind}, {row['bytes'] / MIB:.3g} MiB", *cells])
    cpu = "CPU s a GB / without the daemon"
    return rows(["", "read GB/s (of raw)", cpu, "write GB/s (of raw)", cpu], body, machines[0])


def storage_ttft() -> str:
    """Time to first token by where a prefix lies, with computing all of it as the last row."""
    if not (RESULTS / "storage_ttft.json").exists():
        return "Not recorded yet."
    found = load("storage_ttft.json")
    by_tier = {row["tier"]: row for row in found["rows"]}
    recompute = by_tier.pop("recompute")
    names = {"file": f"file, {found['filesystem']}, {'direct' if found['direct'] else 'by the page cache'}"}
    body = []
    for tier, row in [*by_tier.items(), ("recompute", recompute)]:
        of_recompute = f"{recompute['overlapped_p50_ms'] / row['overlapped_p50_ms']:.1f}x"
        loads = [_p50_max(row, name) for name in ("overlapped", "after", "loaded")]
        rate = "-" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f}"
        body.append([names.get(tier, tier), *loads, rate, of_recompute, str(row["repeats"])])
    head = ["the prefix comes from", "layer by layer, p50 / max ms", "load, then compute", "of that, the load", "GB/s"]
    return rows([*head, "over recompute", "repeats"], body, found["machine"])


def _p50_max(row: dict[str, Any], name: str) -> str:
    if row[f"{name}_p50_ms"] is None:
        return "-"
    return f"{row[f'{name}_p50_ms']:.0f} / {row[f'{name}_max_ms']:.0f}"


def storage_peers() -> str:
    """Bytes between two daemons beside plain TCP streams."""
    found = load("storage_peers.json")
    names = list(found["cases"][0]["rows"])
    body = []
    for case in found["cases"]:
        beside = case["peers_beside"]
        cells = [_rate(case["rows"][name], beside.get(name)) for name in names]
        body.append([f"{case['block_tokens']} tokens, {case['bytes'] / 1e9:.1f} GB", *cells])
    return rows(["blocks of", *(name.replace("plain", "plain streams:") for name in names)], body, found["machine"])


def _rate(row: dict[str, Any], peers_beside: float | None) -> str:
    ratio = "" if peers_beside is None else f" ({peers_beside:.2f})"
    return f"{row['gb_per_s']:.1f}{ratio}, {row['cpu_seconds_per_gb']:.2f}"


def storage_handover() -> str:
    """The part of a hand-over that comes after the prefill's end."""
    found = load("storage_handover.json")
    body = [
        [
            f"{row['tokens']:,}, {row['bytes'] / 1e9:.1f} GB",
            f"{row['chunk']} / {row['rate']:,}",
            f"{row['prefill_ms']:.0f} / {row['transfer_p50_ms']:.0f}",
            f"{row['after_p50_ms']:.0f} / {row['after_max_ms']:.0f}",
            f"{row['share_p50']:.0%}",
            f"{_ms(row['chunk_alone_p50_ms'])} ({row['floor']:.0%} of the bytes)",
        ]
        for row in found["rows"]
    ]
    head = [
        "tokens",
        "chunk / tokens a second",
        "prefill / transfer alone, ms",
        "after the prefill's end, p50 / max ms",
    ]
    head += ["of the transfer, p50", "a chunk alone, ms"]
    return rows(head, body, found["machine"])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def storage_fleet() -> str:
    """A node with many peers."""
    found = load("storage_fleet.json")
    match = {
        name: f"{each['p50_us'] / 1e3:.2f} / {each['p99_us'] / 1e3:.2f}" for name, each in found["match_absent"].items()
    }
    cells = [str(found["peers"]), match["with"], match["without"], f"{found['p99_ratio']:.2f}"]
    cells += [f"{found['right_first']:.1%} of {found['prompts']}", f"{found['digest_bytes'] / 1024:.0f} KiB"]
    head = ["peers", "Match, absent, p50 / p99 ms", "without peers", "p99 ratio", "right peer first", "digests"]
    return rows(head, [cells], found["machine"])


TABLES = {
    "storage-calls": storage_calls,
    "storage-engines": storage_engines,
    "storage-ttft": storage_ttft,
    "storage-peers": storage_peers,
    "storage-handover": storage_handover,
    "storage-fleet": storage_fleet,
}
