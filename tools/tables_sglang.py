"""Tables of docs/sglang.md: SGLang on the daemon's pages beside SGLang alone and its HiCache."""

from __future__ import annotations

from tools.results import ROOT, load, rows

PAGE = ROOT / "docs" / "sglang.md"
RUN, OLDER = "sglang.json", "sglang-h100.json"


def first_tokens() -> str:
    """First tokens of prompts by size: computed, found in place, in turns with SGLang alone, and from the host."""
    found = load(RUN)
    beside = zip(found["a"]["ours"], found["a"]["plain"], found["a"]["in turns with plain"], strict=True)
    loads = zip(found["b"]["ours-a"], found["b"]["hicache"], strict=True)
    body = []
    for (ours, plain, turns), (loaded, hicache) in zip(beside, loads, strict=True):
        times = [ours["computed_ms"], ours["other_ms"], plain["again_ms"]]
        shown = [f"{each:.0f}" for each in times] + [f"{turns['ratio']:.2f} ± {turns['error']:.2f}"]
        shown += [f"{each['host_ms']:.0f}" for each in (loaded, hicache)]
        body.append([f"{ours['tokens']:,}", *shown, f"{max(ours['other_apart'], ours['again_apart']):g}"])
    head = ["tokens", "computed", "another engine's hit", "SGLang alone, its own hit", "in turns, ours / alone"]
    return rows([*head, "from the host", "HiCache", "apart"], body, found["machine"])


def throughput() -> str:
    """Output tokens a second with nothing shared, as a part of SGLang alone."""
    body, machines = [], []
    for found in map(load, (RUN, OLDER)):
        machines.append(found["machine"])
        for load_name in ("1k in, 256 out", "128 in, 512 out"):
            told = found["c"][f"ours beside plain, {load_name}"]
            rounds = ", ".join(f"{each:.3f}" for each in told["ratios"])
            body.append([f"{load_name}, {found['machine']['gpu'].split(' ')[1]}", f"{told['mean']:.3f}", rounds])
    return rows(["nothing shared", "ours / SGLang alone", "rounds"], body, *machines)


TABLES = {
    "sglang-first-tokens": first_tokens,
    "sglang-throughput": throughput,
}
