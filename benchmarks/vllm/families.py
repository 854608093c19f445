"""Families of models on the daemon's pages, drafters too: ``python -m benchmarks.vllm.families --json OUT``.

Needs a GPU and vLLM in this Python. Each family is a small model of its layers, with random weights. Four engines are
asked the same: vLLM alone, vLLM alone once more (how far it is from itself), one on the daemon, and another one on it,
which finds what the third has computed. Questions, in blocks of the family:

    prompt      2.6 blocks, an answer of 1.2: with drafts, states are kept where an answer reaches the end of a block
    again       the same prompt
    answer      both with more behind them: a hit on what was decoded
    long        9.3 blocks in chunks, then again, and with its answer
    batch       eight requests with 5.2 blocks in common, twice
    resume      four that part within the first answer

A row has the tokens that were not computed (the least of its requests), how many of its tokens are those of vLLM alone
up to the first that is not, how far their log-probabilities are apart (0: bit by bit), and drafts made and accepted.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.support.machine import describe_gpu, describe_machine
from benchmarks.support.recording import parser_of, write_result
from benchmarks.vllm.fleet import Engine, EngineFailed, Fleet, Shape, progress
from benchmarks.vllm.models import FAMILIES, Case

GIB = 1 << 30
ENGINES = {"alone": "plain", "control": "plain", "first": "ours", "second": "ours"}
SECONDS = 240.0
PERIOD = 40
"""Tokens after which the beginning of a prompt repeats: drafts by n-grams have something to find."""
ENDING = 200
MORE = [5, 6, 7] * 30


def main() -> None:
    """Print a row for each question, and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="NAME")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="families that run beside each other")
    parser.add_argument("--pool-gib", type=float, default=2.5, help="KV of an engine, or of the engines on the daemon")
    parser.add_argument("--folder", type=Path, help="logs of all processes lie there")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="families-"))
    found: dict[str, Any] = {}
    names = list(arguments.families)
    while names:
        batch, names = names[: arguments.at_once], names[arguments.at_once :]
        for name, rows in measure(batch, folder, int(arguments.pool_gib * GIB)).items():
            found[name] = rows
            show(name, rows)
            if arguments.json:
                machine = {**describe_machine(), **describe_gpu()}
                write_result(arguments.json, {"benchmark": "vllm.families", "machine": machine, "families": found})


def measure(names: Sequence[str], folder: Path, pool_bytes: int) -> dict[str, Any]:
    """Return the rows of some families, or why there are none."""
    fleets, found = dict[str, Fleet](), dict[str, Any]()
    try:
        for name in names:
            fleets[name] = _fleet(FAMILIES[name], folder / name, pool_bytes).__enter__()
            for engine, kind in ENGINES.items():
                fleets[name].standby(engine, kind).begin()
        with ThreadPoolExecutor() as pool:
            asking = {name: pool.submit(ask, fleet, FAMILIES[name]) for name, fleet in fleets.items()}
        for name, each in asking.items():
            try:
                found[name] = each.result()
            except EngineFailed as why:
                found[name] = {"failed": str(why)}
    finally:
        for fleet in fleets.values():
            fleet.__exit__()
    return found


