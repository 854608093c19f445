"""Tables of what a daemon went through: chaos, kills, fuzzing, telemetry, questions of operators, capacity runs."""

from __future__ import annotations

from typing import Any

from tools.results import load, rows

MIB = 1 << 20
WHEN = ("alone", "attacked")
MEMORY = ("before", "most", "after")
HANG_PHASES = ("before", "during", "after")
PHASES = ("idle", "beside")


def windows_real() -> str:
    """The example engine in a pool that is too small, with and without recycling."""
    found = load("windows-real-cuda.json")
    body = []
    for row in found["rows"]:
        off, on = row["off"], row["on"]
        rates = [f"{each['output_tokens_per_s']:,.0f}" for each in (off, on)]
        running = f"{off['mean_running']:.1f} / {on['mean_running']:.1f}"
        told = [f"{row['gain_percent']:+.1f} %", running, f"{off['preemptions']} / {on['preemptions']}"]
        body.append([f"{row['share']:.0%}", *rates, *told, f"{row['answers_equal']} of {row['answers_equal']}"])
    head = ["windowed heads", "tokens/s off", "on", "gain", "mean running off / on", "preempted", "answers the same"]
    return rows(head, body, found["machine"])


def daemon_kills() -> str:
    """The daemon killed at random moments under load."""
    body = []
    machines = []
    for name in ("daemon-kills.json", "daemon-kills-cuda.json"):
        found = load(name)
        machines.append(found["machine"])
        served, noticed = found["served"], found["noticed"]
        left = len(found["sockets_left"]) + len(found["processes_left"]) + found["old_pools_mapped"]
        body.append(
            [
                found["plan"]["backend"],
                str(found["kills"]),
                f"{noticed['p50_s'] * 1e3:.0f} / {noticed['max_s'] * 1e3:.0f} ms",
                f"{served['p50_s']:.2f} / {served['max_s']:.2f} s",
                f"{found['corrupt']} of {found['verified']:,}",
                f"{found['leaked_pages']} pages, {left} sockets, processes and pools",
                found["conservation"],
            ]
        )
    head = ["backend", "kills", "noticed by all, p50 / max", "all served again, p50 / max", "wrong pages"]
    return rows([*head, "left behind", "conservation"], body, *machines)


def soak() -> str:
    """Eight engines on a looped trace with chaos on."""
    found = load("soak.json")
    faults = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(found["faults"].items()))
    start, end = found["step_start"], found["step_end"]
    body = [
        ["minutes, engines", f"{found['seconds'] / 60:.0f}, {found['plan']['engines']}"],
        ["requests", f"{found['requests']:,}"],
        ["done to them", f"{faults}; and {found['plan']['fault_copies']:.0%} of copies fail"],
        ["corrupt pages", f"{found['corrupt']} of {found['verified']:,} verified"],
        ["leaked pages, conservation", f"{found['leaked_pages']}, {found['conservation']}"],
        ["the last daemon's memory after warm-up", _memory(found["memory"])],
        ["Step p50 / p99 at the start", f"{start['p50_ms']:.1f} / {start['p99_ms']:.1f} ms"],
        ["Step p50 / p99 at the end", f"{end['p50_ms']:.1f} / {end['p99_ms']:.1f} ms"],
    ]
    return rows(["", ""], body, found["machine"])


def _memory(memory: dict[str, Any]) -> str:
    before, after = memory["first_half_mib"], memory["second_half_mib"]
    growth = f"lowest {before[0]:.1f}, then {after[0]:.1f} MiB: {memory['growth_percent']:+.1f} %"
    return f"in two halves: {growth}; median {before[1]:.1f}, then {after[1]:.1f}"


def hostile() -> str:
    """An engine beside a hostile tenant and a hostile reader."""
    found = load("hostile.json")
    connections = ", ".join(
        f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(found["connections"].items())
    )
    memory = found["memory_mib"]
    body = [
        ["minutes", f"{found['seconds'] / 60:.0f}"],
        ["attacks", f"{sum(count for kind, count in found['attacks'].items() if ':' not in kind):,}"],
        ["connections of theirs", connections],
        *(
            [f"{call} p50 / p99 alone, then beside them", "; ".join(_quantiles(found[key][when]) for when in WHEN)]
            for call, key in (("Step", "step_ms"), ("Match", "match_ms"))
        ),
        ["calls refused to the engine, its leases lost", f"{found['refused']}, {found['leases_lost']}"],
        ["memory beside slabs before, at most, after", " / ".join(f"{memory[when]:.0f}" for when in MEMORY) + " MiB"],
    ]
    return rows(["", ""], body, found["machine"])


def sick_party() -> str:
    """One sick party, and what an engine beside it saw."""
    found = load("sick-party.json")
    measured = {(row["party"], row["sick"]): _seen(row) for row in found["rows"]}
    ways = list(dict.fromkeys(sick for _, sick in measured))
    parties = list(dict.fromkeys(party for party, _ in measured))
    body = [[party, *(measured.get((party, sick), "not run") for sick in ways)] for party in parties]
    return rows(["sick party", *ways], body, found["machine"])


def _seen(row: dict[str, Any]) -> str:
    lost = f"lost {row['lost_blocks'] / row['known_blocks']:.1%}" if row["lost_blocks"] else "lost none"
    return f"{row['longest_ms']:.0f} / {row['start_ms']} ms, {lost}"


def _quantiles(taken: dict[str, float]) -> str:
    return f"{taken['p50']:.2f} / {taken['p99']:.2f} ms"


