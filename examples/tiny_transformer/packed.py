"""The attention families whose rows are bytes: GQA in fp8 with scales, MLA over packed rows, and DSA's indexer."""

from __future__ import annotations

from dataclasses import dataclass

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import Row, Shape
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.packing import pack_index_key, pack_latent, packed_width, scale_fp8, unpack_latent


@dataclass(frozen=True)
class ScaledGqa(Gqa):
    """GQA over fp8 rows with a scale for each head and token. As cached, so computed: own rows are read back too."""

    def rows(self) -> dict[str, Row]:
        """`k` (rotated) and `v` in fp8, then their scales."""
        scales = dict.fromkeys(("k_scale", "v_scale"), Row(1))
        return {**dict.fromkeys(("k", "v"), Row(self.head_dim, "uint8")), **scales}

    def store(self, arrays: Arrays, key: Array, value: Array) -> dict[str, Array]:
        """New rows [kv_heads, T, head_dim] as they lie in the pages."""
        k, k_scale = scale_fp8(arrays, key)
        v, v_scale = scale_fp8(arrays, value)
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    def read(self, arrays: Arrays, cached: dict[str, Array]) -> tuple[Array, Array]:
        """float32 keys and values [n, keys, head_dim]."""
        key, value = (arrays.from_fp8(cached[name]) * cached[f"{name}_scale"] for name in ("k", "v"))
        return key, value


@dataclass(frozen=True)
class PackedMla(Mla):
    """MLA over packed rows. Every row is read back from its bytes, a token's own as well: as cached, so computed."""

    def rows(self) -> dict[str, Row]:
        """`latent`: fp8 tiles, their scales, and the rotated key in bf16."""
        return {"latent": Row(packed_width(self.kv_lora_rank, self.rope_dim), "uint8")}

    def store(self, arrays: Arrays, latent_and_rope_key: Array) -> dict[str, Array]:
        """New rows [T, rank + rope_dim] as they lie in the pages."""
        latent, rope_key = latent_and_rope_key[:, : self.kv_lora_rank], latent_and_rope_key[:, self.kv_lora_rank :]
        return {"latent": pack_latent(arrays, latent, rope_key)[None]}

    def read(self, arrays: Arrays, cached: dict[str, Array]) -> Array:
        """float32 rows [n, keys, rank + rope_dim] of packed ones."""
        return unpack_latent(arrays, cached["latent"], self.kv_lora_rank)


@dataclass(frozen=True)
class Dsa(PackedMla):
    """Sparse attention: an indexer scores every key that a query may see, and attention runs over the best ``top_k``.

    score(key) = sum over the indexer's heads of gate * ReLU(query . key). Its keys are two planes, values and scales.
    """

    index_heads: int
    index_dim: int
    top_k: int

    def rows(self) -> dict[str, Row]:
        """The packed latent, and the indexer's key with its scale."""
        index = {"index_key": Row(self.index_dim, "uint8"), "index_scale": Row(1)}
        return {**super().rows(), **index}

    def weight_shapes(self, d_model: int) -> dict[str, Shape]:
        """MLA's, and the indexer's."""
        return {
            **super().weight_shapes(d_model),
            "index_query": (self.index_heads, d_model, self.index_dim),
            "index_key": (d_model, self.index_dim),
            "index_gate": (d_model, self.index_heads),
        }

    def project(
        self, arrays: Arrays, x: Array, weights: dict[str, Array], cos: Array, sin: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """MLA's; and the indexer's queries [1, index_heads, T, index_dim], gates [1, index_heads, T, 1] and rows."""
        queries, rows = super().project(arrays, x, weights, cos, sin)
        codes, scales = pack_index_key(arrays, x @ weights["index_key"])
        rows |= {"index_key": codes[None], "index_scale": scales[None]}
        queries["index_query"] = (x @ weights["index_query"])[None]
        queries["index_gate"] = (x @ weights["index_gate"]).T[None, ..., None]
        return queries, rows

    def mix(
        self,
        arrays: Arrays,
        queries: dict[str, Array],
        cached: dict[str, Array],
        hidden: Array,
        weights: dict[str, Array],
    ) -> Array:
        """MLA over the keys that the indexer picks, of cached and new ones alike."""
        keys = arrays.from_fp8(cached["index_key"]) * cached["index_scale"]
        products = arrays.xp.clip(queries["index_query"] @ keys.swapaxes(1, 2)[:, None], 0, None)
        scores = (products * queries["index_gate"]).sum(1)
        return super().mix(arrays, queries, cached, hidden | ~best_keys(arrays, scores, hidden, self.top_k), weights)


def best_keys(arrays: Arrays, scores: Array, hidden: Array, top_k: int) -> Array:
    """[n, T, keys], True for each query's ``top_k`` best visible keys; of equal ones the earlier."""
    order = arrays.stable_order(arrays.xp.where(hidden, float("inf"), -scores))
    return arrays.stable_order(order) < top_k  # a permutation's order is its inverse: each key's rank
