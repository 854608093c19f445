"""The attention families, those with rows of float32. None sees a page id; ``packed`` has those with rows of bytes."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import Row, Shape
from examples.tiny_transformer.ops import masked_softmax, rms_norm, rotate


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention: heads / kv_heads query heads share the rows of planes `k` and `v`."""

    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check_sizes(self, astuple(self), self.head_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self}: kv_heads must divide heads")

    @property
    def rope_dim(self) -> int:
        """All columns are rotated."""
        return self.head_dim

    def rows(self) -> dict[str, Row]:
        """`k` (rotated) and `v`."""
        return dict.fromkeys(("k", "v"), Row(self.head_dim))

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """Projections of the normed hidden rows, head by head, and the way back."""
        return {
            "query": (self.heads, d_model, self.head_dim),
            "key": (self.kv_heads, d_model, self.head_dim),
            "value": (self.kv_heads, d_model, self.head_dim),
            "attention_out": (self.heads * self.head_dim, d_model),
        }

    def project(
        self, arrays: Arrays, x: Array, weights: dict[str, Array], cos: Array, sin: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """[T, d_model] to query [kv_heads, heads of each, T, head_dim] and rows of `k` and `v`."""
        query = rotate(arrays.xp, x @ weights["query"], cos, sin)
        grouped = query.reshape(self.kv_heads, -1, *query.shape[1:])
        key = rotate(arrays.xp, x @ weights["key"], cos, sin)
        return {"query": grouped}, self.store(arrays, key, x @ weights["value"])

    def mix(
        self,
        arrays: Arrays,
        queries: dict[str, Array],
        cached: dict[str, Array],
        hidden: Array,
        weights: dict[str, Array],  # noqa: ARG002
    ) -> Array:
        """Each query head by itself over its kv head's rows."""
        key, value = self.read(arrays, cached)
        scores = queries["query"] @ key.swapaxes(1, 2)[:, None] * self.head_dim**-0.5
        return masked_softmax(arrays.xp, scores, hidden[:, None]) @ value[:, None]

    def store(self, arrays: Arrays, key: Array, value: Array) -> dict[str, Array]:  # noqa: ARG002
        """New rows [kv_heads, T, head_dim] as they lie in the pages."""
        return {"k": key, "v": value}

    def read(self, arrays: Arrays, cached: dict[str, Array]) -> tuple[Array, Array]:  # noqa: ARG002
        """float32 keys and values [n, keys, head_dim] of rows as they lie in the pages."""
        return cached["k"], cached["v"]

    def shard(self, ranks: int) -> Gqa:
        """Each rank has its part of the kv heads, and of the query heads that share them."""
        return replace(self, heads=part_of(self.heads, ranks), kv_heads=part_of(self.kv_heads, ranks))

    def sharded_weights(self) -> tuple[str, ...]:
        """All but the way back."""
        return ("query", "key", "value")


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
        check_sizes(self, astuple(self), self.rope_dim)

    @property
    def kv_heads(self) -> int:
        """One latent row serves all heads."""
        return 1

    def rows(self) -> dict[str, Row]:
        """`latent`, and the rotated key behind it."""
        return {"latent": Row(self.kv_lora_rank + self.rope_dim)}

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """key_up and value_up unfold the latent per head; key_up lies transposed, as absorption needs it."""
        return {
            "query": (self.heads, d_model, self.nope_dim + self.rope_dim),
            "latent_down": (d_model, self.kv_lora_rank + self.rope_dim),
            "latent_gain": (self.kv_lora_rank,),
            "key_up": (self.heads, self.nope_dim, self.kv_lora_rank),
            "value_up": (self.heads, self.kv_lora_rank, self.value_dim),
            "attention_out": (self.heads * self.value_dim, d_model),
        }

    def project(
        self, arrays: Arrays, x: Array, weights: dict[str, Array], cos: Array, sin: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """[T, d_model] to absorbed query [1, heads, T, rank + rope_dim] and the rows of the pages."""
        xp = arrays.xp
        query = x @ weights["query"]
        absorbed = query[..., : self.nope_dim] @ weights["key_up"]
        rotated = rotate(xp, query[..., self.nope_dim :], cos, sin)
        down = x @ weights["latent_down"]
        latent = rms_norm(xp, down[:, : self.kv_lora_rank], weights["latent_gain"])
        rope_key = rotate(xp, down[:, self.kv_lora_rank :], cos, sin)
        rows = self.store(arrays, xp.concatenate((latent, rope_key), axis=-1))
        return {"query": xp.concatenate((absorbed, rotated), axis=-1)[None]}, rows

    def mix(
        self,
        arrays: Arrays,
        queries: dict[str, Array],
        cached: dict[str, Array],
        hidden: Array,
        weights: dict[str, Array],
    ) -> Array:
        """Each head by itself over the shared latent."""
        latent = self.read(arrays, cached)[:, None]
        scores = queries["query"] @ latent.swapaxes(2, 3) * (self.nope_dim + self.rope_dim) ** -0.5
        mixed = masked_softmax(arrays.xp, scores, hidden[:, None]) @ latent[..., : self.kv_lora_rank]
        return mixed @ weights["value_up"]

    def store(self, arrays: Arrays, latent_and_rope_key: Array) -> dict[str, Array]:  # noqa: ARG002
        """New rows [T, rank + rope_dim] as they lie in the pages."""
        return {"latent": latent_and_rope_key[None]}

    def read(self, arrays: Arrays, cached: dict[str, Array]) -> Array:  # noqa: ARG002
        """float32 rows [n, keys, rank + rope_dim] of rows as they lie in the pages."""
        return cached["latent"]

    def shard(self, ranks: int) -> Mla:
        """Each rank has its part of the query heads, and all of the latent."""
        return replace(self, heads=part_of(self.heads, ranks))

    def sharded_weights(self) -> tuple[str, ...]:
        """Names of the weights that exist for each query head."""
        return ("query", "key_up", "value_up")


def part_of(heads: int, ranks: int) -> int:
    """Heads on each rank. Raises ValueError where they do not divide."""
    if heads % ranks:
        raise ValueError(f"{heads} heads do not divide over {ranks} ranks")
    return heads // ranks


def check_sizes(family: object, sizes: tuple[int, ...], rope_dim: int) -> None:
    """Raises ValueError for a size below 1, and for columns that cannot be rotated in pairs."""
    if min(sizes) < 1:
        raise ValueError(f"{family}: every size must be at least 1")
    if rope_dim % 2:
        raise ValueError(f"{family}: RoPE rotates pairs of columns, so their number must be even")
