"""vLLM on the daemon's pages beside vLLM alone, offloading and LMCache: ``python -m benchmarks.vllm --json OUT``.

Needs a GPU and vLLM in this Python. An 8B Llama shape with random weights; all peers in one run, one after another on
an otherwise idle GPU. ``--parts``: (a) a prompt that another process computed, beside an engine's own prefix cache;
(b) the same from the host tier, beside offloading and LMCache; (c) throughput with nothing shared, with the connector's
time in an iteration; (d) agents' turns from a trace whose working set is several times the pool; (e) an engine killed
and started again; (f) random requests on two engines with kills, answer by answer against vLLM alone, and with
vLLM alone asked the same way beside it; (g), where it is asked for, the daemon killed while an engine generates, and
started again; (h), of models with a drafter, that another process's hits are drafted on as an engine's own, and as
without the daemon; (n), where it is asked for and there are GPUs for two engines, what an engine on other GPUs
computed, beside a hit of the engine's own; (i), where it is asked for, (b) in the midst of requests that decode.
Engines stay up between parts. Every step has a time limit; logs of all processes lie in ``--folder``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.support.machine import NO_RESULT, describe_gpu, describe_machine
from benchmarks.support.recording import write_result
from benchmarks.vllm import parts
from benchmarks.vllm.decoding import loads_beside, owner_slowed
from benchmarks.vllm.fleet import Engine, EngineFailed, Fleet, Shape, progress
from benchmarks.vllm.models import CASES
from benchmarks.vllm.replicas import near_hits
from benchmarks.vllm.turns import alike, in_turns

GIB = 1 << 30
SIZES = (1024, 8192, 32768)
SHARED, HOST, ALONE, WARM, RESTART, OUTLIVE = 1_000_000, 2_000_000, 4_000_000, 5_000_000, 6_000_000, 7_000_000
DRAFTED, DRAFTED_TOKENS, DRAFTED_NEW, DRAFTED_REQUESTS = 8_000_000, 1000, 128, 8
NEAR, TURNS, LEAST_TURNS, DECODED = 9_000_000, 10_000_000, 12, 11_000_000
BATCHES = 1 << 32
"""First seed of each part: no two parts have prompts in common."""
LOADS = {"1k in, 256 out": (1024, 256), "128 in, 512 out": (128, 512)}
"""Tokens of a prompt and of its answer, for the loads of (c)."""
AGENTS = 4
"""At a time: their requests fit in the pool together."""


@dataclass
class Run:
    """Options of a run, and its results so far."""

    options: argparse.Namespace
    fleet: Fleet
    found: dict[str, Any] = field(default_factory=dict)
    own: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    drafted: dict[str, dict[str, Any]] = field(default_factory=dict)

    def wants(self, *names: str) -> bool:
        """True where one of these parts is asked for."""
        return bool(set(names) & set(self.options.parts))

    def note(self, part: str, who: str, what: Any) -> None:
        """Keep it, and write all that there is: a run may be cut off."""
        self.found.setdefault(part, {})[who] = what
        write_result(self.options.json, self.result())

    def result(self) -> dict[str, Any]:
        """Everything."""
        shape = self.fleet.shape
        return {
            "machine": {**describe_machine(), **describe_gpu()},
            "shape": {
                "pool_gib": shape.pool_bytes / GIB,
                "host_gib": shape.host_bytes / GIB,
                "eager": shape.eager,
                "compilation": shape.compilation,
                "backend": shape.backend,
                "runner": shape.runner,
                "split": shape.split,
                "daemon": self.options.daemon,
                "model": self.options.model,
                "ranks": shape.ranks,
            },
            "starts": self.fleet.starts,
            **self.found,
        }


class Stage(NamedTuple):
    """Part of a run that has one set of engines. ``peer``: an engine whose process starts ahead, if any."""

    parts: str
    peer: str
    perform: Callable[[Run], None]


def pair(run: Run) -> None:
    """Two engines on the daemon: (a) and (e)."""
    options, fleet = run.options, run.fleet
    owner, other = fleet.start(**{"ours-a": "ours", "ours-b": "ours"})
    parts.warm([owner, other], options.sizes, WARM)
    if run.wants("a"):
        run.own["ours"] = parts.own_hits(owner, options.sizes, options.repeats, SHARED)
        run.note("a", "ours", parts.shared_hits(other, run.own["ours"], options.repeats, SHARED))
        other.ask(*(parts.prompt((TURNS + size, size)) for size in options.sizes))
        run.note("a", "places", fleet.places())
        run.note("a", "verify", fleet.verify(checksums="checksums all" in options.daemon))
    if run.wants("h"):
        run.drafted["computed"] = _drafts(owner)
        run.drafted["hit elsewhere"] = _drafts(other)
        run.note("h", "ours", _drafts_told(run.drafted))
    if run.wants("e"):
        size = options.sizes[-1]
        parts.first_ms(owner, parts.prompt((RESTART + size, size)))
        run.note("e", "ours", parts.restart(fleet, "ours-b", size, RESTART))
    fleet.stop("ours-b")


def beside(run: Run, name: str, kind: str) -> None:
    """A peer, and one of our engines, in turns on the same GPU: (a) to (d)."""
    options, fleet = run.options, run.fleet
    engines = fleet.start(**{name: kind, "ours-a": "ours"})
    peer = engines[0]
    parts.warm(engines, options.sizes, WARM + 1_000)
    if run.wants("a"):
        run.own[name] = parts.own_hits(peer, options.sizes, options.repeats, SHARED)
        run.note("a", name, [{"tokens": size, **_figures(own)} for size, own in run.own[name].items()])
        if mine := run.own.get("ours"):
            run.note("a", f"ours beside {name}", _beside(mine, run.own[name]))
        turns = in_turns(engines[1], peer, options.sizes, max(options.repeats, LEAST_TURNS), TURNS)
        run.note("a", f"in turns with {name}", turns)
    if run.wants("h") and kind == "plain":
        run.drafted["vLLM alone"] = _drafts(peer)
        run.note("h", name, _drafts_told(run.drafted))
    if run.wants("c") and kind == "plain":
        _throughput(run, engines)
    if run.wants("b") and kind != "plain":
        for engine in engines if "ours-a" not in run.found.get("b", {}) else [peer]:
            run.note("b", engine.name, parts.from_host(engine, options.sizes, options.rounds, HOST))
    if run.wants("i") and kind != "plain":
        sizes = [size for size in options.sizes if size % fleet.shape.block_tokens] or options.sizes
        for engine in engines if "ours-a" not in run.found.get("i", {}) else [peer]:
            run.note("i", engine.name, loads_beside(engine, sizes, min(options.rounds, 3), DECODED))
    if run.wants("d"):
        pool_tokens = fleet.shape.pool_tokens
        longest = min(fleet.shape.longest - 256, pool_tokens // AGENTS)
        asked = parts.agents(options.trace, pool_tokens, options.working_set, options.turns, longest)
        for engine in engines if "ours-a" not in run.found.get("d", {}) else [peer]:
            run.note("d", engine.name, parts.load(engine, asked, AGENTS, options.seconds))
    fleet.stop(name)


def control(run: Run) -> None:
    """(k): two engines without a daemon."""
    options = run.options
    run.fleet.stop("ours-a")
    one, two = run.fleet.start(plain="plain", **{"plain-b": "plain"})
    parts.warm([one, two], options.sizes, WARM + 3_000)
    run.note("k", "plain beside plain-b", alike(one, two, options.sizes, options.repeats, SHARED))
    turns = in_turns(two, one, options.sizes, max(options.repeats, LEAST_TURNS), TURNS)
    run.note("k", "in turns", turns)
    run.fleet.stop("plain", "plain-b")


def _throughput(run: Run, engines: Sequence[Engine]) -> None:
    """Loads of (c), peer and ours in turns, each first in every other round; then the ratio of output tokens/s.

    One round before the first is left out, and batches of other sizes before that: kernels are made and tuned there.
    """
    options = run.options
    for number, engine in enumerate(engines):
        lengths = [tokens for tokens, _ in LOADS.values()]
        parts.warm_batches(engine, lengths, options.at_a_time, BATCHES + number * 1_000_000_000)
    rates: dict[str, dict[str, list[float]]] = {label: {each.name: [] for each in engines} for label in LOADS}
    for turn in range(options.rounds + 1):
        for engine in engines if turn % 2 else reversed(engines):
            for label, (tokens, new) in LOADS.items():
                salt = ALONE + turn * 20_000 + tokens * 10
                asked = parts.nothing_shared(options.requests if turn else options.at_a_time, tokens, new, salt)
                found = parts.load(engine, asked, options.at_a_time, options.seconds)
                if turn:
                    rates[label][engine.name].append(found["output_tokens_s"])
                    run.note("c", f"{engine.name}, {label}, round {turn}", found)
        for label, seen in rates.items() if turn else ():
            run.note("c", f"ours beside plain, {label}", parts.ratios(seen["ours-a"], seen["plain"]))


def near(run: Run) -> None:
    """(n): replicas on GPUs of their own."""
    options, fleet, ranks = run.options, run.fleet, run.options.ranks
    names = [f"ours-n{number}" for number in range(1, options.replicas)]
    for number, name in enumerate(names, 1):
        fleet.standby(name, "ours", range(number * ranks, (number + 1) * ranks))
    owner, *others = engines = fleet.start(**dict.fromkeys(("ours-a", *names), "ours"))
    parts.warm(engines, options.sizes, WARM + 2_000)
    for number, other in enumerate(others):
        salt = NEAR + number * 1_000_000
        run.note("n", other.name, near_hits(fleet, owner, other, options.sizes, options.repeats, salt))
        slowed = owner_slowed(owner, other, sorted(options.sizes)[len(options.sizes) // 2], options.repeats, salt)
        run.note("n", f"ours-a while {other.name} loads", slowed)
    run.note("n", "verify", fleet.verify(checksums="checksums all" in options.daemon))
    fleet.stop(*names)


def lmcache(run: Run) -> None:
    """A peer with a server of its own."""
    try:
        run.fleet.start_lmcache()
        beside(run, "lmcache", "lmcache")
    finally:
        run.fleet.stop_lmcache()


def chaos(run: Run) -> None:
    """(f), after its reference."""
    (plain,) = run.fleet.start(plain="plain")
    known = parts.references(plain, 7, run.options.known)
    run.note("f", f"{run.fleet.shape.engine} alone", parts.control(plain, known, run.options.known // 4))
    run.fleet.stop("plain", "ours-a")
    run.note("f", "ours", parts.chaos(run.fleet, known, run.options.chaos_seconds, run.options.kill_every))


def daemon_restart(run: Run) -> None:
    """(g): an engine goes on with the next daemon's memory."""
    (engine,) = run.fleet.start(**{"ours-a": "ours"})
    for size in run.options.sizes:
        run.note("g", f"{size} tokens", parts.outlive(run.fleet, engine, size, OUTLIVE + size))
    run.note("g", "verify", run.fleet.verify(checksums="checksums all" in run.options.daemon))


