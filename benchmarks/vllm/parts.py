"""Measurements of ``benchmarks.vllm``, one function for each: what it asks of engines, and the figures of their
answers."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.vllm.fleet import Engine, Fleet, progress

Prompt = dict[str, Any]
SAID_TOKENS, SAID_LOGPROBS = 8, 3
NOISE = 0.15
"""Difference of a log-probability above which an answer is inspected. Another order of sums in other batches, at 16
bits, comes near it and over it: a count is meaningful only beside the same count for vLLM alone."""


OUTLIVING_TOKENS, OUTLIVING_SECONDS, OUTLIVING_PAUSE_S = 512, 60.0, 0.5
"""Parameters of the daemon's kill: a request under way, the time an engine may take to recover, and the length of
generation before."""


def prompt(*pieces: tuple[int, int], new: int = 1, logprobs: int | None = None) -> Prompt:
    """``(seed, tokens)`` after ``(seed, tokens)``; ``new`` tokens are to follow."""
    return {"pieces": [list(each) for each in pieces], "new": new, "logprobs": logprobs}


def first_ms(engine: Engine, asked: Prompt) -> tuple[float, int]:
    """Time to the first token of one request alone, and how many of its tokens were not computed."""
    answer = engine.ask(asked)["requests"][0]
    return answer["first_s"] * 1e3, answer["cached"]


def said(engine: Engine, *pieces: tuple[int, int]) -> list[Any]:
    """Tokens, and log-probabilities of the likeliest at each place."""
    return _words(_asked(engine, *pieces))


def _asked(engine: Engine, *pieces: tuple[int, int]) -> dict[str, Any]:
    asked = engine.ask(prompt(*pieces, new=SAID_TOKENS, logprobs=SAID_LOGPROBS))["requests"][0]
    return dict(asked)


def apart(mine: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Largest difference of log-probabilities, up to the first token that differs; 0.0: bit by bit the same."""
    if mine == theirs:
        return 0.0
    most = 0.0
    for token, other, at, there in zip(*mine[:1], *theirs[:1], *mine[1:], *theirs[1:], strict=True):
        known = dict(map(tuple, there))
        most = max([most, *(abs(value - known[each]) for each, value in at if each in known)])
        if token != other:
            break
    return most


def warm(engines: Sequence[Engine], sizes: Sequence[int], salt: int) -> None:
    """Run prompts, and hits of each size, so that everything compiled or looked up for a new shape is ready."""
    for number, engine in enumerate(engines):
        for size in sizes:
            asked = prompt((salt + number * 100_000 + size, size), new=4, logprobs=SAID_LOGPROBS)
            engine.ask(asked, asked, asked)


def warm_batches(engine: Engine, lengths: Sequence[int], at_a_time: int, salt: int) -> None:
    """Run prompts of each length in batches of several sizes, whose answers end one by one: kernels are compiled for
    batches of prompts beside tokens, and engines that admit a batch in other parts meet other sizes."""
    for tokens in lengths:
        for count in (1 << power for power in range(at_a_time.bit_length())):
            first = salt + (tokens * 100 + count) * 1_000
            engine.ask(*(prompt((first + each, tokens), new=2 + each) for each in range(count)), at_a_time=count)


def own_hits(engine: Engine, sizes: Sequence[int], repeats: int, salt: int) -> dict[int, dict[str, Any]]:
    """An engine computes prompts, and has them again: by size in tokens."""
    found = {}
    for size in sizes:
        pieces = (salt + size, size)
        computed, _ = first_ms(engine, prompt(pieces, new=2))
        _drop_times(engine)
        again = [first_ms(engine, prompt(pieces, new=2)) for _ in range(repeats)]
        told = {
            "computed_ms": computed,
            "again_ms": statistics.median(ms for ms, _ in again),
            "cached": again[-1][1],
            **_connector_ms(engine, repeats),
        }
        first = said(engine, pieces)
        found[size] = {
            **told,
            "again_apart": apart(first, said(engine, pieces)),
            "said": first,
            "said_computed": said(engine, (salt + size + 1, size)),
        }
        progress(f"{engine.name} {size} tokens: {told} {found[size]['again_apart']}")
    return found


