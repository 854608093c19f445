"""Random loads for ``scheduling``: python -m tests.vllm.scheduling_runs RUN SOCKET SEED. Prints what became of them.

What the daemon is to suffer is said on standard output, and goes on once there is an answer.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cachesvc_client.plugins.outbox import PagesLapsed
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from tests.vllm.scheduling import VOCABULARY, Engine
from tests.vllm.shape import DIGEST_BYTES, FULL, SAVED_STATE, STATE, WIDE_FULL, WIDE_WINDOW, WINDOW, Group, Shape

STUCK_S = 30.0
"""A run in which nothing happens for so long has failed."""

TIGHT = Shape(pages=40, at_a_time=4, step_tokens=16, stock=1)
"""One request hardly fits beside another."""

LATE: dict[str, Any] = {"drafts": 3, "draft_blocks": "lookahead", "drafts_late": True}
"""Drafters like those on a GPU."""

SLOW = Shape(at_a_time=6, stock=2, page_bytes=8 << 20)
"""A load of some requests takes longer than a daemon needs to die."""

WHOLE, LONG_STEPS = 0.3, 0.9
"""Part of the prompts of which all may be a hit; of the iterations that take longer than the daemon's answers."""

WINDOWS: dict[str, Any] = {"groups": (WINDOW, WINDOW, FULL), "pages": 160}
WINDOWS_ALONE: dict[str, Any] = {"groups": (WINDOW,), "pages": 44}
STATES_ALONE: dict[str, Any] = {"groups": (STATE,), "pages": 44}
"""No group keeps whole sequences."""
STATES: dict[str, Any] = {"groups": (STATE, STATE, FULL), "pages": 200}
SAVED: dict[str, Any] = {"groups": (SAVED_STATE, FULL), "pages": 400}
SIZES: dict[str, Any] = {"groups": (WINDOW, WINDOW, WIDE_FULL), "pages": 160, "page_bytes": 16 * DIGEST_BYTES}
"""Windows in blocks of half as many tokens as whole sequences have."""
SIZES_TOO = {**SIZES, "groups": (FULL, WIDE_WINDOW, WINDOW, FULL)}
"""Whole sequences, which lead, in blocks of half as many tokens as windows have."""
SCRATCH: dict[str, Any] = {
    "groups": (Group(window_tokens=8, block_tokens=4), Group(window_tokens=4, block_tokens=2), Group(block_tokens=16)),
    "pages": 260,
    "page_bytes": 32 * DIGEST_BYTES,
}
"""Windows within a block, most of whose pages no hit needs."""
ALL_KINDS: dict[str, Any] = {"groups": (STATE, WINDOW, FULL), "pages": 200}


class Watch:
    """Fails a run in which nothing happens."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._seen: Any = None
        self._since_s = 0.0

    def look(self) -> None:
        """Once in each round."""
        seen = [
            (len(engine.requests), sum(map(len, engine.answers.values())), request.num_computed_tokens, request.status)
            for engine in self._engines
            for request in engine.scheduler.requests.values()
        ]
        if seen != self._seen:
            self._seen, self._since_s = seen, time.monotonic()
        assert time.monotonic() - self._since_s < STUCK_S, f"nothing goes on: {seen}"


def random_prompt(rng: random.Random, longest_head: int) -> list[int]:
    """One that begins as others do; some are nothing but such a beginning, and end with a block."""
    heads = random.Random(0)
    head = [heads.randrange(VOCABULARY) for _ in range(6 * longest_head)]
    first = rng.randrange(6) * longest_head
    if rng.random() < WHOLE:
        return head[first : first + FULL.block_tokens * rng.randint(1, longest_head // FULL.block_tokens)]
    tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 28))]
    return head[first : first + rng.randint(1, longest_head)] + tail


def serve(
    engines: Sequence[Engine],
    rng: random.Random,
    requests: int,
    *,
    aborts: float = 0.03,
    resets: float = 0,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Random requests until all have ended, or it is so far. ``aborts``, ``resets``: how likely in an iteration."""
    watch, longest = Watch(engines), 48 if engines[0].shape.pages > TIGHT.pages else 80
    while requests or any(engine.is_busy for engine in engines):
        for engine in engines:
            if requests and len(engine.scheduler.requests) < engine.shape.at_a_time + 4 and rng.random() < 0.4:
                requests -= 1
                engine.add(random_prompt(rng, longest), rng.randint(1, 40))
            if engine.scheduler.requests and rng.random() < aborts:
                engine.abort(rng.choice(list(engine.scheduler.requests)))
            if rng.random() < resets:
                engine.reset()
            engine.step()
            if rng.random() < LONG_STEPS:
                engine.settle()
        watch.look()
        if until():
            return


