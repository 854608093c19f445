"""Tables of docs/vllm.md of what ``benchmarks.vllm`` measured on GPUs, beside vLLM alone, offloading and LMCache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.results import load, rows

PEERS = {"plain": "vLLM alone", "ours-a": "cachesvc", "offload": "vLLM's offloading", "lmcache": "LMCache"}
LOADS = ("1k in, 256 out", "128 in, 512 out")
THROUGHPUT = ("vllm-throughput.json", "vllm.json", "vllm-throughput-h200.json", "vllm-throughput-back.json")


def hits() -> str:
    """First tokens of what another process computed, in turns with vLLM alone and its own hit."""
    found = load("vllm.json")
    body = []
    for ours, turns in zip(found["a"]["ours"], found["a"]["in turns with plain"], strict=True):
        times = [ours["computed_ms"], turns["ours-a ms"], turns["plain ms"]]
        shown = [f"{each:.0f}" for each in times] + [f"{turns['ratio']:.2f} ± {turns['error']:.2f}"]
        body.append([_tokens(ours["tokens"]), *shown, f"{max(ours['other_apart'], ours['again_apart']):g}"])
    head = ["ms to the first token", "computed", "another process's", "vLLM alone, its own", "ours / alone", "apart"]
    return rows(head, body, found["machine"])


def host() -> str:
    """First tokens of prompts that are on the host alone, by peer."""
    found = load("vllm-host.json")
    body = []
    for ours, offload, lmcache in zip(*(found["b"][who] for who in ("ours-a", "offload", "lmcache")), strict=True):
        times = [f"{each['host_ms']:.0f} ({each['host_ms_least']:.0f})" for each in (ours, offload, lmcache)]
        parts = [f"{ours['host_ms'] / each['host_ms']:.2f}" for each in (offload, lmcache)]
        body.append([_tokens(ours["tokens"]), *times, *parts])
    head = ["ms to the first token, median (least)", *(PEERS[who] for who in ("ours-a", "offload", "lmcache"))]
    return rows([*head, "of offloading", "of LMCache"], body, found["machine"])


def decoding() -> str:
    """Times between tokens of eight requests that decode, with such a load in their midst."""
    found = load("vllm-host.json")
    body = [
        [
            f"{PEERS[who]}, {row['tokens']:,} tokens",
            f"{row['host_ms']:.0f}",
            *(f"{row[name]:.1f}" for name in ("gap_ms_p50", "gap_ms_p99")),
            f"{row['alone_gap_ms_p99']:.1f}",
            f"{row['gap_p99_ratio']:.2f}",
        ]
        for who in ("ours-a", "offload", "lmcache")
        for row in found["i"][who]
    ]
    head = ["ms", "first token", "between tokens, p50", "p99", "p99 without the load", "ratio"]
    return rows(head, body, found["machine"])


def throughput() -> str:
    """Output tokens a second with nothing shared, and the connector's time in an iteration."""
    body, machines = [], []
    for name in THROUGHPUT:
        found = load(name)
        machines.append(found["machine"])
        policy = found["shape"]["daemon"].rpartition(" ")[2]
        for what in LOADS:
            ratios = ", ".join(f"{each:.3f}" for each in found["c"][f"ours beside plain, {what}"]["ratios"])
            label = f"{what}, `{policy}`, {found['machine']['gpu'].split(' ')[1]}"
            body.append([label, ratios, *_connector(found["c"], what)])
    head = ["64 requests at a time", "ours / vLLM alone, by round", "connector, p50", "p99"]
    return rows(head, body, *machines)


def agents() -> str:
    """Agents' turns, whose working set is four pools."""
    found = load("vllm-agents.json")
    body = [
        [
            PEERS[who],
            f"{row['output_tokens_s']:.0f}",
            f"{row['first_ms_p50']:.0f} / {row['first_ms_p99']:.0f}",
            f"{row['hit_ratio']:.3f}",
        ]
        for who in ("ours-a", "plain", "offload", "lmcache")
        for row in [found["d"][who]]
    ]
    return rows(["agents", "output tokens/s", "first token, p50 / p99 ms", "hits"], body, found["machine"])


def near() -> str:
    """First tokens of what an engine on another GPU computed."""
    found = load("vllm-near.json")
    body = [
        [
            f"{row['tokens']:,}",
            f"{row['near_ms']:.0f} ({min(row['near_ms_each']):.0f})",
            f"{row['own_ms']:.0f}",
            *(f"{row[name] / 1e9:.2f}" for name in ("p2p_bytes", "h2d_bytes")),
        ]
        for row in found["n"]["ours-n1"]
    ]
    head = ["tokens", "first token, median (least)", "its own hit", "GB between the GPUs", "GB from the host"]
    return rows(head, body, found["machine"])


def _tokens(count: int) -> str:
    return f"{count:,}" if count % 64 else f"{count:,}, ends with a block"


def _connector(found: dict[str, Any], what: str) -> Iterator[str]:
    """Range over the rounds of the connector's percentiles."""
    rounds = [each for name, each in found.items() if name.startswith(f"ours-a, {what}, round")]
    for percentile in ("step_ms_p50", "step_ms_p99"):
        times = [each[percentile] for each in rounds]
        yield f"{min(times):.2f} to {max(times):.2f} ms"


TABLES = {
    "vllm-hits": hits,
    "vllm-host": host,
    "vllm-decoding": decoding,
    "vllm-throughput": throughput,
    "vllm-agents": agents,
    "vllm-near": near,
}
