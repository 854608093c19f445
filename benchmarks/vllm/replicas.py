"""Hits between replicas, a part of ``benchmarks.vllm``: prompts that an engine on other GPUs computed."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.vllm import parts
from benchmarks.vllm.fleet import Engine, Fleet, progress


def near_hits(
    fleet: Fleet, owner: Engine, other: Engine, sizes: Sequence[int], rounds: int, salt: int
) -> list[dict[str, Any]]:
    """One engine computes prompts, an engine on other GPUs asks for them, and asks again what it has then; a row by
    size, with the bytes that came from GPU to GPU for one prompt (of all ranks)."""
    rows = []
    for size in sizes:
        near, own = list[float](), list[float]()
        cached = size
        before = Counter(fleet.counters())
        for turn in range(rounds):
            asked = parts.prompt((salt + turn * 50_000 + size, size), new=2)
            parts.first_ms(owner, asked)
            ms, found = parts.first_ms(other, asked)
            near.append(ms)
            own.append(parts.first_ms(other, asked)[0])
            cached = min(cached, found)
        after = Counter(fleet.counters())
        moved = {f"{way}_bytes": (after[f"{way}_bytes"] - before[f"{way}_bytes"]) / rounds for way in ("p2p", "h2d")}
        rows.append(
            {
                "tokens": size,
                "near_ms": statistics.median(near),
                "near_ms_each": near,
                "own_ms": statistics.median(own),
                "cached": cached,
                **moved,
            }
        )
        progress(f"{other.name} from other GPUs: {json.dumps(rows[-1])}")
    return rows
