"""Traffic of other kinds than the published traces have: seeded, in blocks of 512 tokens, as a trace tells it.

``python -m benchmarks.ledger.workloads DIRECTORY`` writes each as a trace, for other simulators.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from bisect import bisect
from collections.abc import Callable, Iterable
from pathlib import Path

from cachesvc_lab.traces import TraceRequest

BLOCK_TOKENS = 512
SECONDS_A_TOKEN = 0.02


class Log:
    """Requests as they are made, in any order of time. A block is named by its whole prefix: ``below(path, name)``."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._names = itertools.count()
        self._below: dict[tuple[int, object], int] = {}
        self._asked: list[tuple[float, tuple[int, ...], int, int]] = []

    def fresh(self, blocks: int) -> tuple[int, ...]:
        """Blocks that no request has asked for."""
        return tuple(itertools.islice(self._names, blocks))

    def below(self, path: tuple[int, ...], name: object) -> tuple[int, ...]:
        """The path and one more block, the same for the same name."""
        key = (path[-1] if path else -1, name)
        if key not in self._below:
            self._below[key] = next(self._names)
        return (*path, self._below[key])

    def ask(self, at: float, path: tuple[int, ...], output: int, rest: int = 0) -> float:
        """A request, of ``rest`` tokens more than its blocks have; returns when it has ended, in seconds."""
        self._asked.append((at, path, output, rest))
        return at + SECONDS_A_TOKEN * output

    def lognormal(self, median: float, spread: float = 0.8) -> float:
        """A length or a pause."""
        return median * self.dice.lognormvariate(0.0, spread)

    def requests(self, most: int) -> list[TraceRequest]:
        """In order of time."""
        ordered = sorted(self._asked, key=lambda asked: asked[0])[:most]
        return [
            TraceRequest(number, round(at * 1000), len(path) * BLOCK_TOKENS + rest, output, path)
            for number, (at, path, output, rest) in enumerate(ordered)
        ]


class Zipf:
    """Numbers below ``count``, the low ones more often."""

    def __init__(self, count: int, exponent: float) -> None:
        self._sums = list(itertools.accumulate(rank**-exponent for rank in range(1, count + 1)))

    def draw(self, dice: random.Random) -> int:
        """One of them."""
        return bisect(self._sums, dice.random() * self._sums[-1])


Times = Iterable[float]


def arrivals(log: Log, seconds_between: float, until: float, rate: Callable[[float], float] = lambda _: 1.0) -> Times:
    """A Poisson process from 0 on; ``rate`` (at most 1) thins it."""
    now = 0.0
    while (now := now + log.dice.expovariate(1 / seconds_between)) < until:
        if log.dice.random() < rate(now):
            yield now


