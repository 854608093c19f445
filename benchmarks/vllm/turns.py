"""Hits of two engines in turns, so that both are measured at the same time: what one engine's figure owes to a moment
in which the machine was busy, the other one's does too."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.vllm.fleet import Engine, progress
from benchmarks.vllm.parts import Prompt, apart, first_ms, own_hits, prompt, ratios


def in_turns(mine: Engine, other: Engine, sizes: Sequence[int], turns: int, salt: int) -> list[dict[str, Any]]:
    """Ask both the same prompts, each first in every other turn; a row by size. ``salt``: of prompts that a third
    process has computed, or that are new: the first ask of each engine is not counted, and its hit is noted."""
    rows = []
    for size in sizes:
        asked = prompt((salt + size, size), new=2)
        first = {engine.name: first_ms(engine, asked)[1] for engine in (other, mine)}
        seen: dict[str, list[tuple[float, int, int]]] = {mine.name: [], other.name: []}
        for turn in range(turns):
            for engine in (mine, other) if turn % 2 else (other, mine):
                seen[engine.name].append(_turn(engine, asked))
        ms = {name: [each for each, _, _ in told] for name, told in seen.items()}
        medians = {name: statistics.median(each) for name, each in ms.items()}
        pairs = ratios(ms[mine.name], ms[other.name])
        row = {
            "tokens": size,
            **{f"{name} ms": each for name, each in medians.items()},
            **{f"{name} cached": min(cached for _, cached, _ in told) for name, told in seen.items()},
            **{f"{name} cached at first": cached for name, cached in first.items()},
            "ratio of medians": medians[mine.name] / medians[other.name],
            "ratio": pairs["mean"],
            "error": pairs["error"],
            "ms and steps of each turn": {
                name: [(round(each, 1), steps) for each, _, steps in told] for name, told in seen.items()
            },
        }
        progress(f"in turns {row}")
        rows.append(row)
    return rows


def _turn(engine: Engine, asked: Prompt) -> tuple[float, int, int]:
    """Milliseconds to the first token, tokens not computed, and iterations of the engine; 0 where it does not tell."""
    answer = engine.ask(asked)["requests"][0]
    return answer["first_s"] * 1e3, answer["cached"], answer.get("steps", 0)


def alike(one: Engine, other: Engine, sizes: Sequence[int], repeats: int, salt: int) -> list[dict[str, Any]]:
    """Two engines without a daemon, each with its own cache: distance of their answers, for hits and computed."""
    mine, theirs = (own_hits(each, sizes, repeats, salt) for each in (one, other))
    return [{"tokens": size, **_distances(own, theirs[size])} for size, own in mine.items()]


def _distances(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "cached": [own["cached"], theirs["cached"]],
        "hit_apart": apart(own["said"], theirs["said"]),
        "computed_apart": apart(own["said_computed"], theirs["said_computed"]),
        "again_apart": [own["again_apart"], theirs["again_apart"]],
    }
