"""A decoder-only transformer whose keys and values live in cache pages only.

Bit-identical by construction: a position's rows and logits are the same bytes however the prompt was split
into calls, whatever was cached and whichever sequences share the call. Each position is computed in its block's chunk,
always block_tokens rows in one shape and on its own row; the keys that the chunk gathers follow from the block's
index alone (paging.py); no operation mixes rows, heads are computed one by one; and a hidden key weighs exactly 0.
Decoding is the same path with one computed row. Where chunks run side by side, in lanes, a row may be in any of them:
that needs arithmetic that gives a row the same bits wherever it stands, as a GPU's does in matrices of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from examples.tiny_transformer.arrays import NUMPY, Array, Arrays
from examples.tiny_transformer.config import F32, HIDDEN_PLANE, Layer, TinyConfig, list_planes
from examples.tiny_transformer.ops import (
    hidden_of_heads,
    join_heads,
    lanes_first,
    lanes_last,
    rms_norm,
    rope_tables,
    swiglu,
)
from examples.tiny_transformer.paging import (
    Chunk,
    PageIds,
    Reach,
    Rows,
    StackedReach,
    cut_into_chunks,
    find_reach,
    gather_rows,
    stack_reaches,
    stack_rows,
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
    """Work of one call for a sequence: tokens [n] at start_position and on, and the wanted results."""

    tokens: Tokens
    start_position: int
    tables: Tables
    wanted: int = 1  # number of last tokens whose logits are wanted

    @property
    def end_position(self) -> int:
        """One past the last position."""
        return self.start_position + len(self.tokens)


@dataclass(frozen=True, eq=False)
class _Run:
    """A chunk of a work, and where its rows are found: in a lane of a stack."""

    chunk: Chunk
    reaches: dict[str, Reach]
    tokens: Tokens  # [block_tokens]; those of rows that are not computed are PAD


@dataclass(eq=False)
class _Stack:
    """Chunks of one shape on their way through the layers, one in each of the first lanes."""

    runs: list[_Run]
    rows: Rows
    reaches: dict[str, StackedReach]
    token_rows: Array  # [lanes * block_tokens, d_model]
    hidden: Array = field(init=False)
    queries: dict[str, Array] = field(init=False)

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
        stacks = self._stack([run for runs in batch for run in runs])
        for index, layer in enumerate(self.config.layers):
            wait_layer(index)
            self._run_layer(index, layer, stacks, [stack.hidden for stack in stacks], planes)
        hidden = [stack.hidden for stack in stacks]
        if self.config.draft is not None:
            wait_layer(len(self.config.layers))
            place = (self.config.draft.hidden_group, len(self.config.layers), HIDDEN_PLANE)
            for stack in stacks:
                write_rows(planes[place], stack.reaches[place[0]], stack.rows, stack.hidden[None])
            self._run_draft(stacks, planes)
        return self._logits(works, batch, stacks, hidden)  # on a GPU, all has been written once they are here

    def guess(self, works: Sequence[Work], planes: Planes, wait_layer: WaitLayer) -> list[F32]:
        """Run the draft layer alone for tokens that follow what was computed: logits of what may come after each.

        Writes its rows, which ``compute`` will write again; reads the hidden row before the first token. Raises as
        ``compute``.
        """
        batch = self._begin(works, planes)
        stacks = self._stack([run for runs in batch for run in runs])
        wait_layer(len(self.config.layers))
        self._run_draft(stacks, planes)
        return self._logits(works, batch, stacks, [stack.hidden for stack in stacks])

    def _begin(self, works: Sequence[Work], planes: Planes) -> list[list[_Run]]:
        config = self.config
        _check_planes(config, planes)
        for work in works:
            _check_work(config, work)
        batch = []
        for work in works:
            chunks = cut_into_chunks(work.start_position, len(work.tokens), config.block_tokens)
            tokens = np.full((len(chunks), config.block_tokens), PAD)
            first = chunks[0].first_row
            tokens.reshape(-1)[first : first + len(work.tokens)] = work.tokens
            batch.append(list(map(_Run, chunks, [self._reaches(work, chunk) for chunk in chunks], tokens)))
        return batch

    def _reaches(self, work: Work, chunk: Chunk) -> dict[str, Reach]:
        """By group."""
        block_tokens, step_blocks = self.config.block_tokens, self.arrays.step_blocks
        return {
            group.name: find_reach(group, chunk, block_tokens, work.tables[group.name], step_blocks)
            for group in self.config.groups
        }

    def _stack(self, runs: list[_Run]) -> list[_Stack]:
        """Chunks that gather as much in every group, as many together as there are lanes."""
        alike: dict[tuple[int, ...], list[_Run]] = {}
        for run in runs:
            alike.setdefault(tuple(len(reach.dead_rows) for reach in run.reaches.values()), []).append(run)
        lanes = self.arrays.lanes
        return [self._lay(some[at : at + lanes]) for some in alike.values() for at in range(0, len(some), lanes)]

    def _lay(self, runs: list[_Run]) -> _Stack:
        arrays, block_tokens = self.arrays, self.config.block_tokens
        chunks = [run.chunk for run in runs]
        tokens = np.full((arrays.lanes, block_tokens), PAD)
        tokens[: len(runs)] = [run.tokens for run in runs]
        reaches = {
            name: stack_reaches(arrays, chunks, [run.reaches[name] for run in runs], block_tokens)
            for name in runs[0].reaches
        }
        token_rows = self.weights.embedding[arrays.put(tokens.reshape(-1))]
        return _Stack(runs, stack_rows(arrays, chunks, block_tokens), reaches, token_rows)

    def _run_layer(self, index: int, layer: Layer, stacks: list[_Stack], xs: list[Array], planes: Planes) -> None:
        """Rows ``xs`` of stacks through one layer: write what all of them leave, then attend to the pages."""
        xp, weights, attention = self.arrays.xp, self.weights.layers[index], layer.attention
        cos, sin = self.turns[attention.rope_dim]
        for stack, x in zip(stacks, xs, strict=True):
            normed, turn = rms_norm(xp, x, weights["attention_gain"]), stack.rows.positions
            stack.queries, rows = attention.project(self.arrays, normed, weights, cos[turn], sin[turn])
            for group in dict.fromkeys(layer.head_groups):
                mine, reach = _as_index(layer.heads_of(group)), stack.reaches[group]
                for name, new_rows in rows.items():
                    write_rows(planes[group, index, name], reach, stack.rows, new_rows[mine])
        for stack, x in zip(stacks, xs, strict=True):
            mixed = self._attend(index, layer, stack, planes)
            if self.exchange is not None:
                mixed = self.exchange(mixed)
            attended = x + join_heads(mixed) @ weights["attention_out"]
            normed = rms_norm(xp, attended, weights["ff_gain"])
            stack.hidden = attended + swiglu(xp, normed, weights["gate"], weights["up"], weights["down"])

    def _attend(self, index: int, layer: Layer, stack: _Stack, planes: Planes) -> Array:
        """Attention output of all heads of a layer: [heads, lanes * T, width]."""
        arrays, attention = self.arrays, layer.attention
        parts: dict[int, Array] = {}
        for group in dict.fromkeys(layer.head_groups):
            heads, reach = layer.heads_of(group), stack.reaches[group]
            cached = {name: gather_rows(arrays, planes[group, index, name], reach) for name in layer.attention.rows()}
            mine = {name: lanes_first(arrays, query[_as_index(heads)]) for name, query in stack.queries.items()}
            hidden = hidden_of_heads(arrays, reach.hidden, len(heads))
            mixed = attention.mix(arrays, mine, cached, hidden, self.weights.layers[index])
            parts |= zip(heads, lanes_last(arrays, mixed), strict=True)
        return arrays.xp.concatenate([parts[head] for head in sorted(parts)], axis=0)

    def _run_draft(self, stacks: list[_Stack], planes: Planes) -> None:
        """The draft layer over chunks: each token beside the hidden row of the position before it."""
        draft, index = self.config.draft, len(self.config.layers)
        if draft is None:
            raise ValueError(f"{self.config.name} has no draft layer")
        weights, xs = self.weights.layers[index], []
        for stack in stacks:
            reach = stack.reaches[draft.hidden_group]
            rows = gather_rows(self.arrays, planes[draft.hidden_group, index, HIDDEN_PLANE], reach)
            previous = self.arrays.zeros(tuple(stack.token_rows.shape), rows)  # nothing stands before position 0
            previous[stack.rows.follower_rows] = rows.reshape(-1, rows.shape[-1])[reach.previous_keys]
            normed = rms_norm(self.arrays.xp, previous, weights["draft_gain"])
            xs.append(stack.token_rows + normed @ weights["draft_mix"])
        self._run_layer(index, draft.layer, stacks, xs, planes)

    def _logits(
        self, works: Sequence[Work], batch: list[list[_Run]], stacks: list[_Stack], hidden: list[Array]
    ) -> list[F32]:
        """[wanted, vocab] for each work, of stacks' hidden rows; each stack's are multiplied in one shape."""
        block_tokens = self.config.block_tokens
        found: dict[_Run, F32] = {}
        wanting = {run for work, runs in zip(works, batch, strict=True) for run in _wanted(work, runs, block_tokens)}
        for stack, rows in zip(stacks, hidden, strict=True):
            if not wanting.isdisjoint(stack.runs):
                normed = rms_norm(self.arrays.xp, rows, self.weights.final_gain)
                logits = self.arrays.get(normed @ self.weights.unembedding)
                found |= zip(stack.runs, logits.reshape(self.arrays.lanes, block_tokens, -1), strict=False)
        return [
            np.concatenate([found[run][each] for run, each in _wanted(work, runs, block_tokens).items()])
            for work, runs in zip(works, batch, strict=True)
        ]


def _as_index(heads: tuple[int, ...]) -> slice | list[int]:
    """A slice where heads are neighbours: a list has to be sent to a GPU first."""
    is_run = heads[-1] - heads[0] == len(heads) - 1
    return slice(heads[0], heads[-1] + 1) if is_run else list(heads)


def _wanted(work: Work, runs: list[_Run], block_tokens: int) -> dict[_Run, slice]:
    """The rows of chunks whose logits are wanted."""
    first = work.end_position - work.wanted
    rows = {
        run: slice(max(first - run.chunk.block * block_tokens, run.chunk.first_row), run.chunk.end_row) for run in runs
    }
    return {run: each for run, each in rows.items() if each.start < each.stop}


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