def main() -> int:
    """Run the parts, in the order that starts engines seldom."""
    options = read_options("python -m benchmarks.vllm", __doc__, "abcdef")
    case = CASES[options.model]
    shape = Shape(
        options.folder.resolve(),
        int(options.pool * GIB),
        int(options.host * GIB),
        model=case.model,
        python=options.python,
        eager=not (options.graphs or options.compilation),
        compilation=options.compilation,
        backend="" if options.tiny else options.backend or case.backend,
        runner=options.runner,
        split=options.split,
        on_gpu=not options.tiny,
        options=case.options(options.folder.resolve()),
        latent_values=case.latent_values,
        block_tokens=case.block_tokens,
        draft_layers=case.draft_layers,
        ranks=options.ranks,
    )
    stages = [
        Stage("aeh", "", pair),
        Stage("n", "", near),
        Stage("acdh", "plain", lambda run: beside(run, "plain", "plain")),
        Stage("bdi", "offload", lambda run: beside(run, "offload", "offload")),
        *([Stage("bdi", "", lmcache)] if options.lmcache else []),
        Stage("k", "plain", control),
        Stage("g", "", daemon_restart),
        Stage("f", "plain", chaos),
    ]
    return perform(options, shape, stages)


def perform(options: argparse.Namespace, shape: Shape, stages: Sequence[Stage]) -> int:
    """Run the stages of which a part is asked for, on one daemon; the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(NO_RESULT))  # engines and the daemon end with it then, too
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = [each for each in stages if set(each.parts) & set(options.parts)]
    sizes = ["--device-pool", f"{shape.pool_bytes * 17 // 16}", "--host-pool", f"{shape.host_bytes}"]
    flags = ["--backend", "cuda" if shape.on_gpu else "shm", *sizes, *options.daemon.split()]
    with Fleet(shape, flags) as fleet:
        run = Run(options, fleet)
        for number, stage in enumerate(wanted):
            for each in wanted[number : number + 2]:
                if each.peer:
                    fleet.standby(each.peer, each.peer)
            progress(f"parts {', '.join(sorted(set(stage.parts) & set(options.parts)))}")
            try:
                stage.perform(run)
            except EngineFailed as failed:
                progress(f"failed: {failed}")
                run.note("failed", stage.parts, str(failed))
        write_result(options.json, run.result())
    print(table(run.found))
    return NO_RESULT if "failed" in run.found else 0


def table(found: Mapping[str, Any]) -> str:
    """A line for each row of figures."""
    lines = []
    for part, whos in found.items():
        for who, what in whos.items():
            for row in what if isinstance(what, list) else [what]:
                figures = row.items() if isinstance(row, dict) else [("", row)]
                told = "  ".join(f"{key} {_short(value)}" for key, value in figures)
                lines.append(f"{part}  {who:32}  {told}")
    return "\n".join(lines)


def _drafts(engine: Engine) -> dict[str, Any]:
    return parts.drafts(engine, DRAFTED, DRAFTED_REQUESTS, DRAFTED_TOKENS, DRAFTED_NEW)


def _drafts_told(drafted: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Draft counts of each engine, and the distance of its answers from the first one's."""
    first = drafted["computed"]["said"]
    return [
        {
            "how": how,
            "draft_tokens": found["draft"],
            "accepted_tokens": found["accepted"],
            "apart": max(parts.apart(mine, other) for mine, other in zip(first, found["said"], strict=True)),
        }
        for how, found in drafted.items()
    ]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in own.items() if not key.startswith("said")}


