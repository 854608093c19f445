"""Generator of small seeded traces in the Mooncake format, for users without a trace of their own.

The traffic is multi-turn chat over a few shared system prompts: conversations arrive as a Poisson process and
choose a system prompt by Zipf; each sends a turn, waits while the user thinks, and sends the next one with
its whole history.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from cachesvc_ctl.core.atomic_file import part_file
from cachesvc_ctl.lab.traces.trace import DEFAULT_BLOCK_TOKENS, TraceError


@dataclass(frozen=True, slots=True)
class SyntheticTraceSpec:
    """Parameters of a trace. The same spec gives the same bytes.

    Lengths of messages are lognormal around their medians. A conversation has `turns_mean` turns (geometric),
    fewer where its history reaches `max_prompt_tokens` before. Raises ValueError for a value out of range.
    """

    requests: int = 1000
    seed: int = 0
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    system_prompts: int = 8
    system_tokens_min: int = 1024
    system_tokens_max: int = 6144
    zipf_exponent: float = 1.1
    conversations_per_second: float = 0.5
    turns_mean: float = 5.0
    think_seconds_mean: float = 30.0
    message_tokens_median: int = 400
    answer_tokens_median: int = 300
    max_prompt_tokens: int = 32768

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "block_tokens",
            "system_prompts",
            "message_tokens_median",
            "answer_tokens_median",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("conversations_per_second", "think_seconds_mean"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if not 0 <= self.zipf_exponent < math.inf:
            raise ValueError(f"zipf_exponent must be 0 or more and finite, not {self.zipf_exponent}")
        if not 1 <= self.turns_mean < math.inf:
            raise ValueError(f"turns_mean must be at least 1 and finite, not {self.turns_mean}")
        if not 0 <= self.system_tokens_min <= self.system_tokens_max < self.max_prompt_tokens:
            raise ValueError("0 <= system_tokens_min <= system_tokens_max < max_prompt_tokens must hold")


class TraceLine(TypedDict):
    """One line: time in ms, lengths in tokens, ids root to leaf, the last of a block that may be unfilled."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(slots=True)
class _History:
    """Beginning of a prompt: its number of tokens, and the ids of the blocks that they fill."""

    tokens: int
    block_ids: list[int]

    def extend(self, tokens: int, block_tokens: int, new_ids: Iterator[int]) -> None:
        self.tokens += tokens
        missing = self.tokens // block_tokens - len(self.block_ids)
        self.block_ids.extend(itertools.islice(new_ids, missing))


def write_synthetic_trace(path: Path | str, spec: SyntheticTraceSpec) -> int:
    """Writes plain `.jsonl` over what was there, once it is whole, and returns its bytes. TraceError for another
    suffix, OSError."""
    path = Path(path)
    if path.suffix != ".jsonl":
        raise TraceError(path, None, "a synthetic trace is written as plain .jsonl", "Name a file that ends in .jsonl")
    with part_file(path) as part, part.open("w", encoding="utf-8", newline="\n") as file:
        return sum(file.write(json.dumps(line) + "\n") for line in generate_trace(spec))


def generate_trace(spec: SyntheticTraceSpec) -> Iterator[TraceLine]:
    """The lines of the trace, in order of time."""
    dice = random.Random(spec.seed)
    new_ids = itertools.count()
    prompts = _system_prompts(spec, dice, new_ids)
    popularity = list(itertools.accumulate(rank**-spec.zipf_exponent for rank in range(1, spec.system_prompts + 1)))
    order = itertools.count()  # turns of the same instant go in the order in which they were planned
    # (seconds, order, whose turn it is: None is the arrival of a new conversation)
    turns: list[tuple[float, int, _History | None]] = [(0.0, next(order), None)]
    for _ in range(spec.requests):
        now_seconds, _, history = heapq.heappop(turns)
        if history is None:
            next_arrival = now_seconds + dice.expovariate(spec.conversations_per_second)
            heapq.heappush(turns, (next_arrival, next(order), None))
            prompt = dice.choices(prompts, cum_weights=popularity)[0]
            history = _History(prompt.tokens, list(prompt.block_ids))
        message_tokens = _lognormal_tokens(dice, spec.message_tokens_median)
        history.extend(min(message_tokens, spec.max_prompt_tokens - history.tokens), spec.block_tokens, new_ids)
        answer_tokens = _lognormal_tokens(dice, spec.answer_tokens_median)
        yield _line(now_seconds, history, answer_tokens, spec.block_tokens, new_ids)
        history.extend(answer_tokens, spec.block_tokens, new_ids)
        if history.tokens < spec.max_prompt_tokens and dice.random() < 1 - 1 / spec.turns_mean:
            next_turn = now_seconds + dice.expovariate(1 / spec.think_seconds_mean)
            heapq.heappush(turns, (next_turn, next(order), history))


def _system_prompts(spec: SyntheticTraceSpec, dice: random.Random, new_ids: Iterator[int]) -> list[_History]:
    prompts = [_History(0, []) for _ in range(spec.system_prompts)]
    for prompt in prompts:
        prompt.extend(dice.randint(spec.system_tokens_min, spec.system_tokens_max), spec.block_tokens, new_ids)
    return prompts


def _lognormal_tokens(dice: random.Random, median: int) -> int:
    return max(1, round(median * dice.lognormvariate(0.0, 0.8)))


def _line(
    now_seconds: float, history: _History, answer_tokens: int, block_tokens: int, new_ids: Iterator[int]
) -> TraceLine:
    hash_ids = list(history.block_ids)
    if history.tokens % block_tokens:
        hash_ids.append(next(new_ids))  # the unfilled block: no later prompt begins with just these tokens
    return TraceLine(
        timestamp=round(now_seconds * 1000),
        input_length=history.tokens,
        output_length=answer_tokens,
        hash_ids=hash_ids,
    )
