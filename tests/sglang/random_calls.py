"""Random calls of SGLang's scheduler to the caches of two engines on one daemon, without a model. What a request would
compute of a block is a digest of its tokens: each hit, each load, and each block of a request under way is compared.

    python -m tests.sglang.random_calls SOCKET SEEDS STEPS [windows]

Run by the Python that has SGLang, which need not have pytest. Prints what happened, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

from tests.sglang.stubs import install

install()

import torch  # noqa: E402 - the stubs come first
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome  # noqa: E402

from cachesvc.model.layout import Layout, Plane, PlaneGroup  # noqa: E402
from tests.sglang import cache_runs  # noqa: E402
from tests.sglang.cache_runs import PAGE_TOKENS, Request, Scheduling  # noqa: E402

LAYERS = 4
BYTES = 64
GROUPS = ["full"] * LAYERS
"""Group of each layer."""
WINDOWS = ["window", "full", "window", "full"]
WINDOW_TOKENS = 2 * PAGE_TOKENS + 3
VOCABULARY = 50_000
HEADS = 5
MOST_WAITING = 4


class RandomRequest(Request):
    """``end``: tokens that are computed, or will be by the step under way; ``done``: full blocks that are."""

    def __init__(self, rid: str, tokens: Sequence[int], salt: str | None) -> None:
        super().__init__(rid, 0, 0)
        self.origin_input_ids = self.full_untruncated_fill_ids = array("q", tokens)
        self.cache_salt = salt
        self.end = self.done = self.chunk = 0
        self.is_over = False

    @property
    def is_prefilled(self) -> bool:
        """True where all of its chunks were computed."""
        return self.end >= len(self.full_untruncated_fill_ids)

    def finished(self) -> bool:
        """True once it has ended."""
        return self.is_over

    def grow(self, token: int) -> None:
        """Decode a token."""
        self.output_ids.append(token)
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids
        self.end = len(self.full_untruncated_fill_ids)


class Engine:
    """An engine that serves random requests, some with a beginning that others have."""

    def __init__(self, socket: str, model: str, name: str, seed: int) -> None:
        self._at = Scheduling(socket, model)
        self._cache = self._at.cache
        self._rng = random.Random(seed)
        self._name = name
        self._planes = [self._at.node.pool.to_torch(layer, "kv") for layer in range(LAYERS)]
        self._waiting: list[RandomRequest] = []
        self._running: list[RandomRequest] = []
        self._quiet = self._version = 0
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        """Make an iteration."""
        self._cache.begin_iteration()
        if self._cache.take_void_step():
            for each in [*self._running]:
                self._retract(each)
        self._receive()
        if self._running and self._rng.random() < 0.05:
            self._retract(self._rng.choice(self._running))
        while not self._cache.reserve_decode([each for each in self._running if each.is_prefilled]):
            self._retract(self._rng.choice(self._running))
        admitted = self._admit()
        self._running += admitted
        chunked = [each for each in self._running if not each.is_prefilled and each not in admitted]
        decoding = [each for each in self._running if each.is_prefilled and each not in admitted]
        if cache_runs.WINDOW_TOKENS is not None:
            chunked = [each for each in chunked if self._has_chunk(each)]
        if batch := admitted or chunked or decoding:
            self._launch(batch, admitted, decodes=not (admitted or chunked))

    def close(self) -> None:
        """End all requests, and the lease. Nothing may be left of them."""
        for each in [*self._running]:
            self._end(each, CacheRequestOutcome.ABORT)
        for each in self._waiting:
            self._at.abort(each)
        cache = self._cache
        loads = cache._loads  # noqa: SLF001 - nothing else shows what it keeps
        left = [cache._book._requests, cache._keys, cache._rows, cache._reserved, cache._book.without_host]  # noqa: SLF001
        assert not any([*left, loads._running, loads._came, loads._early]), left  # noqa: SLF001
        cache.release_host_resources()

    def _receive(self) -> None:
        rng = self._rng
        self._quiet = max(0, self._quiet - 1) if self._quiet or rng.random() > 0.02 else 25
        while not self._quiet and len(self._waiting) < MOST_WAITING and rng.random() < 0.6:
            self.seen["requests"] += 1
            head, length = rng.randrange(HEADS), rng.randrange(12 * PAGE_TOKENS)
            tokens = [(head * 7919 + at * 31) % VOCABULARY for at in range(length)]
            tokens += [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 4 * PAGE_TOKENS))]
            request = RandomRequest(
                f"{self._name}{self.seen['requests']}", tokens, rng.choice([None, None, "a tenant"])
            )
            self._waiting.append(request)
            if rng.random() < 0.8:
                self._cache.expect(request)
        if self._waiting and rng.random() < 0.1:
            self._at.abort(self._waiting.pop(rng.randrange(len(self._waiting))))
            self.seen["aborted"] += 1
        if not (self._waiting or self._running) and rng.random() < 0.03:
            self._cache.reset()
            self._version += 1

    def _admit(self) -> list[RandomRequest]:
        admitted: list[RandomRequest] = []
        while self._waiting and (not admitted or self._rng.random() < 0.6):
            if cache_runs.WINDOW_TOKENS is not None and any(not each.is_prefilled for each in self._running + admitted):
                break  # SGLang has one such request at a time
            request = self._waiting[0]
            found, tokens = self._at.match(request), len(request.full_untruncated_fill_ids)
            request.end = found.device_prefix_len + found.host_hit_length
            fits = tokens - request.end + 2 * PAGE_TOKENS <= self._cache.available_tokens()
            request.chunk = self._next_chunk()
            wanted = tokens - request.end
            if cache_runs.WINDOW_TOKENS is not None:
                wanted = min(wanted, request.chunk)
            if not self._cache.reserve(wanted, fits=fits):
                break
            if found.host_hit_length:
                loaded = self._cache.init_load_back(SimpleNamespace(best_match_node=request.last_node))
                if loaded is None:
                    break
                assert loaded == (found.host_hit_length, request.last_node)
                self.seen["from_host"] += 1
            assert len(self._cache.path_device_indices(request.last_node)) >= request.end
            self.seen["hits"] += request.end > 0
            request.done = request.end // PAGE_TOKENS
            self._see_windows(request, request.done)
            admitted.append(self._waiting.pop(0))
        return admitted

    def _next_chunk(self) -> int:
        return self._rng.choice([1, 2 * PAGE_TOKENS + 3, 1 << 20])

    def _has_chunk(self, request: RandomRequest) -> bool:
        """Give a request the pages of its next chunk; False where there is no room."""
        request.prefix_len, request.chunk = request.end, self._next_chunk()
        self._cache.look_at_chunk(request)
        tokens = min(request.chunk, len(request.full_untruncated_fill_ids) - request.end)
        fits = tokens + PAGE_TOKENS <= min(self._cache.available_tokens(pool) for pool in (0, 1))
        has_pages = self._cache.reserve(tokens, fits=fits)
        self.seen["waiting_chunks"] += not has_pages
        return has_pages

    def _see_windows(self, request: RandomRequest, blocks: int) -> None:
        """Compare what a request reads of windows that end with ``blocks`` blocks, once loads have come."""
        if cache_runs.WINDOW_TOKENS is None or self._cache._loads.running(request.last_node):  # noqa: SLF001
            return
        windows = request.last_node.others[0].pages
        for block in range(max(0, (blocks * PAGE_TOKENS - WINDOW_TOKENS) // PAGE_TOKENS), blocks):
            for layer, digest in enumerate(self._digests(request, block)):
                if GROUPS[layer] == "window":
                    assert bytes(self._planes[layer][windows[block]][0].tolist()) == digest
                    self.seen["windows"] += 1

    def _launch(self, batch: list[RandomRequest], admitted: list[RandomRequest], *, decodes: bool) -> None:
        hits = {each.rid: each.done for each in admitted}
        for each in batch:
            if decodes:
                each.grow(self._rng.randrange(VOCABULARY))
            else:
                chunk = each.chunk if cache_runs.WINDOW_TOKENS is not None else self._next_chunk()
                each.end = min(each.end + chunk, len(each.full_untruncated_fill_ids))
            if decodes and cache_runs.WINDOW_TOKENS is not None:
                self._cache.evict_sliding_windows(each, each.end - 1)
            each.kv.kv_allocated_len = each.end
        tables = self._cache.take(batch, [each.end for each in batch])
        assert tables is not None
        result = object()
        self._cache.begin_step(batch)
        for layer in range(LAYERS):
            self._cache._loads.wait_until(layer)  # noqa: SLF001 - SGLang's pool does
        self._cache.end_launch(result)
        self._cache.begin_output()
        if self._cache.take_void(result):
            self.seen["void"] += 1
        else:
            for each, table in zip(batch, tables, strict=True):
                self._compute(each, table, hits.get(each.rid, 0))
                self._cache.checkpoint(each, up_to=each.end - decodes)
            for each in [*self._running]:
                if each.is_prefilled and self._rng.random() < 0.12:
                    self._end(each, CacheRequestOutcome.SUCCESS)
        self._cache.end_output()

    def _compute(self, request: RandomRequest, table: Sequence[int], hit: int) -> None:
        """Compare what the request found, or computed before, and compute the rest."""
        self._see_windows(request, max(hit, request.done))
        for block in range(max(hit, request.done)):
            for layer, digest in enumerate(self._digests(request, block)):
                if GROUPS[layer] == "window":
                    continue
                held = bytes(self._planes[layer][table[block]][0].tolist())
                assert held == digest, f"{request.rid}: block {block}, layer {layer}, page {table[block]}"
        for block in range(request.done, request.end // PAGE_TOKENS):
            for layer, digest in enumerate(self._digests(request, block)):
                pages = request.last_node.others[0].pages if GROUPS[layer] == "window" else table
                self._planes[layer][pages[block]][0] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        request.done = request.end // PAGE_TOKENS

    def _digests(self, request: RandomRequest, block: int) -> list[bytes]:
        weights = f"{self._name}{self._version}" if self._version else ""
        tokens = request.full_untruncated_fill_ids[: (block + 1) * PAGE_TOKENS].tobytes()
        told = f"{request.cache_salt} {weights}".encode() + tokens
        return [hashlib.blake2b(told + bytes([layer]), digest_size=BYTES).digest() for layer in range(LAYERS)]

    def _end(self, request: RandomRequest, outcome: CacheRequestOutcome) -> None:
        request.is_over = True
        self._cache.on_release(request, checkpointed=False)
        self._cache.finish(SimpleNamespace(rid=request.rid), outcome)
        self._running.remove(request)

    def _retract(self, request: RandomRequest) -> None:
        self.seen["retracted"] += 1
        self._cache.on_release(request, checkpointed=False)
        self._running.remove(request)
        request.end = request.done = 0
        request.kv = ReqKvInfo()
        self._waiting.insert(0, request)
        self._cache.expect(request)


def main(socket: str, seeds: int, steps: int, *, has_windows: bool) -> None:
    """Make the calls of all seeds."""
    groups = [PlaneGroup("full")]
    if has_windows:
        GROUPS[:], cache_runs.WINDOW_TOKENS = WINDOWS, WINDOW_TOKENS
        groups.append(PlaneGroup("window", WINDOW_TOKENS + 1))
    planes = [Plane("kv", layer, group, (PAGE_TOKENS, BYTES), "uint8") for layer, group in enumerate(GROUPS)]
    cache_runs.LAYOUT = Layout(PAGE_TOKENS, 1, tuple(groups), tuple(planes))
    seen: Counter[str] = Counter()
    for seed in range(seeds):
        rng = random.Random(seed)
        engines = [Engine(socket, f"random {seed}", name, 2 * seed + at) for at, name in enumerate("ab")]
        for _ in range(steps):
            rng.choice(engines).step()
        for engine in engines:
            engine.close()
            seen += engine.seen
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]), has_windows=sys.argv[4:] == ["windows"])