def _beside(mine: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Distance of both answers, for a hit and for what both computed."""
    return [
        {
            "tokens": size,
            "hit_apart": parts.apart(own["said"], theirs[size]["said"]),
            "computed_apart": parts.apart(own["said_computed"], theirs[size]["said_computed"]),
        }
        for size, own in mine.items()
    ]


def read_options(program: str, words: str | None, parts: str) -> argparse.Namespace:
    """Read a run's options. ``parts``: those that run where none are named."""
    parser = argparse.ArgumentParser(
        prog=program, description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="vllm.json", help="where the result goes, and what there is of it meanwhile")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/benchmarks-vllm"), help="for logs")
    parser.add_argument("--python", default=sys.executable, help="that has the engine")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a processor: to try this program")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(parts))
    parser.add_argument("--pool", type=float, default=12.0, help="GiB of KV on the device, for each engine's own too")
    parser.add_argument("--host", type=float, default=24.0, help="GiB of the host tier")
    parser.add_argument("--graphs", action="store_true", help="compile, and use CUDA graphs; else eager")
    parser.add_argument("--compilation", type=json.loads, help="of vLLM, as JSON: graphs alone start sooner")
    parser.add_argument("--backend", default="", help="of attention, as vLLM calls it; empty: the model's usual one")
    parser.add_argument("--model", default="", choices=["", *CASES], help="shape and drafter; empty: an 8B Llama")
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism, a GPU each")
    parser.add_argument("--replicas", type=int, default=2, help="of (n), on GPUs of their own")
    parser.add_argument("--lmcache", action="store_true", help="(b) and (d) with LMCache too, which --python needs")
    parser.add_argument("--runner", default="", choices=["", "1", "2"], help="vLLM's model runner; empty: its choice")
    parser.add_argument("--split", action="store_true", help="engine cores in processes of their own")
    parser.add_argument("--daemon", default="", help="further flags of the daemon")
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), default=SIZES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="of (b) and (c)")
    parser.add_argument("--requests", type=int, default=128, help="of each load of (c)")
    parser.add_argument("--at-a-time", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=40.0, help="of one load of (c) and (d), at most")
    parser.add_argument("--trace", type=Path, default=Path("trace.jsonl"), help="of (d)")
    parser.add_argument("--working-set", type=float, default=4.0, help="of (d), in pools")
    parser.add_argument("--turns", type=int, default=400, help="of (d)")
    parser.add_argument("--known", type=int, default=48, help="different requests of (f)")
    parser.add_argument("--chaos-seconds", type=float, default=120.0)
    parser.add_argument("--kill-every", type=float, default=20.0)
    options = parser.parse_args()
    options.model = options.model or ("tiny" if options.tiny else "llama")
    if "d" in options.parts and not options.trace.is_file():
        parser.error(f"(d) replays a trace, and there is no {options.trace}: name one by --trace, or leave (d) out")
    return options


if __name__ == "__main__":
    sys.exit(main())
