"""Hits of whole prompts for ``scheduling``: python -m tests.vllm.whole_hits RUN SOCKET SEED."""

from __future__ import annotations

import random

import torch
from cachesvc_vllm.worker_side import PageCopier

from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_geometry
from tests.vllm.scheduling import LONGEST, VOCABULARY, Engine
from tests.vllm.scheduling_runs import RUNS, cached, main, run_out
from tests.vllm.shape import Shape

SLOW = Shape(page_bytes=1 << 20)
"""A load of ten blocks takes longer than a step here."""

PROMPT_TOKENS = 40
"""Ten blocks."""


PAGES = 5


def copies() -> None:
    """A page is copied in all planes, and no byte of another changes."""
    for widths in ((64,) * 4, (64, 64, 24), (24,), (6, 6), (64, 7)):
        planes = tuple(Plane("kv", layer, "full", (width,), "uint8") for layer, width in enumerate(widths))
        layout = Layout(16, 1, (PlaneGroup("full"),), planes)
        geometry = device_geometry(layout, 0, PAGES)
        slab = torch.randint(-128, 128, (geometry.total_bytes,), dtype=torch.int8)
        wanted = slab.clone()
        for source, target in ((1, 3), (3, 4)):
            for span in geometry.spans:
                first, to = (span.offset + page * span.page_stride for page in (source, target))
                wanted[to : to + span.width] = wanted[first : first + span.width].clone()
        PageCopier(slab, layout, PAGES).copy([(1, 3), (3, 4)])
        assert torch.equal(slab, wanted), widths


def whole(socket: str, seed: int) -> list[Engine]:
    """All of a prompt that ends with a block is a hit, in place and from the host: one token of it is computed, in a
    step that waits for the load itself. What the engine writes into its own copy of the last block comes to no other
    request."""
    copies()
    engines, rng = [Engine(f"e{each}", socket, seed + each, SLOW) for each in range(2)], random.Random(seed)
    one, two = engines
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    assert cached(one, prompt) == 0
    for where in ("in place", "on the host"):
        early = two.early
        name = two.add(prompt, LONGEST)
        while not two.answers[name]:
            two.step()
        two.connector.update_state_after_alloc(two.requests[name], None, 0)  # as of a session that gets more input
        (table,) = two.scheduler.kv_cache_manager.get_block_ids(name)
        two.worker.slots[table[PROMPT_TOKENS // two.shape.block_tokens - 1]] = 0
        two.abort(name)
        run_out(two)
        assert two.hits[name] == PROMPT_TOKENS - 1, where
        assert (two.early > early) == (where == "on the host"), "nothing else runs"
        assert [cached(each, prompt) for each in engines] == [PROMPT_TOKENS - 1] * 2, where
        drive_out(one, rng)
    assert one.copies >= 2
    unasked(two, one, rng)
    return engines


def unasked(engine: Engine, other: Engine, rng: random.Random) -> None:
    """A layer reads its blocks and asks for none, as indexers do: the first step that counts on it is dropped, and the
    later ones wait for all before they begin."""
    engine.asks_layers, engine.worker._layers["indexer"] = 1.0, 0  # noqa: SLF001 - it has no such layer
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + 1)]
    cached(engine, prompt)
    for early in range(engine.early, engine.early + 2):
        drive_out(other, rng)
        assert cached(engine, prompt) == PROMPT_TOKENS
        assert engine.early == early + 1
        assert engine.stats.data["failed_loads"] == 1


def drive_out(engine: Engine, rng: random.Random) -> None:
    """Have others' blocks leave the device for the host."""
    for _ in range(12):
        cached(engine, [rng.randrange(VOCABULARY) for _ in range(LONGEST - 4)])


def lone(socket: str, seed: int, *, is_async: bool) -> list[Engine]:
    """Requests that come while nothing runs, and others that come a step or two later: steps wait for their loads."""
    engine, rng = Engine("e0", socket, seed, Shape(is_async=is_async)), random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(12, 25) * 4 + each % 2)] for each in range(12)]
    for _ in range(60):
        engine.add(rng.choice(prompts), rng.randint(1, 12))
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if rng.random() < 0.3:
            engine.add(rng.choice(prompts), rng.randint(1, 12))
        run_out(engine)
    return [engine]


def unsound(socket: str, seed: int) -> list[Engine]:
    """Steps are dropped whose load came, for a layer did not ask for its part: a request that comes when the next one
    is launched finds in place what the first one's load has brought, and vLLM counts that as computed no more."""
    engine, rng = Engine("e0", socket, seed, Shape(is_async=True)), random.Random(seed)
    engine.wait_for_answers()
    engine.asks_layers, engine.worker._layers["indexer"] = 1.0, 0  # noqa: SLF001 - it has no such layer
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + 1)]
    cached(engine, prompt)
    for _ in range(8):
        drive_out(engine, rng)
        engine.worker._has_layer_calls = True  # noqa: SLF001 - as of a new engine
        names = [engine.add(prompt, 8)]
        engine.step()
        names.append(engine.add(prompt, 8))
        run_out(engine)
        assert engine.requests[names[0]].num_preemptions == 1
    return [engine]


RUNS |= {
    "unsound": unsound,
    "whole": whole,
    "lone": lambda socket, seed: lone(socket, seed, is_async=False),
    "lone-async": lambda socket, seed: lone(socket, seed, is_async=True),
}

if __name__ == "__main__":
    main()
