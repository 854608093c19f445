"""The examples' transformer: real attention, and the same bits however a prompt is cut, whatever is cached."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_transformer.digest import ONE_BLAS_THREAD
from examples.tiny_transformer.generate import Drafts, generate
from examples.tiny_transformer.model import Tables, TinyTransformer, Work, build_model
from examples.tiny_transformer.paging import PageMissing
from examples.tiny_transformer.reference import dense_generate, dense_guess, dense_logits
from examples.tiny_transformer.tokens import VOCAB_SIZE
from examples.tiny_transformer.variants import DEMO, VARIANTS
from tests.long_cases import IS_LONG, looped
from tests.unit.examples.tiny_rig import (
    PACKED,
    SMALL,
    Pool,
    assert_same_bits,
    assert_same_rows,
    make_prompt,
    run_cold,
    wait_for_nothing,
    with_blocks,
)

TOLERANCE = {True: 3e-2, False: 2e-4}
"""Tolerance of logits around 1. Where rows are fp8 a value beside a rounding border may fall to its other side in
float64."""


MODELS = [(name, block) for name in SMALL for block in (4, 16) if IS_LONG or block == 4 or name in ("sinks", "mtp")]
"""``make examples-test`` takes all; blocks of 4 tokens cut windows and prompts more often than those of 16."""


@pytest.fixture(params=MODELS, ids=lambda p: f"{p[0]}-{p[1]}")
def model(request: pytest.FixtureRequest) -> TinyTransformer:
    name, block_tokens = request.param
    return build_model(with_blocks(name, block_tokens))


@looped("length", [1, 37], [1, 17, 37, 61])
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
        for plane, pages in warm.planes.items():
            cached = warm.tables[plane[0]][: cached_tokens // block_tokens]
            cached = cached[cached >= 0]
            np.testing.assert_array_equal(pages[cached], before[plane][cached])


@looped("seed", range(1, 2), range(4))
def test_any_cut_into_calls_gives_the_same_bits(model: TinyTransformer, seed: int) -> None:
    """Odd cuts, and with seed 0 one token a call: what decoding writes is what prefill would have written.

    Behind each call the window groups lose every page that the next one has no right to need, and the rest goes to
    other pages, as by a swap out and in. Page 0 is never handed out: a -1 that were read as page 0 would show.
    """
    prompt, block_tokens = make_prompt(53), model.config.block_tokens
    draw = np.random.Generator(np.random.PCG64(seed))
    cuts = range(1, 53) if seed == 0 else sorted(draw.choice(np.arange(1, 53), size=6, replace=False))
    pool = Pool(model.config, seed=200 + seed, blocks=model.config.max_positions // block_tokens)
    for free in pool.free.values():
        free.remove(0)
    start = 0
    for end in [*map(int, cuts), 53]:
        pool.cover(-(-start // block_tokens), -(-end // block_tokens))
        logits = model.forward(prompt[start:end], start, pool.tables, pool.planes, wait_for_nothing)
        expected, cold = run_cold(model, prompt[:end], seed=1)
        assert_same_bits(logits, expected)
        assert_same_rows(pool, cold, start, end)
        pool.recycle(end)
        pool.move()
        start = end
    pool.assert_only_mapped_pages_touched()


@pytest.mark.parametrize("name", SMALL)
@looped("block_tokens", [16], [16, 32, 64, 128])
def test_cuts_hits_and_moves_of_whole_blocks_give_the_same_bits(name: str, block_tokens: int) -> None:
    """Real block sizes; chunks smaller and larger than a block and than the windows, behind every cached prefix."""
    length = 2 * block_tokens + 21
    model = build_model(with_blocks(name, block_tokens, max_positions=512))
    prompt = make_prompt(length)
    expected, cold = run_cold(model, prompt, seed=1)
    for cached_tokens, chunk in ((0, block_tokens + 9), (block_tokens, 10), (2 * block_tokens, 5)):
        warm = Pool(model.config, seed=cached_tokens, blocks=len(cold.tables["full"]))
        warm.map_prefix(cached_tokens)
        warm.take_prefix(cold, cached_tokens)
        covered, logits = cached_tokens // block_tokens, expected[:0]
        for start in range(cached_tokens, length, chunk):
            end = min(start + chunk, length)
            warm.move()
            warm.cover(covered, -(-end // block_tokens))
            covered = -(-end // block_tokens)
            logits = model.forward(prompt[start:end], start, warm.tables, warm.planes, wait_for_nothing)
            assert_same_rows(warm, cold, start, end)
            warm.recycle(end)
        assert_same_bits(logits, expected)
        warm.assert_only_mapped_pages_touched()


def test_sequences_of_one_call_do_not_touch_each_other(model: TinyTransformer) -> None:
    """Two prefills behind different prefixes and a decode in one call: the bits of three calls."""
    prompts, starts = [make_prompt(length, seed=length) for length in (37, 20, 30)], (0, 16, 29)
    works, expected, pools = [], [], []
    shared = Pool(model.config, seed=0, blocks=96)
    taken = 0
    for prompt, start in zip(prompts, starts, strict=True):
        logits, cold = run_cold(model, prompt, seed=1)
        blocks = -(-len(prompt) // model.config.block_tokens)
        shared.cover(taken, taken + blocks)
        for plane, pages in shared.planes.items():
            pages[shared.tables[plane[0]][taken : taken + blocks]] = cold.planes[plane][cold.tables[plane[0]][:blocks]]
        tables = {group: table[taken : taken + blocks] for group, table in shared.tables.items()}
        works.append(Work(prompt[start:], start, tables))
        expected.append(logits)
        pools.append(cold)
        taken += blocks
    got = model.compute(works, shared.planes, wait_for_nothing)
    for logits, wanted in zip(got, expected, strict=True):
        assert_same_bits(logits[-1], wanted)
    shared.assert_only_mapped_pages_touched()


@looped("length", [1, 33], [1, 5, 33, 50])
def test_logits_agree_with_dense_attention(model: TinyTransformer, length: int) -> None:
    prompt = make_prompt(length)
    logits, _ = run_cold(model, prompt, seed=5)
    expected = dense_logits(model, prompt)
    tolerance = TOLERANCE[model.config.name in PACKED]
    np.testing.assert_allclose(logits, expected, atol=tolerance, rtol=tolerance)
    assert np.argmax(logits) == np.argmax(expected)


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_page_shows_in_the_logits(name: str) -> None:
    """In every plane of every layer, so each of them is read; the draft's own show in its guess alone."""
    model, prompt = build_model(with_blocks(name, 4)), make_prompt(21)
    expected, pool = run_cold(model, prompt, seed=6)
    work = Work(prompt[20:], 20, pool.tables)
    guessed = model.guess([work], pool.planes, wait_for_nothing)[0] if model.config.draft else expected
    for plane, pages in pool.planes.items():
        page, other = pool.tables[plane[0]][[4, 0]]
        before = pages[page].copy()
        pages[page] = pages[other] if pages.dtype == np.uint8 else -3 * pages[other]
        if plane[1] < len(model.config.layers):
            logits = model.forward(prompt[20:], 20, pool.tables, pool.planes, wait_for_nothing)
            assert np.abs(logits - expected).max() > 1e-4, plane
        else:
            logits = model.guess([work], pool.planes, wait_for_nothing)[0]
            assert np.abs(logits - guessed).max() > 1e-4, plane
        pages[page] = before


