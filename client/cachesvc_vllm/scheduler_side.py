"""The scheduler's side: match when vLLM looks for hits, reserve before it counts, seal what is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cachesvc_client import DaemonUnavailable, LeaseLost
from cachesvc_client.plugins.keeper import STUCK, ConnectorRefused, WeightsVersion
from cachesvc_client.plugins.matches import Written
from cachesvc_client.plugins.node import Node, announced_in
from cachesvc_client.plugins.outbox import Dropped, Vouching
from cachesvc_client.plugins.page_book import PageBook
from cachesvc_client.plugins.request_pages import Positions, RequestPages, Wish

from cachesvc_vllm.adapters import AdapterReport, Adapters, watch_loads
from cachesvc_vllm.block_pool import DaemonBlockPool, spare_states, take_place
from cachesvc_vllm.kv_events import Announcer
from cachesvc_vllm.metrics import IDLE_WAITS, SHARES, STEP_SECONDS, WAITS, CacheStats, Stopwatch, timed
from cachesvc_vllm.plain import (
    FirstToken,
    LookaheadKeys,
    Pace,
    blocks_wanted,
    computed_blocks,
    fills_nothing,
    keep_last_blocks,
)
from cachesvc_vllm.refusals import require_known_pool
from cachesvc_vllm.settings import Settings
from cachesvc_vllm.transfers import Loading, SiblingLoads, StepTransfers
from cachesvc_vllm.wishes import Wishes, blocks_ahead

RUNNING = "RUNNING"
WORTH_DIVISOR = 16
"""Part of a step's tokens that a request has to have in common with what another one computes, to wait for that."""

log = logging.getLogger(__name__)


