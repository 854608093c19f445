"""Shape of a tiny transformer as data: sizes, layers, planes and groups. Holds no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.tokens import VOCAB_SIZE

F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Shape = tuple[int, ...]

HIDDEN_PLANE = "hidden"


class Row(NamedTuple):
    """Bytes of a token for one head in one plane."""

    width: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Group:
    """Heads of layers whose pages are kept and dropped together.

    A query at position q sees the keys (q - window_tokens, q], itself counted, and the first sink_tokens.
    ``is_replicated``: every rank holds the same bytes.
    """

    name: str
    window_tokens: int | None = None
    sink_tokens: int = 0
    is_replicated: bool = False

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"group {self.name}: window_tokens is {self.window_tokens}, must be at least 1")
        if self.sink_tokens < 0 or (self.window_tokens is None and self.sink_tokens):
            raise ValueError(f"group {self.name}: sink_tokens is {self.sink_tokens}, sinks belong to a window")


class Attention(Protocol):
    """One attention family. T is block_tokens; a plane's page is [kv heads of its group, T, row width]."""

    @property
    def kv_heads(self) -> int:
        """Number of heads with rows of their own in the pages."""
        ...

    @property
    def rope_dim(self) -> int:
        """Number of columns of a query or key that are rotated."""
        ...

    def rows(self) -> dict[str, Row]:
        """Plane name to what a token leaves there, in the order in which a layer lists its planes."""
        ...

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """Weight name to shape; the axis before the last is the one that is summed over."""
        ...

    def project(
        self, arrays: Arrays, x: Array, weights: dict[str, Array], cos: Array, sin: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Normed hidden rows [T, d_model] to (queries [kv_heads, ...], plane name to new rows [kv_heads, T, width])."""
        ...

    def mix(
        self,
        arrays: Arrays,
        queries: dict[str, Array],
        cached: dict[str, Array],
        hidden: Array,
        weights: dict[str, Array],
    ) -> Array:
        """Queries of n kv heads over their rows [n, keys, width], as they lie in the pages, to
        [n, query heads of each, T, value width].

        hidden: [n or 1, T, keys], True where a query may not see a key.
        """
        ...

    def shard(self, ranks: int) -> Attention:
        """The family as one of several ranks computes it. Raises ValueError where heads do not divide."""
        ...

    def sharded_weights(self) -> tuple[str, ...]:
        """Weights whose first axis is heads, of which each rank takes its part; the others are on all ranks."""
        ...


@dataclass(frozen=True)
class Layer:
    """``head_groups``: the group of each kv head. Heads of one layer may be in different groups."""

    attention: Attention
    head_groups: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.head_groups) != self.attention.kv_heads:
            raise ValueError(f"{self.attention.kv_heads} kv heads, but {len(self.head_groups)} groups: name one a head")

    def heads_of(self, group: str) -> tuple[int, ...]:
        """The kv heads in a group, ascending."""
        return tuple(head for head, name in enumerate(self.head_groups) if name == group)


@dataclass(frozen=True)
class Draft:
    """A layer that guesses the token after next (MTP): from a position's token and the hidden row before it.

    Those hidden rows are a plane too, in ``hidden_group``, a window of two tokens: what a prefix leaves for a draft.
    """

    layer: Layer
    hidden_group: str


@dataclass(frozen=True)
class TinyConfig:
    """A model. Two equal configs make bit-identical weights."""

    name: str
    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    draft: Draft | None = None
    block_tokens: int = 16
    d_model: int = 512
    ff_dim: int = 1408
    rope_theta: float = 10_000.0
    residual_scale: float = 1.0  # of what a layer adds: with less of it a draft guesses better
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
        used = {name for layer in self.all_layers for name in layer.head_groups}
        if self.draft is not None:
            used.add(self.draft.hidden_group)
        if set(names) != used:
            raise ValueError(f"{self.name}: groups {names}, but the layers use {sorted(used)}")

    @property
    def layer_count(self) -> int:
        """Number of layers with planes, the draft's included."""
        return len(self.all_layers)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, then the draft's, whose index follows theirs."""
        return self.layers if self.draft is None else (*self.layers, self.draft.layer)

    def shard(self, ranks: int) -> TinyConfig:
        """Configuration of one of several equal ranks. Raises ValueError where they cannot be equal."""

        def cut(layer: Layer) -> Layer:
            attention = layer.attention.shard(ranks)
            parts = {layer.head_groups[first :: attention.kv_heads] for first in range(attention.kv_heads)}
            if attention.kv_heads != layer.attention.kv_heads and any(len(set(part)) > 1 for part in parts):
                raise ValueError(f"{self.name}: the ranks' heads would be in different groups")
            return Layer(attention, layer.head_groups[: attention.kv_heads])

        draft = self.draft and replace(self.draft, layer=cut(self.draft.layer))
        return replace(self, layers=tuple(map(cut, self.layers)), draft=draft)


def alike(attention: Attention, groups: Sequence[str]) -> tuple[Layer, ...]:
    """Layers of one family, each with all its heads in one group."""
    return tuple(Layer(attention, (group,) * attention.kv_heads) for group in groups)


def head_wise(attention: Attention, windowed: Sequence[Sequence[bool]], full: str, window: str) -> tuple[Layer, ...]:
    """Layers of one family; ``windowed[layer][kv_head]`` says which heads see a window only."""
    return tuple(Layer(attention, tuple(window if each else full for each in heads)) for heads in windowed)


def list_planes(config: TinyConfig) -> tuple[tuple[str, int, str, Shape, str], ...]:
    """Every plane as (name, layer, group, page_shape, dtype_name), by layer, group, then in the layer's order."""
    planes: list[tuple[str, int, str, Shape, str]] = []
    for index, layer in enumerate(config.all_layers):
        for group in config.groups:
            heads = len(layer.heads_of(group.name))
            planes += [
                (name, index, group.name, (heads, config.block_tokens, row.width), row.dtype)
                for name, row in layer.attention.rows().items()
                if heads
            ]
    if config.draft is not None:
        shape = (1, config.block_tokens, config.d_model)
        planes.append((HIDDEN_PLANE, len(config.layers), config.draft.hidden_group, shape, "float32"))
    return tuple(planes)


def list_groups(config: TinyConfig) -> tuple[tuple[str, int | None, int, bool], ...]:
    """Every group as (name, window_tokens or None, sink_tokens, is_replicated)."""
    return tuple((group.name, group.window_tokens, group.sink_tokens, group.is_replicated) for group in config.groups)
