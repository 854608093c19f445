"""The example engine in torch on a GPU, every family: hits, chunks, recycling, swaps and preemption change no token.

Within the GPU's own arithmetic all is exact, drafts that were accepted too. Against NumPy, whose sums have another
order, logits agree within a tolerance; where rows are float32, tokens agree as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from cachesvc_client import BlockHasher, Lease
from kvcache.v1 import admin_pb2

from examples.batch_requests import BatchLimits
from examples.batching import BatchEngine
from examples.engine import CachedEngine
from examples.tiny_transformer.arrays import NUMPY, torch_arrays
from examples.tiny_transformer.model import TinyTransformer, build_model, make_planes
from examples.tiny_transformer.packing import pack_index_key, pack_latent, scale_fp8, unpack_latent
from examples.workers import PoolWorker, StreamWorker
from gpu_ops.kernels.operands import Half
from gpu_ops.kernels.packed_keys import write_packed_keys
from tests.e2e.examples.test_example_engine import (
    CHUNKS,
    LIMITS,
    NEW_TOKENS,
    VARIANTS,
    WINDOWED,
    Served,
    alone,
    leased,
    make_prompts,
    outcome,
    swapped_answer,
)
from tests.e2e.rig import Node, running_node, wait_until
from tests.gpu.engine import BACKED_UP
from tests.unit.examples.tiny_rig import PACKED, make_prompt, wait_for_nothing, with_blocks

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"
TOLERANCE = {True: 3e-2, False: 1e-3}
"""Tolerance of logits around 1, against NumPy: a value beside a rounding border of fp8 may fall to its other side."""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One daemon for all: each test is a model of its own. What is sealed is copied to the host at once."""
    pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    with running_node(BACKED_UP) as running:
        yield running


@cache
def model_of(name: str, block_tokens: int = 16) -> TinyTransformer:
    """On the GPU."""
    return build_model(with_blocks(name, block_tokens, max_positions=512), torch_arrays(CUDA))


def serve(lease: Lease, model: TinyTransformer, limits: BatchLimits = LIMITS) -> Served:
    """The prompts in a batch, on a stream of their own that waits for loads."""
    with lease.attach() as pool:
        engine = BatchEngine(StreamWorker(model, pool), lease, limits)
        return Served(engine.run(make_prompts(), NEW_TOKENS), engine.counters)


@cache
def expected_of(name: str) -> list[tuple[list[int], tuple[int, int]]]:
    """Answers to the prompts one by one on the GPU, without a cache."""
    return [alone(model_of(name), prompt) for prompt in make_prompts()]


def take_to_host(node: Node, lease: Lease) -> None:
    """Leave the host's copies alone, and poison in every page of the device."""
    import torch

    wait_until(lambda: not any(node.held().values()), "stores have ended")
    model_id = lease.registration.model_id
    node.admin.Evict(admin_pb2.EvictRequest(model_id=model_id, tier="device"))
    with lease.match(b"") as sequence:
        sequence.allocate(min(lease.registration.device_pages))
        for pool in lease.pools:
            for plane in pool.layout.planes:
                pool.to_torch(plane.layer, plane.name, plane.group).view(torch.uint8).fill_(0xFF)
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gpus_logits_are_numpys_within_a_tolerance(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    config, prompt = model_of(name).config, make_prompt(150)
    tables = {group.name: np.arange(10, dtype=np.int32) for group in config.groups}
    numpys, gpus = (
        model.forward(prompt, 0, tables, make_planes(model, 10), wait_for_nothing)
        for model in (build_model(config), model_of(name))
    )
    tolerance = TOLERANCE[name in PACKED]
    np.testing.assert_allclose(gpus, numpys, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in PACKED])
