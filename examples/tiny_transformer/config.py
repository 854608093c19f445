"""What a tiny transformer looks like, as data: sizes, layers, planes and groups. Holds no weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.tokens import VOCAB_SIZE

F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Shape = tuple[int, ...]

PLANE_DTYPE = "float32"


@dataclass(frozen=True)
class Group:
    """Layers whose pages are kept and dropped together.

    A query at position q sees the keys (q - window_tokens, q], itself counted, and the first sink_tokens.
    """

    name: str
    window_tokens: int | None = None
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"group {self.name}: window_tokens is {self.window_tokens}, must be at least 1")
        if self.sink_tokens < 0 or (self.window_tokens is None and self.sink_tokens):
            raise ValueError(f"group {self.name}: sink_tokens is {self.sink_tokens}, sinks belong to a window")


class Attention(Protocol):
    """One attention family. T is block_tokens; a plane's page is [page_heads, T, width]."""

    @property
    def rope_dim(self) -> int:
        """How many columns of a query or key are rotated."""
        ...

    def page_shapes(self, block_tokens: int) -> dict[str, Shape]:
        """Plane name to the shape of one page, in the order in which a layer lists its planes."""
        ...

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """Weight name to shape; the axis before the last is the one that is summed over."""
        ...

    def project(self, x: F32, weights: dict[str, F32], cos: F32, sin: F32) -> tuple[F32, dict[str, F32]]:
        """Normed hidden rows [T, d_model] to (query, plane name to new rows [page_heads, T, width])."""
        ...

    def attend(self, query: F32, cached: dict[str, F32], hidden: Bool, weights: dict[str, F32]) -> F32:
        """Query and the cached rows [page_heads, keys, width] to [T, d_model].

        hidden: [T, keys], True where a query may not see a key.
        """
        ...


@dataclass(frozen=True)
class TinyConfig:
    """A model. Two equal configs make bit-identical weights."""

    name: str
    attention: Attention
    groups: tuple[Group, ...]
    layer_groups: tuple[str, ...]  # the group of each layer: its length is the number of layers
    block_tokens: int = 16
    d_model: int = 512
    ff_dim: int = 1408
    rope_theta: float = 10_000.0
    max_positions: int = 8192  # bounds the RoPE tables: 2 * 4 bytes * rope_dim / 2 a position
    vocab_size: int = VOCAB_SIZE
    seed: int = 7

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "seed" and value < 1:
                raise ValueError(f"{self.name}: {field.name} is {value}, must be at least 1")
        if self.vocab_size < VOCAB_SIZE:
            raise ValueError(f"{self.name}: vocab_size is {self.vocab_size}, the tokens need {VOCAB_SIZE}")
        if self.max_positions % self.block_tokens:
            raise ValueError(f"{self.name}: max_positions must be whole blocks of {self.block_tokens} tokens")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: group names repeat: {names}")
        if set(names) != set(self.layer_groups):
            raise ValueError(f"{self.name}: groups {names}, but the layers use {sorted(set(self.layer_groups))}")

    @property
    def layer_count(self) -> int:
        """How many layers the model has."""
        return len(self.layer_groups)


def list_planes(config: TinyConfig) -> tuple[tuple[str, int, str, Shape, str], ...]:
    """Every plane as (name, layer, group, page_shape, dtype_name), by layer, then in the layer's order."""
    pages = config.attention.page_shapes(config.block_tokens)
    return tuple(
        (name, layer, group, shape, PLANE_DTYPE)
        for layer, group in enumerate(config.layer_groups)
        for name, shape in pages.items()
    )


def list_groups(config: TinyConfig) -> tuple[tuple[str, int | None, int], ...]:
    """Every group as (name, window_tokens or None, sink_tokens)."""
    return tuple((group.name, group.window_tokens, group.sink_tokens) for group in config.groups)
