"""A decoder-only transformer whose keys and values live in cache pages only.

Bit-identical by construction: a position's rows and logits are the same bytes however the prompt was split
into calls, whatever was cached and whoever else is in the call. Each position is computed in its block's chunk,
always block_tokens rows in one shape and on its own row; the keys that the chunk gathers follow from the block's
index alone (paging.py); no operation mixes rows, heads are computed one by one; and a hidden key weighs exactly 0.
Decoding is the same path with one computed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from examples.tiny_transformer.arrays import NUMPY, Array, Arrays
from examples.tiny_transformer.config import F32, HIDDEN_PLANE, Layer, TinyConfig, list_planes
from examples.tiny_transformer.ops import join_heads, rms_norm, rope_tables, swiglu
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
Planes = Mapping[tuple[str, int, str], Array]  # (group, layer, plane name) to [pages, *page_shape]
WaitLayer = Callable[[int], None]
Exchange = Callable[[Array], Array]  # one rank's heads [heads, T, width] to those of all ranks, in order


@dataclass(frozen=True, eq=False)
class Work:
    """What a call computes of one sequence: tokens [n] at start_position and on, and what is wanted of them."""

    tokens: Tokens
    start_position: int
    tables: Tables
    wanted: int = 1  # logits of so many of the last tokens

    @property
    def end_position(self) -> int:
        """One past the last position."""
        return self.start_position + len(self.tokens)


@dataclass(eq=False)
class _Run:
    """A chunk on its way through the layers."""

    chunk: Chunk
    reaches: dict[str, Reach]
    token_rows: Array  # [block_tokens, d_model]; rows that are not computed hold PAD's embedding
    hidden: Array = field(init=False)

    def __post_init__(self) -> None:
        self.hidden = self.token_rows


@dataclass(frozen=True, eq=False)
class TinyTransformer:
    """A config with its weights and RoPE tables. Holds no state between calls: that is all in the pages."""

    config: TinyConfig
    weights: Weights
    turns: dict[int, tuple[Array, Array]]  # by rope_dim, cosines and sines [max_positions, rope_dim / 2]
    arrays: Arrays = NUMPY
    exchange: Exchange | None = None

    def forward(
        self, tokens: Tokens, start_position: int, tables: Tables, planes: Planes, wait_layer: WaitLayer
    ) -> F32:
        """``compute`` for one sequence: the logits [vocab] of its last token."""
        last: F32 = self.compute([Work(tokens, start_position, tables)], planes, wait_layer)[0][-1]
        return last

    def compute(self, works: Sequence[Work], planes: Planes, wait_layer: WaitLayer) -> list[F32]:
        """Compute the tokens of several sequences; give for each the logits [wanted, vocab] of its last tokens.

        Writes their rows into the pages of their blocks, the draft layer's too, and reads of [0, end_position) what a
        group's rule lets them see; no other page is touched. All tokens pass a layer before the next one begins, and
        wait_layer(layer) is called once for each layer, before any of its pages is read or written.
        Raises PageMissing for a table without a page that is needed, ValueError for tokens, positions or
        planes that do not fit the config; pages are then untouched.
        """
        batch = self._begin(works, planes)
        runs = [run for each in batch for run in each]
        for index, layer in enumerate(self.config.layers):
            wait_layer(index)
            for run in runs:
                run.hidden = self._run_layer(index, layer, run.hidden, run, planes)
        if self.config.draft is not None:
            wait_layer(len(self.config.layers))
            place = (self.config.draft.hidden_group, len(self.config.layers), HIDDEN_PLANE)
            for run in runs:
                write_rows(planes[place], run.reaches[place[0]], run.chunk, run.hidden[None])
            for run in runs:
                self._run_draft(run, planes)
        return [self._logits(work, each) for work, each in zip(works, batch, strict=True)]

    def guess(self, works: Sequence[Work], planes: Planes, wait_layer: WaitLayer) -> list[F32]:
        """Run the draft layer alone for tokens that follow what was computed: logits of what may come after each.

        Writes its rows, which ``compute`` will write again; reads the hidden row before the first token. Raises as
        ``compute``.
        """
        batch = self._begin(works, planes)
        wait_layer(len(self.config.layers))
        for runs in batch:
            for run in runs:
                run.hidden = self._run_draft(run, planes)
        return [self._logits(work, each) for work, each in zip(works, batch, strict=True)]

    def _begin(self, works: Sequence[Work], planes: Planes) -> list[list[_Run]]:
        config = self.config
        _check_planes(config, planes)
        for work in works:
            _check_work(config, work)
        batch = []
        for work in works:
            chunks = cut_into_chunks(work.start_position, len(work.tokens), config.block_tokens)
            reaches = [self._reaches(work, chunk) for chunk in chunks]
            batch.append(list(map(_Run, chunks, reaches, self._embed(work.tokens, chunks))))
        return batch

    def _reaches(self, work: Work, chunk: Chunk) -> dict[str, Reach]:
        """By group."""
        block_tokens = self.config.block_tokens
        return {
            group.name: find_reach(group, chunk, block_tokens, work.tables[group.name]).on(self.arrays)
            for group in self.config.groups
        }

    def _embed(self, tokens: Tokens, chunks: list[Chunk]) -> list[Array]:
        ids = np.full((len(chunks), self.config.block_tokens), PAD)
        first = chunks[0].first_row
        ids.reshape(-1)[first : first + len(tokens)] = tokens
        return [self.weights.embedding[self.arrays.put(row)] for row in ids]

    def _run_layer(self, index: int, layer: Layer, x: Array, run: _Run, planes: Planes) -> Array:
        """A chunk [block_tokens, d_model] through one layer: write its rows, then attend to the pages."""
        xp, weights, attention = self.arrays.xp, self.weights.layers[index], layer.attention
        start = run.chunk.block * self.config.block_tokens
        turn = slice(start, start + self.config.block_tokens)
        cos, sin = self.turns[attention.rope_dim]
        normed = rms_norm(xp, x, weights["attention_gain"])
        queries, rows = attention.project(self.arrays, normed, weights, cos[turn], sin[turn])
        parts: dict[int, Array] = {}
        for group in dict.fromkeys(layer.head_groups):
            heads, reach = list(layer.heads_of(group)), run.reaches[group]
            cached = {}
            for name, new_rows in rows.items():
                write_rows(planes[group, index, name], reach, run.chunk, new_rows[heads])
                cached[name] = gather_rows(self.arrays, planes[group, index, name], reach)
            mine = {name: query[heads] for name, query in queries.items()}
            parts |= zip(heads, attention.mix(self.arrays, mine, cached, reach.hidden[None], weights), strict=True)
        mixed = xp.concatenate([parts[head] for head in sorted(parts)], axis=0)
        if self.exchange is not None:
            mixed = self.exchange(mixed)
        x = x + join_heads(mixed) @ weights["attention_out"]
        normed = rms_norm(xp, x, weights["ff_gain"])
        return x + swiglu(xp, normed, weights["gate"], weights["up"], weights["down"])

    def _run_draft(self, run: _Run, planes: Planes) -> Array:
        """The draft layer over a chunk: each token beside the hidden row of the position before it."""
        draft, index = self.config.draft, len(self.config.layers)
        if draft is None:
            raise ValueError(f"{self.config.name} has no draft layer")
        xp, weights = self.arrays.xp, self.weights.layers[index]
        rows = gather_rows(
            self.arrays, planes[draft.hidden_group, index, HIDDEN_PLANE], run.reaches[draft.hidden_group]
        )
        block_tokens, width = self.config.block_tokens, rows.shape[-1]
        before = self.arrays.zeros((1, width), rows)  # nothing stands before position 0
        own = rows[0][-block_tokens - 1 :] if run.chunk.block else xp.concatenate((before, rows[0]), axis=0)
        previous = self.arrays.zeros((block_tokens, width), rows)
        computed = slice(run.chunk.first_row, run.chunk.end_row)
        previous[computed] = own[computed]
        x = run.token_rows + rms_norm(xp, previous, weights["draft_gain"]) @ weights["draft_mix"]
        return self._run_layer(index, draft.layer, x, run, planes)

    def _logits(self, work: Work, runs: list[_Run]) -> F32:
        """[wanted, vocab]; each chunk's rows are multiplied in one shape."""
        wanted: list[F32] = []
        block_tokens = self.config.block_tokens
        for run in runs:
            start = run.chunk.block * block_tokens
            first = max(work.end_position - work.wanted - start, run.chunk.first_row)
            if first < run.chunk.end_row:
                normed = rms_norm(self.arrays.xp, run.hidden, self.weights.final_gain)
                wanted.append(self.arrays.get(normed @ self.weights.unembedding)[first : run.chunk.end_row])
        return np.concatenate(wanted)


