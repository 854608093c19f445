"""Runs vLLM's own ``KVCacheManager`` on the daemon's pages, without a model, and asks it everything that the connector
did not ask: python -m tests.vllm.allocations SOCKET SEED. Prints how often the connector was right to ask nothing."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from cachesvc_client.plugins.node import Node, Share
from cachesvc_vllm.scheduler_side import SchedulerSide
from cachesvc_vllm.settings import FLAGS, Settings
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from cachesvc.model.layout import Layout, Plane, PlaneGroup

BLOCK_TOKENS, PAGES, LONGEST = 4, 96, 120
AT_A_TIME, WAITING, ITERATIONS = 8, 4, 1500
MOST_DRAFTS, MOST_AHEAD = 3, 2


class Manager:
    """vLLM's manager as the connector leaves it; ``idle`` and ``busy``: how often it was asked nothing, and asked."""

    def __init__(self, socket: str) -> None:
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float16)
        config = KVCacheConfig(PAGES, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        self.vllm = KVCacheManager(
            config,
            max_model_len=LONGEST,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_caching=True,
            max_in_flight_tokens=1024,
        )
        layout = Layout(BLOCK_TOKENS, 1, (PlaneGroup("full"),), (Plane("kv", 0, "full", (64,), "uint8"),))
        self._node = Node(Settings(socket=socket), "test", Share("m", layout, PAGES), flags=FLAGS, attaches=False)
        self._node.start()
        self.side = SchedulerSide(self._node, Settings(socket=socket), 64)
        self.side._book.outbox.runs = lambda: False  # noqa: SLF001 - an iteration here takes no time: wait for answers
        self._really = self.vllm.allocate_slots
        self._asked = 0
        self.vllm.allocate_slots = self._ask
        self.side.bind(self.vllm)
        self._pool = self.vllm.block_pool
        self.idle = self.busy = 0

    def allocate(self, request: Request, tokens: int, ahead: int) -> Any:
        """For a request that runs; what was not asked is asked, and must change nothing."""
        before = self._asked
        blocks = self.vllm.allocate_slots(request, tokens, num_lookahead_tokens=ahead)
        if self._asked > before:
            self.busy += 1
            return blocks
        if blocks is None:
            return None  # there was no room to be reserved
        self.idle += 1
        seen = self._seen(request)
        self._pool.schedule(self._pool.book.find(request.request_id))
        self._pool.now.counts_own = True
        said = self._really(request, tokens, num_lookahead_tokens=ahead)
        self._pool.now.counts_own = False
        assert said is blocks is self.vllm.empty_kv_cache_blocks, (said, blocks)
        assert self._seen(request) == seen
        return blocks

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        self._asked += 1
        return self._really(*args, **kwargs)

    def _seen(self, request: Request) -> Any:
        """All that an allocation may change."""
        (group,) = self.vllm.coordinator.single_type_managers
        name = request.request_id
        pages = self._pool.book.find(name)
        assert pages is not None
        table = [block.block_id for block in group.req_to_blocks[name]]
        told = {each: blocks for each, (_, blocks) in self._pool.now.filling.items()}
        return table, group.num_cached_block.get(name), pages.taken, pages.held, pages.full_blocks, told

    def close(self) -> None:
        """End the lease."""
        self.side.close()


class Engine:
    """Schedules as vLLM does: output comes some iterations after it was scheduled, and drafts may be refused."""

    def __init__(self, manager: Manager, seed: int) -> None:
        self._manager, self._rng, self._count = manager, random.Random(seed), 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._under_way: list[list[tuple[Request, int, int]]] = []
        self.ended = 0

    def step(self) -> None:
        """An iteration, and the output of an earlier one."""
        rng = self._rng
        scheduled: list[tuple[Request, int, int]] = []
        for request in list(self._running):
            drafts = rng.randrange(MOST_DRAFTS + 1) if request.num_output_tokens else 0
            missing = request.num_tokens - request.num_computed_tokens
            if missing > 0:
                tokens, drafts = min(missing, rng.randint(1, 24)), 0
            else:
                tokens = 1 + drafts
            if request.num_computed_tokens + tokens > LONGEST:
                continue
            if self._manager.allocate(request, tokens, rng.randrange(MOST_AHEAD + 1)) is None:
                self._end(request)
                continue
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            scheduled.append((request, tokens, drafts))
        self._admit(scheduled)
        self._manager.side.begin_step({request.request_id for request, _, _ in scheduled})
        self._manager.side.take_transfers(is_empty=not scheduled)
        self._under_way.append(scheduled)
        if len(self._under_way) > rng.randrange(3):
            self._take(self._under_way.pop(0))
            self._manager.side.end_step()

    def finish(self) -> None:
        """End what runs."""
        while self._under_way:
            self._take(self._under_way.pop(0))
            self._manager.side.end_step()
        for request in list(self._running):
            self._end(request)
        for request in self._waiting:
            self._manager.side.finish(request)
        self._manager.side.begin_step(())  # an iteration of nothing tells of what has ended
        self._manager.side.take_transfers(is_empty=True)
        self._manager.side.end_step()

    def _admit(self, scheduled: list[tuple[Request, int, int]]) -> None:
        vllm, rng = self._manager.vllm, self._rng
        while len(self._waiting) < WAITING:
            self._waiting.append(self._new())
        if len(self._running) >= AT_A_TIME or rng.random() < 0.5:
            return
        request = self._waiting[0]
        hits = vllm.get_computed_blocks(request)
        cached = hits[1]
        tokens = min(request.num_tokens - cached, rng.randint(1, 40))
        if vllm.allocate_slots(request, tokens, cached, hits[0]) is None:
            return
        del self._waiting[0]
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = cached + tokens
        request.num_in_flight_tokens += tokens
        self._running.append(request)
        scheduled.append((request, tokens, 0))

    def _new(self) -> Request:
        rng = self._rng
        self._count += 1
        prompt = [rng.randrange(3)] * rng.randrange(24) + [rng.randrange(3, 1000) for _ in range(rng.randint(1, 40))]
        params, hasher = SamplingParams(max_tokens=64), self._manager.hasher
        request = Request(str(self._count), prompt, params, None, block_hasher=hasher)
        self._manager.side.expect(request)
        return request

    def _take(self, output: list[tuple[Request, int, int]]) -> None:
        for request, tokens, drafts in output:
            if request not in self._running:
                continue
            request.num_in_flight_tokens -= tokens
            refused = self._rng.randrange(drafts + 1)
            request.num_computed_tokens -= refused
            if request.num_computed_tokens - request.num_in_flight_tokens >= request.num_tokens:
                for _ in range(1 + drafts - refused):
                    request.append_output_token_ids(self._rng.randrange(3, 1000))
            if request.num_tokens >= LONGEST - 8 or self._rng.random() < 0.01:
                self._end(request)

    def _end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        self._running.remove(request)
        self._manager.side.finish(request)
        self._manager.vllm.free(request)
        self.ended += 1


def main() -> None:
    """Run, and tell."""
    manager = Manager(sys.argv[1])
    engine = Engine(manager, int(sys.argv[2]))
    for _ in range(ITERATIONS):
        engine.step()
    engine.finish()
    told = {"idle": manager.idle, "busy": manager.busy, "ended": engine.ended}
    manager.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