def fuzz() -> str:
    """Messages that were tried on every RPC."""
    found = load("fuzz.json")
    body = []
    labels = {
        "in_process": "to handlers in process",
        "without_tokens": "over the socket",
        "with_tokens": "over the socket, with tokens of two tenants",
    }
    for name, label in labels.items():
        part = found[name]
        if not part["messages"]:
            continue
        kinds = [f"{part[kind]:,}" for kind in ("messages", "sensible", "mutated", "random")]
        body.append([label, *kinds, str(len(part["crashes"])), str(len(part["problems"])), str(len(part["rpcs"]))])
    head = ["", "messages", "sensible", "mutated", "random", "crashes or INTERNAL", "accounting problems", "RPCs"]
    return rows(head, body)


def telemetry() -> str:
    """Cost of telemetry and access control to a Step of 32 sequences and a Match of 2,048 blocks."""
    found = load("telemetry.json")
    names = {
        "plain": "neither metrics nor traces",
        "metrics": "metrics, scraped every second",
        "otlp": "metrics and OTLP, calls not sampled",
        "traced": "every call sampled",
        "tokens": "a token and quotas of every kind",
    }
    body = []
    for name, label in names.items():
        body.append([label])
        for one in (found["variants"][name][call] for call in ("step", "match")):
            low, high = one["cost_percent_quartiles"]
            cost = "" if name == "plain" else f"{one['cost_percent']:+.1f} % ({low:+.1f} to {high:+.1f})"
            body[-1] += [f"{one['p50_ms']:.2f}", cost]
    cost = "cost: median of rounds (quartiles)"
    return rows(["", "Step of 32, p50 ms", cost, "Match of 2,048, p50 ms", cost], body, found["machine"])


def inspection() -> str:
    """Effect of operators' questions on Steps beside them, at a million blocks."""
    found = load("inspection.json")
    body = [["nothing", "", f"{found['alone_ms']['p50']:.2f} / {found['alone_ms']['p99']:.1f}"]]
    for name, one in found["questions"].items():
        step = one["step_ms"]
        body.append([name, f"{one['seconds']:.2f}", f"{step['p50']:.2f} / {step['p99']:.1f}"])
    return rows(["asked meanwhile", "answered in, s", "Step of 32, p50 / p99 ms"], body, found["machine"])


def gpus(name: str = "gpus.json") -> str:
    """Copies on several GPUs at once beside plain copies on all of them."""
    found = load(name)
    cells: dict[str, dict[int, str]] = {}
    for row in found["copies"]["rows"]:
        label = f"{row['kind']}, {row['way']}, {row['steps']}, {row['gpu_mib']:,} MiB a GPU"
        rates = f"{row['gb_per_s']:.0f} ({row['time_ratio']:.2f}); {row['one_gb_per_s']:.0f}"
        cells.setdefault(label, {})[row["plane_bytes"]] = f"{rates}; {row['mover_ms_per_gib']:.1f}"
    widths = sorted({row["plane_bytes"] for row in found["copies"]["rows"]})
    body = [[label, *(each.get(width, "-") for width in widths)] for label, each in cells.items()]
    head = [f"{found['gpus']} GPUs, GB/s (of plain time, budget {found['budgets']['time']:g}); one GPU plain; ms/GiB"]
    return rows([*head, *(f"{width >> 10} KiB" for width in widths)], body, found["machine"])


def gpus_peers() -> str:
    """Loads from one GPU's replica to another's."""
    found = load("gpus.json")
    body = [
        [f"{row['mib']:,} MiB, planes of {row['plane_bytes'] >> 10} KiB"]
        + [
            f"{row[name]:.0f}"
            for name in ("gb_per_s", "plain_gb_per_s", "beside_gb_per_s", "host_gb_per_s", "host_beside_gb_per_s")
        ]
        for row in found["peers"]["rows"]
    ]
    head = ["GB/s", "from the other GPU", "one plain copy", "beside a host load", "host load", "beside the other GPU's"]
    return rows(head, body, found["machine"])


def gpus_beside(name: str = "gpus.json") -> str:
    """Calls beside swaps on several GPUs, a mover that is killed, and one that hangs."""
    found = load(name)
    budgets, calls, killed = found["budgets"], found["calls"], found["kill"]
    body = []
    for name, label in (("step", "Step, 32 grow and publish"), ("match", "Match of 2,048 blocks")):
        idle, beside = (f"{calls[name][phase]['p50']:.2f} / {calls[name][phase]['p99']:.2f}" for phase in PHASES)
        ratio = f"p99 {calls[name]['ratio']['p99']:.2f}x (budget {budgets['p99']:g})"
        body.append([f"{label}, p50 / p99 ms", idle, f"{beside}, {calls['gb_per_s']:.0f} GB/s", ratio])
    for at, other in enumerate(killed["others"]):
        during = f"{other['during']:.1f}, then {other['after']:.1f}; longest ticket {other['longest_ms']:.0f} ms"
        body.append([f"GPU {at} beside a mover that is killed, GB/s", f"{other['before']:.1f}", during, ""])
    if hang := found.get("hang"):
        before, during, after = (f"{sum(hang[phase][: len(hang['during'])]):.0f}" for phase in HANG_PHASES)
        body.append(["other GPUs beside a mover that hangs, GB/s", before, f"{during}, then {after}", ""])
        body.append(["until a new engine on that GPU has swapped", "", f"{hang['served_again_s']:.1f} s", ""])
        started = f"{hang['start_beside_hung_s']:.2f} s"
        body.append(["daemon ready; beside a mover that hangs", f"{hang['ready_s']:.2f} s", started, ""])
    again = f"{killed['again_s']:.2f} s (its ticket failed after {killed['told_s']:.2f} s)"
    body.append(["until that GPU is served again", "", again, f"budget {budgets['again_s']:g} s"])
    return rows([f"{found['gpus']} GPUs", "before or idle", "beside", ""], body, found["machine"])
