"""Inputs of the capacity benchmark as numbers: machines and models, layouts, pools, requests. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from cachesvc.model.layout import PLANE_ALIGN_BYTES, Layout, Plane, PlaneGroup

FULL, WINDOW = 0, 1
GB = 1_000_000_000


@dataclass(frozen=True)
class Machine:
    """One model on one GPU, and what a step of it costs.

    A step reads all weights, computes each token at ``flop_per_token`` and reads each byte of KV that its queries
    attend to once. Nothing overlaps; launches and the attention's own FLOP are left out.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    weight_bytes: float
    flop_per_token: float
    flop_per_s: float
    bytes_per_s: float
    pool_bytes: int
    source: str

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that computes nothing."""
        return self.weight_bytes / self.bytes_per_s

    @property
    def token_s(self) -> float:
        """Seconds that each token of a step adds, in prefill and in decode."""
        return self.flop_per_token / self.flop_per_s

    @property
    def head_token_bytes(self) -> int:
        """Bytes of one token in one kv head: key and value of all layers, 16 bits an element."""
        return 2 * self.layers * self.head_dim * 2


ERNIE_A800 = Machine(
    name="ERNIE-4.5-21B-A3B on an A800",
    layers=28,
    kv_heads=4,
    head_dim=128,
    weight_bytes=42 * GB,
    flop_per_token=2 * 3e9,
    flop_per_s=156e12,
    bytes_per_s=1.7e12,
    pool_bytes=32 * GB,
    source="the source system's model and GPU: 21e9 weights of 2 bytes, all read in every step (a batch reaches every "
    "expert), 3e9 active; half of 312 TFLOP/s, 1.7 of 2.04 TB/s; 32 GB of KV is its RFC's figure",
)
LLAMA_H100 = Machine(
    name="an 8B model on an H100",
    layers=32,
    kv_heads=8,
    head_dim=128,
    weight_bytes=16 * GB,
    flop_per_token=2 * 8e9,
    flop_per_s=600e12,
    bytes_per_s=3e12,
    pool_bytes=48 * GB,
    source="8e9 weights of 2 bytes at 600 TFLOP/s and 3 TB/s; of 80 GB, 16 are weights and 16 are kept free",
)


def layout_of(machine: Machine, windowed_heads: int, window_tokens: int, sink_tokens: int, block_tokens: int) -> Layout:
    """The machine's kv heads over a full and a windowed group; a group's planes are written as one of its bytes.

    Where every head has a window, the full group is a marker of one byte a block: prefixes are matched by its pages.
    """

    def plane(group: str, heads: int) -> Plane:
        size = max(1, heads * machine.head_token_bytes * block_tokens)
        return Plane("kv", 0, group, (size,), "uint8")

    groups = (PlaneGroup("full"), PlaneGroup("window", window_tokens, sink_tokens))
    planes = (plane("full", machine.kv_heads - windowed_heads), plane("window", windowed_heads))
    return Layout(block_tokens, 1, groups, planes)


def held_blocks(layout: Layout) -> int:
    """Pages of the windowed group that a decoding sequence holds at most: its window and its sinks."""
    return layout.window_blocks(WINDOW) + layout.sink_blocks(WINDOW)


def pools_shared(layout: Layout, size_bytes: int) -> tuple[int, int]:
    """Pages where nothing is recycled: both groups need as many, as in one id space."""
    pages = (size_bytes - _padding(layout)) // (layout.page_bytes(FULL) + layout.page_bytes(WINDOW))
    return pages, pages


def pools_split(layout: Layout, size_bytes: int, tokens: int, step_tokens: int) -> tuple[int, int]:
    """Pages of each group for as many running sequences as fit: proportional to what one of ``tokens`` tokens holds.

    The windowed group has a step's chunk of prefill beside that, which is recycled when the step is over.
    """
    full = -(-tokens // layout.block_tokens)
    window = min(full, held_blocks(layout))
    chunk = step_tokens // layout.block_tokens + 1
    left = size_bytes - _padding(layout) - chunk * layout.page_bytes(WINDOW)
    sequences = left / (full * layout.page_bytes(FULL) + window * layout.page_bytes(WINDOW))
    return int(sequences * full), int(sequences * window) + chunk


def _padding(layout: Layout) -> int:
    """A slab's planes begin at aligned bytes."""
    return len(layout.planes) * PLANE_ALIGN_BYTES


class Request(NamedTuple):
    """``prompt_tokens`` in, ``output_tokens`` out, told at ``arrival_s``."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def requests_of(count: int, rate: float, seed: int, mean_in: float, mean_out: float) -> list[Request]:
    """Poisson arrivals; lengths uniform within a quarter of the means, their totals exactly ``count`` means."""
    rng = random.Random(seed)
    prompts = _lengths(rng, count, round(count * mean_in))
    outputs = _lengths(rng, count, round(count * mean_out))
    now = 0.0
    requests = []
    for prompt, output in zip(prompts, outputs, strict=True):
        now += rng.expovariate(rate)
        requests.append(Request(now, prompt, output))
    return requests


def _lengths(rng: random.Random, count: int, total: int) -> list[int]:
    weights = [rng.uniform(0.75, 1.25) for _ in range(count)]
    scale, done, out, exact = total / sum(weights), 0, [], 0.0
    for weight in weights:
        exact += weight * scale
        out.append(round(exact) - done)
        done += out[-1]
    return out
