"""Time of the connector in iterations of vLLM's own scheduler, without a model or a GPU: ``python -m
benchmarks.vllm.iterations SOCKET``, in a Python that has vLLM, beside ``cachesvcd --backend shm --device-pool 64MiB
--host-pool 256MiB`` of either write policy.

Requests of one length come sixteen at a time to a pool full of cached blocks, 64 at a time run, and an iteration takes
as long as a step of a model does. Times are those of ``vllm:cachesvc_step_seconds``, and of each hook of the connector.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cachesvc_client.plugins.node import Node, Share, new_instance
from cachesvc_vllm.settings import FLAGS, Settings
from cachesvc_vllm.transfers import WorkerShare
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.support.machine import describe_machine
from tests.vllm.schedulers import make_scheduler
from tests.vllm.shape import Group, Shape

AT_A_TIME, AT_ONCE, PROMPT, ANSWER, BLOCK_TOKENS, VOCABULARY, LONGEST = 64, 16, 1024, 256, 16, 32000, 2048
JITTER = 32
"""Answers differ in length, so blocks fill in any iteration."""
SHAPE = Shape(8192, AT_A_TIME, AT_ONCE * PROMPT, is_async=True, groups=(Group(block_tokens=BLOCK_TOKENS),))
STEP_S = 0.005
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "take_events",
)
POOL = ("get_cached_block", "touch", "get_new_blocks", "cache_full_blocks", "free_blocks", "get_num_free_blocks")
"""Methods of vLLM's block pool, in the connector's place."""


class Clock:
    """Seconds of each hook in the iteration under way, without those of others that it calls."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner_s = [0.0]

    def wrap(self, owner: Any, method: str) -> None:
        """Time a method of an object."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            began_s = time.perf_counter()
            answer = call(*args, **kwargs)
            took_s = time.perf_counter() - began_s
            self._seconds[method] += took_s - self._inner_s.pop()
            self._inner_s[-1] += took_s
            return answer

        setattr(owner, method, timed)

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds


class Load:
    """An engine without a model, and its requests."""

    def __init__(self, socket: str, seed: int) -> None:
        self._rng = random.Random(seed)
        share = Share("iterations", SHAPE.layout, SHAPE.pages, longest_blocks=LONGEST // BLOCK_TOKENS)
        settings, instance = Settings(socket=socket), new_instance("iterations")
        self._worker = Node(settings, instance, share, flags=FLAGS, attaches=True)
        self._worker.start()
        self._scheduler = make_scheduler("iterations", settings, SHAPE, LONGEST)
        self._connector = self._scheduler.connector
        self._connector.set_xfer_handshake_metadata({0: WorkerShare(share, False, instance)})
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        self._coming: list[Request] = []
        self._made = 0
        self._under_way: Any = None

    def time_hooks(self, clock: Clock) -> None:
        """Have a clock time each hook; those beside the connector's call vLLM's own methods."""
        side, manager = self._connector._scheduler, self._scheduler.kv_cache_manager  # noqa: SLF001
        for hook in HOOKS:
            clock.wrap(self._connector, hook)
        for inner, hook in (("_find_hits", "get_computed_blocks"), ("_allocate", "allocate_slots")):
            clock.wrap(side, inner)
            clock.wrap(manager, hook)
        pools = [manager.block_pool, *(each.block_pool for each in manager.coordinator.single_type_managers)]
        for pool in pools:
            for method in POOL:
                clock.wrap(pool, method)

    def turn(self) -> list[float]:
        """Schedule, take the output of the step before, and return the metric's seconds."""
        if len(self._scheduler.requests) <= AT_A_TIME - AT_ONCE:
            for request in self._coming:
                self._scheduler.add_request(request)
            self._coming = []
        said, last, requests = self._scheduler.schedule(), self._under_way, self._scheduler.requests
        names = list(said.num_scheduled_tokens)
        ready = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in names]
        tokens = [[self._rng.randrange(VOCABULARY)] if each else [] for each in ready]
        places = {name: at for at, name in enumerate(names)}
        self._under_way = said, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
        while len(self._coming) < AT_ONCE:  # hashed beside the scheduler
            self._made += 1
            prompt = [self._rng.randrange(VOCABULARY) for _ in range(PROMPT)]
            params = SamplingParams(max_tokens=ANSWER + self._rng.randrange(-JITTER, JITTER), ignore_eos=True)
            self._coming.append(Request(f"r{self._made}", prompt, params, None, block_hasher=self._hasher))
        time.sleep(STEP_S)  # a model would compute meanwhile, and the daemon answer
        if last is not None:
            self._scheduler.update_from_output(*last)
        stats = self._connector.get_kv_connector_stats()
        return [] if stats is None else stats.data["step_seconds"]

    def close(self) -> None:
        """End the lease."""
        self._scheduler.shutdown()
        self._worker.close()


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles and the longest, in ms."""
    told = {f"p{at}": float(np.percentile(seconds, at)) for at in (50, 90, 99)} | {"max": max(seconds)}
    return {name: round(value * 1e3, 4) for name, value in told.items()}


def main() -> None:
    """Print the times of iterations, once the pool is full."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", type=int, default=3 * ANSWER)
    parser.add_argument("--iterations", type=int, default=4 * ANSWER)
    options = parser.parse_args()
    load, clock = Load(options.socket, options.seed), Clock()
    for _ in range(options.before):
        load.turn()
    gc.collect()
    gc.freeze()  # as vLLM does
    load.time_hooks(clock)
    steps: list[float] = []
    laps = []
    for _ in range(options.iterations):
        steps += load.turn()
        laps.append(clock.lap())
    load.close()
    hooks = (*HOOKS, *POOL, "get_computed_blocks", "allocate_slots")
    by_hook = {hook: percentiles_ms([lap.get(hook, 0.0) for lap in laps]) for hook in hooks}
    all_hooks = percentiles_ms([sum(lap.get(hook, 0.0) for hook in hooks) for lap in laps])
    found = {"step_ms": percentiles_ms(steps), "all_hooks_ms": all_hooks, "hook_ms": by_hook}
    print(json.dumps({"machine": describe_machine(), **found}, indent=1))


if __name__ == "__main__":
    main()
