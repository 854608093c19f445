"""Many admissions for ``scheduling``, in iterations that take longer than the daemon: python -m
tests.vllm.admission_runs RUN SOCKET SEED."""

from __future__ import annotations

import random
from dataclasses import replace

from cachesvc_vllm.metrics import CacheStats

from tests.vllm.scheduling import LONGEST, VOCABULARY, Engine
from tests.vllm.scheduling_runs import RUNS, cached, main, run_out, serve, tell
from tests.vllm.shape import Shape

BUSY = Shape(pages=6200, at_a_time=80, step_tokens=640, stock=8)
"""Sixteen requests of eight blocks an iteration are a small part of the pool."""

CROWDED = Shape(pages=400, at_a_time=16, step_tokens=128, stock=4)

AT_ONCE = 16
"""Iterations of ``admissions`` before it counts, and while it does."""


def admissions(socket: str, seed: int) -> list[Engine]:
    """Sixteen requests an iteration on a full pool, in iterations that end once the daemon has done what they asked:
    each is admitted at once, and the scheduler waits for no answer while requests run."""
    engine, rng = Engine("e0", socket, seed, BUSY), random.Random(seed)
    for _ in range(BUSY.pages // 31):  # a full pool
        engine.add([rng.randrange(VOCABULARY) for _ in range(LONGEST - 2)], 1)
    run_out(engine)
    for _ in range(AT_ONCE):  # as many requests as stay
        _admit(engine, rng)
    engine.take_stats()
    before, engine.stats = len(engine.hits), CacheStats()
    for _ in range(AT_ONCE):
        _admit(engine, rng)
    engine.take_stats()
    assert engine.stats.data["waits"] == 0, "a running request waited for the daemon"
    assert len(engine.hits) - before >= 16 * (AT_ONCE - 1), "requests came later than they could"
    run_out(engine)
    return [engine]


def _admit(engine: Engine, rng: random.Random) -> None:
    for _ in range(16):
        engine.add([rng.randrange(VOCABULARY) for _ in range(30)], 4)
    engine.step()
    engine.catch_up()


def four(socket: str, seed: int) -> list[Engine]:
    """Four engines on a full pool, one of which has nothing more to do: its stock goes back, and the others' requests
    end."""
    engines, rng = [Engine(f"e{each}", socket, seed + each, CROWDED) for each in range(4)], random.Random(seed)
    for engine in engines:
        for _ in range(12):
            engine.add([rng.randrange(VOCABULARY) for _ in range(30)], 8)
        while engine.is_busy:
            engine.step()
            engine.settle()
    idle = engines.pop()
    assert max(each.most_stock for each in (idle, *engines)) > CROWDED.stock, "none had more than its base"
    assert idle.stock == CROWDED.stock
    serve(engines, rng, 150, aborts=0)
    assert idle.stock == CROWDED.stock
    return [*engines, idle]


def first_token(socket: str, seed: int) -> list[Engine]:
    """A request with a hit comes alone: until its first token, the daemon gets its match and nothing else."""
    engine, rng = Engine("e1", socket, seed, replace(BUSY, is_async=True)), random.Random(seed)
    prompt = [rng.randrange(VOCABULARY) for _ in range(42)]
    cached(engine, prompt)
    record = engine.connector._scheduler._book._lease.record  # noqa: SLF001 - vLLM need not know
    before = record.next_request_id()
    name = engine.add(prompt, 20)
    while not engine.answers[name]:
        engine.step()
    assert record.next_request_id() == before + 2, "the match is a message, and the second of these numbers is ours"
    assert engine.hits[name] == 40
    run_out(engine)
    return [engine]


def burst(socket: str, seed: int) -> list[Engine]:
    """Requests that come together while nothing runs are admitted in one iteration, again and again; those that come
    while requests run wait for no answer."""
    engine, rng = Engine("e2", socket, seed, replace(BUSY, is_async=True)), random.Random(seed)
    for _ in range(4):
        before = len(engine.hits)
        for _ in range(64):
            engine.add([rng.randrange(VOCABULARY) for _ in range(8)], 4)
        engine.step()
        assert len(engine.hits) - before == 64, "admitted in one iteration"
        engine.catch_up()
        engine.take_stats()
        engine.stats = CacheStats()
        for _ in range(8):
            engine.add([rng.randrange(VOCABULARY) for _ in range(8)], 4)
        engine.step()
        engine.take_stats()
        assert engine.stats.data["waits"] == engine.stats.data["idle_waits"] == 0
        run_out(engine)
    return [engine]


def last_token(socket: str, seed: int) -> list[Engine]:
    """The last token of an engine's last request comes while the daemon answers nothing, and waits for no answer."""
    engine, rng = Engine("e3", socket, seed, Shape()), random.Random(seed)
    for _ in range(3):
        name = engine.add([rng.randrange(VOCABULARY) for _ in range(41)], 3)
        while len(engine.answers[name]) < 2:
            engine.step()
        engine.settle()
        engine.take_stats()
        engine.stats = CacheStats()
        tell("pause")
        while len(engine.answers[name]) < 3:
            engine.step()
        engine.take_stats()
        assert engine.stats.data["waits"] == engine.stats.data["idle_waits"] == 0
        tell("resume")
        run_out(engine)
        engine.settle()
    assert engine.stock == engine.shape.stock, "it went back"
    return [engine]


RUNS["burst"], RUNS["last-token"] = burst, last_token
RUNS["admissions"] = lambda socket, seed: admissions(socket, seed) + first_token(socket, seed)
RUNS["four"] = four

if __name__ == "__main__":
    main()
