"""The example engines against a real daemon: every family, batched, preempted, on ranks and on replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
from cachesvc_client import BlockHasher, CacheClient, Lease, PoolExhausted
from kvcache.v1 import admin_pb2

from examples.batch_requests import BatchCounters, BatchLimits, Request
from examples.batching import BatchEngine
from examples.engine import CachedEngine, answer_alone, layout_of, name_tables, seal_blocks
from examples.tiny_transformer.arrays import torch_arrays
from examples.tiny_transformer.generate import Drafts, generate
from examples.tiny_transformer.model import Tables, TinyTransformer, build_model
from examples.tiny_transformer.tokens import Tokens
from examples.workers import PoolWorker, RankWorkers
from tests.e2e.rig import Node, running_node, wait_until
from tests.long_cases import looped
from tests.unit.examples.tiny_rig import make_prompt, with_blocks

WINDOWED = ("gqa-fp8", "window", "sinks", "mla-window", "mla-swa", "head-wise")
VARIANTS = ("gqa", "mla", "dsa", "mtp", *WINDOWED)
NEW_TOKENS = 24
BLOCK_TOKENS = 16
LIMITS = BatchLimits(requests=4, token_budget=40, chunk_tokens=24, stock_blocks=2)


class Served(NamedTuple):
    requests: list[Request]
    counters: BatchCounters


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    """One daemon for all variants: each is a model of its own. What is sealed is copied to the host at once."""
    with running_node(("--write-policy", "write_through")) as running:
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[Node]:
    """One daemon of two devices for all variants."""
    with running_node(("--shm-devices", "2")) as running:
        yield running


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> TinyTransformer:
    return build_model(with_blocks(request.param, 16, max_positions=256))


@contextmanager
def leased(
    node: Node,
    model: TinyTransformer,
    name: str,
    pages: int,
    *,
    ranks: int = 1,
    devices: Sequence[str] = (),
    host_pages: int = 64,
) -> Iterator[Lease]:
    layout = layout_of(model.config, ranks)
    with CacheClient(node.socket, engine="example") as client:
        registration = client.register(
            name,
            layout,
            devices=devices,
            device_pages=[pages] * len(layout.groups),
            host_pages=[host_pages] * len(layout.groups),
        )
        with client.open_lease(registration) as lease:
            yield lease


def make_prompts() -> list[Tokens]:
    """Prompts of several lengths; the last two begin like the first one."""
    prompts = [make_prompt(length, seed=length) for length in (70, 33, 48, 90, 17)]
    return [*prompts, np.concatenate((prompts[0][:48], prompts[1])), np.concatenate((prompts[0][:64], prompts[2]))]


def alone(model: TinyTransformer, prompt: Tokens, new_tokens: int = NEW_TOKENS) -> tuple[list[int], tuple[int, int]]:
    """Tokens, and drafts proposed and accepted, without a cache."""
    answer = answer_alone(model, prompt, new_tokens, 0.0, "to compare with")
    return answer.tokens, (answer.proposed, answer.accepted)


def outcome(request: Request) -> tuple[list[int], tuple[int, int]]:
    return request.answer, (request.drafts.proposed, request.drafts.accepted)


def serve(lease: Lease, model: TinyTransformer, limits: BatchLimits = LIMITS) -> Served:
    with lease.attach() as pool:
        engine = BatchEngine(PoolWorker(model, pool), lease, limits)
        return Served(engine.run(make_prompts(), NEW_TOKENS), engine.counters)


CHUNKS = {"large": LIMITS, "below every window": BatchLimits(requests=4, token_budget=11, chunk_tokens=5)}


@looped("chunks", ["below every window"], CHUNKS)
def test_a_batch_in_a_small_pool_answers_like_requests_one_by_one(
    shared: Node, model: TinyTransformer, chunks: str
) -> None:
    """Preempted, recycled, grown from stock, mixed: and not one token, nor one draft's luck, is another."""
    with leased(shared, model, f"batch {model.config.name} {chunks}", pages=17) as lease:
        served = serve(lease, model, CHUNKS[chunks])
        assert [outcome(each) for each in served.requests] == [alone(model, prompt) for prompt in make_prompts()]
        counters = served.counters
        assert min(counters.swapped_out, counters.swapped_in, counters.grown_blocks, counters.mixed_iterations) > 0
        assert 0 < counters.sent_ahead < counters.steps
        assert counters.published_blocks > 20
        assert (counters.recycled_cells > 0) == (model.config.name in (*WINDOWED, "mtp"))
        again = serve(lease, model, CHUNKS[chunks])
        assert [outcome(each) for each in again.requests] == [outcome(each) for each in served.requests]
        assert again.counters.hit_tokens > served.counters.hit_tokens
        assert (sum(each.drafts.accepted for each in served.requests) > 0) == (model.config.name == "mtp")


