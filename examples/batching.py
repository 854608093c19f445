"""Continuous batching: prefills in chunks and decodes in one call, and one Step to the daemon for each iteration.

An iteration, as `BatchEngine._iterate` has it:

    plan     every request on the device gets its next tokens, decodes first, then prefills as far as the budget goes
    grow     a block that the plan enters comes from the stock, without a round trip, or is asked for in the step
    step     one message: publish and recycle what the last iteration computed, release, swap, allocate, match
    compute  all that has its pages, layer by layer; what comes from the host is waited for by layer

The step is on its way while the iteration computes, and its answer is taken before the next one. Only where a request
cannot be computed without it (pages beyond the stock, a match, a swap) is it awaited first.

When the pool is full, the youngest request is swapped out to the host, and comes back, oldest first, once another one
has ended. A request that was swapped out goes on where it was, in the very bits that it left. Where the host is full
too, it is released instead, and computed again as far as its blocks are not found then: in the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cachesvc_client import BlockHasher, CacheClientError, Lease, PendingStep, PoolExhausted, StepBatch, StepStream
from cachesvc_client import Sequence as CacheSequence

from examples.batch_requests import BatchCounters, BatchLimits, Phase, Request
from examples.engine import name_tables, reusable_keys
from examples.tiny_transformer.generate import with_draft
from examples.tiny_transformer.model import Work
from examples.tiny_transformer.tokens import Tokens
from examples.workers import Worker

Handler = Callable[[Any], None]


class Step:
    """Operations of one iteration, each with what becomes of its result."""

    def __init__(self, batch: StepBatch[CacheSequence]) -> None:
        self.batch = batch
        self.is_needed = False
        self._handlers: list[tuple[int, Handler]] = []
        self._pending: PendingStep | None = None

    def add(self, place: int, handle: Handler, *, is_needed: bool = False) -> None:
        """``place``: where the operation's result will stand. ``is_needed``: before this iteration computes."""
        self._handlers.append((place, handle))
        self.is_needed |= is_needed

    def send(self, steps: StepStream) -> None:
        """Send it; ``collect`` once it was."""
        self._pending = steps.send(self.batch)

    def collect(self) -> None:
        """Wait for the answer and hand out the results, unless that was done."""
        pending, self._pending = self._pending, None
        if pending is not None:
            results = pending.results()
            for place, handle in self._handlers:
                handle(results[place])


