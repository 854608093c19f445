"""The attention families: grouped-query attention and multi-head latent attention. Neither sees a page id."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from examples.tiny_transformer.config import F32, Bool, Shape
from examples.tiny_transformer.ops import masked_softmax, rms_norm, rotate


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention: heads / kv_heads query heads share the rows of planes `k` and `v`."""

    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self, astuple(self), self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self}: kv_heads must divide heads")

    @property
    def rope_dim(self) -> int:
        """All columns are rotated."""
        return self.head_dim

    def page_shapes(self, block_tokens: int) -> dict[str, Shape]:
        """`k` (rotated) and `v`, each [kv_heads, block_tokens, head_dim]."""
        return dict.fromkeys(("k", "v"), (self.kv_heads, block_tokens, self.head_dim))

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """Projections of the normed hidden rows, and the way back."""
        kv_width = self.kv_heads * self.head_dim
        return {
            "query": (d_model, self.heads * self.head_dim),
            "key": (d_model, kv_width),
            "value": (d_model, kv_width),
            "attention_out": (self.heads * self.head_dim, d_model),
        }

    def project(self, x: F32, weights: dict[str, F32], cos: F32, sin: F32) -> tuple[F32, dict[str, F32]]:
        """[T, d_model] to query [heads, T, head_dim] and rows of `k` and `v` [kv_heads, T, head_dim]."""
        query = _split_heads(x @ weights["query"], self.heads)
        key = _split_heads(x @ weights["key"], self.kv_heads)
        value = _split_heads(x @ weights["value"], self.kv_heads)
        return rotate(query, cos, sin), {"k": rotate(key, cos, sin), "v": value}

    def attend(self, query: F32, cached: dict[str, F32], hidden: Bool, weights: dict[str, F32]) -> F32:
        """Query [heads, T, head_dim] over `k` and `v` [kv_heads, keys, head_dim]; gives [T, d_model]."""
        rows, keys = hidden.shape
        grouped = query.reshape(self.kv_heads, -1, self.head_dim)  # the query heads of a kv head, one below another
        scores = grouped @ cached["k"].swapaxes(1, 2)
        scores *= np.float32(self.head_dim**-0.5)
        shares = masked_softmax(scores.reshape(self.heads, rows, keys), hidden)
        mixed = (shares.reshape(scores.shape) @ cached["v"]).reshape(self.heads, rows, self.head_dim)
        return _join_heads(mixed) @ weights["attention_out"]


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: all heads share plane `latent`, a normed latent beside one rotated key.

    Attention runs absorbed: a head's query is mapped into the latent's space, so pages are read as they lie.
    """

    heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self, astuple(self), self.rope_dim)

    def page_shapes(self, block_tokens: int) -> dict[str, Shape]:
        """`latent`, [1, block_tokens, kv_lora_rank + rope_dim]."""
        return {"latent": (1, block_tokens, self.kv_lora_rank + self.rope_dim)}

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """key_up and value_up unfold the latent per head; key_up lies transposed, as absorption needs it."""
        return {
            "query": (d_model, self.heads * (self.nope_dim + self.rope_dim)),
            "latent_down": (d_model, self.kv_lora_rank + self.rope_dim),
            "latent_gain": (self.kv_lora_rank,),
            "key_up": (self.heads, self.nope_dim, self.kv_lora_rank),
            "value_up": (self.heads, self.kv_lora_rank, self.value_dim),
            "attention_out": (self.heads * self.value_dim, d_model),
        }

    def project(self, x: F32, weights: dict[str, F32], cos: F32, sin: F32) -> tuple[F32, dict[str, F32]]:
        """[T, d_model] to absorbed query [heads, T, width] and rows of `latent` [1, T, width]."""
        query = _split_heads(x @ weights["query"], self.heads)
        absorbed = query[..., : self.nope_dim].copy() @ weights["key_up"]
        rotated = rotate(query[..., self.nope_dim :], cos, sin)
        down = x @ weights["latent_down"]
        latent = rms_norm(down[:, : self.kv_lora_rank], weights["latent_gain"])
        rope_key = rotate(down[:, self.kv_lora_rank :], cos, sin)
        rows = np.concatenate((latent, rope_key), axis=-1)[None]
        return np.concatenate((absorbed, rotated), axis=-1), {"latent": rows}

    def attend(self, query: F32, cached: dict[str, F32], hidden: Bool, weights: dict[str, F32]) -> F32:
        """Query [heads, T, rank + rope_dim] over `latent` [1, keys, rank + rope_dim]; gives [T, d_model]."""
        rows, keys = hidden.shape
        latent = cached["latent"][0]
        scores = query.reshape(self.heads * rows, -1) @ latent.T
        scores *= np.float32((self.nope_dim + self.rope_dim) ** -0.5)
        shares = masked_softmax(scores.reshape(self.heads, rows, keys), hidden)
        mixed = shares.reshape(scores.shape) @ latent[:, : self.kv_lora_rank]
        values = mixed.reshape(self.heads, rows, self.kv_lora_rank) @ weights["value_up"]
        return _join_heads(values) @ weights["attention_out"]


def _split_heads(x: F32, heads: int) -> F32:
    """[T, heads * width] to [heads, T, width]."""
    return x.reshape(x.shape[0], heads, -1).swapaxes(0, 1)


def _join_heads(x: F32) -> F32:
    """[heads, T, width] to [T, heads * width]."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _check_sizes(family: object, sizes: tuple[int, ...], rope_dim: int) -> None:
    if min(sizes) < 1:
        raise ValueError(f"{family}: every size must be at least 1")
    if rope_dim % 2:
        raise ValueError(f"{family}: RoPE rotates pairs of columns, so their number must be even")