def test_preempted_while_the_host_is_full_too_they_are_computed_again(shared: Node, model: TinyTransformer) -> None:
    """No request can be swapped out for long: what was released comes to the same tokens, and the same drafts' luck."""
    with leased(shared, model, f"full host {model.config.name}", pages=17, host_pages=2) as lease:
        served = serve(lease, model)
        assert [outcome(each) for each in served.requests] == [alone(model, prompt) for prompt in make_prompts()]
        assert served.counters.recomputed > 0
        assert served.counters.swapped_out == served.counters.swapped_in


def test_a_request_that_never_fits_is_told(shared: Node) -> None:
    model = build_model(with_blocks("gqa", 16, max_positions=256))
    with leased(shared, model, "too small", pages=6) as lease, pytest.raises(PoolExhausted):
        serve(lease, model)


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute(shared: Node) -> None:
    model = build_model(with_blocks("gqa", 16, max_positions=256))
    with leased(shared, model, "whole blocks", pages=17) as lease, lease.attach() as pool:
        engine = BatchEngine(PoolWorker(model, pool), lease, LIMITS)
        for length in (16, 32):
            prompt = make_prompt(length)
            for found in (0 if length == 16 else 16, length - 16):
                before = engine.counters.hit_tokens
                assert outcome(engine.run([prompt], NEW_TOKENS)[0]) == alone(model, prompt)
                assert engine.counters.hit_tokens - before == found
                assert CachedEngine(model, lease, pool).answer(prompt, NEW_TOKENS).device_tokens == length - 16