def test_where_rows_are_float32_the_tokens_are_numpys(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    numpys = build_model(model_of(name).config)
    assert expected_of(name) == [alone(numpys, prompt) for prompt in make_prompts()]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_in_a_small_pool_answers_like_requests_one_by_one(node: Node, name: str, chunks: str) -> None:
    """Preempted, recycled, grown from stock, mixed, then found again: no token and no draft's luck is another."""
    model = model_of(name)
    with leased(node, model, f"torch batch {name} {chunks}", pages=17) as lease:
        served = serve(lease, model, CHUNKS[chunks])
        assert [outcome(each) for each in served.requests] == expected_of(name)
        counters = served.counters
        assert min(counters.swapped_out, counters.swapped_in, counters.grown_blocks, counters.mixed_iterations) > 0
        assert (counters.recycled_cells > 0) == (name in (*WINDOWED, "mtp"))
        again = serve(lease, model, CHUNKS[chunks])
        assert [outcome(each) for each in again.requests] == expected_of(name)
        assert again.counters.hit_tokens > counters.hit_tokens
        assert (sum(each.drafts.accepted for each in served.requests) > 0) == (name == "mtp")


@pytest.mark.parametrize("name", VARIANTS)
def test_preempted_while_the_host_is_full_too_they_are_computed_again(node: Node, name: str) -> None:
    model = model_of(name)
    with leased(node, model, f"torch full host {name}", pages=17, host_pages=2) as lease:
        served = serve(lease, model)
        assert [outcome(each) for each in served.requests] == expected_of(name)
        assert served.counters.recomputed > 0


@pytest.mark.parametrize(
    ("name", "block_tokens"), [(name, 16) for name in VARIANTS] + [(name, 64) for name in (*PACKED, "mtp")]
)
def test_a_sequence_swapped_at_every_block_and_loaded_anew_goes_on_as_it_was(
    node: Node, name: str, block_tokens: int
) -> None:
    """The model accepts as many drafts as without the way to the host and back."""
    model, prompt = model_of(name, block_tokens), make_prompt(2 * block_tokens - 10, seed=1)
    expected = alone(model, prompt)
    with leased(node, model, f"torch swap {name} {block_tokens}", pages=8) as lease, lease.attach() as pool:
        assert swapped_answer(lease, PoolWorker(model, pool), prompt, NEW_TOKENS) == expected
        take_to_host(node, lease)
        answer = CachedEngine(model, lease, pool).answer(prompt, NEW_TOKENS)
        assert (answer.device_tokens, answer.host_tokens, answer.went_alone) == (0, block_tokens, "")
        assert (answer.tokens, (answer.proposed, answer.accepted)) == expected
        if name == "mtp":
            assert 0 < answer.accepted < answer.proposed


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_comes_back_from_the_host_layer_by_layer(node: Node, name: str) -> None:
    model, prompt = model_of(name), make_prompt(150)
    with leased(node, model, f"torch layers {name}", pages=24) as lease, lease.attach() as pool:
        worker, limits = StreamWorker(model, pool), BatchLimits(token_budget=64, chunk_tokens=64, stock_blocks=0)
        cold = BatchEngine(worker, lease, limits).run([prompt], NEW_TOKENS)
        take_to_host(node, lease)
        hasher = BlockHasher(lease.registration.namespace, 16)
        hasher.extend(prompt)
        with lease.match(bytes(hasher.keys)) as sequence:
            assert (sequence.device_blocks, sequence.host_blocks) == (0, 9)
        engine, loaded_before = BatchEngine(worker, lease, limits), node.counters().get("h2d_bytes", 0)
        warm = engine.run([prompt], NEW_TOKENS)
        assert engine.counters.hit_tokens == 144
        assert node.counters()["h2d_bytes"] > loaded_before
        assert outcome(warm[0]) == outcome(cold[0]) == alone(model, prompt)
        np.testing.assert_array_equal(warm[0].tokens[:150], prompt)


def test_rows_of_bytes_are_numpys_to_the_byte() -> None:
    pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    arrays, draw = torch_arrays(CUDA), np.random.default_rng(11)
    latent, rope_key = (
        (draw.standard_normal((300, width)) * 10.0 ** draw.integers(-40, 30, (300, 1))).astype(np.float32)
        for width in (512, 64)
    )
    latent[::7] = 0
    rows = pack_latent(NUMPY, latent, rope_key)
    np.testing.assert_array_equal(arrays.get(pack_latent(arrays, arrays.put(latent), arrays.put(rope_key))), rows)
    read = arrays.get(unpack_latent(arrays, arrays.put(rows), 512))
    np.testing.assert_array_equal(read.view(np.uint32), unpack_latent(NUMPY, rows, 512).view(np.uint32))
    for pack in (scale_fp8, pack_index_key):
        for got, expected in zip(pack(arrays, arrays.put(latent)), pack(NUMPY, latent), strict=True):
            np.testing.assert_array_equal(arrays.get(got), expected)


def test_packed_rows_are_those_of_the_kernel_to_the_byte() -> None:
    """Latents in bf16 from the start, as the kernel takes them."""
    torch = pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    arrays, draw = torch_arrays(CUDA), np.random.default_rng(12)
    keys = arrays.put(draw.standard_normal((64, 576), np.float32)).to(torch.bfloat16)
    latent, rope_key = keys[:, :512].contiguous(), keys[:, 512:].contiguous()
    pool = torch.full((4, 1, 16, 656), 0xA5, dtype=torch.uint8, device=CUDA)
    slots, stream = torch.arange(64, dtype=torch.int64, device=CUDA), torch.cuda.Stream()
    torch.cuda.synchronize()
    write_packed_keys(pool, slots, latent, rope_key, stream.cuda_stream, Half.BF16)
    torch.cuda.synchronize()
    rows = pack_latent(arrays, latent.to(torch.float32), rope_key.to(torch.float32))
    np.testing.assert_array_equal(arrays.get(pool.reshape(64, 656)), arrays.get(rows))