def build_model(config: TinyConfig, arrays: Arrays = NUMPY) -> TinyTransformer:
    """The model of a config; the same one in every process."""
    turns = {}
    for layer in config.all_layers:
        dim = layer.attention.rope_dim
        cos, sin = rope_tables(dim, config.max_positions, config.rope_theta)
        turns[dim] = arrays.put(cos), arrays.put(sin)
    return TinyTransformer(config, make_weights(config).on(arrays), turns, arrays)


def make_planes(model: TinyTransformer, blocks: int) -> dict[tuple[str, int, str], Array]:
    """Planes of one's own, all zeros."""
    return {
        (group, layer, name): model.arrays.put(np.zeros((blocks, *shape), dtype=dtype))
        for name, layer, group, shape, dtype in list_planes(model.config)
    }


def shard_model(model: TinyTransformer, rank: int, ranks: int, exchange: Exchange) -> TinyTransformer:
    """One rank's part of a model on NumPy: its heads, and a copy of all the rest. Raises ValueError.

    ``exchange`` gathers heads and adds nothing up, so that sums keep their order and all ranks get one rank's bits.
    """
    weights = model.weights.shard(model.config, rank, ranks)
    return replace(model, config=model.config.shard(ranks), weights=weights, exchange=exchange)


def _check_work(config: TinyConfig, work: Work) -> None:
    tokens, start, end = work.tokens, work.start_position, work.end_position
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"{config.name}: a call computes at least one token, got shape {tokens.shape}")
    if start < 0 or end > config.max_positions:
        raise ValueError(f"{config.name}: positions {start} to {end} leave [0, {config.max_positions})")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"{config.name}: tokens leave [0, {config.vocab_size})")


def _check_planes(config: TinyConfig, planes: Planes) -> None:
    for name, layer, group, page_shape, dtype in list_planes(config):
        pages = planes[group, layer, name]
        if tuple(pages.shape[1:]) != page_shape or not str(pages.dtype).endswith(dtype):
            raise ValueError(f"layer {layer} {name}: pages are {pages.dtype} {pages.shape[1:]}, not {page_shape}")
