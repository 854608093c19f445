"""Cache of every rank but the first: it asks the daemon nothing, and answers SGLang as the first rank has.

It has its own slab, in which pages have the numbers of the first rank's; waits for its own part of each load; and has
its own look at the lease before a step's output is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cachesvc_client.adapters.layer_waits import LayerWaits
from cachesvc_client.plugins.node import Node
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome, IncLockRefResult

from cachesvc_sglang.calls import LEASE, Called, prompt_call, requests_call
from cachesvc_sglang.engine_cache import ROOT, EngineCache, name_of
from cachesvc_sglang.host_loads import LOOK_S, SOUND, LoadBegin, current_stream, end_of
from cachesvc_sglang.links import Call, LeaderLink, RanksDiverged, Record
from cachesvc_sglang.plain import may_share

log = logging.getLogger("sglang.srt." + __name__)


@dataclass(eq=False)
class FollowedPages:
    """Pages of a request, as the first rank has them: its node in SGLang's tree. ``is_used``: what the host has of it
    counts as found. ``windows``: its pages in the pool of windows."""

    request_id: str
    hit_blocks: int
    host_blocks: int
    is_used: bool = False
    pages: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)


class FollowingCache(EngineCache):
    """``context``: SGLang's ``TreeCacheBuildContext``, with the link to the first rank. ``is_to_move``: as of the first
    rank. Used from SGLang's scheduler thread."""

    is_to_move = False

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        self._leader: LeaderLink = pool.cachesvc.leader
        self._loads = RankLoads(self.node, self._leader, pool.layer_num)
        pool.register_layer_transfer_counter(self._loads)
        self._followed: dict[str, FollowedPages] = {}
        self._looked_at: FollowedPages | None = None
        self._free_tokens = self._reserved_tokens = (0,) * len(self._pool_blocks)
        self._follow((Called.START,))
        self.token_to_kv_pool_allocator.bind(self)

    # -- matches -----------------------------------------------------------------------------------------------------

    def expect(self, request: Any) -> None:
        """No-op: the first rank asks for it."""

    def match_prefix(self, params: Any) -> Any:
        """Return what the first rank has found."""
        request = params.req
        if request is None:
            return self._found(ROOT, 0, 0)
        if may_share(request) and not self._is_off:
            self._keys_of(request).extend(params.key.token_ids)
        name = name_of(request)
        call = prompt_call(name, params.key, self._keys.get(name), self.page_size)
        record = self._leader.hear(call)
        if record.answer is not None:
            is_new, hit_blocks, host_blocks, is_used = record.answer
            if is_new:
                self._followed[name] = FollowedPages(name, hit_blocks, host_blocks)
            self._followed[name].is_used = is_used
        self._take(record)
        if record.answer is None:
            return self._found(ROOT, 0, 0)
        pages = self._followed[name]
        return self._found(pages, pages.hit_blocks, pages.host_blocks)

    def inc_lock_ref(self, node: Any) -> Any:
        """SGLang looks at the request of this node."""
        self._looked_at = node if isinstance(node, FollowedPages) else None
        return IncLockRefResult()

    def look_at_chunk(self, request: Any) -> None:
        """SGLang looks at the request whose next chunk is to be computed."""
        self.inc_lock_ref(request.last_node)

    def path_device_indices(self, node: Any) -> Any:
        """Slots of what a match has found in place, and of what SGLang was told to load."""
        if not isinstance(node, FollowedPages):
            return self._indices([])
        blocks = node.hit_blocks + (node.host_blocks if node.is_used else 0)
        return self._indices(node.pages[:blocks])

    def init_load_back(self, params: Any) -> Any:
        """Look at this rank's part of a load, and return what the first rank has decided."""
        pages = params.best_match_node
        self._loads.report()
        load, pages.is_used, is_given = self._follow((Called.LOAD, pages.request_id))
        if load is not None:
            self._loads.begin(pages.request_id, load)
        return (pages.host_blocks * self.page_size, pages) if is_given else None

    # -- pages -------------------------------------------------------------------------------------------------------

    def available_tokens(self, pool: int = 0) -> int:
        """Tokens of a pool that can be had, as of the first rank's last decision."""
        return self._free_tokens[pool]

    def reserved_tokens(self, pool: int = 0) -> int:
        """Tokens that this pass has reserved, as of the first rank's last decision."""
        return self._reserved_tokens[pool]

    def ask_room(self) -> None:
        self._follow((Called.ROOM,))

    def reserve(self, new_tokens: int, *, fits: bool) -> bool:
        """Return whether the request that SGLang looks at has its pages."""
        pages = self._looked_at
        rid = None if pages is None else pages.request_id
        has_room, self._has_void_step = self._follow((Called.PROMPT, rid, new_tokens, fits))
        return bool(has_room)

    def reserve_decode(self, requests: Sequence[Any]) -> bool:
        """Return whether each request has room for its next token."""
        tokens = sum(each.kv.kv_allocated_len for each in requests)
        return bool(self._follow(requests_call(Called.DECODE, requests, tokens)))

    def take(self, requests: Sequence[Any], ends: Sequence[int]) -> list[list[int]] | None:
        """Tables of requests that are allocated up to these tokens; None where one is too short."""
        if not self._follow(requests_call(Called.TAKE, requests, sum(ends))):
            return None
        self._rows.update((name_of(each), each.kv) for each in requests)
        return [each.last_node.pages for each in requests]

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Note what the request has computed: the first rank seals it."""
        if self.supports_swa() and not req.finished():
            self.evict_sliding_windows(req, up_to)
        if isinstance(req.last_node, FollowedPages):
            self._protect(req, up_to)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """The request has ended, or was retracted."""
        self._forget(name_of(req), ends=bool(req.finished()))
        if not req.finished():
            self._synchronize()

    def finish(self, handle: Any, outcome: Any) -> None:
        """A request was aborted, perhaps before it had any page."""
        if outcome is not CacheRequestOutcome.SUCCESS and handle.rid not in self._rows:
            self._forget(handle.rid, ends=True)

    def reset(self) -> None:
        for rid in [*self._keys]:
            self._forget(rid, ends=True)

    def release_host_resources(self) -> None:
        """End this rank's part of the lease. Idempotent."""
        self._leader.close()
        self.node.close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        self._loads.report()
        self.is_to_move = bool(self._follow((Called.ITERATION,)))

    def move(self) -> None:
        """Go on under the first rank's new lease, where there is one. Nothing uses any page."""
        self._synchronize()
        next_lease = self._follow((Called.MOVE,))
        if not next_lease:
            return
        lease = self.node.follow(next_lease)
        self._loads.forget_all()
        self._leader.answer(LEASE, lease)

    def begin_step(self, requests: Sequence[Any]) -> None:
        """A step with these requests is launched."""
        self._in_flight += 1
        self._vouching.begin_step(computes=True)
        self._loads.begin_step(self._follow((Called.STEP, len(requests))))

    def end_launch(self, result: object) -> None:
        """A step was launched, and ``result`` will be its output."""
        if self._loads.end_launch() and self._follow((Called.LAUNCHED,)):
            self._void, self._has_void_step = result, True

    def end_output(self) -> None:
        """No-op: the first rank reports to the daemon."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def _follow(self, call: Call) -> Any:
        return self._take(self._leader.hear(call))

    def _take(self, record: Record) -> Any:
        self._free_tokens, self._reserved_tokens = record.free_tokens, record.reserved_tokens
        for rid, (first, new, windows) in record.pages.items():
            followed = self._followed[rid]
            if len(followed.pages) != first:
                raise RanksDiverged(
                    f"this rank has {len(followed.pages)} pages of request {rid} where rank 0 had sent {first}"
                )
            followed.pages += new
            followed.windows += windows
        return record.answer

    def _windows_of(self, node: FollowedPages) -> list[int]:
        return node.windows

    def _slide(self, node: Any, blocks: int) -> None:
        """No-op: the first rank gives windows back."""

    def _forget(self, rid: str, *, ends: bool) -> None:
        self._loads.forget(rid)
        self._followed.pop(rid, None)
        self._rows.pop(rid, None)
        self._shown.pop(rid, None)
        if ends:
            self._keys.pop(rid, None)


class RankLoads:
    """SGLang's counter of layers. ``num_layers``: of the KV pool. Used from SGLang's scheduler thread."""

    def __init__(self, node: Node, leader: LeaderLink, num_layers: int) -> None:
        self.num_layers = num_layers
        self._node = node
        self._leader = leader
        self._known: dict[str, LoadBegin] = {}
        self._reported: set[int] = set()
        self._launched: list[LoadBegin] = []
        self._waits = LayerWaits(lambda: node.pool, current_stream)

    def begin(self, request_id: str, load: LoadBegin) -> None:
        """Look at the load of a request. Idempotent."""
        known = self._known.get(request_id)
        if known is None or known.number != load.number:
            self.forget(request_id)
            self._known[request_id] = load

    def report(self) -> None:
        for load in self._known.values():
            self._report(load, 0.0)

    def forget(self, request_id: str) -> None:
        load = self._known.pop(request_id, None)
        if load is not None:
            self._reported.discard(load.number)

    def forget_all(self) -> None:
        """Forget all loads: there is a new lease."""
        self._known.clear()
        self._reported.clear()

    def begin_step(self, requests: Sequence[str]) -> None:
        """A step is launched: its layers wait for the loads of these requests."""
        self._launched = [self._known[each] for each in requests]
        self._waits.begin(ticket for load in self._launched for ticket in load.tickets)

    def end_launch(self) -> bool:
        """Wait for the loads of the step that was launched, and report them; False where it has none."""
        launched, self._launched = self._launched, []
        for load in launched:
            while not self._report(load, LOOK_S):
                pass
        if launched:
            self._leader.answer(SOUND, self._waits.is_sound)
        self._waits.begin(())
        return bool(launched)

    def _report(self, load: LoadBegin, wait_s: float) -> bool:
        """True once the end of a load was reported."""
        if load.number in self._reported:
            return True
        has_come = end_of(self._node.pool, load.tickets, wait_s)
        if has_come is None:
            return False
        self._reported.add(load.number)
        self._leader.end_load(load.number, has_come=has_come)
        return True

    @property
    def consumer_index(self) -> int:
        return 0 if self._launched else -1

    def wait_until(self, layer: int) -> None:
        """SGLang is about to use a layer of the step that it launches."""
        self._waits.wait(layer)
