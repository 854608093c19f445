"""Loads beside requests that decode, parts of ``benchmarks.vllm``: what these feel of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.vllm.fleet import Engine, progress
from benchmarks.vllm.parts import Prompt, first_ms, flood, percentile, prompt

DECODING, DECODING_TOKENS, DECODING_NEW = 8, 128, 160
"""Requests that decode meanwhile, their prompts and their answers. The load is asked for in their midst."""
BEHIND = 48
"""Tokens that each of them has when the load is asked for."""
OWNER_NEW = 64
"""Tokens of an answer of each request that decodes while another GPU takes what its engine has computed: about as long
as that lasts."""


def _decoding(salt: int, new: int = DECODING_NEW) -> list[Prompt]:
    return [prompt((salt + each, DECODING_TOKENS), new=new) for each in range(DECODING)]


def _gaps_ms(requests: Sequence[dict[str, Any]]) -> list[float]:
    """Times between tokens of those that decode, once all of them do."""
    return [gap * 1e3 for each in requests[:DECODING] for gap in each["gaps_s"][BEHIND // 2 :]]


def loads_beside(engine: Engine, sizes: Sequence[int], repeats: int, salt: int) -> list[dict[str, Any]]:
    """Prompts leave the device, and each is asked again in the midst of others that decode; a row by size, with the
    time to its first token, and the times between the others' tokens beside those of a run without it."""
    alone, beside = list[float](), {size: list[float]() for size in sizes}
    firsts: dict[int, list[float]] = {size: [] for size in sizes}
    cached = dict.fromkeys(sizes, engine.shape.longest)
    for repeat in range(repeats):
        seeds = {size: salt + repeat * 1000 + size for size in sizes}
        for size, seed in seeds.items():
            first_ms(engine, prompt((seed, size)))
        flood(engine, engine.shape.pool_tokens, salt + (repeat + 1) * 100_000)
        decoding = _decoding(salt + (repeat + 1) * 200_000)
        engine.ask(*decoding, at_a_time=DECODING)  # their prompts are hits from now on
        alone += _gaps_ms(engine.ask(*decoding, at_a_time=DECODING, gaps=True)["requests"])
        for size, seed in seeds.items():
            asked = {**prompt((seed, size), new=2), "behind": BEHIND}
            requests = engine.ask(*decoding, asked, at_a_time=DECODING + 1, gaps=True)["requests"]
            firsts[size].append(requests[-1]["first_s"] * 1e3)
            cached[size] = min(cached[size], requests[-1]["cached"])
            beside[size] += _gaps_ms(requests)
    quiet = {"alone_gap_ms_p50": percentile(alone, 50), "alone_gap_ms_p99": percentile(alone, 99)}
    rows = [
        {
            "tokens": size,
            "host_ms": statistics.median(firsts[size]),
            "host_ms_least": min(firsts[size]),
            "cached": cached[size],
            "gap_ms_p50": percentile(gaps, 50),
            "gap_ms_p99": percentile(gaps, 99),
            "gap_ms_most": max(gaps),
            **quiet,
            "gap_p99_ratio": percentile(gaps, 99) / quiet["alone_gap_ms_p99"],
        }
        for size, gaps in beside.items()
    ]
    progress(f"{engine.name} beside others that decode: {json.dumps(rows)}")
    return rows


def owner_slowed(owner: Engine, other: Engine, size: int, repeats: int, salt: int) -> dict[str, Any]:
    """Requests decode on the engine that computed prompts, which fill half of its pool, while another one takes these
    one after another; beside that the time of the same requests alone."""
    rows: list[tuple[float, float, float, int]] = []
    count = owner.shape.pool_tokens // (2 * size)
    for repeat in range(repeats):
        decoding = _decoding(salt + repeat * 100, OWNER_NEW)
        owner.ask(*decoding, at_a_time=DECODING)
        taken = [prompt((salt + 10_000 + repeat * 100 + each, size)) for each in range(count)]
        owner.ask(*taken)
        alone_s = owner.ask(*decoding, at_a_time=DECODING)["seconds"]
        owner.send(decoding, at_a_time=DECODING, seconds=120.0)
        took = other.ask(*taken)
        cached = min(each["cached"] for each in took["requests"])
        rows.append((alone_s, owner.collect()["seconds"], took["seconds"], cached))
    found = {
        "tokens": size,
        "prompts": count,
        "alone_s": statistics.median(alone for alone, *_ in rows),
        "beside_s": statistics.median(beside for _, beside, *_ in rows),
        "taking_s": statistics.median(taking for *_, taking, _ in rows),
        "ratios": [beside / alone for alone, beside, *_ in rows],
        "ratio": statistics.median(beside / alone for alone, beside, *_ in rows),
        "cached": min(cached for *_, cached in rows),
    }
    progress(f"{owner.name} while {other.name} takes its pages: {json.dumps(found)}")
    return found
