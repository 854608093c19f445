"""Tables of eviction policies: what they hit, and what they cost."""

from __future__ import annotations

from typing import Any

from tools.results import ROOT, load, rows

PAGE = ROOT / "docs" / "simulating.md"


def simulation() -> str:
    """Hit rates of policies on the real traces, by the device's share of their blocks."""
    found = load("simulation.json")
    body = []
    for each in found["traces"]:
        pace = " / ".join(f"{each['requests_per_minute'][policy]:,}" for policy in ("lru", "hazard"))
        body.append([str(each["trace"]), f"{each['blocks'] / each['requests']:.0f}", *_shares(each), pace])
    pace = "requests a minute, lru / hazard"
    return rows(["trace", "blocks a request", *_percents(found["traces"][0]), pace], body, found["machine"])


def stress() -> str:
    """Hit rates of policies on traffic of other kinds."""
    return _stress(is_long=True)


def stress_traces() -> str:
    """Hit rates of policies on real traces that are flooded, and on one after another."""
    return _stress(is_long=False)


def _stress(*, is_long: bool) -> str:
    found = load("stress.json")
    picked = [each for each in found["traces"] if (len(each["rows"]) > 1) == is_long]
    body = [[str(each["trace"]), f"{each['requests']:,}", *_shares(each)] for each in picked]
    return rows(["traffic", "requests", *_percents(picked[0])], body)


def learning() -> str:
    """Time of each step of the learning eviction."""
    found = load("learning.json")
    return rows(["in one go", "us"], [[name, f"{us:.0f}"] for name, us in found["us"].items()], found["machine"])


def learning_sizes() -> str:
    """The ledger's moves, with least recently used and with hazard."""
    found = load("learning.json")
    names = {
        "match_us": "Match of 2,048 blocks, us",
        "publish_us_per_block": "publish, us a block",
        "evict_us_per_block": "evict, 16 blocks at a time, us a block",
        "bytes_per_block": "memory, bytes a block",
    }
    sizes = found["by_size"]
    body = [
        [label, *(f"{each['lru'][name]:.1f} / {each['hazard'][name]:.1f}" for each in sizes.values())]
        for name, label in names.items()
    ]
    return rows(["lru / hazard", *(f"{int(size):,}" for size in sizes)], body, found["machine"])


def hybrid_states() -> str:
    """Token hits of a hybrid model: two rules for its states, both policies, and blocks alone."""
    found = load("hybrid-states.json")
    body = []
    for name, trace in found["traces"].items():
        for percent, row in sorted(trace["rows"].items(), key=lambda item: int(item[0])):
            rules = [f"{row[rule]:.1%}" for rule in ("every aligned block", "ends and branches")]
            body.append([name, f"{percent}%", *rules, *(_beside_bound(row, policy) for policy in ("lru", "hazard"))])
    head = ["trace", "device", "every aligned block", "ends and branches", "lru / KV alone", "hazard / KV alone"]
    return rows(head, body, found["machine"])


def _beside_bound(row: dict[str, Any], policy: str) -> str:
    hit, alone = row.get(policy), row[f"{policy}, KV alone"]
    if hit is None:
        return f"not measured / {alone:.1%}"
    return f"{hit:.1%} / {alone:.1%} ({hit / alone:.0%})"


def _shares(trace: dict[str, Any]) -> list[str]:
    return [
        " / ".join(f"{row['hits'][policy] / trace['blocks']:.1%}" for policy in ("lru", "hazard", "opt"))
        for row in trace["rows"]
    ]


def _percents(trace: dict[str, Any]) -> list[str]:
    return [f"{row['percent']}%" for row in trace["rows"]]
