"""Every family of layouts at every block size: computed in chunks, stored, hit on the host, gone on from, by bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cachesvc_client import (
    KEY_BYTES,
    NO_PAGE,
    IndexPage,
    Layout,
    dsa,
    gqa,
    gqa_head_windows,
    gqa_windowed,
    mla,
    mla_windowed,
    with_draft,
)
from cachesvc_client.sequence import Sequence as CacheSequence
from kvcache.v1 import admin_pb2

from tests.e2e.engine import WAIT_SECONDS, Engine
from tests.e2e.rig import Node, running_node, wait_until
from tests.long_cases import looped

BLOCKS = 7
CHUNKS = (2, 3, 5)
"""Blocks that are there after each chunk of the first prompt."""
WINDOW_TOKENS = 100
HEADS = [[True, False], [False, True], [True, True]]
FAMILIES: dict[str, Callable[[int], Layout]] = {
    "gqa": lambda b: gqa(layers=3, kv_heads=2, head_dim=16, block_tokens=b),
    "gqa-fp8": lambda b: gqa(
        layers=3, kv_heads=2, head_dim=16, block_tokens=b, dtype="float8_e4m3fn", scale_dtype="float32"
    ),
    "window": lambda b: gqa_windowed(
        window_layers=[True, False, True], kv_heads=2, head_dim=16, block_tokens=b, window_tokens=WINDOW_TOKENS
    ),
    "sinks-fp8": lambda b: gqa_windowed(
        window_layers=[True, False, True],
        kv_heads=2,
        head_dim=16,
        block_tokens=b,
        window_tokens=WINDOW_TOKENS,
        sink_tokens=4,
        dtype="int8",
        scale_dtype="bfloat16",
    ),
    "windows-alone": lambda b: gqa_windowed(
        window_layers=[True] * 2, kv_heads=2, head_dim=16, block_tokens=b, window_tokens=WINDOW_TOKENS
    ),
    "head-wise": lambda b: gqa_head_windows(
        window_heads=HEADS, head_dim=16, block_tokens=b, window_tokens=WINDOW_TOKENS, sink_tokens=4
    ),
    "mla": lambda b: mla(layers=3, kv_lora_rank=128, rope_dim=16, block_tokens=b),
    "mla-swa": lambda b: mla_windowed(
        window_layers=[True, True, False],
        kv_lora_rank=128,
        rope_dim=16,
        block_tokens=b,
        window_tokens=WINDOW_TOKENS,
    ),
    "dsa": lambda b: dsa(layers=2, kv_lora_rank=128, rope_dim=16, index_head_dim=128, block_tokens=b),
    "dsa-fused": lambda b: dsa(
        layers=2, kv_lora_rank=128, rope_dim=16, index_head_dim=128, block_tokens=b, index_page=IndexPage.FUSED
    ),
    "mtp": lambda b: with_draft(
        gqa(layers=2, kv_heads=2, head_dim=16, block_tokens=b), gqa(layers=1, kv_heads=1, head_dim=16, block_tokens=b)
    ),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    """One daemon for all: each layout is a model of its own. What is sealed is copied to the host at once."""
    with running_node(("--write-policy", "write_through")) as running:
        yield running


def prompt(block_tokens: int, blocks: int, *, turn: int = 0) -> list[int]:
    """Tokens of whole blocks; from block 5 on another turn has others."""
    tokens = np.random.default_rng(block_tokens).integers(0, 50_000, blocks * block_tokens)
    tokens[5 * block_tokens :] += turn
    return [int(token) for token in tokens]


def compute(engine: Engine, sequence: CacheSequence, keys: bytes, first: int, end: int) -> None:
    """A chunk: what it looks back to must be there; then its own."""
    assert engine.bad(sequence, keys, range(first)) == []
    engine.fill(sequence, keys, range(first, end))


@pytest.mark.parametrize("family", FAMILIES)
@looped("block_tokens", [16, 32, 64, 128])
def test_a_prompt_in_chunks_goes_to_the_host_and_is_gone_on_from(shared: Node, family: str, block_tokens: int) -> None:
    layout = FAMILIES[family](block_tokens)
    name = f"{family} {block_tokens}"
    with Engine(shared.socket, model=name, layout=layout, device_pages=2 * BLOCKS, host_pages=4 * BLOCKS) as engine:
        keys = engine.keys(prompt(block_tokens, CHUNKS[-1]))
        with engine.lease.match(keys) as sequence:
            for first, end in zip((0, *CHUNKS), CHUNKS, strict=False):
                sequence.allocate(end)
                compute(engine, sequence, keys, first, end)
                sequence.publish(end)
                sequence.recycle(end * block_tokens)
        wait_until(lambda: not any(shared.held().values()), "stores have ended")
        shared.admin.Evict(admin_pb2.EvictRequest(model_id=engine.registration.model_id, tier="device"))
        poison(engine)

        keys = engine.keys(prompt(block_tokens, BLOCKS, turn=1))
        with engine.lease.match(keys) as sequence:
            assert (sequence.device_blocks, sequence.host_blocks) == (0, CHUNKS[-1])
            for end in (CHUNKS[-1] + 1, BLOCKS):
                sequence.allocate(end)
                sequence.wait_loaded(WAIT_SECONDS)
                compute(engine, sequence, keys, end - 1, end)
                for group, table in zip(layout.own_groups, sequence.tables, strict=False):
                    dead = 0 if group.window_tokens is None else (end - 1) * block_tokens - WINDOW_TOKENS + 1
                    assert min(table[max(0, dead) // block_tokens :]) > NO_PAGE
                sequence.publish(end)
                sequence.recycle(end * block_tokens)
            assert engine.bad(sequence, keys, range(len(keys) // KEY_BYTES)) == []


def poison(engine: Engine) -> None:
    """Overwrite every page of the device that is free."""
    with engine.lease.match(b"") as sequence:
        sequence.allocate(min(engine.registration.device_pages))
        for group, table in zip(engine.layout.own_groups, sequence.tables, strict=False):
            for page in table.tolist():
                for plane in engine.pool.page(group.name, page).values():
                    plane.reshape(-1).view(np.uint8)[:] = 0xFF
