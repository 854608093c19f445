"""The demo's transformer: real attention, and the same bits however a prompt is cut, whatever is cached."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_transformer.config import F32, Group, TinyConfig, list_planes
from examples.tiny_transformer.digest import ONE_BLAS_THREAD
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.generate import generate
from examples.tiny_transformer.model import Tables, TinyTransformer, build_model
from examples.tiny_transformer.paging import PageIds, PageMissing
from examples.tiny_transformer.reference import dense_logits
from examples.tiny_transformer.tokens import VOCAB_SIZE, Tokens
from examples.tiny_transformer.variants import VARIANTS

SIZES = {"d_model": 24, "ff_dim": 40, "max_positions": 128}
FULL = Group("full")
SMALL_GQA = Gqa(heads=4, kv_heads=2, head_dim=6)
SMALL_MLA = Mla(heads=3, kv_lora_rank=10, rope_dim=4, nope_dim=6, value_dim=5)


def windowed(name: str, window_tokens: int, sink_tokens: int) -> TinyConfig:
    groups = (FULL, Group("window", window_tokens, sink_tokens))
    return replace(SMALL["gqa"], name=name, groups=groups, layer_groups=("window", "full", "window"))


SMALL = {
    "gqa": TinyConfig("gqa", SMALL_GQA, (FULL,), ("full",) * 3, **SIZES),
    "mla": TinyConfig("mla", SMALL_MLA, (FULL,), ("full",) * 3, **SIZES),
}
SMALL["window"] = windowed("window", window_tokens=11, sink_tokens=0)
SMALL["narrow"] = windowed("narrow", window_tokens=3, sink_tokens=0)
SMALL["sinks"] = windowed("sinks", window_tokens=7, sink_tokens=5)
SMALL["mla_window"] = replace(SMALL["sinks"], name="mla_window", attention=SMALL_MLA)


@pytest.fixture(params=[(name, block) for name in SMALL for block in (4, 16)], ids=lambda p: f"{p[0]}-{p[1]}")
def model(request: pytest.FixtureRequest) -> TinyTransformer:
    name, block_tokens = request.param
    return build_model(replace(SMALL[name], block_tokens=block_tokens))


@dataclass
class Pool:
    """Pages full of NaN, handed out in random order: one id space for each group, as the daemon has it."""

    config: TinyConfig
    seed: int
    blocks: int = 8
    planes: dict[tuple[int, str], F32] = field(init=False)
    tables: dict[str, PageIds] = field(init=False)
    free: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.Generator(np.random.PCG64(self.seed))
        pages = 3 * self.blocks
        self.planes = {
            (layer, name): np.full((pages, *shape), np.nan, dtype=np.float32)
            for name, layer, _, shape, _ in list_planes(self.config)
        }
        self.tables = {group.name: np.full(self.blocks, -1, dtype=np.int32) for group in self.config.groups}
        self.free = {group.name: [int(page) for page in draw.permutation(pages)] for group in self.config.groups}

    def cover(self, first_block: int, end_block: int) -> None:
        """Give every group a page for each block of [first_block, end_block)."""
        for name, table in self.tables.items():
            table[first_block:end_block] = [self.free[name].pop() for _ in range(first_block, end_block)]

    def take_prefix(self, other: Pool, cached_tokens: int) -> None:
        """Copy in what a hit of cached_tokens brings: all blocks, or those of the window and the sinks."""
        for layer, name in self.planes:
            self.take_layer_prefix(other, cached_tokens, layer, name)

    def map_prefix(self, cached_tokens: int) -> None:
        """Give pages to the blocks that a hit of cached_tokens needs; the others stay -1."""
        for group in self.config.groups:
            for block in needed_blocks(group, cached_tokens, self.config.block_tokens):
                self.tables[group.name][block] = self.free[group.name].pop()

    def take_layer_prefix(self, other: Pool, cached_tokens: int, layer: int, name: str) -> None:
        group = self.config.groups[[g.name for g in self.config.groups].index(self.config.layer_groups[layer])]
        for block in needed_blocks(group, cached_tokens, self.config.block_tokens):
            source, target = other.tables[group.name][block], self.tables[group.name][block]
            self.planes[layer, name][target] = other.planes[layer, name][source]

    def rows(self, layer: int, name: str, first_block: int, end_block: int) -> F32:
        """A plane's rows [page_heads, tokens, width] of the blocks, by position."""
        table = self.tables[self.config.layer_groups[layer]][first_block:end_block]
        assert (table >= 0).all()
        pages = self.planes[layer, name][table].swapaxes(0, 1)
        return pages.reshape(pages.shape[0], -1, pages.shape[-1])

    def assert_only_mapped_pages_touched(self) -> None:
        for (layer, _), pages in self.planes.items():
            table = self.tables[self.config.layer_groups[layer]]
            unmapped = np.setdiff1d(np.arange(len(pages)), table)
            assert np.isnan(pages[unmapped]).all()


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
    pool = Pool(model.config, seed, blocks=model.config.max_positions // model.config.block_tokens)
    pool.cover(0, -(-len(prompt) // model.config.block_tokens))
    return model.forward(prompt, 0, pool.tables, pool.planes, wait_for_nothing), pool


def assert_same_bits(got: F32, expected: F32) -> None:
    assert not np.isnan(got).any()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def assert_same_rows(got: Pool, expected: Pool, start: int, end: int) -> None:
    """The rows that were computed, [start, end), hold the same bits in both pools."""
    block_tokens = got.config.block_tokens
    first, last = start // block_tokens, -(-end // block_tokens)
    computed = slice(start - first * block_tokens, end - first * block_tokens)
    for layer, name in got.planes:
        rows = got.rows(layer, name, first, last)[:, computed]
        assert_same_bits(rows, expected.rows(layer, name, first, last)[:, computed])


@pytest.mark.parametrize("length", [1, 17, 37, 61])
def test_a_cached_prefix_changes_no_bit(model: TinyTransformer, length: int) -> None:
    prompt, block_tokens = make_prompt(length), model.config.block_tokens
    expected, cold = run_cold(model, prompt, seed=1)
    for cached_tokens in range(0, length, block_tokens):
        warm = Pool(model.config, seed=100 + cached_tokens, blocks=len(cold.tables["full"]))
        warm.map_prefix(cached_tokens)
        warm.cover(cached_tokens // block_tokens, -(-length // block_tokens))
        warm.take_prefix(cold, cached_tokens)
        before = {plane: pages.copy() for plane, pages in warm.planes.items()}
        logits = model.forward(prompt[cached_tokens:], cached_tokens, warm.tables, warm.planes, wait_for_nothing)
        assert_same_bits(logits, expected)
        assert_same_rows(warm, cold, cached_tokens, length)
        warm.assert_only_mapped_pages_touched()
        for (layer, name), pages in warm.planes.items():
            table = warm.tables[model.config.layer_groups[layer]]
            cached = table[: cached_tokens // block_tokens]
            cached = cached[cached >= 0]
            assert_same_bits(pages[cached], before[layer, name][cached])


@pytest.mark.parametrize("seed", range(4))
def test_any_cut_into_calls_gives_the_same_bits(model: TinyTransformer, seed: int) -> None:
    """Odd cuts, and with seed 0 one token a call: what decoding writes is what prefill would have written.

    Behind each call the window groups lose every page that the next one has no right to need.
    """
    prompt, block_tokens = make_prompt(53), model.config.block_tokens
    draw = np.random.Generator(np.random.PCG64(seed))
    cuts = range(1, 53) if seed == 0 else sorted(draw.choice(np.arange(1, 53), size=6, replace=False))
    pool = Pool(model.config, seed=200 + seed, blocks=model.config.max_positions // block_tokens)
    start = 0
    for end in [*map(int, cuts), 53]:
        pool.cover(-(-start // block_tokens), -(-end // block_tokens))
        logits = model.forward(prompt[start:end], start, pool.tables, pool.planes, wait_for_nothing)
        expected, cold = run_cold(model, prompt[:end], seed=1)
        assert_same_bits(logits, expected)
        assert_same_rows(pool, cold, start, end)
        recycle(pool, end)
        start = end
    pool.assert_only_mapped_pages_touched()


def recycle(pool: Pool, position: int) -> None:
    """Take the pages out of reach of position and on out of the tables, and fill them with NaN."""
    for group in pool.config.groups:
        table = pool.tables[group.name]
        keep = needed_blocks(group, position, pool.config.block_tokens)
        for block in np.flatnonzero(table >= 0):
            if block not in keep:
                for (layer, _), pages in pool.planes.items():
                    if pool.config.layer_groups[layer] == group.name:
                        pages[table[block]] = np.nan
                table[block] = -1


@pytest.mark.parametrize("length", [1, 5, 33, 50])
def test_logits_agree_with_dense_attention(model: TinyTransformer, length: int) -> None:
    prompt = make_prompt(length)
    logits, _ = run_cold(model, prompt, seed=5)
    expected = dense_logits(model, prompt)
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["gqa", "mla", "sinks"])
def test_one_flipped_cached_value_shows_in_the_logits(name: str) -> None:
    model, prompt = build_model(replace(SMALL[name], block_tokens=4)), make_prompt(21)
    expected, pool = run_cold(model, prompt, seed=6)
    for (layer, plane), pages in pool.planes.items():
        page = pool.tables[model.config.layer_groups[layer]][4]
        pages[page, 0, 1, 0] += 0.5
        logits = model.forward(prompt[20:], 20, pool.tables, pool.planes, wait_for_nothing)
        assert np.abs(logits - expected).max() > 1e-4, plane
        pages[page, 0, 1, 0] -= 0.5


def test_layers_may_arrive_one_by_one(model: TinyTransformer) -> None:
    """A layer's cached pages are NaN until it is waited for; each is waited for once, in order."""
    prompt, cached_tokens = make_prompt(37), 32
    expected, cold = run_cold(model, prompt, seed=1)
    warm = Pool(model.config, seed=9, blocks=len(cold.tables["full"]))
    warm.map_prefix(cached_tokens)
    warm.cover(cached_tokens // model.config.block_tokens, -(-37 // model.config.block_tokens))
    arrived: list[int] = []

    def load(layer: int) -> None:
        for plane_layer, name in warm.planes:
            if plane_layer == layer:
                assert np.isnan(warm.planes[layer, name]).all()
                warm.take_layer_prefix(cold, cached_tokens, layer, name)
        arrived.append(layer)

    logits = model.forward(prompt[cached_tokens:], cached_tokens, warm.tables, warm.planes, load)
    assert_same_bits(logits, expected)
    assert arrived == list(range(model.config.layer_count))


def test_a_table_without_a_needed_page_is_refused_before_anything_is_written() -> None:
    model = build_model(replace(SMALL["sinks"], block_tokens=4))
    prompt = make_prompt(24)
    _, pool = run_cold(model, prompt, seed=1)
    before = {plane: pages.copy() for plane, pages in pool.planes.items()}
    for group, block in (("full", 2), ("window", 0), ("window", 4), ("window", 5)):
        table = pool.tables[group].copy()
        table[block] = -1
        with pytest.raises(PageMissing) as refused:
            model.forward(prompt[20:], 20, {**pool.tables, group: table}, pool.planes, wait_for_nothing)
        assert (refused.value.group, refused.value.block) == (group, block)
    short = {**pool.tables, "full": pool.tables["full"][:5]}
    with pytest.raises(PageMissing):
        model.forward(prompt[20:], 20, short, pool.planes, wait_for_nothing)
    for plane, pages in pool.planes.items():
        np.testing.assert_array_equal(pages, before[plane])


def test_calls_that_do_not_fit_the_config_are_refused() -> None:
    model = build_model(replace(SMALL["gqa"], block_tokens=4))
    pool = Pool(model.config, seed=1)
    pool.cover(0, 8)
    too_far = model.config.max_positions - 1
    for tokens, start in ((make_prompt(0), 0), (make_prompt(2), -1), (make_prompt(2), too_far)):
        with pytest.raises(ValueError, match="gqa"):
            model.forward(tokens, start, pool.tables, pool.planes, wait_for_nothing)
    with pytest.raises(ValueError, match="tokens leave"):
        model.forward(np.array([VOCAB_SIZE], dtype=np.int32), 0, pool.tables, pool.planes, wait_for_nothing)
    pool.planes[1, "v"] = pool.planes[1, "v"][..., :-1]
    with pytest.raises(ValueError, match="layer 1 v"):
        model.forward(make_prompt(2), 0, pool.tables, pool.planes, wait_for_nothing)


def test_generate_asks_for_pages_as_it_enters_blocks(model: TinyTransformer) -> None:
    """And gives the tokens of a run that prefills everything anew for each of them."""
    prompt, block_tokens = make_prompt(30), model.config.block_tokens
    pool = Pool(model.config, seed=4, blocks=model.config.max_positions // block_tokens)
    asked: list[int] = []

    def tables_for(blocks: int) -> Tables:
        pool.cover(asked[-1] if asked else 0, blocks)
        asked.append(blocks)
        return pool.tables

    tokens = list(generate(model, prompt, 0, 40, tables_for, pool.planes, wait_for_nothing))
    first, last = -(-30 // block_tokens), -(-(30 + 39) // block_tokens)
    assert asked == list(range(first, last + 1))
    whole = np.concatenate((prompt, np.array(tokens, dtype=np.int32)))
    for count in (0, 1, 7, 39):
        logits, cold = run_cold(model, whole[: 30 + count], seed=8)
        assert int(np.argmax(logits[:256])) == tokens[count]
        assert_same_rows(pool, cold, 0, 30 + count)


def test_generate_continues_a_cached_prefix_with_the_same_tokens(model: TinyTransformer) -> None:
    prompt, block_tokens = make_prompt(43), model.config.block_tokens

    def run(pool: Pool, cached_tokens: int) -> list[int]:
        held = [cached_tokens // block_tokens]

        def tables_for(blocks: int) -> Tables:
            pool.cover(held[-1], blocks)
            held.append(blocks)
            return pool.tables

        return list(generate(model, prompt, cached_tokens, 12, tables_for, pool.planes, wait_for_nothing))

    cold = Pool(model.config, seed=4, blocks=16)
    expected = run(cold, 0)
    warm = Pool(model.config, seed=5, blocks=16)
    warm.map_prefix(32)
    warm.take_prefix(cold, 32)
    assert run(warm, 32) == expected
    with pytest.raises(ValueError, match="nothing to compute"):
        run(Pool(model.config, seed=6), 43)


def check_wide_model(name: str, layers: int, prompt_tokens: int) -> None:
    """The demo's widths, where BLAS cuts its sums into parts and shares its rows out to threads."""
    config = replace(VARIANTS[name], max_positions=256)
    config = replace(config, layer_groups=config.layer_groups[:layers])
    model, prompt = build_model(config), make_prompt(prompt_tokens)
    expected, cold = run_cold(model, prompt, seed=1)
    for cached_tokens in (16, (prompt_tokens - 4) // 16 * 16):
        warm = Pool(config, seed=cached_tokens, blocks=16)
        warm.map_prefix(cached_tokens)
        warm.take_prefix(cold, cached_tokens)
        warm.cover(cached_tokens // 16, -(-prompt_tokens // 16))
        last = prompt_tokens - 1
        model.forward(prompt[cached_tokens:last], cached_tokens, warm.tables, warm.planes, wait_for_nothing)
        logits = model.forward(prompt[last:], last, warm.tables, warm.planes, wait_for_nothing)
        assert_same_bits(logits, expected)
        assert_same_rows(warm, cold, cached_tokens, prompt_tokens)


@pytest.mark.parametrize(
    ("threads", "checks"),
    [
        (1, [(name, 2, 203) for name in VARIANTS]),
        (2, [("tiny-gqa", 1, 71)]),  # few calls: two threads spin for a core when the machine is busy
    ],
)
def test_the_demo_models_keep_their_bits(threads: int, checks: list[tuple[str, int, int]]) -> None:
    """For each number of threads by itself: between them the last bits differ, and so do the digests."""
    script = f"from tests.unit.test_tiny_transformer import *\nfor check in {checks}: check_wide_model(*check)"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **dict.fromkeys(ONE_BLAS_THREAD, str(threads))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
