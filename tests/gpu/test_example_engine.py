"""The example engine in torch on a GPU: NumPy's tokens, preempted or not, and out of the host's copies too."""

from __future__ import annotations

import numpy as np
import pytest
from cachesvc_client import BlockHasher, Lease
from kvcache.v1 import admin_pb2

from examples.batch_requests import BatchLimits
from examples.batching import BatchEngine
from examples.tiny_transformer.arrays import torch_arrays
from examples.tiny_transformer.model import build_model
from examples.workers import StreamWorker
from tests.e2e.rig import Node, running_node, wait_until
from tests.e2e.test_example_engine import LIMITS, NEW_TOKENS, alone, leased, make_prompts, outcome
from tests.gpu.engine import BACKED_UP
from tests.unit.tiny_rig import make_prompt, with_blocks

pytestmark = pytest.mark.gpu

VARIANTS = ("gqa", "mla", "window", "sinks", "head-wise", "mtp")


def take_to_host(node: Node, lease: Lease) -> None:
    """Leave the host's copies alone, and NaN in every page of the device."""
    import torch

    wait_until(lambda: not any(node.held().values()), "stores have ended")
    model_id = lease.registration.model_id
    node.admin.Evict(admin_pb2.EvictRequest(model_id=model_id, tier="device"))
    with lease.match(b"") as sequence:
        sequence.allocate(min(lease.registration.device_pages))
        for pool in lease.pools:
            for plane in pool.layout.planes:
                pool.to_torch(plane.layer, plane.name, plane.group).fill_(float("nan"))
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", VARIANTS)
def test_batches_on_a_gpu_answer_like_numpy_one_by_one(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    config = with_blocks(name, 16, max_positions=256)
    oracle, model = build_model(config), build_model(config, torch_arrays("cuda:0"))
    with (
        running_node(BACKED_UP) as node,
        leased(node, model, f"torch {name}", pages=17) as lease,
        lease.attach() as pool,
    ):
        engine = BatchEngine(StreamWorker(model, pool), lease, LIMITS)
        requests = engine.run(make_prompts(), NEW_TOKENS)
        assert [outcome(each) for each in requests] == [alone(oracle, prompt) for prompt in make_prompts()]
        assert min(engine.counters.swapped_out, engine.counters.swapped_in) > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_comes_back_from_the_host_layer_by_layer(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed beside this GPU")
    config, prompt = with_blocks(name, 16, max_positions=256), make_prompt(150)
    oracle, model = build_model(config), build_model(config, torch_arrays("cuda:0"))
    with (
        running_node(BACKED_UP) as node,
        leased(node, model, f"torch {name}", pages=24) as lease,
        lease.attach() as pool,
    ):
        worker, limits = StreamWorker(model, pool), BatchLimits(token_budget=64, chunk_tokens=64, stock_blocks=0)
        cold = BatchEngine(worker, lease, limits).run([prompt], NEW_TOKENS)
        take_to_host(node, lease)
        hasher = BlockHasher(lease.registration.namespace, 16)
        hasher.extend(prompt)
        with lease.match(bytes(hasher.keys)) as sequence:
            assert (sequence.device_blocks, sequence.host_blocks) == (0, 9)
        engine = BatchEngine(worker, lease, limits)
        warm = engine.run([prompt], NEW_TOKENS)
        assert engine.counters.hit_tokens == 144
        assert node.counters()["h2d_bytes"] > 0
        assert outcome(warm[0]) == outcome(cold[0]) == alone(oracle, prompt)
        np.testing.assert_array_equal(warm[0].tokens[:150], prompt)