@pytest.mark.parametrize("name", VARIANTS)
@looped("beyond", [0, 1], [0, 1, BLOCK_TOKENS - 1])
def test_a_second_turn_hits_the_blocks_of_prompt_and_answer_that_were_computed(
    shared: Node, name: str, beyond: int
) -> None:
    """All of them and no other: no call computes what follows the last token of an answer, so it has no keys and
    values."""
    model = build_model(with_blocks(name, BLOCK_TOKENS, max_positions=256))
    total = 3 * BLOCK_TOKENS + beyond
    computed_tokens = (total - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with leased(shared, model, f"turns {name} {beyond}", pages=24) as lease, lease.attach() as pool:
        alone_engine, batch = CachedEngine(model, lease, pool), BatchEngine(PoolWorker(model, pool), lease, LIMITS)

        def in_batch(prompt: Tokens, new_tokens: int) -> tuple[list[int], tuple[int, int], int]:
            before = batch.counters.hit_tokens
            return (*outcome(batch.run([prompt], new_tokens)[0]), batch.counters.hit_tokens - before)

        def by_itself(prompt: Tokens, new_tokens: int) -> tuple[list[int], tuple[int, int], int]:
            answer = alone_engine.answer(prompt, new_tokens)
            assert (answer.host_tokens, answer.went_alone) == (0, "")
            return answer.tokens, (answer.proposed, answer.accepted), answer.device_tokens

        for seed, serve_one in enumerate((in_batch, by_itself)):
            prompt = make_prompt(BLOCK_TOKENS + 5, seed=seed)
            first = serve_one(prompt, total - len(prompt))
            assert first == (*alone(model, prompt, total - len(prompt)), 0)
            turn = np.concatenate((prompt, np.array(first[0], np.int32), make_prompt(BLOCK_TOKENS, seed=9)))
            assert serve_one(turn, NEW_TOKENS) == (*alone(model, turn), computed_tokens)


@pytest.mark.parametrize("name", VARIANTS)
@looped("block_tokens", [16, 64], [16, 32, 64, 128])
def test_a_sequence_swapped_at_every_block_and_loaded_anew_goes_on_as_it_was(
    shared: Node, name: str, block_tokens: int
) -> None:
    """Blocks on the host are hit there, and the rest of the prompt computed behind it; in large blocks by chunks."""
    model = build_model(with_blocks(name, block_tokens, max_positions=512))
    prompt, has_draft = make_prompt(2 * block_tokens - 10, seed=1), model.config.draft is not None
    new_tokens = NEW_TOKENS if has_draft else 14  # enough to enter a block
    expected = alone(model, prompt, new_tokens)
    with leased(shared, model, f"swap {name} {block_tokens}", pages=8) as lease, lease.attach() as pool:
        worker = PoolWorker(model, pool)
        assert swapped_answer(lease, worker, prompt, new_tokens) == expected
        take_to_host(shared, lease)
        if block_tokens < 64:
            answer = CachedEngine(model, lease, pool).answer(prompt, new_tokens)
            assert (answer.device_tokens, answer.host_tokens, answer.went_alone) == (0, block_tokens, "")
            assert (answer.tokens, (answer.proposed, answer.accepted)) == expected
        else:
            loaded = shared.counters().get("hit_blocks_host", 0)
            engine = BatchEngine(worker, lease, LIMITS)
            assert outcome(engine.run([prompt], new_tokens)[0]) == expected
            assert engine.counters.hit_tokens == block_tokens
            assert shared.counters()["hit_blocks_host"] == loaded + 1
        if has_draft:
            proposed, accepted = expected[1]
            assert 0 < accepted < proposed


def swapped_answer(
    lease: Lease, worker: PoolWorker, prompt: Tokens, new_tokens: int
) -> tuple[list[int], tuple[int, int]]:
    """An answer in whose course the sequence goes to the host and back whenever it enters a block."""
    model, drafts, swaps = worker.model, Drafts(), 0
    hasher = BlockHasher(lease.registration.namespace, model.config.block_tokens)
    hasher.extend(prompt)
    with lease.match(bytes(hasher.keys)) as sequence:

        def tables_for(blocks: int, computed_tokens: int) -> Tables:
            nonlocal swaps
            if sequence.blocks:
                seal_blocks(sequence, hasher, computed_tokens)
                sequence.swap_out()
                sequence.wait_swapped()
                sequence.swap_in()
                sequence.wait_swapped()
                swaps += 1
            sequence.allocate(blocks)
            return name_tables(sequence, lease.registration.layout)

        answer: list[int] = []
        for token in generate(model, prompt, 0, new_tokens, tables_for, worker.planes, lambda _: None, drafts):
            answer.append(token)
            hasher.extend([token])
    assert swaps > 0
    return answer, (drafts.proposed, drafts.accepted)


def take_to_host(node: Node, lease: Lease) -> None:
    """Leave the host's copies alone, and poison in the device's pages."""
    wait_until(lambda: not any(node.held().values()), "stores have ended")
    model_id = lease.registration.model_id
    node.admin.Evict(admin_pb2.EvictRequest(model_id=model_id, tier="device"))
    pages = min(lease.registration.device_pages)
    with lease.match(b"") as sequence:
        sequence.allocate(pages)
        for pool in lease.pools:
            for group in pool.layout.groups:
                for plane in pool.group_planes(group.name).values():
                    plane.view(np.uint8)[:] = 0xFF


@pytest.mark.parametrize("name", ["gqa", "window", "mtp", "dsa", "mla-swa"])
def test_two_ranks_answer_like_one(pair: Node, name: str) -> None:
    """Each computes its heads over its own pool; a latent is on both, and once on the host."""
    model = build_model(with_blocks(name, 16, max_positions=256))
    with (
        leased(pair, model, f"two ranks {name}", pages=17, ranks=2, devices=("shm-0", "shm-1")) as lease,
        lease.attach(0) as first,
        lease.attach(1) as second,
        RankWorkers(model, (first, second)) as workers,
    ):
        engine = BatchEngine(workers, lease, LIMITS)
        requests = engine.run(make_prompts(), NEW_TOKENS)
        assert [outcome(each) for each in requests] == [alone(model, prompt) for prompt in make_prompts()]
        assert min(engine.counters.swapped_out, engine.counters.swapped_in) > 0
        assert first.device != second.device
        for group in model.config.groups:
            planes = [pool.group_planes(group.name) for pool in (first, second)]
            is_same = all(np.array_equal(plane, planes[1][key], equal_nan=True) for key, plane in planes[0].items())
            assert is_same == (group.is_replicated or group.name == "draft-hidden")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_replica_goes_on_from_what_another_one_computed(pair: Node, name: str) -> None:
    model = build_model(with_blocks(name, 16, max_positions=256))
    prompt, before = make_prompt(75), pair.counters().get("peer_blocks", 0)
    with (
        leased(pair, model, f"replicas {name}", pages=20, devices=("shm-0",)) as first,
        leased(pair, model, f"replicas {name}", pages=20, devices=("shm-1",)) as second,
        first.attach() as first_pool,
        second.attach() as second_pool,
    ):
        expected = alone(model, prompt)[0]
        cold = CachedEngine(model, first, first_pool).answer(prompt, NEW_TOKENS)
        assert (cold.tokens, cold.device_tokens) == (expected, 0)
        warm = CachedEngine(model, second, second_pool).answer(prompt, NEW_TOKENS)
        assert (warm.tokens, warm.device_tokens, warm.went_alone) == (expected, 64, "")
        assert pair.counters()["peer_blocks"] == before + 4


@pytest.mark.parametrize("name", VARIANTS)
def test_torch_computes_in_the_same_pages(shared: Node, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    config = with_blocks(name, 16, max_positions=256)
    model = build_model(config, torch_arrays("cpu"))
    with leased(shared, model, f"torch {name}", pages=17) as lease:
        served = serve(lease, model)
        expected = [alone(build_model(config), prompt) for prompt in make_prompts()]
        assert [outcome(each) for each in served.requests] == expected
        assert min(served.counters.swapped_out, served.counters.swapped_in) > 0