def two(socket: str, seed: int, shape: Shape, *, resets: float = 0) -> list[Engine]:
    """Two engines on one pool, the second of which waits for the daemon's answers."""
    engines = [Engine(f"e{each}", socket, seed + each, shape) for each in range(2)]
    engines[1].wait_for_answers()
    serve(engines, random.Random(seed), 400, resets=resets)
    return engines


def tight(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """Three on a pool that is too small for them, none of whose requests is aborted."""
    engines = [Engine(f"e{each}", socket, seed + each, shape) for each in range(3)]
    serve(engines, random.Random(seed), 200, aborts=0)
    return engines


def deaths(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """The daemon dies again and again, and is away for some steps each time."""
    rng = random.Random(seed)
    engines = [Engine(f"e{each}", socket, seed + each, shape) for each in range(2)]
    for _ in range(5):
        serve(engines, rng, 30, until=lambda: sum(each.waiting_for_loads() for each in engines) > 1)
        tell("kill")
        serve(engines, rng, 5, until=lambda: rng.random() < 0.05)
        tell("start")
        serve(engines, rng, 30, until=lambda: not any(each.is_adrift for each in engines))
    serve(engines, rng, 30)
    return engines


def die_while_loading(socket: str, seed: int) -> list[Engine]:
    """The daemon dies while three requests are loaded, and comes back; again, where none of the loads has failed."""
    engine, rng = Engine("e0", socket, seed, SLOW), random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(90)] for _ in range(6)]
    for _ in range(10):  # on a loaded machine all loads may end before the daemon does
        for prompt in prompts:  # the later ones drive the first to the host
            cached(engine, prompt)
        for prompt in prompts[:3]:
            engine.add([*prompt, 1, 2, 3], 4)
        run_out(engine, until=lambda: engine.waiting_for_loads() == 3)
        tell("kill")
        for _ in range(20):
            engine.step()
        tell("start")
        while engine.is_adrift:
            engine.add([1, 2, 3], 1)
            run_out(engine)
        if engine.failed_loads:
            break
    return [engine]


def stopped(socket: str, seed: int) -> list[Engine]:
    """Stopped for longer than its lease again and again, once in the middle of a step and once between two, while
    another engine takes all that is not kept from it."""
    engine, rng = Engine("e0", socket, seed, Shape()), random.Random(seed)
    for where in ("step", "between", "step"):
        _begin_hits(engine, rng)
        if where == "step":
            engine.interrupt = lambda: tell("stop")
        else:
            tell("stop")
        run_out(engine)
        assert engine.interrupt is None
    assert engine.misread
    return [engine]


