"""Small models of every family, and pools of pages for them, full of poison."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.tiny_transformer.config import F32, Draft, Group, TinyConfig, alike, head_wise, list_planes
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.model import TinyTransformer
from examples.tiny_transformer.packed import Dsa, PackedMla, ScaledGqa
from examples.tiny_transformer.paging import PageIds
from examples.tiny_transformer.tokens import VOCAB_SIZE, Tokens

POISON = 0xFF  # of every byte: NaN as float32, bf16 and fp8 alike
Plane = tuple[str, int, str]

SIZES: dict[str, Any] = {"d_model": 24, "ff_dim": 40, "max_positions": 128}
FULL = Group("full")
WINDOW = Group("window", 11)
SINKS = Group("window", 7, 5)
LATENT = Group("full", is_replicated=True)
LATENT_WINDOW = Group("window", 11, is_replicated=True)
SMALL_GQA = Gqa(heads=4, kv_heads=2, head_dim=6)
SMALL_SCALED = ScaledGqa(heads=4, kv_heads=2, head_dim=6)
SMALL_MLA = Mla(heads=3, kv_lora_rank=10, rope_dim=4, nope_dim=6, value_dim=5)
PACKED_SIZES = {"heads": 2, "kv_lora_rank": 128, "rope_dim": 4, "nope_dim": 6, "value_dim": 5}
SMALL_PACKED = PackedMla(**PACKED_SIZES)
SMALL_DSA = Dsa(**PACKED_SIZES, index_heads=2, index_dim=8, top_k=9)
PACKED = ("gqa-fp8", "dsa", "mla-swa")  # their rows are bytes
MIXED = ("window", "full", "window")


def make_small(name: str, groups: tuple[Group, ...], layers: Any, **more: Any) -> TinyConfig:
    return TinyConfig(name, groups, layers, **SIZES, **more)


SMALL = {
    config.name: config
    for config in (
        make_small("gqa", (FULL,), alike(SMALL_GQA, ("full",) * 3)),
        make_small("gqa-fp8", (FULL, WINDOW), alike(SMALL_SCALED, MIXED)),
        make_small("mla", (LATENT,), alike(SMALL_MLA, ("full",) * 3)),
        make_small("window", (FULL, WINDOW), alike(SMALL_GQA, MIXED)),
        make_small("narrow", (FULL, Group("window", 3)), alike(SMALL_GQA, MIXED)),
        make_small("sinks", (FULL, SINKS), alike(SMALL_GQA, MIXED)),
        make_small("mla-window", (FULL, SINKS), alike(SMALL_MLA, MIXED)),
        make_small("dsa", (LATENT,), alike(SMALL_DSA, ("full",) * 2)),
        make_small(
            "mla-swa",
            (LATENT, LATENT_WINDOW),
            alike(SMALL_PACKED, ("window",) * 2) + alike(Mla(**PACKED_SIZES), ("full",)),
        ),
        make_small(
            "head-wise",
            (FULL, SINKS),
            head_wise(SMALL_GQA, ((True, False), (True, True), (False, True)), full="full", window="window"),
        ),
        make_small(
            "mtp",
            (FULL, Group("draft"), Group("draft-hidden", 2)),
            alike(SMALL_GQA, ("full",) * 2),
            draft=Draft(alike(SMALL_GQA, ("draft",))[0], "draft-hidden"),
            residual_scale=0.4,
        ),
    )
}


@dataclass
class Pool:
    """Poisoned pages, handed out in random order: one id space for each group, as the daemon has it."""

    config: TinyConfig
    seed: int
    blocks: int = 8
    planes: dict[Plane, Any] = field(init=False)
    tables: dict[str, PageIds] = field(init=False)
    free: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.Generator(np.random.PCG64(self.seed))
        pages = 3 * self.blocks
        self.planes = {
            (group, layer, name): np.empty((pages, *shape), dtype=dtype)
            for name, layer, group, shape, dtype in list_planes(self.config)
        }
        for plane in self.planes.values():
            plane.view(np.uint8)[:] = POISON
        self.tables = {group.name: np.full(self.blocks, -1, dtype=np.int32) for group in self.config.groups}
        self.free = {group.name: [int(page) for page in draw.permutation(pages)] for group in self.config.groups}

    def cover(self, first_block: int, end_block: int) -> None:
        """Give every group a page for each block of [first_block, end_block)."""
        for name, table in self.tables.items():
            table[first_block:end_block] = [self.free[name].pop() for _ in range(first_block, end_block)]

    def map_prefix(self, cached_tokens: int) -> None:
        """Give pages to the blocks that a hit of cached_tokens needs; the others stay -1."""
        for group in self.config.groups:
            for block in needed_blocks(group, cached_tokens, self.config.block_tokens):
                self.tables[group.name][block] = self.free[group.name].pop()

    def take_prefix(self, other: Pool, cached_tokens: int) -> None:
        """Copy in what a hit of cached_tokens brings: all blocks, or those of the window and the sinks."""
        for plane in self.planes:
            self.take_plane(other, cached_tokens, plane)

    def take_plane(self, other: Pool, cached_tokens: int, plane: Plane) -> None:
        group = next(group for group in self.config.groups if group.name == plane[0])
        for block in needed_blocks(group, cached_tokens, self.config.block_tokens):
            source, target = other.tables[plane[0]][block], self.tables[plane[0]][block]
            self.planes[plane][target] = other.planes[plane][source]

    def move(self) -> None:
        """Take all pages to other ones, as by a swap out and in, and poison those that they were on."""
        for name, table in self.tables.items():
            held = np.flatnonzero(table >= 0)
            targets = [self.free[name].pop() for _ in held]
            for plane, pages in self.planes.items():
                if plane[0] == name:
                    pages[targets] = pages[table[held]]
                    pages.view(np.uint8)[table[held]] = POISON
            self.free[name] = [int(page) for page in table[held]] + self.free[name]
            table[held] = targets

    def recycle(self, position: int) -> int:
        """Take the pages out of reach of position and on out of the tables and poison them; how many there were."""
        count = 0
        for group in self.config.groups:
            table = self.tables[group.name]
            keep = needed_blocks(group, position, self.config.block_tokens)
            gone = [block for block in np.flatnonzero(table >= 0) if block not in keep]
            for plane, pages in self.planes.items():
                if plane[0] == group.name:
                    pages.view(np.uint8)[table[gone]] = POISON
            table[gone] = -1
            count += len(gone)
        return count

    def rows(self, plane: Plane, first_block: int, end_block: int) -> npt.NDArray[Any]:
        """A plane's rows [page_heads, tokens, width] of the blocks, by position."""
        table = self.tables[plane[0]][first_block:end_block]
        assert (table >= 0).all()
        pages = self.planes[plane][table].swapaxes(0, 1)
        rows: npt.NDArray[Any] = pages.reshape(pages.shape[0], -1, pages.shape[-1])
        return rows

    def assert_only_mapped_pages_touched(self) -> None:
        for plane, pages in self.planes.items():
            unmapped = np.setdiff1d(np.arange(len(pages)), self.tables[plane[0]])
            assert (pages.view(np.uint8)[unmapped] == POISON).all()