def test_layers_may_arrive_one_by_one(model: TinyTransformer) -> None:
    """A layer's cached pages are NaN until it is waited for; each is waited for once, in order."""
    prompt, cached_tokens = make_prompt(37), 32
    expected, cold = run_cold(model, prompt, seed=1)
    warm = Pool(model.config, seed=9, blocks=len(cold.tables["full"]))
    warm.map_prefix(cached_tokens)
    warm.cover(cached_tokens // model.config.block_tokens, -(-37 // model.config.block_tokens))
    arrived: list[int] = []

    def load(layer: int) -> None:
        for plane, pages in warm.planes.items():
            if plane[1] == layer:
                assert (pages.view(np.uint8) == 0xFF).all()
                warm.take_plane(cold, cached_tokens, plane)
        arrived.append(layer)

    logits = model.forward(prompt[cached_tokens:], cached_tokens, warm.tables, warm.planes, load)
    assert_same_bits(logits, expected)
    assert arrived == list(range(model.config.layer_count))


def test_a_table_without_a_needed_page_is_refused_before_anything_is_written() -> None:
    model = build_model(with_blocks("sinks", 4))
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
    model = build_model(with_blocks("gqa", 4))
    pool = Pool(model.config, seed=1)
    pool.cover(0, 8)
    too_far = model.config.max_positions - 1
    for tokens, start in ((make_prompt(0), 0), (make_prompt(2), -1), (make_prompt(2), too_far)):
        with pytest.raises(ValueError, match="gqa"):
            model.forward(tokens, start, pool.tables, pool.planes, wait_for_nothing)
    with pytest.raises(ValueError, match="tokens leave"):
        model.forward(np.array([VOCAB_SIZE], dtype=np.int32), 0, pool.tables, pool.planes, wait_for_nothing)
    pool.planes["full", 1, "v"] = pool.planes["full", 1, "v"][..., :-1]
    with pytest.raises(ValueError, match="layer 1 v"):
        model.forward(make_prompt(2), 0, pool.tables, pool.planes, wait_for_nothing)


def test_generate_asks_for_pages_as_it_enters_blocks(model: TinyTransformer) -> None:
    """And gives the tokens of a run that prefills everything anew for each of them."""
    prompt, block_tokens = make_prompt(30), model.config.block_tokens
    pool = Pool(model.config, seed=4, blocks=model.config.max_positions // block_tokens)
    asked: list[int] = []
    drafts = Drafts()

    def tables_for(blocks: int, computed_tokens: int) -> Tables:
        assert (blocks - 1) * block_tokens <= computed_tokens + (30 if not asked else 1)
        pool.cover(asked[-1] if asked else 0, blocks)
        asked.append(blocks)
        return pool.tables

    tokens = list(generate(model, prompt, 0, 40, tables_for, pool.planes, wait_for_nothing, drafts))
    first, last = -(-30 // block_tokens), -(-(30 + 39) // block_tokens)
    assert asked == list(range(first, last + 1))
    whole = np.concatenate((prompt, np.array(tokens, dtype=np.int32)))
    for count in (0, 1, 7, 39):
        logits, cold = run_cold(model, whole[: 30 + count], seed=8)
        assert int(np.argmax(logits[:256])) == tokens[count]
        assert_same_rows(pool, cold, 0, 30 + count)
    if model.config.draft is not None:
        assert 0 < drafts.accepted < drafts.proposed
        assert drafts.proposed + drafts.accepted in (38, 39)
    else:
        assert drafts == Drafts()


def test_generate_continues_a_cached_prefix_with_the_same_tokens(model: TinyTransformer) -> None:
    prompt, block_tokens = make_prompt(43), model.config.block_tokens

    def run(pool: Pool, cached_tokens: int) -> tuple[list[int], Drafts]:
        held, drafts = [cached_tokens // block_tokens], Drafts()

        def tables_for(blocks: int, computed_tokens: int) -> Tables:
            pool.cover(held[-1], blocks)
            held.append(blocks)
            return pool.tables

        stream = generate(model, prompt, cached_tokens, 12, tables_for, pool.planes, wait_for_nothing, drafts)
        return list(stream), drafts

    cold = Pool(model.config, seed=4, blocks=16)
    expected = run(cold, 0)
    warm = Pool(model.config, seed=5, blocks=16)
    warm.map_prefix(32)
    warm.take_prefix(cold, 32)
    assert run(warm, 32) == expected  # as many drafts are accepted, too
    with pytest.raises(ValueError, match="nothing to compute"):
        run(Pool(model.config, seed=6), 43)


@pytest.mark.parametrize("name", SMALL)
def test_greedy_decoding_is_the_oracles(name: str) -> None:
    model, prompt = build_model(with_blocks(name, 16)), make_prompt(25)
    pool = Pool(model.config, seed=4)
    pool.cover(0, 8)
    stream = generate(model, prompt, 0, 12, lambda *_: pool.tables, pool.planes, wait_for_nothing)
    assert list(stream) == dense_generate(model, prompt, 12)


@looped("length", [1, 16, 17, 40])
def test_a_guess_is_the_oracles(length: int) -> None:
    model, prompt = build_model(with_blocks("mtp", 16)), make_prompt(length + 1)
    pool = Pool(model.config, seed=4)
    pool.cover(0, 8)
    model.forward(prompt[:-1], 0, pool.tables, pool.planes, wait_for_nothing)
    guessed = model.guess([Work(prompt[-1:], length, pool.tables)], pool.planes, wait_for_nothing)[0]
    np.testing.assert_allclose(guessed[-1], dense_guess(model, prompt), atol=2e-4, rtol=2e-4)


def check_wide_model(name: str, layers: int, prompt_tokens: int) -> None:
    """The demo's widths, where BLAS cuts its sums into parts and shares its rows out to threads."""
    config = replace(VARIANTS[name], max_positions=256)
    config = replace(config, layers=config.layers[:layers])
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
        (1, [(name, 2 if name in DEMO else 3, 203) for name in VARIANTS]),
        (2, [("tiny-gqa", 1, 71)]),  # few calls: two threads spin for a core when the machine is busy
    ],
)
def test_the_demo_models_keep_their_bits(threads: int, checks: list[tuple[str, int, int]]) -> None:
    """For each number of threads by itself: between them the last bits differ, and so do the digests."""
    script = f"from tests.unit.examples.test_tiny_transformer import *\nfor check in {checks}: check_wide_model(*check)"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **dict.fromkeys(ONE_BLAS_THREAD, str(threads))},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