def stopped_for_good(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """The same where vLLM cannot take a step back, so engines end: another one is scheduled before an output is taken,
    or the cache has several groups."""
    misread = ended = 0
    for each in range(3):
        engine, rng = Engine(f"e{each}", socket, seed + each, shape), random.Random(seed + each)
        _begin_hits(engine, rng)
        engine.interrupt = lambda: tell("stop")
        try:
            run_out(engine)
        except PagesLapsed:
            ended += 1
        engine.check_beginnings()
        misread += engine.misread
        engine.close()
    assert misread
    assert ended == 3
    return []


def sibling(socket: str, seed: int) -> list[Engine]:
    """Another connector of a MultiConnector could not load a block of a request that runs: vLLM computes it again. What
    it says at the start is not taken for a worker's word, and its loads are not counted as ours. vLLM repeats what our
    worker said when it wakes, and that changes nothing."""
    engine, rng = Engine("e0", socket, seed, Shape()), random.Random(seed)
    for told in (KVConnectorHandshakeMetadata(), engine.share):
        engine.connector.set_xfer_handshake_metadata({0: told})
    name = engine.add([rng.randrange(VOCABULARY) for _ in range(40)], 20)
    while not engine.answers[name]:
        engine.step()
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    engine.sibling_errors = {table[-1]}
    engine.connector.update_connector_output(KVConnectorOutput(finished_recving={name}, failed_recving={name}))
    run_out(engine)
    assert [engine.stats.data[each] for each in ("loads", "failed_loads")] == [0, 0]
    return [engine]


def adapters(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """Two engines with an adapter of one name and path under two numbers. The first one loads another one in place
    while a request runs: what that computes afterwards is no other's, and what it computed before is. Later the
    second one loads that too, and then the older one again. A request's hit is known from its first step on."""
    one, two, rng = Engine("e0", socket, seed, shape), Engine("e1", socket, seed, shape), random.Random(seed)
    first, second = LoRARequest("a", 1, "folder"), LoRARequest("a", 7, "folder")
    prompts = [[rng.randrange(VOCABULARY) for _ in range(42)] for _ in range(2)]
    one.worker.adapters.files["folder"], two.worker.adapters.files["folder"] = 11, 11
    plain = one.add(prompts[0], 2)
    run_out(one)
    for engine, adapter, hit in ((one, first, 0), (one, first, 40), (two, second, 40)):
        name = engine.add(prompts[0], 2, adapter)
        run_out(engine)
        assert engine.hits[name] == hit
    running = one.add(prompts[1], 40, first)
    while len(one.answers[running]) < 10:
        one.step()
    before = len(prompts[1]) + len(one.answers[running])
    one.load_adapter(first, 12, is_noticed=shape.steps_under_way == 1)
    run_out(one)
    whole = prompts[1] + one.answers[running]
    for content, prompt, least, most in (
        (11, whole, 40, before),
        (12, whole, 0, 0),
        (12, prompts[0], 0, 0),
        (11, whole, 72, 80),
    ):
        two.load_adapter(second, content, is_noticed=True)
        name = two.add(prompt, 2, second)
        run_out(two)
        assert least <= two.hits[name] <= most, (content, two.hits[name])
    name = one.add(prompts[0], 2, first)
    run_out(one)
    assert one.hits[name] == 40, "of the second engine, by what it had loaded"
    assert one.hits[plain] == 0
    return [one, two]


def weights(socket: str, seed: int) -> list[Engine]:
    """Three versions of weights over two engines, and a third one that starts with the last of them. Within a version
    the second engine has the first one's blocks from its first request on; across versions there is no hit."""
    one, two = Engine("e0", socket, seed, Shape()), Engine("e1", socket, seed + 1, Shape(weights_version="step-0"))
    prompt = [random.Random(seed).randrange(VOCABULARY) for _ in range(40)]
    assert [cached(each, prompt) for each in (one, two)] == [0, 0], "the checkpoint's weights are not step-0 by name"
    for root in (1, 2, 3):
        tell(f"announce step-{root}")
        one.load(root)
        assert cached(one, prompt) == 0, "it has other weights"
        assert cached(two, prompt) == 39, "it has the old ones, and what was computed with them"
        two.load(root)
        assert cached(two, prompt) == 39, "the first request"
        two.load(root)  # as after a pause without new weights
        assert cached(two, prompt) == 39
    three = Engine("e2", socket, seed + 2, Shape(weights_version="step-3"))
    three.model.root = 3
    assert cached(three, prompt) == 39
    one.load(4)
    assert cached(one, prompt) == 0, "not announced, so of no name"
    assert cached(one, prompt) == 39, "its own"
    assert [cached(each, prompt) for each in (two, three)] == [39, 39], "step-3"
    _forget_an_announcement([one, two, three], prompt)
    return [one, two, three]


def _forget_an_announcement(engines: Sequence[Engine], prompt: Sequence[int]) -> None:
    """A version is announced, and the daemon is replaced before the engines load it. They share again with the next."""
    tell("announce step-5")
    for each in engines:
        each.load(5)
    tell("announce step-6")
    tell("kill")
    tell("start")
    while any(each.is_adrift for each in engines):
        for each in engines:
            cached(each, [1, 2, 3])
    assert [cached(each, prompt) for each in engines] == [0, 39, 39], "still of step-5"
    engines[0].load(6)
    assert cached(engines[0], prompt) == 0, "step-6, of which the daemon knows nothing"
    engines[1].load(6)
    assert cached(engines[1], prompt) == 0, "nor of this one's"
    assert cached(engines[2], prompt) == 39, "step-5"
    tell("announce step-6")
    for each in engines:
        each.load(6)
    assert [cached(each, prompt) for each in engines] == [0, 39, 39]


def aborted(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """Clients go while the step that computes their prompts is under way: all blocks before the last token are there,
    as in vLLM alone."""
    engine, rng = Engine("e0", socket, seed, shape), random.Random(seed)
    for tokens in (7, 8, 9, 41, 64):
        prompt = [rng.randrange(VOCABULARY) for _ in range(tokens)]
        name = engine.add(prompt, 6)
        engine.step()
        assert not engine.answers[name]
        engine.abort(name)
        run_out(engine)
        assert cached(engine, prompt, 1) >= (tokens - 1) // 4 * 4, tokens
    return [engine]


def cached(engine: Engine, prompt: Sequence[int], new: int = 3) -> int:
    """Serve a prompt; how many of its tokens were there. The answer is that of the engine's weights."""
    name = engine.add(prompt, new)
    run_out(engine)
    assert engine.answers[name] == engine.model.answer(prompt, new)
    return engine.hits[name]


def repeated(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """Prompts of lengths around the ends of blocks and of chunks, each of which comes again: all blocks before the last
    token are there, as in vLLM alone, also where vLLM frees a state before the output of the step that wrote it."""
    engine, rng = Engine("e0", socket, seed, shape), random.Random(seed)
    for tokens in [*range(3, 23), *range(63, 67), *range(95, 98)]:
        for new in (1, 6):
            prompt = [rng.randrange(VOCABULARY) for _ in range(tokens)]
            first, again = cached(engine, prompt, new), cached(engine, prompt, new)
            assert (first, again) == (0, (tokens - 1) // 4 * 4), (tokens, new)
    return [engine]


def parting(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """Prompts that go on differently behind a shared beginning, which ends within a chunk of each: the second one finds
    its blocks without a state, and leaves one there, as in vLLM alone, for the third."""
    engines, rng = [Engine(f"e{number}", socket, seed, shape) for number in range(2)], random.Random(seed)
    for head in (8, 20, 40):
        prompts = [[rng.randrange(VOCABULARY) for _ in range(head)]] * 3
        prompts = [[*each, *(rng.randrange(VOCABULARY) for _ in range(10))] for each in prompts]
        found = [cached(engines[at % 2], prompt) for at, prompt in enumerate(prompts)]
        assert found == [0, 0, head], found
    return engines


def together(socket: str, seed: int, shape: Shape) -> list[Engine]:
    """Requests that come together and begin alike: one of them computes that, and the others find it."""
    engine, rng = Engine("e0", socket, seed, shape), random.Random(seed)
    for head, tail in ((41, 0), (40, 5), (100, 0), (90, 6)):
        common = [rng.randrange(VOCABULARY) for _ in range(head)]
        names = [engine.add([*common, *[each] * tail], 4 if each else 1) for each in range(6)]
        run_out(engine)
        hits = sorted(engine.hits[name] for name in names)
        assert hits[1] >= head // 4 * 4 - 4 * (1 + (shape.draft_blocks == "drop")), hits
    common = [rng.randrange(VOCABULARY) for _ in range(50)]
    gone = [engine.add([*common, *[each] * 9], 4) for each in range(3)]
    engine.step()
    engine.abort(gone[0])  # which computes what the others wait for
    run_out(engine)
    return [engine]


def queued(socket: str, seed: int) -> list[Engine]:
    """Six requests of one prompt and two places: those that vLLM does not look at are matched again once, not with
    each report."""
    engine, rng = Engine("e0", socket, seed, Shape(pages=400, at_a_time=2)), random.Random(seed)
    matches, sent = engine.connector._scheduler._book._matches, []  # noqa: SLF001 - how often the daemon is asked
    send = matches.send

    def count(*args: Any, **kwargs: Any) -> Any:
        found = send(*args, **kwargs)
        sent.extend(found)
        return found

    matches.send = count
    prompt = [rng.randrange(VOCABULARY) for _ in range(40)]
    names = [engine.add(prompt, 40) for _ in range(6)]
    while engine.is_busy:
        engine.step()
        engine.settle()
    assert sum(engine.hits[name] > 0 for name in names) == 5
    assert len(sent) <= 6 * len(names), f"{len(sent)} matches for {len(names)} requests"
    return [engine]


def _begin_hits(engine: Engine, rng: random.Random) -> None:
    """Requests that have hits, and run."""
    prompts = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(4)]
    for prompt in prompts:
        engine.add(prompt, 2)
    run_out(engine)
    for prompt in prompts:
        engine.add([*prompt, 1, 2, 3], 20)
    while not all(engine.answers[name] for name in list(engine.answers)[-4:]):
        engine.step()


def run_out(engine: Engine, until: Callable[[], bool] = lambda: False) -> None:
    """Until it has nothing to do, or it is so far."""
    watch = Watch([engine])
    while engine.is_busy and not until():
        engine.step()
        watch.look()


def tell(what: str) -> None:
    """Have the daemon suffer it."""
    print(f"@{what}", flush=True)
    assert sys.stdin.readline() == "done\n"


RUNS: dict[str, Callable[[str, int], list[Engine]]] = {
    "plain": lambda socket, seed: two(socket, seed, Shape()),
    "async": lambda socket, seed: two(socket, seed, Shape(is_async=True)),
    "stages": lambda socket, seed: two(socket, seed, Shape(stages=3)),
    "stages-async": lambda socket, seed: two(socket, seed, Shape(stages=3, is_async=True)),
    "stages-all-kinds": lambda socket, seed: two(
        socket, seed, Shape(stages=2, is_async=True, at_a_time=24, **ALL_KINDS)
    ),
    "stages-windows": lambda socket, seed: two(socket, seed, Shape(stages=3, **WINDOWS)),
    "tight-stages": lambda socket, seed: tight(socket, seed, replace(TIGHT, stages=2)),
    "together-stages": lambda socket, seed: together(socket, seed, Shape(pages=200, stages=2)),
    "aborted-stages": lambda socket, seed: aborted(socket, seed, Shape(stages=2)),
    "adapters-stages": lambda socket, seed: adapters(socket, seed, Shape(stages=2)),
    "resets-stages": lambda socket, seed: two(socket, seed, Shape(stages=3, is_async=True), resets=0.05),
    "stopped-stages": lambda socket, seed: stopped_for_good(socket, seed, Shape(stages=2)),
    "deaths-stages": lambda socket, seed: deaths(socket, seed, Shape(stock=2, stages=2)),
    "deaths-stages-async": lambda socket, seed: deaths(socket, seed, Shape(stock=2, stages=2, is_async=True)),
    "repeated-stages": lambda socket, seed: repeated(socket, seed, Shape(stages=2, is_async=True, **SAVED)),
    "drafts": lambda socket, seed: two(socket, seed, Shape(drafts=3)),
    "lookahead": lambda socket, seed: two(socket, seed, Shape(drafts=3, draft_blocks="lookahead")),
    "late": lambda socket, seed: two(socket, seed, Shape(**LATE)),
    "tight-late": lambda socket, seed: tight(socket, seed, replace(TIGHT, **LATE)),
    "drop": lambda socket, seed: two(socket, seed, Shape(drafts=3, draft_blocks="drop")),
    "tight-lookahead": lambda socket, seed: tight(socket, seed, replace(TIGHT, drafts=2, draft_blocks="lookahead")),
    "resets": lambda socket, seed: two(socket, seed, Shape(), resets=0.05),
    "windows": lambda socket, seed: two(socket, seed, Shape(**WINDOWS)),
    "windows-alone": lambda socket, seed: two(socket, seed, Shape(**WINDOWS_ALONE)),
    "states-alone": lambda socket, seed: two(socket, seed, Shape(**STATES_ALONE)),
    "windows-alone-drafts": lambda socket, seed: two(socket, seed, Shape(drafts=3, **WINDOWS_ALONE)),
    "states-alone-drafts": lambda socket, seed: two(socket, seed, Shape(drafts=3, **{**STATES_ALONE, "pages": 90})),
    "states-alone-async": lambda socket, seed: two(socket, seed, Shape(is_async=True, **STATES_ALONE)),
    "tight-windows-alone": lambda socket, seed: tight(socket, seed, replace(TIGHT, **{**WINDOWS_ALONE, "pages": 24})),
    "deaths-windows-alone": lambda socket, seed: deaths(socket, seed, Shape(stock=2, **WINDOWS_ALONE)),
    "deaths-states-alone": lambda socket, seed: deaths(socket, seed, Shape(stock=2, **{**STATES_ALONE, "pages": 60})),
    "states": lambda socket, seed: two(socket, seed, Shape(**STATES)),
    "all-kinds": lambda socket, seed: two(socket, seed, Shape(at_a_time=24, **ALL_KINDS)),
    "windows-async": lambda socket, seed: two(socket, seed, Shape(is_async=True, **WINDOWS)),
    "sizes": lambda socket, seed: two(socket, seed, Shape(**SIZES)),
    "sizes-async": lambda socket, seed: two(socket, seed, Shape(is_async=True, **SIZES_TOO)),
    "sizes-late": lambda socket, seed: two(socket, seed, Shape(**LATE, **SIZES)),
    "sizes-drop": lambda socket, seed: two(socket, seed, Shape(drafts=3, draft_blocks="drop", **SIZES_TOO)),
    "tight-sizes": lambda socket, seed: tight(socket, seed, replace(TIGHT, **{**SIZES, "pages": 90})),
    "deaths-sizes": lambda socket, seed: deaths(socket, seed, Shape(stock=2, **SIZES_TOO)),
    "scratch": lambda socket, seed: two(socket, seed, Shape(**SCRATCH)),
    "scratch-late": lambda socket, seed: two(socket, seed, Shape(**LATE, **SCRATCH)),
    "tight-scratch": lambda socket, seed: tight(socket, seed, replace(TIGHT, **{**SCRATCH, "pages": 110})),
    "states-within": lambda socket, seed: two(socket, seed, Shape(groups=(SAVED_STATE, SAVED_STATE, FULL), pages=200)),
    "states-priorities": lambda socket, seed: two(
        socket, seed, Shape(has_priorities=True, groups=(STATE, FULL), pages=60, at_a_time=6)
    ),
    "states-async": lambda socket, seed: two(socket, seed, Shape(is_async=True, **STATES)),
    "states-drafts": lambda socket, seed: two(socket, seed, Shape(drafts=3, **STATES)),
    "states-late": lambda socket, seed: two(socket, seed, Shape(**LATE, **STATES)),
    "states-drop": lambda socket, seed: two(socket, seed, Shape(drafts=2, draft_blocks="drop", **STATES)),
    "saved-late": lambda socket, seed: two(
        socket, seed, Shape(**LATE, groups=(SAVED_STATE, SAVED_STATE, FULL), pages=240)
    ),
    "all-kinds-late": lambda socket, seed: two(
        socket, seed, Shape(at_a_time=16, **LATE, **{**ALL_KINDS, "pages": 260})
    ),
    "tight-states-late": lambda socket, seed: tight(
        socket, seed, replace(TIGHT, **LATE, groups=(STATE, WINDOW, FULL), pages=130)
    ),
    "deaths-states-drafts": lambda socket, seed: deaths(
        socket, seed, Shape(stock=2, drafts=2, **{**ALL_KINDS, "pages": 260})
    ),
    "repeated-lookahead": lambda socket, seed: repeated(
        socket, seed, Shape(drafts=2, draft_blocks="lookahead", keeps_last=True, groups=(STATE, FULL), pages=400)
    ),
    "repeated-drafts": lambda socket, seed: repeated(socket, seed, Shape(drafts=2, **SAVED)),
    "windows-drafts": lambda socket, seed: two(socket, seed, Shape(drafts=3, **WINDOWS)),
    "windows-late": lambda socket, seed: two(socket, seed, Shape(**LATE, **WINDOWS)),
    "windows-drop": lambda socket, seed: two(socket, seed, Shape(drafts=3, draft_blocks="drop", **WINDOWS)),
    "tight-all-kinds": lambda socket, seed: tight(socket, seed, replace(TIGHT, groups=(STATE, WINDOW, FULL), pages=90)),
    "deaths-all-kinds": lambda socket, seed: deaths(socket, seed, Shape(stock=2, **ALL_KINDS)),
    "resets-all-kinds": lambda socket, seed: two(socket, seed, Shape(**ALL_KINDS), resets=0.05),
    "failing": lambda socket, seed: two(socket, seed, Shape(recomputes=False)),
    "tight": lambda socket, seed: tight(socket, seed, TIGHT),
    "tight-async": lambda socket, seed: tight(socket, seed, replace(TIGHT, is_async=True)),
    "together": lambda socket, seed: together(socket, seed, Shape(pages=200)),
    "together-async": lambda socket, seed: together(socket, seed, Shape(pages=200, is_async=True)),
    "queued": queued,
    "together-windows": lambda socket, seed: together(socket, seed, Shape(**WINDOWS)),
    "together-late": lambda socket, seed: together(socket, seed, Shape(pages=200, **LATE)),
    "together-drop": lambda socket, seed: together(socket, seed, Shape(pages=200, drafts=3, draft_blocks="drop")),
    "repeated": lambda socket, seed: repeated(socket, seed, Shape(**SAVED)),
    "repeated-async": lambda socket, seed: repeated(socket, seed, Shape(is_async=True, **SAVED)),
    "parting": lambda socket, seed: parting(socket, seed, Shape(groups=(STATE, STATE, FULL), pages=400)),
    "parting-async": lambda socket, seed: parting(socket, seed, Shape(is_async=True, **SAVED)),
    "aborted": lambda socket, seed: aborted(socket, seed, Shape(is_async=True)),
    "aborted-states": lambda socket, seed: aborted(socket, seed, Shape(is_async=True, **SAVED)),
    "aborted-windows": lambda socket, seed: aborted(socket, seed, Shape(is_async=True, **WINDOWS)),
    "die-while-loading": die_while_loading,
    "sibling": sibling,
    "adapters": lambda socket, seed: adapters(socket, seed, Shape()),
    "adapters-async": lambda socket, seed: adapters(socket, seed, Shape(is_async=True)),
    "weights": weights,
    "stopped": stopped,
    "stopped-async": lambda socket, seed: stopped_for_good(socket, seed, Shape(is_async=True)),
    "stopped-all-kinds": lambda socket, seed: stopped_for_good(socket, seed, Shape(**ALL_KINDS)),
    "deaths": lambda socket, seed: deaths(socket, seed, Shape(stock=2)),
    "deaths-async": lambda socket, seed: deaths(socket, seed, Shape(stock=2, is_async=True)),
}


def main() -> None:
    """Run, and tell."""
    run, socket, seed = sys.argv[1:]
    engines = RUNS[run](socket, int(seed))
    told = dict.fromkeys(("whole", "loads", "failed_loads", "preempted", "again", "copies", "early"), 0)
    for engine in engines:
        told["loads"] += engine.loads
        told["failed_loads"] += engine.failed_loads
        told["copies"] += engine.copies
        told["early"] += engine.early
        told["preempted"] += sum(each.num_preemptions for each in engine.requests.values())
        engine.take_stats()
        told["again"] += engine.stats.data["preempted_asked_tokens"]
        assert engine.stats.data["asked_tokens"] <= sum(each.num_prompt_tokens for each in engine.requests.values())
        if not run.startswith(("resets", "weights")):  # else answers are of several weights
            told["whole"] += engine.check_answers()
        assert engine.leftovers() == {}, engine.leftovers()
        engine.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
