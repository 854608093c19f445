"""Tables of docs/sglang.md: SGLang on the daemon's pages beside SGLang alone and its HiCache."""

from __future__ import annotations

from tools.results import ROOT, load, rows

PAGE = ROOT / "docs" / "sglang.md"
HITS, HOST = "sglang-hits.json", "sglang-host.json"


def first_tokens() -> str:
    """First tokens of prompts by size: computed, found in place, in turns with SGLang alone, and from the host."""
    hits, host = load(HITS), load(HOST)
    beside = zip(hits["a"]["ours"], hits["a"]["plain"], hits["a"]["in turns with plain"], strict=True)
    loads = zip(host["b"]["ours-a"], host["b"]["hicache"], strict=True)
    body = []
    for (ours, plain, turns), (loaded, hicache) in zip(beside, loads, strict=True):
        times = [ours["computed_ms"], ours["other_ms"], plain["again_ms"]]
        shown = [f"{each:.0f}" for each in times] + [f"{turns['ratio']:.2f} ± {turns['error']:.2f}"]
        shown += [f"{each['host_ms']:.0f}" for each in (loaded, hicache)]
        body.append([f"{ours['tokens']:,}", *shown, f"{max(ours['other_apart'], ours['again_apart']):g}"])
    head = ["tokens", "computed", "another engine's hit", "SGLang alone, its own hit", "in turns, ours / alone"]
    return rows([*head, "from the host", "HiCache", "apart"], body, hits["machine"], host["machine"])


def throughput() -> str:
    """Output tokens a second with nothing shared, as a part of SGLang alone."""
    found = load(HITS)
    body = []
    for load_name in ("1k in, 256 out", "128 in, 512 out"):
        told = found["c"][f"ours beside plain, {load_name}"]
        rounds = ", ".join(f"{each:.3f}" for each in told["ratios"])
        body.append([load_name, f"{told['mean']:.3f}", rounds])
    return rows(["nothing shared", "ours / SGLang alone", "rounds"], body, found["machine"])