def _fleet(case: Case, folder: Path, pool_bytes: int) -> Fleet:
    folder.mkdir(parents=True, exist_ok=True)
    options = {"gpu_memory_utilization": 0.05, "max_num_batched_tokens": 4096, **case.options(folder)}
    shape = Shape(folder, pool_bytes, GIB, model=case.model, backend=case.backend, sequences=16, options=options)
    pools = ("--device-pool", str(pool_bytes * 5 // 4), "--host-pool", "2GiB")
    return Fleet(shape, (*pools, "--write-policy", "write_through"))


def ask(fleet: Fleet, case: Case) -> dict[str, Any]:
    """Ask all engines all questions, and compare. Raises EngineFailed."""
    engines = [fleet.standby(name, kind).wait_ready() for name, kind in ENGINES.items()]
    block_tokens = int(engines[0].facts["block_tokens"])
    drafts = bool(case.speculative)
    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(question_all, each, block_tokens, drafts=drafts) for each in engines[:-1]]
    answers = {each.name: said.result() for each, said in zip(engines, asking, strict=False)}
    answers[engines[-1].name] = question_all(engines[-1], block_tokens, drafts=drafts)
    rows = [
        {"what": alone["what"], "alone": figures_of(alone, alone)}
        | {name: figures_of(alone, answers[name][at]) for name in REST}
        for at, alone in enumerate(answers["alone"])
    ]
    return {
        "block_tokens": block_tokens,
        "v2": engines[0].facts["v2"],
        "async": engines[0].facts["async"],
        "drafts": dict(case.speculative),
        "verify": fleet.verify(checksums=True),
        "rows": rows,
    }


REST = [name for name in ENGINES if name != "alone"]


def question_all(engine: Engine, block: int, *, drafts: bool) -> list[dict[str, Any]]:
    """Ask an engine everything."""
    rows: list[dict[str, Any]] = []

    def put(what: str, prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
        before, begun_s = _drafts(engine, drafts=drafts), time.perf_counter()
        engine.send(prompts, at_a_time=len(prompts), seconds=SECONDS)
        requests = engine.collect()["requests"]
        made = [now - then for now, then in zip(_drafts(engine, drafts=drafts), before, strict=True)]
        rows.append({"what": what, "seconds": time.perf_counter() - begun_s, "requests": requests, "drafts": made})
        return [each["tokens"] for each in requests]

    short, long = _prompt(1, int(2.6 * block)), _prompt(2, int(9.3 * block))
    (said,) = put("prompt", [_question(short, int(1.2 * block))])
    put("again", [_question(short, 40)])
    put("answer", [_question(short, 40, [*said, *MORE])])
    (more,) = put("long", [_question(long, 60)])
    put("long again", [_question(long, 60)])
    put("long answer", [_question(long, 60, [*more, *MORE])])
    shared = _cut(long, int(5.2 * block))
    for what in ("batch", "batch again"):
        put(what, [_question(shared, 100, [50 + at] * 30) for at in range(8)])
    kept = int(3.5 * block) - sum(count for _, count in short)
    put("resume", [_question(short, 60, [*said[:kept], *[900 + at] * 20]) for at in range(4)])
    return rows


def _prompt(seed: int, tokens: int) -> list[tuple[int, int]]:
    rest = tokens - ENDING
    return [(seed, PERIOD)] * (rest // PERIOD) + [(seed, rest % PERIOD), (seed + 100, ENDING)]


def _cut(pieces: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    found = []
    for seed, count in pieces:
        found.append((seed, min(count, tokens)))
        tokens -= found[-1][1]
    return [each for each in found if each[1]]


def _question(pieces: Sequence[tuple[int, int]], new: int, tail: Sequence[int] = ()) -> dict[str, Any]:
    return {"pieces": [list(each) for each in pieces], "tail": list(tail), "new": new, "logprobs": 1}


def _drafts(engine: Engine, *, drafts: bool) -> list[float]:
    taken = engine.do("take_drafts") if drafts else {"draft": 0.0, "accepted": 0.0}
    return [taken["draft"], taken["accepted"]]


def figures_of(alone: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an engine's answers, held against those of vLLM alone."""
    same, apart, tokens = 0, 0.0, 0
    for theirs, each in zip(alone["requests"], mine["requests"], strict=True):
        tokens += len(each["tokens"])
        said = zip(theirs["tokens"], each["tokens"], theirs["logprobs"], each["logprobs"], strict=True)
        for token, other, at, there in said:
            if token != other:
                break
            same += 1
            apart = max(apart, abs(dict(map(tuple, at))[token] - dict(map(tuple, there))[token]))
    return {
        "cached": min(each["cached"] for each in mine["requests"]),
        "same": same,
        "tokens": tokens,
        "apart": round(apart, 4),
        "drafted": int(mine["drafts"][0]),
        "accepted": int(mine["drafts"][1]),
        "seconds": round(mine["seconds"], 2),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print a family."""
    progress(f"{name}: {json.dumps({key: value for key, value in found.items() if key != 'rows'})}")
    for row in found.get("rows", ()):
        shown = [f"{each} {row[each]['cached']}/{row[each]['same']}/{row[each]['apart']:g}" for each in ENGINES]
        accepted = [f"{row[each]['accepted']}/{row[each]['drafted']}" for each in ENGINES]
        print(f"  {row['what']:12} {'  '.join(shown)}  drafts {' '.join(accepted)}", flush=True)


if __name__ == "__main__":
    main()