def needed_blocks(group: Group, cached_tokens: int, block_tokens: int) -> list[int]:
    """DESIGN section 3: all of [0, n), or what covers [n - window + 1, n) and the sinks."""
    end = -(-cached_tokens // block_tokens)
    if group.window_tokens is None:
        return list(range(end))
    first = max(cached_tokens - group.window_tokens + 1, 0) // block_tokens
    sinks = range(-(-group.sink_tokens // block_tokens))
    return sorted(block for block in {*sinks, *range(first, end)} if block < end)


def make_prompt(length: int, seed: int = 3) -> Tokens:
    draw = np.random.Generator(np.random.PCG64(seed))
    return draw.integers(0, VOCAB_SIZE, length, dtype=np.int32)


def wait_for_nothing(layer: int) -> None:
    pass


def run_cold(model: TinyTransformer, prompt: Tokens, seed: int) -> tuple[F32, Pool]:
    """The prompt in one call, and its pages."""
    pool = Pool(model.config, seed, blocks=model.config.max_positions // model.config.block_tokens)
    pool.cover(0, -(-len(prompt) // model.config.block_tokens))
    return model.forward(prompt, 0, pool.tables, pool.planes, wait_for_nothing), pool


def with_blocks(name: str, block_tokens: int, max_positions: int = 128) -> TinyConfig:
    """A small config with other blocks."""
    return replace(SMALL[name], block_tokens=block_tokens, max_positions=max_positions)


def assert_same_bits(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    assert got.dtype == expected.dtype
    assert got.dtype == np.uint8 or not np.isnan(got).any()
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def assert_same_rows(got: Pool, expected: Pool, start: int, end: int) -> None:
    """The rows that were computed, [start, end), hold the same bits in both pools."""
    block_tokens = got.config.block_tokens
    first, last = start // block_tokens, -(-end // block_tokens)
    computed = slice(start - first * block_tokens, end - first * block_tokens)
    for plane in got.planes:
        rows = got.rows(plane, first, last)[:, computed]
        assert_same_bits(rows, expected.rows(plane, first, last)[:, computed])