class SchedulerSide:
    """Begun once the workers have their memory from the daemon. Used from vLLM's scheduler thread."""

    def __init__(
        self,
        node: Node,
        settings: Settings,
        step_tokens: int,
        lookahead_tokens: int = 0,
        *,
        most_requests: int = 0,
        drafts: bool = False,
        publisher: Any = None,
        lora_config: Any = None,
        ranks: int = 1,
        replaced: str = "",
    ) -> None:
        """``step_tokens``: the most that vLLM schedules in an iteration, of ``most_requests``. ``lookahead_tokens``:
        those that a drafter reads ahead (``draft_lookahead``). ``drafts``: kernels run on behind an output
        (``has_late_kernels``). ``publisher``: of KV events. ``lora_config``: of adapters; None: there are none.
        ``ranks``: of the engine. ``replaced``: why its weights may not be those that it is named by."""
        self._node, self._allows_untested = node, settings.allow_untested_vllm
        self._has_lookahead, self._lookahead_tokens = settings.draft_blocks == "lookahead", lookahead_tokens
        registration = node.lease.registration
        block_tokens = self._block_tokens = registration.layout.block_tokens
        self._book = PageBook(
            node.lease,
            settings.stock_blocks,
            blocks_ahead(step_tokens, registration),
            parts=node.share.parts,
            step_blocks=-(-step_tokens // block_tokens),
            most_requests=most_requests,
        )
        self._book.outbox.runs = self._computes
        self._book.untold.is_late = drafts
        self._book.drops_last = lookahead_tokens > 0 and not self._has_lookahead
        self._step_tokens = step_tokens
        self._book.prefills.least_blocks = -(-step_tokens // WORTH_DIVISOR // block_tokens)
        self._keys = LookaheadKeys(lookahead_tokens if self._has_lookahead else 0, block_tokens)
        self._weights = WeightsVersion(settings.weights_version, announced_in(registration), node.announced_weights)
        if replaced:
            self._weights.lose(replaced)
        self._book.salt = self._weights.salt
        keys = self._book.keys
        self._announcer = None if publisher is None else Announcer(node, settings.token_file, publisher, keys)
        self._sealing = Sealer(self._book, self._keys, self._announcer, block_tokens, lookahead_tokens)
        has_whole = len(self._book.groups.parts) == 1 and block_tokens > 1 and not lookahead_tokens
        wished, has_tails = (self._keys, settings, self._announcer, step_tokens, block_tokens), has_whole and not drafts
        most_adapters = () if lora_config is None else (lora_config.max_loras, lora_config.max_cpu_loras)
        self._adapters = Adapters(self._adapters_in_use, ranks, *most_adapters)
        if lora_config is not None:
            watch_loads()
        self._wishes = Wishes(
            *wished,
            adapters=self._adapters,
            weights_salt=lambda: self._weights.salt,
            in_towers=bool(lora_config and lora_config.enable_tower_connector_lora),
            has_whole=has_whole,
            has_tails=has_tails,
        )
        self._check = node.page_check()
        self._vouching, self._dropped = Vouching(lambda: node.lease), Dropped.NOT
        has_early_loads = len(self._book.groups.parts) == 1
        self._loading = Loading(self._book.find, registration.layout.page_bytes(0) if has_early_loads else 0)
        are_whole = not registration.layout.window_groups  # vLLM has no pages of what lies before a window or state
        self._siblings = SiblingLoads(are_shared=settings.share_loaded and are_whole)
        self._pool: DaemonBlockPool | None = None
        self._manager: Any = None
        self._states = StateCells(None, {}, step_tokens)
        self._find_hits: Any = None
        self._allocate: Any = None
        first_tokens = step_tokens if registration.layout.window_groups else None
        self._wanted: Callable[..., int] = partial(blocks_wanted, block_tokens=block_tokens, step_tokens=first_tokens)
        self._unfinished: dict[str, Any] = {}
        self._ended: list[tuple[Any, RequestPages]] = []
        self._put_off: set[str] = set()
        self._first_token, self._pace = FirstToken(), Pace()
        self.watch, self._stats = Stopwatch(), CacheStats()
        self._ran: bool | None = None

    def bind(self, manager: Any) -> None:
        """Take the place of the manager's block pool, and of two methods that say which request is scheduled. Raises
        ConnectorRefused for a pool that has more than those that were looked at."""
        require_known_pool(manager.block_pool, allow_any=self._allows_untested)
        pool = self._pool = DaemonBlockPool(
            manager.block_pool, self._book, self._weights, self.watch, self._block_tokens
        )
        pool.on_reset = self._forget_salts
        if self._announcer is not None:
            self._announcer.start()
        take_place(manager, pool)
        self._manager = manager
        self._wanted = partial(self._wanted, longest_tokens=manager.max_model_len)
        states = {group: self._book.groups.state_of(group) for group in self._book.groups.states}
        self._states = StateCells(manager, states, self._step_tokens)
        self._keys.hashes_a_block = self._block_tokens // pool.hash_block_size
        if self._lookahead_tokens:
            keep_last_blocks(manager.coordinator)
        self._find_hits, self._allocate = manager.get_computed_blocks, manager.allocate_slots
        manager.get_computed_blocks, manager.allocate_slots = self.get_computed_blocks, self.allocate_slots

    def expect(self, request: Any) -> None:
        """Note a new request, which vLLM will schedule."""
        with self.watch:
            self._loading.waiting.add(request.request_id)
            if (wish := self._wish(request, None)) is not None:
                self._book.expect(request.request_id, wish)

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        """Do ``KVCacheManager.get_computed_blocks``, after the request's match; no hits while its adapter is read, and
        ``host_tokens`` then says so. vLLM 0.32 has no limit to pass on. vLLM saves a state where the prompt parts from
        others, whose blocks it does not see here beyond the hit."""
        assert self._pool is not None
        with self.watch:
            self._look()
            self._leave_if_back()
            pages = self._book.find(request.request_id)
            if pages is not None and pages.waits_for is not None and self._book.must_wait(pages):
                self._pool.hide_hits()
            elif (wish := self._wish(request, max_cache_hit_length)) is None:
                self._pool.hide_hits()
                self._book.forget(request.request_id)
                pages = None
            else:
                pages = self._book.begin(request.request_id, wish)
                self._pool.show_hits(pages, request.block_hashes)
        blocks, tokens, _ = self._find_hits(request)
        if pages is None or not pages.lost_blocks:
            return blocks, tokens, 0
        return blocks, tokens, (pages.loaded_blocks + pages.lost_blocks) * self._block_tokens

    @timed
    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do ``KVCacheManager.allocate_slots``, once the request's pages are reserved; None where there is no room."""
        self._look()
        local, external = num_new_computed_tokens, num_external_computed_tokens
        pool, pages = self._pool, self._book.find(request.request_id)
        assert pool is not None
        if self._loading.is_void(pages):
            return None
        if pages is not None and self._book.goes_on and not (local or external):
            new, ahead, block_tokens = num_new_tokens, num_lookahead_tokens, self._block_tokens
            if fills_nothing(request, pages, new, ahead, block_tokens):
                return self._manager.empty_kv_cache_blocks
        if pages is not None and not pages.taken:
            taken_blocks = pages.blocks_of(local + external, self._block_tokens)
            if taken_blocks < pages.hit_blocks + pages.host_blocks:
                pages = self._take_less(request, local // self._block_tokens, taken_blocks)
                if pages is None:
                    return None
                with self.watch.apart:
                    new_computed_blocks = self._find_hits(request)[0]
        if pages is not None and pages.others:  # what has left a window may serve what comes
            read = request.num_computed_tokens + local + external - request.num_in_flight_tokens
            with self.watch.apart:
                self._manager.remove_skipped_blocks(request.request_id, max(0, read), request.num_prompt_tokens)
        states = self._states.wanted(request, num_new_tokens, local, external, new_computed_blocks)
        awaited = 0 if num_new_tokens else external
        new = local + external - awaited + num_new_tokens
        wanted = self._wanted(request, new, external_tokens=awaited, lookahead_tokens=num_lookahead_tokens)
        asked = (request, num_new_tokens, local, new_computed_blocks, num_lookahead_tokens, external, *args)
        if pages is not None and self._book.has(pages, wanted, states):
            pool.schedule(pages)
            pool.now.counts_own = True
            with self.watch.apart:
                blocks = self._allocate(*asked, **kwargs)
            pool.now.counts_own = False
            if blocks is not None:
                return blocks
        allocate = partial(self._allocate, *asked, **kwargs)
        return self._reserve_and_allocate(request, wanted, states, allocate, external)

    @property
    def peer_address(self) -> str:
        """HOST:PORT at which the daemon lends what this engine shares; empty: nowhere."""
        return "" if self._book.is_adrift else self._node.lease.registration.peer_address

    @property
    def next_lease(self) -> str:
        """The lease that workers are to move to: after a loss, once nothing uses pages of the old one."""
        return self._node.back_id if self._book.is_moving and self._book.is_empty else ""

    def move(self, lease_id: str) -> None:
        """Go on under the lease of this slab, which all workers are on, if it is the new one; empty: they differ."""
        with self.watch:
            if not lease_id or lease_id != self.next_lease or not self._node.move(lease_id):
                return
            self._check = self._node.page_check()  # the model may have another number
            with suppress(DaemonUnavailable, LeaseLost):  # then they move again
                self._book.adopt(self._node.lease)
            if self._announcer is not None:
                self._announcer.restart()

    def host_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens to bring behind ``local_tokens`` in place, and whether they come from the host: then the request runs
        later. 0 where vLLM leaves out a part of the hit: what lies behind that is no use. None: ask again, for its
        adapter is read, another node computes more, or, once a request, the daemon's answer is due and others run."""
        with self.watch:
            pages = self._book.find(request.request_id)
            if pages is None or pages.is_coming:
                return None, False
            if self._book.must_wait(pages):
                self._put_off.discard(request.request_id)
                return None, False
            tokens = pages.offer(local_tokens, self._block_tokens)
            awaited = tokens if self._loading.is_awaited(pages, self._unfinished) else 0
            if request.request_id not in self._put_off:
                first = tokens - awaited if tokens else min(request.num_tokens - local_tokens, self._step_tokens)
                if not self._book.is_ready(pages, self._wanted(request, local_tokens + first, external_tokens=awaited)):
                    self._put_off.add(request.request_id)
                    return None, False
            return tokens, awaited > 0

    @timed
    def note_load(self, request: Any, external_tokens: int) -> None:
        """vLLM has the request's pages, ``external_tokens`` of which this connector brings, or their load has ended.
        Raises as ``Loading.begin``."""
        pages = self._book.find(request.request_id)
        if pages is not None and self._loading.begin(pages, external_tokens, self._block_tokens):
            tokens = min(pages.loaded_blocks * self._block_tokens, request.num_tokens)
            self._count(request, host_tokens=tokens - pages.hit_blocks * self._block_tokens)

    @timed
    def note_ends(self, ended: Collection[str], failed: Collection[str], invalid_pages: Collection[int]) -> None:
        """Loads of these requests have ended, ours or a sibling's, and an output lacked these pages. vLLM schedules
        requests whose load ``failed`` again; those of an early load begin anew."""
        self._book.without_host |= self._loading.end(ended, failed, self._stats)
        self._siblings.note_failures(failed, invalid_pages)
        if invalid_pages:
            self._book.distrust(invalid_pages)
        self._book.without_host |= self._loading.end_early(invalid_pages, self._unfinished, self._stats)

    @timed
    def begin_step(self, scheduled: Collection[str]) -> None:
        """An iteration is scheduled, which computes these requests."""
        assert self._pool is not None
        self._ran = None
        self._book.begin_step()
        self._sealing.begin_step(self._pool.now.filling, scheduled)
        self._siblings.begin_step(scheduled)
        self._vouching.begin_step(computes=bool(scheduled))

    @timed
    def drop_step(self, *, repeats: bool) -> None:
        """A worker says of the output that has come that what it was computed from may have been others'. ``repeats``:
        vLLM was told too, and computes it again."""
        self._dropped = Dropped.REPEATED if repeats else Dropped.LOST

    def note_adapters(self, report: AdapterReport) -> None:
        """The workers have these adapters in memory: what was computed with one that a request's keys do not name is
        shared with no other. Comes with a step's output, before that is reported to the daemon."""
        loaded = self._adapters.learn(report)
        adapted = [(each, self._book.find(each.request_id)) for each in self._unfinished.values() if each.lora_request]
        running = [
            (each, pages) for each, pages in adapted if pages is not None and pages.held and each.status.name == RUNNING
        ]
        for request, pages in (*running, *self._ended):
            if not self._wishes.is_salted_by(loaded, request, pages.salt):
                log.warning("adapter_changed request=%s name=%s", request.request_id, request.lora_request.lora_name)
                pages.is_foreign = True
                self._book.untold.forget_blocks(pages)

    def take_transfers(self, *, is_empty: bool) -> StepTransfers:
        """Message to the workers, once an iteration is scheduled: report the last ones to the daemon, or later
        (``Pace``, and where a lone request needs its first token)."""
        with self.watch:
            if self._first_token.may_report() and self._pace.is_due(is_urgent=self._book.is_urgent):
                self._book.flush()
        step = self._loading.take_step(is_empty=is_empty, next_lease=self.next_lease)
        step.adapters, step.adapters_epoch = self._adapters.begin_step(), self._adapters.epoch
        return step

    def finish(self, request: Any) -> None:
        """A request has ended: what it has computed is sealed before its pages go."""
        with self.watch:
            if request.lora_request is not None and (pages := self._book.find(request.request_id)) is not None:
                self._ended.append((request, pages))
            self._unfinished.pop(request.request_id, None)
            self._put_off.discard(request.request_id)
            self._book.without_host.discard(request.request_id)
            self._loading.forget(request.request_id)
            self._siblings.forget(request.request_id)
            self._wishes.forget(request.request_id)
            self._sealing.end(request, self._wishes.tail_keys(request))
            if self._announcer is not None:
                self._announcer.drop(request.request_id)

    def end_step(self) -> None:
        """A step's output has come: seal what it has computed, and tell the daemon. Raises PagesLapsed."""
        assert self._pool is not None
        dropped, self._dropped = self._dropped, Dropped.NOT
        computes = self._vouching.end_step(dropped)
        self._adapters.end_step()
        self._loading.end_step(self._stats)
        self._ended.clear()
        with self.watch:
            self._book.untold.begin_output()
            self._siblings.end_step(is_sound=dropped is Dropped.NOT)
            self._sealing.seal_filled(self._pool.now.filling)
            self._book.end_writes(is_sound=dropped is Dropped.NOT)
            self._book.untold.end_output(computes=computes)
            is_first = self._first_token.take_output()
            if not self._unfinished:  # no iteration follows but an empty one, whose output nothing waits for
                self._book.flush(is_last=True, may_wait=not computes)
            elif not is_first:  # answers to users come first
                self._book.top_up()
            self._leave_if_back()
        if seconds := self.watch.lap():
            self._stats.data[STEP_SECONDS].append(seconds)
        if not self._book.is_adrift:
            self._check.step()

    @property
    def has_late_pages(self) -> bool:
        """True where pages come back once the next output has: nothing need be preempted for them."""
        return self._book.untold.has_late_pages

    def take_stats(self) -> CacheStats:
        taken, self._stats = self._stats, CacheStats()
        taken.data[WAITS], taken.data[IDLE_WAITS] = self._book.outbox.take_waits()
        taken.data[SHARES] = int(self._weights.is_shared and not self._book.is_adrift)
        return taken

    def close(self) -> None:
        """Tell what is left to tell, and end the lease. Idempotent."""
        if self._announcer is not None:
            self._announcer.close()
        self._book.close()
        self._wishes.close()
        self._node.close()

    def _count(self, request: Any, **tokens: int) -> None:
        """Tokens of an admission. What a request finds again after a preemption or a failed load is no prompt's hit."""
        is_again = request.num_preemptions or request.request_id in self._book.without_host
        for name, count in tokens.items():
            self._stats.data[f"preempted_{name}" if is_again else name] += count

    def _look(self) -> None:
        """Check the lease once in an iteration, before it schedules anything: lost pages are used no more."""
        if self._vouching.look():
            self._book.is_with_daemon()
            self._ran = self._computes()

    def _wish(self, request: Any, most_tokens: int | None) -> Wish | None:
        """Match for a request; None while its adapter is read."""
        return self._wishes.of(request, most_tokens, may_hit=self._manager.prefix_cache_lookup_enabled(request))

    def _forget_salts(self) -> None:
        """The prefix cache was reset: no salt that was chosen before it is used again."""
        self._wishes.reset()
        if self._announcer is not None:
            self._announcer.reset()

    def _adapters_in_use(self) -> set[int]:
        """Numbers of the adapters that running requests use."""
        running = (each for each in self._unfinished.values() if each.lora_request and each.status.name == RUNNING)
        return {each.lora_request.lora_int_id for each in running}

    def _computes(self) -> bool:
        """True while requests run: those that are only loaded lose nothing by a wait, nor do those that the iteration
        under way has admitted, where none ran when it began."""
        if self._ran is not None:
            return self._ran
        return not self._book.is_empty and len(self._unfinished) > len(self._loading)

    def _take_less(self, request: Any, device_blocks: int, blocks: int) -> RequestPages | None:
        """vLLM takes ``blocks`` blocks of a longer hit, ``device_blocks`` of them in place: let go of the others, whose
        pages it would write. None where the daemon does not have exactly these: vLLM asks again."""
        assert self._pool is not None
        wish = self._wish(request, blocks * self._block_tokens)
        if wish is None:
            return None
        pages = self._book.shorten(request.request_id, wish, blocks)
        self._pool.show_hits(pages, request.block_hashes)
        return pages if (pages.hit_blocks, pages.host_blocks) == (device_blocks, blocks - device_blocks) else None

    def _reserve_and_allocate(
        self, request: Any, wanted: int, states: Positions, allocate: Callable[[], Any], external_tokens: int
    ) -> Any:
        """Have vLLM ``allocate`` once there are ``wanted`` blocks and ``states``, else None. ``external_tokens``:
        loaded by any."""
        assert self._pool is not None
        pages = self._reserve(request, wanted, states)
        if pages is None:
            return None
        self._pool.schedule(pages)
        if external_tokens > pages.outside_tokens(self._block_tokens):
            self._siblings.begin(pages)
        is_admitted = bool(pages.taken)
        with self.watch.apart:
            blocks = allocate()
        if blocks is None:
            self._book.ask_room()
            self._book.give_way(pages)
        elif not is_admitted:
            self._unfinished[request.request_id] = request
            self._book.prefills.begin(pages)
            self._first_token.admit(is_alone=len(self._unfinished) == 1)
            self._put_off.discard(request.request_id)
            tokens, block_tokens = request.num_tokens, self._block_tokens
            in_place, lost = min(pages.hit_blocks * block_tokens, tokens), pages.lost_blocks * block_tokens
            may_hit = self._manager.prefix_cache_lookup_enabled(request)
            self._count(request, asked_tokens=tokens * may_hit, device_tokens=in_place, lost_tokens=lost)
        return blocks

    def _reserve(self, request: Any, blocks: int, states: Positions) -> RequestPages | None:
        """Grow a request's table to ``blocks`` blocks, with pages for ``states``; None where there is no room. Raises
        ConnectorRefused where there will be none, for this engine does not come back."""
        self._leave_if_back()
        pages = self._book.find(request.request_id)
        if pages is None:
            return None
        if self._book.reserve(pages, blocks, states):
            return pages
        if self._book.is_beyond(pages, blocks, states) and not self._node.comes_back:
            raise ConnectorRefused(STUCK)
        self._book.give_way(pages)
        if self._book.is_adrift:
            free_waiting(self._manager, self._book, self._unfinished, self._loading)
        return None

    def _leave_if_back(self) -> None:
        """Return after a loss: once there is a new lease, preempt everything; then ask the workers to move."""
        if self._node.back_id:
            self._book.is_moving = True


class StateCells:
    """``manager``: vLLM's ``KVCacheManager``. ``groups``: those of states, and the layout's group that each is.
    ``step_tokens``: the most that is computed in a step."""

    def __init__(self, manager: Any, groups: Mapping[int, int], step_tokens: int) -> None:
        self._manager = manager
        self._groups = groups
        self._step_tokens = step_tokens

    def wanted(
        self, request: Any, new_tokens: int, local_tokens: int, external_tokens: int, computed_blocks: Any
    ) -> Positions:
        """Return where an allocation for ``new_tokens`` takes cells, behind ``local_tokens`` of a hit in place, whose
        blocks are ``computed_blocks``, and ``external_tokens`` that are loaded. A request that is loaded holds its
        pages while it waits, so it gets those of its first chunk, too: else such requests may hold all pages, and none
        of them can run. States for drafts move on with a chunk of several blocks, to pages of their own
        (``DaemonBlockPool.replace_spare``), which vLLM does not count."""
        is_loaded = bool(external_tokens and not new_tokens)
        if is_loaded:
            known = int(request.num_computed_tokens) + local_tokens + external_tokens
            new_tokens = max(0, min(int(request.num_tokens) - known, self._step_tokens))
        found: dict[int, range] = {}
        for group, state_group in self._groups.items():
            manager = self._manager.coordinator.single_type_managers[group]
            computed = () if computed_blocks is None else computed_blocks.blocks[group]
            local = int(request.num_computed_tokens) + local_tokens
            tokens = local + external_tokens + new_tokens
            pages = manager.get_num_blocks_to_allocate(
                request.request_id,
                tokens,
                computed,
                local + external_tokens,
                local,
                tokens,
                prefill_end=self._prefill_end(request),
            )
            pages -= sum(block.ref_cnt == 0 and not block.is_null for block in computed)
            spare = spare_states(manager)
            end = -(-tokens // manager.block_size) + spare
            had = len(manager.req_to_blocks.get(request.request_id, ()))
            if is_loaded:
                had = (local + external_tokens) // manager.block_size
            if had and pages:
                pages = min(pages + spare, end - had)
            found[state_group] = range(end - pages, end)
        return found

    def _prefill_end(self, request: Any) -> int:
        """Token at which vLLM saves a state within a chunk, as its ``allocate_slots`` says."""
        if self._manager.coordinator.retention_interval != 0:
            return 0
        return max(int(request.num_prompt_tokens), int(request.num_tokens) - 1)


class Sealer:
    """``announcer``: notes the keys of what is sealed; None: there are no KV events. ``lookahead_tokens``: those that a
    drafter reads ahead. Used from vLLM's scheduler thread."""

    def __init__(
        self, book: PageBook, keys: LookaheadKeys, announcer: Announcer | None, block_tokens: int, lookahead_tokens: int
    ) -> None:
        self._book = book
        self._keys = keys
        self._announcer = announcer
        self._block_tokens = block_tokens
        self._lookahead_tokens = lookahead_tokens
        self._redrafted_tokens = max(0, lookahead_tokens - 1)

    def seal(self, request: Any, keys: Sequence[bytes] | None = None) -> int:
        """Seal what a request has computed; the number of these blocks. ``keys``: of the request, where they are at
        hand."""
        if keys is None:
            keys = self._keys.of(request)
        full_blocks = computed_blocks(
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            block_tokens=self._block_tokens,
            keys=len(keys),
            redrafted_tokens=self._redrafted_tokens,
        )
        pages = self._book.find(request.request_id)
        if pages is not None:
            if self._announcer is not None:
                self._announcer.note(request, keys, pages.salt)
            self._book.seal(pages, min(full_blocks, pages.taken_blocks), keys)
        return full_blocks

    def seal_filled(self, filling: dict[str, tuple[Any, int]]) -> None:
        """Seal what an output has computed of requests that have full blocks, by id and up to where; those are taken
        out that have no more of them."""
        if not filling:
            return
        for request_id, (request, full_blocks) in list(filling.items()):
            pages = self._book.find(request_id)
            if (
                pages is None
                or request.is_finished()
                or (self.seal(request) >= full_blocks and not pages.awaits_others)
            ):
                del filling[request_id]

    def begin_step(self, filling: Mapping[str, tuple[Any, int]], scheduled: Collection[str]) -> None:
        """A step is launched that computes the ``scheduled`` requests, of which ``filling`` has blocks that will be
        full. A drafter may write behind its step's output, and who vouches for an adapter looks at running requests:
        of these nothing is sealed once vLLM has let go of them."""
        writes = []
        if not self._lookahead_tokens:
            for request_id, (request, blocks) in filling.items():
                pages = self._book.find(request_id)
                if pages is not None and pages.held and request_id in scheduled and request.lora_request is None:
                    keys = self._keys.of(request)
                    is_over = partial(self._is_over, request, pages)
                    writes.append(Written(pages, min(blocks, len(keys)), keys, is_over))
        self._book.begin_writes(writes)

    def _is_over(self, request: Any, pages: RequestPages) -> bool:
        return request.status.name != RUNNING or self._book.find(request.request_id) is not pages

    def end(self, request: Any, tail_keys: Sequence[bytes]) -> None:
        """Seal what a request has computed that has ended. ``tail_keys``: of its blocks with a last one that is not
        full, where that is handed over."""
        keys, pages = self._keys.of(request), self._book.find(request.request_id)
        self._keys.forget(request.request_id)
        if pages is None:
            self._book.forget(request.request_id)
            return
        self.seal(request, keys)
        if tail_keys:
            self._book.seal(pages, min(len(tail_keys), pages.taken_blocks), tail_keys)
        self._book.finish(pages, request.num_output_tokens)


WAITING = ("WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS")
"""States of a request that waits for its turn; with the last one it may be that it need not know yet."""


def free_waiting(manager: Any, book: PageBook, requests: Mapping[str, Any], loading: Loading) -> None:
    """Free those of the ``requests`` that wait, but for what is ``loading``, when all pages are held by requests that
    came from the host and wait: else none finds room. vLLM preempts none that has not run, and looks no further than
    the first: they start over."""
    waiting = [each for name, each in requests.items() if each.status.name in WAITING and name not in loading]
    held = [pages.held for each in waiting if (pages := book.find(each.request_id)) is not None]
    if book.is_moving or sum(held) == book.held_blocks:
        for request in waiting:
            manager.free(request)
            request.num_computed_tokens = 0