def shared_hits(other: Engine, owned: Mapping[int, Mapping[str, Any]], repeats: int, salt: int) -> list[dict[str, Any]]:
    """Another engine asks what ``own_hits`` computed elsewhere; a row by size."""
    rows = []
    for size, own in owned.items():
        pieces = (salt + size, size)
        _drop_times(other)
        first, cached = first_ms(other, prompt(pieces, new=2))
        again = [first_ms(other, prompt(pieces, new=2))[0] for _ in range(repeats)]
        answer = _asked(other, pieces)
        rows.append(
            {
                "tokens": size,
                **{key: own[key] for key in own if not key.startswith("said") and key != "cached"},
                "other_first_ms": first,
                "other_ms": statistics.median(again),
                "cached": cached,
                **{f"other_{key}": value for key, value in _connector_ms(other, repeats + 1).items()},
                "other_apart": apart(own["said"], _words(answer)),
                "other_again_apart": apart(own["said"], said(other, pieces)),
                "other_said_cached": answer["cached"],
            }
        )
        progress(f"{other.name} {json.dumps(rows[-1])}")
    return rows


def flood(engine: Engine, tokens: int, salt: int) -> None:
    """Have the pool hold other prompts."""
    size = min(8192, engine.shape.longest // 2)
    engine.ask(*[prompt((salt + each, size)) for each in range(-(-tokens // size))], at_a_time=4)


def from_host(engine: Engine, sizes: Sequence[int], repeats: int, salt: int) -> list[dict[str, Any]]:
    """Prompts leave the device, and are asked again; a row by size, with the connector's time in all iterations of a
    request, which has that of making room in it, and the load's own."""
    times: dict[int, list[tuple[float, int]]] = {size: [] for size in sizes}
    parts: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for repeat in range(repeats):
        seeds = {size: salt + repeat * 1000 + size for size in sizes}
        for size, seed in seeds.items():
            first_ms(engine, prompt((seed, size)))
        flood(engine, engine.shape.pool_tokens, salt + (repeat + 1) * 100_000)
        for size, seed in seeds.items():
            _drop_times(engine)
            times[size].append(first_ms(engine, prompt((seed, size))))
            parts[size].append(_connector_ms(engine, 1) | _load_ms(engine))
        progress(f"{engine.name} from its host: {times} {parts}")
    return [
        {
            "tokens": size,
            "host_ms": statistics.median(ms for ms, _ in seen),
            "host_ms_least": min(ms for ms, _ in seen),
            "cached": min(cached for _, cached in seen),
            **{name: statistics.median(each[name] for each in parts[size]) for name in parts[size][0]},
        }
        for size, seen in times.items()
    ]


def load(engine: Engine, asked: Sequence[Prompt], at_a_time: int, seconds: float) -> dict[str, Any]:
    """Many requests: tokens a second, and time to the first token."""
    _drop_times(engine)
    answer = engine.ask(*asked, at_a_time=at_a_time, seconds=seconds)
    requests, took_s = answer["requests"], answer["seconds"]
    firsts = [each["first_s"] * 1e3 for each in requests]
    inputs = sum(count for each in asked[: len(requests)] for _, count in each["pieces"])
    found = {
        "requests": len(requests),
        "seconds": took_s,
        "output_tokens_s": sum(len(each["tokens"]) for each in requests) / took_s,
        "input_tokens_s": inputs / took_s,
        "first_ms_p50": percentile(firsts, 50),
        "first_ms_p99": percentile(firsts, 99),
        "hit_ratio": sum(each["cached"] for each in requests) / max(1, inputs),
    }
    if engine.has_times:
        steps = [each * 1e3 for each in engine.do("take_times")]
        found |= {"step_ms_p50": percentile(steps, 50), "step_ms_p99": percentile(steps, 99), "steps": len(steps)}
    progress(f"{engine.name} {json.dumps(found)}")
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Ratio of each round, their geometric mean, and its standard error (as a factor's logarithm)."""
    logs = [math.log(mine / other) for mine, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
    return {"ratios": [math.exp(each) for each in logs], "mean": math.exp(statistics.fmean(logs)), "error": error}


def nothing_shared(count: int, tokens: int, new: int, salt: int) -> list[Prompt]:
    """Prompts that have nothing in common."""
    return [prompt((salt + each, tokens), new=new) for each in range(count)]


def agents(trace: Path, pool_tokens: int, working_set: float, requests: int, longest: int) -> list[Prompt]:
    """Turns of agents in a trace's order, with a block of the engine's for each of the trace's (512 tokens), from
    enough sessions that they need ``working_set`` times the pool."""
    sessions: dict[str, list[Any]] = {}
    for line in trace.read_text(encoding="utf-8").splitlines():
        turn = json.loads(line)
        sessions.setdefault(turn["session"], []).append(turn)
    chosen: list[Any] = []
    blocks: set[int] = set()
    for turns in sessions.values():
        fitting = [turn for turn in turns if len(turn["hash_ids"]) * 64 < longest]
        if len(fitting) < 4 or len(blocks) * 64 >= working_set * pool_tokens:
            continue
        chosen.append(fitting)
        blocks |= {key for turn in fitting for key in turn["hash_ids"]}
    turns = [turn for rank in range(max(map(len, chosen))) for each in chosen for turn in each[rank : rank + 1]]
    return [
        prompt(*((key + (1 << 32), 64) for key in turn["hash_ids"]), new=min(128, max(8, turn["output_length"] // 8)))
        for turn in turns[:requests]
    ]


def drafts(engine: Engine, salt: int, requests: int, tokens: int, new: int) -> dict[str, Any]:
    """One request after another, so that nothing depends on batches: what was said, and what was drafted for it."""
    before = engine.do("take_drafts")
    asked = [prompt((salt + each, tokens), new=new, logprobs=SAID_LOGPROBS) for each in range(requests)]
    said = [_words(each) for each in engine.ask(*asked)["requests"]]
    after = engine.do("take_drafts")
    return {"said": said, **{name: after[name] - before[name] for name in after}}


def restart(fleet: Fleet, name: str, size: int, salt: int) -> dict[str, Any]:
    """Kill an engine and start it again: until its first answer, which finds what others computed."""
    fleet.kill(name)
    begun_s = time.monotonic()
    (engine,) = fleet.start(**{name: "ours"})
    first, cached = first_ms(engine, prompt((salt + size, size)))
    return {
        "tokens": size,
        "first_ms": first,
        "cached": cached,
        "ready_s": engine.facts["ready_s"],
        "first_answer_s": time.monotonic() - begun_s,
    }


def outlive(fleet: Fleet, engine: Engine, size: int, salt: int) -> dict[str, Any]:
    """Kill the daemon while an engine generates, and start it again: what becomes of what is under way, when the engine
    finds its own prompts again, and how far answers are from those before, computed beside computed and hit beside
    hit: what is computed with other tokens at a time differs on a GPU by itself, and so does what is preempted because
    the engine moves, so both are asked once it has."""
    pieces, unseen = (salt, size), (salt + 3, size)
    computed, _, hit = said(engine, unseen), said(engine, pieces), said(engine, pieces)
    long = prompt((salt + 1, 256), new=OUTLIVING_TOKENS, logprobs=SAID_LOGPROBS)
    whole = engine.ask(long, long)["requests"][1]
    engine.send([long], at_a_time=1, seconds=OUTLIVING_SECONDS)
    time.sleep(OUTLIVING_PAUSE_S)  # so that it generates
    fleet.kill_daemon()
    (under_way,) = engine.collect()["requests"]
    fleet.start_daemon()
    begun_s = time.monotonic()
    first_ms(engine, prompt((salt + 2, size)))
    first_answer_s, cached = time.monotonic() - begun_s, 0
    while not cached and time.monotonic() - begun_s < OUTLIVING_SECONDS:
        _, cached = first_ms(engine, prompt(pieces))
    return {
        "tokens": size,
        "under_way_apart": apart(_words(under_way), _words(whole)),
        "under_way_tokens": len(under_way["tokens"]),
        "first_answer_s": first_answer_s,
        "hit_s": time.monotonic() - begun_s,
        "cached": cached,
        "computed_apart": apart(said(engine, unseen), computed),
        "hit_apart": apart(said(engine, pieces), hit),
    }


def _words(request: Mapping[str, Any]) -> list[Any]:
    return [request["tokens"], request["logprobs"]]


def references(engine: Engine, seed: int, count: int) -> list[tuple[Prompt, Any]]:
    """Random requests, most of which begin as others do, and what an engine says to each of them alone."""
    rng = random.Random(seed)
    asked = [
        prompt(
            (seed + rng.randrange(6), engine.shape.longest // rng.choice((10, 20, 40))),
            (seed + 100 + each, rng.randrange(16, 512)),
            new=rng.randrange(8, 48),
            logprobs=2,
        )
        for each in range(count)
    ]
    return list(zip(asked, engine.ask(*asked)["requests"], strict=True))


def nothing_judged() -> dict[str, Any]:
    """Counts of answers, before the first."""
    return {"answers": 0, "apart": 0, "most_apart": 0.0, "near_ties": 0, "cached_tokens": 0}


def pick(rng: random.Random, known: Sequence[Any]) -> list[int]:
    """Prompts to ask together."""
    return [rng.randrange(len(known)) for _ in range(12)]


def control(engine: Engine, known: Sequence[tuple[Prompt, Any]], rounds: int) -> dict[str, Any]:
    """vLLM alone, asked as ``chaos`` asks, with its own prefix cache: how far its answers are from those
    that it gave to each request alone."""
    rng, found = random.Random(3), nothing_judged()
    for _ in range(rounds):
        picks = pick(rng, known)
        answers = engine.ask(*[known[each][0] for each in picks], at_a_time=6)["requests"]
        for answer in answers:
            _judge(known[picks[answer["number"]]][1], answer, found)
    return found


def chaos(fleet: Fleet, known: Sequence[tuple[Prompt, Any]], seconds: float, kill_every_s: float) -> dict[str, Any]:
    """Random requests on two engines, each killed in mid-request about ``kill_every_s`` after it began to serve."""
    begun_s = time.monotonic()
    found: dict[str, Any] = {**nothing_judged(), "kills": 0}

    def drive(name: str, seed: int) -> None:
        rng, generation, kill_s = random.Random(seed), 0, 0.0
        while time.monotonic() < begun_s + seconds:
            (engine,) = fleet.start(**{f"{name}{generation}": "ours"})
            fleet.standby(f"{name}{generation + 1}", "ours")
            kill_s = kill_s or time.monotonic() + kill_every_s * (0.5 + rng.random())
            picks = pick(rng, known)
            engine.send([known[each][0] for each in picks], at_a_time=6, seconds=20.0)
            if time.monotonic() > kill_s:
                time.sleep(rng.random() * 0.5)  # at any moment of what runs
                fleet.kill(engine.name)
                found["kills"] += 1
                generation, kill_s = generation + 1, 0.0
                continue
            for answer in engine.collect()["requests"]:
                _judge(known[picks[answer["number"]]][1], answer, found)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(drive, name, seed) for seed, name in enumerate(("chaos-a", "chaos-b"))]:
            done.result()
    found["problems"] = fleet.verify(checksums=True)
    progress(f"chaos {json.dumps(found)}")
    return found


def _judge(expected: Mapping[str, Any], answer: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Count an answer as apart where a log-probability is off by more than noise, up to the first other token."""
    found["answers"] += 1
    found["cached_tokens"] += answer["cached"]
    pairs = zip(expected["tokens"], answer["tokens"], expected["logprobs"], answer["logprobs"], strict=True)
    for wanted, got, told, heard in pairs:
        theirs, mine = dict(map(tuple, told)), dict(map(tuple, heard))
        both = theirs.keys() & mine.keys()
        off = max(
            (abs(theirs[token] - mine[token]) for token in both), default=abs(max(theirs.values()) - max(mine.values()))
        )
        found["most_apart"] = max(found["most_apart"], off)
        if off > NOISE or not both:
            found["apart"] += 1
            return
        if wanted != got:
            found["near_ties"] += 1
            return  # what follows is another text


def _drop_times(engine: Engine) -> None:
    if engine.has_times:
        engine.do("take_times")
        engine.do("take_loads")


def _connector_ms(engine: Engine, requests: int) -> dict[str, float]:
    """Time of the connector for one request, on average since the last drop."""
    return {"connector_ms": sum(engine.do("take_times")) * 1e3 / requests} if engine.has_times else {}


def _load_ms(engine: Engine) -> dict[str, float]:
    """Time of all loads from the host since the last drop."""
    return {"load_ms": sum(engine.do("take_loads")) * 1e3} if engine.has_times else {}


def percentile(values: Sequence[float], percent: int) -> float:
    """Value that ``percent`` of the values do not exceed; 0.0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0
