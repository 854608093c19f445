"""A decoder-only transformer in NumPy whose keys and values live in cache pages only.

Bit-identical by construction: a position's rows and logits are the same bytes however the prompt was split
into calls and whatever was cached. Each position is computed in its block's chunk, always block_tokens rows
in one shape and on its own row; the keys that the chunk gathers follow from the block's index alone
(paging.py); no operation mixes rows; and a hidden key weighs exactly 0. Decoding is the same path with one
computed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from examples.tiny_transformer.config import F32, TinyConfig, list_planes
from examples.tiny_transformer.ops import rms_norm, rope_tables, swiglu
from examples.tiny_transformer.paging import (
    Chunk,
    PageIds,
    Reach,
    cut_into_chunks,
    find_reach,
    gather_rows,
    write_rows,
)
from examples.tiny_transformer.tokens import PAD, Tokens
from examples.tiny_transformer.weights import Weights, make_weights

Tables = Mapping[str, PageIds]  # group to page ids [blocks], -1 where the group has no page
Planes = Mapping[tuple[int, str], F32]  # (layer, plane name) to [pages, *page_shape]
WaitLayer = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class TinyTransformer:
    """A config with its weights and RoPE tables. Holds no state between calls: that is all in the pages."""

    config: TinyConfig
    weights: Weights
    cos: F32  # [max_positions, rope_dim / 2]
    sin: F32

    def forward(
        self, tokens: Tokens, start_position: int, tables: Tables, planes: Planes, wait_layer: WaitLayer
    ) -> F32:
        """Compute tokens [n] at start_position and on; give the logits [vocab] of the last one.

        Writes their rows into the pages of their blocks, and reads of [0, start_position + n) what a group's
        rule lets them see; no other page is touched. All tokens pass a layer before the next one begins, and
        wait_layer(layer) is called once for each layer, before any of its pages is read or written.
        Raises PageMissing for a table without a page that is needed, ValueError for tokens, positions or
        planes that do not fit the config; pages are then untouched.
        """
        config = self.config
        self._check_call(tokens, start_position, planes)
        chunks = cut_into_chunks(start_position, len(tokens), config.block_tokens)
        reaches = {
            group.name: [find_reach(group, chunk, config.block_tokens, tables[group.name]) for chunk in chunks]
            for group in config.groups
        }
        hidden = self._embed(tokens, chunks)
        for layer, group_name in enumerate(config.layer_groups):
            wait_layer(layer)
            for index, chunk in enumerate(chunks):
                hidden[index] = self._run_layer(layer, hidden[index], chunk, reaches[group_name][index], planes)
        normed = rms_norm(hidden[-1], self.weights.final_gain)
        logits: F32 = (normed @ self.weights.unembedding)[chunks[-1].end_row - 1]
        return logits

    def _check_call(self, tokens: Tokens, start_position: int, planes: Planes) -> None:
        config = self.config
        end = start_position + len(tokens)
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"{config.name}: a call computes at least one token, got shape {tokens.shape}")
        if start_position < 0 or end > config.max_positions:
            raise ValueError(f"{config.name}: positions {start_position} to {end} leave [0, {config.max_positions})")
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            raise ValueError(f"{config.name}: tokens leave [0, {config.vocab_size})")
        for name, layer, _, page_shape, dtype in list_planes(config):
            pages = planes[layer, name]
            if pages.shape[1:] != page_shape or pages.dtype != dtype:
                raise ValueError(f"layer {layer} {name}: pages are {pages.dtype} {pages.shape[1:]}, not {page_shape}")

    def _embed(self, tokens: Tokens, chunks: list[Chunk]) -> list[F32]:
        """One [block_tokens, d_model] for each chunk; rows that are not computed hold PAD's embedding."""
        ids = np.full((len(chunks), self.config.block_tokens), PAD)
        first = chunks[0].first_row
        ids.reshape(-1)[first : first + len(tokens)] = tokens
        return [self.weights.embedding[row] for row in ids]

    def _run_layer(self, layer: int, x: F32, chunk: Chunk, reach: Reach, planes: Planes) -> F32:
        """A chunk [block_tokens, d_model] through one layer: write its rows, then attend to the pages."""
        attention, weights = self.config.attention, self.weights.layers[layer]
        start = chunk.block * self.config.block_tokens
        turn = slice(start, start + self.config.block_tokens)
        normed = rms_norm(x, weights["attention_gain"])
        query, rows = attention.project(normed, weights, self.cos[turn], self.sin[turn])
        for name, new_rows in rows.items():
            write_rows(planes[layer, name], reach, chunk, new_rows)
        cached = {name: gather_rows(planes[layer, name], reach) for name in rows}
        x = x + attention.attend(query, cached, reach.hidden, weights)
        return x + swiglu(rms_norm(x, weights["ff_gain"]), weights["gate"], weights["up"], weights["down"])


def build_model(config: TinyConfig) -> TinyTransformer:
    """The model of a config; the same one in every process."""
    cos, sin = rope_tables(config.attention.rope_dim, config.max_positions, config.rope_theta)
    return TinyTransformer(config, make_weights(config), cos, sin)