def chats(log: Log, times: Times, *, systems: int = 12, turns: float = 4.0, pause: float = 40.0) -> None:
    """Conversations below a few system prompts: short messages, answers that the next turn begins with."""
    dice, popular = log.dice, Zipf(systems, 1.0)
    prompts = [log.fresh(dice.randint(1, 6)) for _ in range(systems)]
    for begin in times:
        at, path, tokens = begin, prompts[popular.draw(dice)], 0
        while True:
            tokens += int(log.lognormal(150))
            path += log.fresh(tokens // BLOCK_TOKENS)
            tokens %= BLOCK_TOKENS
            output = 1 + int(log.lognormal(250))
            at = log.ask(at, path, output, tokens) + log.lognormal(pause)
            tokens += output
            if dice.random() < 1 / turns or len(path) > 60:
                break


def agents(log: Log, times: Times, *, kinds: int = 5, turns: float = 25.0, pause: float = 4.0) -> None:
    """Tool loops: many turns a few seconds apart, each with a tool's answer; now and then a person thinks about it, and
    now and then a helper begins with what there is."""
    dice = log.dice
    prompts = [log.fresh(dice.randint(10, 30)) for _ in range(kinds)]
    for begin in times:
        at, path = begin, dice.choice(prompts) + log.fresh(dice.randint(1, 12))
        while len(path) < 250:
            output = 1 + int(log.lognormal(120))
            at = log.ask(at, path, output, 100)
            if dice.random() < 0.05:
                helper, when = path, at
                for _ in range(dice.randint(2, 6)):
                    helper += log.fresh(1 + int(log.lognormal(1.5)))
                    when = log.ask(when, helper, 1 + int(log.lognormal(120))) + log.lognormal(pause)
            path += log.fresh(int(log.lognormal(1.5)))
            at += log.lognormal(240) if dice.random() < 0.06 else log.lognormal(pause)
            if dice.random() < 1 / turns:
                break


def documents(log: Log, times: Times, *, count: int = 1200, exponent: float = 0.9, questions: float = 1.0) -> None:
    """Questions about long documents, of which some are popular; ``questions`` by one reader, a minute apart."""
    dice, popular = log.dice, Zipf(count, exponent)
    texts = [log.fresh(dice.randint(8, 60)) for _ in range(count)]
    for begin in times:
        at, text = begin, texts[popular.draw(dice)]
        while True:
            at = log.ask(at, text + log.fresh(dice.random() < 0.3), 1 + int(log.lognormal(200)), 200)
            at += log.lognormal(60)
            if dice.random() < 1 / questions:
                break


def retrieval(log: Log, times: Times, *, chunks: int = 4000, exponent: float = 0.9) -> None:
    """A system prompt, then retrieved chunks, the most popular first; a second question now and then."""
    dice, popular = log.dice, Zipf(chunks, exponent)
    system = log.fresh(2)
    for at in times:
        path = system
        for chunk in sorted({popular.draw(dice) for _ in range(dice.randint(4, 12))}):
            path = log.below(path, chunk)
        end = log.ask(at, path, 1 + int(log.lognormal(300)), 60)
        if dice.random() < 0.2:
            log.ask(end + log.lognormal(45), path + log.fresh(1), 1 + int(log.lognormal(300)), 60)


def batches(log: Log, times: Times, *, items: int = 150, rate: float = 2.0) -> None:
    """Jobs: one long template, then items that follow one another and are never seen again."""
    dice = log.dice
    for begin in times:
        at, template = begin, log.fresh(dice.randint(4, 40))
        for _ in range(1 + int(log.lognormal(items))):
            at += dice.expovariate(rate)
            log.ask(at, template + log.fresh(dice.randint(1, 4)), 1 + int(log.lognormal(40)))


def completions(log: Log, times: Times, *, keys: int = 30) -> None:
    """Editors: a prompt of a few blocks at every pause in typing, below what a file begins with; the file changes
    further up now and then."""
    dice = log.dice
    for begin in times:
        at, path = begin, log.fresh(dice.randint(1, 8))
        for _ in range(1 + int(log.lognormal(keys))):
            log.ask(at, path, dice.randint(5, 40), dice.randrange(BLOCK_TOKENS))
            at += log.lognormal(2.0) if dice.random() > 0.03 else log.lognormal(200)
            if dice.random() < 0.15:
                path += log.fresh(1)
            if dice.random() < 0.08:
                kept = dice.randint(0, len(path))
                path = path[:kept] + log.fresh(len(path) - kept)


def round_robin(log: Log, times: Times, *, count: int = 60, blocks: int = 40) -> None:
    """The same prompts again and again in the same order: what was used longest ago comes next."""
    prompts = [log.fresh(blocks) for _ in range(count)]
    for number, at in enumerate(times):
        log.ask(at, prompts[number % count], 100)


def bursts(log: Log, times: Times) -> None:
    """Each prompt a few times within seconds, and never again: least recently used is right."""
    for begin in times:
        at, path = begin, log.fresh(log.dice.randint(2, 30))
        for _ in range(log.dice.randint(2, 6)):
            log.ask(at, path, 20)
            at += log.dice.expovariate(0.5)


def daily(at: float) -> float:
    """A rate that rises and falls within a day, of two hours here."""
    return 0.55 - 0.45 * math.cos(at * 2 * math.pi / 7200)


def once_more(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """A trace with as many one-time prompts of the same lengths spread all over it."""
    dice = random.Random(seed)
    names = itertools.count(1 + max(block for request in requests for block in request.block_ids))
    first, last = requests[0].timestamp_ms, requests[-1].timestamp_ms
    flood = [
        TraceRequest(0, dice.randint(first, last), each.input_tokens, each.output_tokens, ids)
        for each in requests
        for ids in [tuple(itertools.islice(names, len(each.block_ids)))]
    ]
    return sorted(requests + flood, key=lambda request: request.timestamp_ms)


def in_turn(parts: list[list[TraceRequest]]) -> list[TraceRequest]:
    """One trace after the other, each with blocks of its own but for one that is there twice."""
    out: list[TraceRequest] = []
    begins, offsets, offset = 0, {}, 0
    for part in parts:
        if id(part) not in offsets:
            offsets[id(part)] = offset
            offset += 1 + max(block for request in part for block in request.block_ids)
        shift = offsets[id(part)]
        for request in part:
            ids = tuple(block + shift for block in request.block_ids)
            at = begins + request.timestamp_ms - part[0].timestamp_ms
            out.append(TraceRequest(0, at, request.input_tokens, request.output_tokens, ids))
        begins = out[-1].timestamp_ms + 1000
    return out


def _mixed(log: Log, until: float, rate: Callable[[float], float]) -> None:
    chats(log, arrivals(log, 4.0, until, rate))
    agents(log, arrivals(log, 150.0, until, rate))
    completions(log, arrivals(log, 60.0, until, rate))
    batches(log, arrivals(log, 600.0, until, rate), items=80)
    retrieval(log, arrivals(log, 8.0, until, rate))


WORKLOADS: dict[str, Callable[[Log], None]] = {
    "short chats": lambda log: chats(log, arrivals(log, 0.8, 2400)),
    "long chats, slow users": lambda log: chats(log, arrivals(log, 6.0, 7200), turns=10, pause=180),
    "agents with tools": lambda log: agents(log, arrivals(log, 12.0, 3600)),
    "Zipf documents, one question": lambda log: documents(log, arrivals(log, 0.7, 3600)),
    "Zipf documents, several questions": lambda log: documents(log, arrivals(log, 3.0, 7200), questions=4),
    "retrieval": lambda log: retrieval(log, arrivals(log, 0.5, 3600)),
    "batch jobs": lambda log: batches(log, arrivals(log, 120.0, 3600)),
    "code completion": lambda log: completions(log, arrivals(log, 10.0, 3600)),
    "mixed tenants": lambda log: _mixed(log, 3600, lambda _: 1.0),
    "mixed tenants by day and night": lambda log: _mixed(log, 14400, daily),
    "round robin": lambda log: round_robin(log, arrivals(log, 1.0, 3600)),
    "bursts": lambda log: bursts(log, arrivals(log, 2.0, 3600)),
}
MOST_REQUESTS = 6000


def workload(name: str, seed: int = 1) -> list[TraceRequest]:
    """The requests of one of ``WORKLOADS``."""
    log = Log(seed)
    WORKLOADS[name](log)
    return log.requests(MOST_REQUESTS)


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write a trace in the Mooncake format."""
    with path.open("w", encoding="utf-8") as file:
        for each in requests:
            ids, at = list(each.block_ids), each.timestamp_ms
            line = {"timestamp": at, "input_length": each.input_tokens, "output_length": each.output_tokens}
            file.write(json.dumps({**line, "hash_ids": ids}) + "\n")


if __name__ == "__main__":
    for each_name in WORKLOADS:
        write(Path(sys.argv[1]) / f"{each_name.replace(' ', '_').replace(',', '')}.jsonl", workload(each_name))