class BatchEngine:
    """Runs requests through one lease. Used from one thread."""

    def __init__(self, worker: Worker, lease: Lease, limits: BatchLimits) -> None:
        self.counters = BatchCounters()
        self._worker = worker
        self._lease = lease
        self._limits = limits
        self._block_tokens = worker.model.config.block_tokens
        self._requests: list[Request] = []
        self._starving: tuple[Request, PoolExhausted] | None = None  # the oldest request that got no pages
        self._has_room = True  # a request has ended since an allocation failed

    def run(self, prompts: Sequence[Tokens], new_tokens: int | Sequence[int]) -> list[Request]:
        """Answer all prompts, each with ``new_tokens`` tokens; the requests as they ended, in order.

        Raises PoolExhausted when a request does not fit by itself.
        """
        namespace = self._lease.registration.namespace
        counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        self._requests = [
            Request(age, prompt, count, BlockHasher(namespace, self._block_tokens))
            for age, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        with self._lease.step(self._limits.stock_blocks) as steps:
            while any(request.phase is not Phase.ENDED for request in self._requests):
                self._iterate(steps)
        return self._requests

    def _iterate(self, steps: StepStream) -> None:
        planned, step = self._plan(), Step(steps.batch())
        starving, self._starving = self._starving, None
        victim = None if starving is None else self._pick_victim(starving[0])
        running = [request for request in self._requests if request.phase is Phase.RUNNING]
        for request in running:  # all of them first: so they travel in a column
            if request is not victim:  # a swap out drops spares, so nothing may be published just before it
                self._publish(request, step)
        for request in running:
            self._give_back(request, step)
        if victim is not None:
            self._send_away(victim, step)
        for request in sorted(planned, key=lambda each: each.age):
            if request.is_active:
                self._reserve(request, planned[request], step)
        if starving is None:
            self._bring_in(planned, step)
        step.send(steps)
        self.counters.steps += 1
        if step.is_needed:
            step.collect()
        else:
            self.counters.sent_ahead += 1
        ready = {request: count for request, count in planned.items() if self._has_pages(request, count)}
        if ready:
            self._compute(ready)
        step.collect()
        for request in self._requests:  # transfers have their own end, after which the daemon takes the next call
            if request.phase in (Phase.RUNNING, Phase.SWAPPED):
                request.open_sequence.wait_swapped()
                if not request.open_sequence.is_swapped_out:
                    request.open_sequence.wait_loaded()
        if not ready and victim is None:
            self._require_hope()

    def _require_hope(self) -> None:
        """Raise PoolExhausted unless another request can make room for the starving one. Nothing was computed."""
        if self._starving is not None and self._pick_victim(self._starving[0]) is None:
            raise self._starving[1]

    def _plan(self) -> dict[Request, int]:
        """Number of tokens each request is to compute; a decode's draft not counted."""
        budget = self._limits.token_budget
        planned: dict[Request, int] = {}
        active = [each for each in self._requests if each.is_active and each.tokens_left]
        for request in sorted(active, key=lambda each: (each.tokens_ahead > 1, each.age)):
            count = min(request.chunk_ahead, self._limits.chunk_tokens, budget)
            if count:
                planned[request] = count
                budget -= count
        return planned

    def _pick_victim(self, starving: Request) -> Request | None:
        """The youngest request on the device, unless that is the one that starves."""
        active = [each for each in self._requests if each.is_active and each.tokens_left and each.age > starving.age]
        return max(active, key=lambda each: each.age, default=None)

    def _publish(self, request: Request, step: Step) -> None:
        """Seal the full blocks of what was computed."""
        sequence, counters = request.open_sequence, self.counters
        full_blocks, sealed_before = request.computed // self._block_tokens, sequence.sealed_blocks

        def published(result: Any) -> None:
            counters.published_blocks += _require_done(result).sealed_blocks - sealed_before

        if full_blocks > sealed_before:
            step.add(step.batch.publish(sequence, full_blocks, bytes(request.hasher.keys)), published)

    def _give_back(self, request: Request, step: Step) -> None:
        """Recycle what no window needs any more, and release what has ended."""
        sequence, counters = request.open_sequence, self.counters
        holes_before = _count_holes(sequence)

        def recycled(result: Any) -> None:
            _require_done(result)
            if not sequence.is_swapped_out:
                counters.recycled_cells += _count_holes(sequence) - holes_before

        reached = request.computed if self._limits.recycles else 0  # with 0 spares alone are given back
        step.add(step.batch.recycle(sequence, reached), recycled)

        def ended(result: Any) -> None:
            _require_done(result)
            request.move(Phase.ENDED)
            self._has_room = True

        if not request.tokens_left:
            step.add(step.batch.release(sequence), ended)

    def _send_away(self, victim: Request, step: Step) -> None:
        """Swap a request out; one that has nothing yet but its hit matches again later."""
        sequence = victim.open_sequence

        def left(result: Any) -> None:
            if isinstance(result, PoolExhausted):  # of the host
                sequence.release()
                victim.restart()
                self.counters.recomputed += 1
            else:
                _require_done(result)
                self.counters.swapped_out += 1

        if victim.phase is Phase.MATCHED:
            step.add(step.batch.release(sequence), _require_done)
            victim.restart()
        else:
            step.add(step.batch.swap_out(sequence), left, is_needed=True)
            victim.move(Phase.SWAPPED)

    def _reserve(self, request: Request, count: int, step: Step) -> None:
        """Pages for what is planned: out of the stock where it has them, else by the step."""
        sequence, needed = request.open_sequence, self._needed_blocks(request, count)
        stock = self._lease.record.stock
        missing = needed - sequence.blocks
        if request.phase is Phase.RUNNING and missing > 0 and stock is not None and stock.blocks:
            taken = min(missing, stock.blocks)
            sequence.grow_from_stock(taken)
            self.counters.grown_blocks += taken
            missing -= taken

        def allocated(result: Any) -> None:
            if isinstance(result, PoolExhausted):
                self._has_room = False
                if self._starving is None or request.age < self._starving[0].age:
                    self._starving = (request, result)
                return
            _require_done(result)
            if request.phase is Phase.MATCHED:
                request.move(Phase.RUNNING)

        if request.phase is Phase.MATCHED or missing > 0:
            step.add(step.batch.allocate(sequence, max(needed, sequence.hit_blocks)), allocated, is_needed=True)

    def _bring_in(self, planned: dict[Request, int], step: Step) -> None:
        """Swap in the oldest request when there may be room, or admit a new one if none is swapped out."""
        away = next((each for each in self._requests if each.phase is Phase.SWAPPED), None)
        waiting = next((each for each in self._requests if each.phase is Phase.WAITING), None)
        active = sum(each.is_active for each in self._requests)
        if active and (not self._has_room or active >= self._limits.requests):
            return
        if away is not None:
            back = self._returner(away, planned, is_alone=not active)
            step.add(step.batch.swap_in(away.open_sequence), back, is_needed=True)
        elif waiting is not None:
            found = step.batch.match(reusable_keys(waiting.hasher, len(waiting.tokens)))
            step.add(found, self._admitter(waiting), is_needed=True)

    def _returner(self, request: Request, planned: dict[Request, int], *, is_alone: bool) -> Handler:
        def returned(result: Any) -> None:
            if isinstance(result, PoolExhausted) and not is_alone:
                self._has_room = False
                return
            _require_done(result)
            request.move(Phase.RUNNING)
            planned[request] = min(request.chunk_ahead, self._limits.chunk_tokens)
            self.counters.swapped_in += 1

        return returned

    def _admitter(self, request: Request) -> Handler:
        def admitted(result: Any) -> None:
            request.sequence = _require_done(result)
            request.computed = request.open_sequence.hit_blocks * self._block_tokens
            self.counters.hit_tokens += request.computed
            request.move(Phase.MATCHED)

        return admitted

    def _compute(self, ready: dict[Request, int]) -> None:
        """Guess where there is a draft layer, then compute everything in one call, and take what follows."""
        layout = self._lease.registration.layout
        works = {}
        for request, count in ready.items():
            tokens = np.array(request.tokens[request.computed : request.computed + count], dtype=np.int32)
            works[request] = Work(tokens, request.computed, name_tables(request.open_sequence, layout))
        tickets = [ticket for request in ready for ticket in request.open_sequence.tickets]
        drafted = [request for request, count in ready.items() if self._takes_draft(request, count)]
        if drafted:
            guesses = self._worker.guess([works[request] for request in drafted], tickets)
            for request, guess in zip(drafted, guesses, strict=True):
                works[request] = with_draft(works[request], guess)
        decodes = sum(bool(request.answer) for request in ready)
        self.counters.mixed_iterations += 0 < decodes < len(ready)
        for request, logits in zip(works, self._worker.compute(list(works.values()), tickets), strict=True):
            request.take(works[request], logits, ready[request])

    def _takes_draft(self, request: Request, count: int) -> bool:
        """True for a decode of a model with a draft layer, unless one token is all that is wanted."""
        has_draft = self._worker.model.config.draft is not None
        return has_draft and bool(request.answer) and request.tokens_ahead == count == 1 and request.tokens_left > 1

    def _needed_blocks(self, request: Request, count: int) -> int:
        end = request.computed + count + self._takes_draft(request, count)
        return -(-end // self._block_tokens)

    def _has_pages(self, request: Request, count: int) -> bool:
        return (
            request.phase is Phase.RUNNING
            and bool(request.tokens_left)
            and request.open_sequence.blocks >= self._needed_blocks(request, count)
        )


def _count_holes(sequence: CacheSequence) -> int:
    """Cells of the tables without a page."""
    return sum(int(np.count_nonzero(table < 0)) for table in sequence.tables)


def _require_done(result: Any) -> Any:
    """An operation's result. Raises what it failed with."""
    if isinstance(result, CacheClientError):
        raise result
    return result
