"""vLLM's own scheduler and both sides of the connector on a real daemon, without a model: what runs instead writes into
each token's slot a digest of the tokens up to there, and before that looks whether all slots behind it hold theirs. So
a page that is lost, another's, or of other weights is found in the step that reads it. A drafter has a second slot for
each token, with a digest of the next token too, as EAGLE-like drafters have."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachesvc_client.memory.pool import LoadOutcome
from cachesvc_client.plugins.node import Node, Share, new_instance
from cachesvc_vllm.metrics import CacheStats
from cachesvc_vllm.settings import FLAGS, Settings
from cachesvc_vllm.transfers import SHORT_LOAD_BYTES, WorkerShare
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.vllm.cells import Cells, Misread, Running
from tests.vllm.schedulers import make_scheduler
from tests.vllm.shape import Shape
from tests.vllm.workers import Worker

LONGEST, VOCABULARY = 128, 50

SHORT_LOAD_BLOCKS = 4
"""Blocks of loads that steps with other requests wait for."""


class Model:
    """``root`` stands for the weights: with other ones, digests and answers are others."""

    def __init__(self) -> None:
        self.root = 0

    def digests(self, tokens: Sequence[int], adapter: int = 0) -> list[int]:
        """Digest of each token, with all before it. ``adapter``: what is loaded of one; 0: none."""
        digest, found = hash((self.root, adapter)) if adapter else self.root, []
        for token in tokens:
            digest = self.follow(digest, token)
            found.append(digest)
        return found

    def follow(self, digest: int, token: int) -> int:
        """The digest of a token behind others."""
        return hash((digest, token)) & (1 << 63) - 1

    def answer(self, prompt: Sequence[int], new: int, adapter: int = 0) -> list[int]:
        """Tokens that follow a prompt."""
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(self.digests(tokens, adapter)[-1] % VOCABULARY)
        return tokens[len(prompt) :]


class Engine:
    """``share``: what its worker says at the start. ``answers``: by request, as far as they have come. ``told``: by
    request, its last words for a router. ``hits``: tokens that were there when it was first scheduled.
    ``loads``, and the ``failed_loads`` of these, have ended; ``early``: those that a step waited for.
    ``copies``: pages that were copied within the device. ``asks_layers``: how likely layers ask for early loads.
    ``interrupt``: called once when a request is about to be computed that has something behind it; from then on tokens
    that are not what they should be are read all the same, as kernels would, and are ``misread``.
    ``sibling_errors``: blocks that another connector of a MultiConnector reports, with the next output.
    ``mixed``: requests whose adapter was loaded anew while they ran: what they say is of two adapters."""

    def __init__(self, name: str, socket: str, seed: int, shape: Shape) -> None:
        self.name, self.shape, self.model = name, shape, Model()
        self._rng = random.Random(seed)
        settings = Settings(
            socket=socket,
            stock_blocks=shape.stock,
            draft_blocks=shape.draft_blocks or "lookahead",
            weights_version=shape.weights_version,
            remote_patience_ms=shape.patience_ms,
        )
        share = Share("m", shape.layout, shape.pages, longest_blocks=LONGEST // shape.block_tokens, parts=shape.parts)
        instance = new_instance(name)
        node = Node(settings, instance, share, flags=FLAGS, attaches=True)
        self.worker = Worker(node, shape.page_bytes, shape.stages)
        self.scheduler = make_scheduler(name, settings, shape, LONGEST)
        self.connector = self.scheduler.connector
        self.share = WorkerShare(share, self.worker.comes_back, instance)
        self.connector.set_xfer_handshake_metadata({0: self.share})
        loading = self.connector._scheduler._loading  # noqa: SLF001 - as of blocks that are larger
        loading._block_bytes *= SHORT_LOAD_BYTES // (SHORT_LOAD_BLOCKS * max(1, loading._block_bytes))  # noqa: SLF001
        self.stats, self._tell_stats = CacheStats(), self.connector.get_kv_connector_stats
        self.connector.get_kv_connector_stats = self.take_stats
        self._hasher = get_request_block_hasher(shape.hash_tokens, sha256_cbor)
        self._tokens: dict[str, list[int]] = {}
        self._under_way: deque[_Step] = deque()
        self._late: list[Callable[[], None]] = []
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.told: dict[str, Any] = {}
        self.loads = self.failed_loads = self.misread = self.most_stock = self.copies = self.early = 0
        self.asks_layers = 0.5
        self.interrupt: Callable[[], None] | None = None
        self.sibling_errors: set[int] = set()
        self.mixed: set[str] = set()
        self._adapters: dict[str, int] = {}
        self._was_interrupted = False
        self._step_loads: dict[str, Any] = {}
        self._spoilt: set[str] = set()
        self._tables: dict[str, list[list[int]]] = {}
        self._running: dict[str, Running] = {}

    @property
    def is_busy(self) -> bool:
        """True while anything is left to do."""
        return bool(self.scheduler.has_requests() or self._under_way)

    def add(self, prompt: Sequence[int], new: int, adapter: Any = None, handover: Any = None) -> str:
        """A request comes; its name. ``adapter``: its ``LoRARequest``; ``handover``: a router's words with it."""
        name = f"{self.name}-{len(self.requests)}"
        extra = None if handover is None else {"kv_transfer_params": handover}
        params = SamplingParams(max_tokens=new, ignore_eos=True, extra_args=extra)
        priority = self._rng.randrange(3) if self.shape.has_priorities else 0
        request = Request(
            name, list(prompt), params, None, lora_request=adapter, block_hasher=self._hasher, priority=priority
        )
        self.requests[name] = request
        self._tokens[name], self.answers[name] = list(prompt), []
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def load(self, root: int) -> None:
        """Load other weights, while nothing runs, and reset."""
        self.model.root = root
        assert self.scheduler.reset_prefix_cache()

    def load_adapter(self, request: Any, content: int, *, is_noticed: bool) -> None:
        """Load an adapter in place. ``is_noticed``: by a call of the scheduler's process, else by none of its."""
        adapters = self.worker.adapters
        adapters.files[request.lora_path] = adapters.memory[request.lora_int_id] = content
        running = self.scheduler.running
        self.mixed |= {
            each.request_id for each in running if each.lora_request and each.lora_request.name == request.name
        }
        if is_noticed:
            self.connector._scheduler._adapters.forget()  # noqa: SLF001 - as the wrapped call does

    def reset(self) -> None:
        """There are new weights, unless vLLM cannot take them now."""
        with suppress(RuntimeError):  # what is loaded cannot be preempted
            if self.scheduler.reset_prefix_cache(reset_running_requests=True):
                self.model.root += 1

    def take_stats(self) -> CacheStats | None:
        """Statistics of the connector, which vLLM asks for in each iteration; ``stats`` has the sum."""
        told: CacheStats | None = self._tell_stats()
        if told is not None:
            assert told.data["failed_loads"] <= told.data["loads"], "vLLM counts those that came, and no less than none"
            self.stats.aggregate(told)
        return told

    @property
    def is_adrift(self) -> bool:
        """True while it has no daemon."""
        return bool(self.connector._scheduler._book.is_adrift)  # noqa: SLF001 - vLLM need not know

    @property
    def stock(self) -> int:
        """Pages that the daemon has granted ahead."""
        stock = self.connector._scheduler._book._lease.record.stock  # noqa: SLF001 - vLLM need not know
        assert stock is not None
        return int(stock.blocks)

    def wait_for_answers(self) -> None:
        """Wait for the daemon as an engine that computes nothing: its iterations take no time here."""
        self.connector._scheduler._book.outbox.runs = lambda: False  # noqa: SLF001 - vLLM need not know

    def settle(self) -> None:
        """Kernels of an iteration take longer than the daemon's answers."""
        book = self.connector._scheduler._book  # noqa: SLF001 - vLLM need not know
        while not (book.outbox.is_empty or book.is_adrift):
            book.outbox.poll()
        if not book.is_adrift:
            self.most_stock = max(self.most_stock, self.stock)

    def catch_up(self) -> None:
        """Kernels take longer than the daemon's making room, too."""
        book = self.connector._scheduler._book  # noqa: SLF001 - as its hooks do, which come once in an iteration
        while not (book.outbox.is_empty and book._lease.record.stock.is_full):  # noqa: SLF001
            book.outbox.poll()
            if book.outbox.is_empty:
                book.flush()

    def waiting_for_loads(self) -> int:
        """Number of requests that are being loaded from the host."""
        return sum(each.status == RequestStatus.WAITING_FOR_REMOTE_KVS for each in self.scheduler.requests.values())

    def step(self) -> None:
        """Schedule, and take the output of what was scheduled first. Kernels may run at once, or as late as can be."""
        if not self.is_busy:
            return
        steps = self._under_way
        if self.scheduler.has_requests():
            steps.append(self._schedule())
            if self._rng.random() < 0.5:
                self._run(len(steps))
            is_last = not (steps[-1].said.total_num_scheduled_tokens or self.scheduler.has_requests())
            if len(steps) < self.shape.steps_under_way and not is_last:
                return
        self._run(1)
        step = steps.popleft()
        for outputs in self.scheduler.update_from_output(step.said, step.output).values():
            for each in outputs.outputs:
                self.answers[each.request_id] += each.new_token_ids
                if each.kv_transfer_params is not None:
                    self.told[each.request_id] = each.kv_transfer_params
        if (told := step.output.kv_connector_output) is not None and told.invalid_block_ids:
            for name, (tables, _) in step.places.items():
                is_under_way = any(name in each.places for each in steps)
                if not (is_under_way or told.invalid_block_ids.isdisjoint(*tables)):  # it is computed again
                    self._tokens[name] = list(self.requests[name].all_token_ids)
        if self.shape.drafts:
            self._draft()

    def run_all(self) -> None:
        """Have all kernels run that were launched."""
        self._run(len(self._under_way))

    def check_answers(self) -> int:
        """Each is as far as it goes what the model says; how many are whole."""
        whole = 0
        for name, request in self.requests.items():
            new = min(request.max_tokens, LONGEST - request.num_prompt_tokens)
            if name in self.mixed:
                continue
            expected = self.model.answer(request.prompt_token_ids, new, self._adapters.get(name, 0))
            assert self.answers[name] == expected[: len(self.answers[name])], name
            whole += self.answers[name] == expected
            broken = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
            assert broken or self.answers[name] == expected, (name, request.status)
        return whole

    def check_beginnings(self) -> None:
        """All that came is right, of an engine that has ended."""
        for name, request in self.requests.items():
            answer = self.answers[name]
            assert answer == self.model.answer(request.prompt_token_ids, len(answer)), name

    def leftovers(self) -> dict[str, Any]:
        """State of requests that is kept when none is left."""
        side = self.connector._scheduler  # noqa: SLF001 - it shall be empty
        book, record = side._book, side._book._lease.record  # noqa: SLF001
        kept: dict[str, Any] = {"loads": self.worker._loads, "scheduler": self.scheduler.requests}  # noqa: SLF001
        parts = [getattr(book.untold, each) for each in ("ready", "_late", "_fresh")]
        kept |= {"untold": [part for part in parts if part.sealing or part.ended]}
        owners = (side, side._pool, side._keys, side._loading, book, book._matches, book.prefills, book.outbox, record)  # noqa: SLF001
        for owner in owners:
            kept |= {each: value for each, value in vars(owner).items() if isinstance(value, dict | list | set)}
        ours = ("pools", "blocks", "kv_event_queue", "_callbacks", "_hits")
        return {each: value for each, value in kept.items() if value and each not in ours}

    def close(self) -> None:
        """End the leases."""
        self.scheduler.shutdown()
        self.worker.close()

    def _schedule(self) -> _Step:
        said = self.scheduler.schedule()
        self._take_tables(said)
        places = {}
        for name, count in said.num_scheduled_tokens.items():
            table = tuple(list(each) for each in self._tables[name])
            places[name] = table, self.requests[name].num_computed_tokens - count
            self.hits.setdefault(name, places[name][1])
        zeroed = set(said.new_block_ids_to_zero or ())
        if zeroed:
            tables = [self.scheduler.kv_cache_manager.get_block_ids(name) for name in self.scheduler.requests]
            zeroed.difference_update(page for each in tables for table in each for page in table)
            assert not zeroed, f"pages {zeroed} are no request's any more, and would be zeroed"
        return _Step(said, places)

    def _take_tables(self, said: Any) -> None:
        """Workers' tables only grow while a request runs: what the scheduler does to blocks behind these it must say
        with new ones."""
        for name in (*said.finished_req_ids, *(said.preempted_req_ids or ())):
            self._tables.pop(name, None)
        for each in said.scheduled_new_reqs:
            self._tables[each.req_id] = [list(table) for table in each.block_ids]
        cached = said.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(table) for table in new]
                continue
            for table, more in zip(self._tables[name], new or (), strict=False):
                table.extend(more)

    def _run(self, steps: int) -> None:
        for step in list(self._under_way)[:steps]:
            if step.output is None:
                step.output = self._execute(step)

    def _execute(self, step: _Step) -> ModelRunnerOutput:
        told = step.said.kv_connector_metadata
        self._finish_drafts()
        self.worker.begin_step(told.next_lease)
        self.worker.slots[step.said.new_block_ids_to_zero or []] = 0
        assert step.said.has_sync_kv_loads or not (told.copies or told.early), "workers would begin after they computed"
        self.worker.start_early(told, calls_layers=self._rng.random() < self.asks_layers)
        if step.said.num_scheduled_tokens:
            self.worker.wait_layer("l0")
        self.copies += len(told.copies)
        self.early += len(told.early)
        resumed = step.said.scheduled_cached_reqs.resumed_req_ids
        for name in resumed:  # what was in flight is over, or was dropped
            self._tokens[name] = list(self.requests[name].all_token_ids)
            self._spoilt.discard(name)
        for name in (*step.said.finished_req_ids, *(step.said.preempted_req_ids or ()), *resumed):
            self._running.pop(name, None)
        self._step_loads = told.early
        sampled = [
            self._compute(name, *step.places[name], count, step.said.scheduled_spec_decode_tokens.get(name, ()))
            for name, count in step.said.num_scheduled_tokens.items()
        ]
        self.worker.start_loads(told.loads, may_wait=told.is_empty)
        results = self.worker.take_results()
        self.loads += len(results.finished_recving) + len(told.early)
        void = {name for name in told.early if self._is_void(name)}
        self._spoilt |= void  # a step that is under way reads what this one wrote
        self.failed_loads += len(results.failed_recving) + len(void)
        errors, self.sibling_errors = self.sibling_errors, set()
        output = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.invalid_blocks() | errors,
            kv_connector_worker_meta=self.worker.take_lease(),
        )
        return ModelRunnerOutput(
            req_ids=list(step.places),
            req_id_to_index={name: index for index, name in enumerate(step.places)},
            sampled_token_ids=sampled,
            kv_connector_output=None if output.is_empty() else output,
        )

    def _compute(
        self, name: str, tables: tuple[list[int], ...], computed: int, count: int, drafts: Sequence[int]
    ) -> list[int]:
        """Kernels of one request: what they sample. Drafts of which the last ones are wrong are computed too."""
        tokens, slots = self._tokens[name], self.worker.slots
        running = self._running.setdefault(name, Running())
        cells = [Cells(group, table, slots, running) for group, table in zip(self.shape.groups, tables, strict=True)]
        row = tokens[: computed + count]
        guesses = len(drafts)
        row += drafts[: computed + count - len(row)]
        if computed and self.interrupt is not None:
            interrupt, self.interrupt, self._was_interrupted = self.interrupt, None, True
            interrupt()
        adapter = self.requests[name].lora_request
        loaded = self._adapters[name] = 0 if adapter is None else self.worker.adapters.load(adapter)
        digests = self.model.digests(row, loaded)
        wrong = 0
        try:
            for each in cells:
                each.read(digests, computed)
        except Misread:
            if not (self._was_interrupted or self._is_void(name) or name in self.mixed):
                raise
            wrong = 1
        self.misread += wrong
        digests = [digest + wrong for digest in digests]
        for each in cells:
            each.write(digests, computed, guesses)
        sampled = self._sample(tokens, row, digests, is_whole=computed + count >= len(tokens))
        running.column, running.accepted = Cells.column(len(row)), max(1, len(sampled))
        has_moved = [each.accept(len(row), guesses, running.accepted) for each in cells]
        running.accepted = 1 if any(has_moved) else running.accepted
        tokens += sampled
        if self.shape.draft_blocks:
            self._late.append(partial(self._write_drafter, name, tables[-1], computed, digests, list(tokens)))
            if not self.shape.drafts_late:
                self._finish_drafts()
        return sampled

    def _is_void(self, name: str) -> bool:
        """True where an early load of the request has failed, in this step or the last one: vLLM drops what it says."""
        if name in self._spoilt:
            return True
        load, waits = self._step_loads.get(name), self.worker._waits  # noqa: SLF001 - vLLM need not know
        return load is not None and any(waits.end(ticket) is not LoadOutcome.CAME for ticket in load.tickets)

    def _finish_drafts(self) -> None:
        late, self._late = self._late, []
        for draft in late:
            draft()

    def _write_drafter(
        self, name: str, table: list[int], computed: int, digests: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """The drafter's pass behind the target's: it reads its slots of what was computed before, and writes those of
        this step, each with the token behind it; those of drafts that were refused are left wrong. Keys without
        lookahead do not tell apart what follows a block, as in vLLM alone: its last slot may be for another token."""
        slots, block = self.worker.slots, self.shape.groups[-1].block_tokens
        for at in range(len(digests)):
            page, slot = table[at // block], block + at % block
            if at + 1 >= len(tokens):
                slots[page, slot] = 1
                continue
            expected = self.model.follow(digests[at], tokens[at + 1])
            if at >= computed:
                slots[page, slot] = expected
            elif self.shape.draft_blocks == "lookahead" or (at + 1) % self.shape.block_tokens:
                assert slots[page, slot] == expected, f"{name}: the drafter's token {at} of {computed} is another's"

    def _sample(self, tokens: list[int], row: list[int], digests: list[int], *, is_whole: bool) -> list[int]:
        if not is_whole:
            return []
        sampled = [digests[len(tokens) - 1] % VOCABULARY]
        for at in range(len(tokens), len(row)):
            if row[at] != sampled[-1]:
                break
            sampled.append(digests[at] % VOCABULARY)
        return sampled

    def _draft(self) -> None:
        """Guess what comes next: often rightly."""
        names = [each.request_id for each in self.scheduler.running]
        guesses = []
        for name in names:
            right = self.model.answer(self._tokens[name], self._rng.randrange(self.shape.drafts + 1))
            guesses.append([each if self._rng.random() < 0.7 else (each + 1) % VOCABULARY for each in right])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))


@dataclass
class _Step:
    """``places``: by request, its tables, and how much of it is computed before."""

    said: Any
    places: dict[str, tuple[tuple[list[int], ...], int]]
    output: Any = None
