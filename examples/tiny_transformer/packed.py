"""The attention families whose rows are bytes: MLA over packed fp8 rows, and DSA, which adds an indexer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.arrays import Array, Arrays
from examples.tiny_transformer.config import F32, Bool, Row, Shape
from examples.tiny_transformer.families import Mla
from examples.tiny_transformer.packing import decode_fp8, pack_index_key, pack_latent, packed_width, unpack_latent


@dataclass(frozen=True)
class PackedMla(Mla):
    """MLA over packed rows. Every row is read back from its bytes, a token's own as well: as cached, so computed."""

    def rows(self) -> dict[str, Row]:
        """`latent`: fp8 tiles, their scales, and the rotated key in bf16."""
        return {"latent": Row(packed_width(self.kv_lora_rank, self.rope_dim), "uint8")}

    def store(self, latent_and_rope_key: Array) -> dict[str, Array]:
        """New rows [T, rank + rope_dim] as they lie in the pages."""
        rank = self.kv_lora_rank
        return {"latent": pack_latent(latent_and_rope_key[:, :rank], latent_and_rope_key[:, rank:])[None]}

    def read(self, cached: dict[str, Array]) -> Array:
        """float32 rows [keys, rank + rope_dim] of packed ones."""
        return unpack_latent(cached["latent"][0], self.kv_lora_rank)


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
        codes, scales = pack_index_key(x @ weights["index_key"])
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
        keys = decode_fp8(cached["index_key"][0]) * cached["index_scale"][0]
        products = np.maximum(queries["index_query"][0] @ keys.T, 0)
        scores = (products * queries["index_gate"][0]).sum(axis=0)
        return super().mix(arrays, queries, cached, hidden | ~best_keys(scores, hidden, self.top_k), weights)


def best_keys(scores: F32, hidden: Bool, top_k: int) -> Bool:
    """[T, keys], True for each query's ``top_k`` best visible keys; of equal ones the earlier."""
    keys = scores.shape[-1]
    order: npt.NDArray[np.intp] = np.argsort(np.where(hidden, np.inf, -scores), axis=-1, kind="stable")
    best = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(best, order[:, : min(top_k, keys)], True, axis=-1)
    return best
