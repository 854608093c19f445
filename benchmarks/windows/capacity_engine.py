"""A discrete-event engine over the real ledger: continuous batching, chunked prefill, preemption by recomputing.

Every page comes from the daemon's flows; only time is made up (``Machine``). Steps in which no table changes, no
request ends and none can be admitted are counted in one go, with their exact sum.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from benchmarks.windows.capacity_node import Node
from benchmarks.windows.capacity_plan import FULL, WINDOW, Machine, Request, held_blocks
from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.model.answers import GroupCells
from cachesvc.model.errors import PoolExhausted
from cachesvc.model.words import KEY_BYTES


@dataclass(frozen=True)
class Rules:
    """Scheduling rules of the engine. ``reserve_tokens``: room that admission keeps for tokens to be generated."""

    recycles: bool
    step_tokens: int
    shared_tokens: int
    reserve_tokens: int


@dataclass(eq=False)
class Job:
    """One request. While it decodes, ``computed`` is the engine's step count less ``offset``."""

    id: int
    request: Request
    keys: bytes
    computed: int = 0
    generated: int = 0
    blocks: int = 0
    sealed: int = 0
    charged: int = 0
    offset: int = 0
    spares: tuple[GroupCells, ...] = ()

    @property
    def known(self) -> int:
        """Tokens that there are: those of the prompt and those generated."""
        return self.request.prompt_tokens + self.generated


@dataclass
class Outcome:
    """Result of a run. ``running_seconds``: integral of the sequences on the device over time."""

    seconds: float = 0.0
    output_tokens: int = 0
    prefill_tokens: int = 0
    hit_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    running_seconds: float = 0.0
    most_running: int = 0
    done: int = 0
    first_token_s: list[float] = field(default_factory=list)


class Engine:
    """Runs requests to their end; ``run`` gives the outcome."""

    def __init__(self, machine: Machine, node: Node, rules: Rules, requests: list[Request]) -> None:
        self.machine = machine
        self.node = node
        self.rules = rules
        self.layout = node.model.layout
        self.block = self.layout.block_tokens
        self.coming = deque(self._job(i, request) for i, request in enumerate(requests, start=1))
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}  # in the order of admission
        self.prefilling: dict[Job, None] = {}
        self.due: dict[int, list[Job]] = {}
        self.decode_steps = 0
        self.context = 0  # tokens of all that decode
        self.decoding = 0
        self.charged = 0
        self.now = 0.0
        self.out = Outcome()
        group = self.layout.groups[WINDOW]
        self.reach = (group.window_tokens or 0) + group.sink_tokens
        self.token_bytes = [self.layout.page_bytes(g) / self.block for g in (FULL, WINDOW)]

    def run(self) -> Outcome:
        """Serve everything."""
        while self.coming or self.waiting or self.running:
            while self.coming and self.coming[0].request.arrival_s <= self.now:
                self.waiting.append(self.coming.popleft())
            while self.waiting and self._has_room(self.waiting[0]):
                self._admit(self.waiting.popleft())
            if not self.running:
                assert self.coming, "a request does not fit into an empty pool"
                self.now = self.coming[0].request.arrival_s
                continue
            self._grow()
            self._step(self._plan_chunks())
        self.out.seconds = self.now
        return self.out

    # -- admission ---------------------------------------------------------------------------------------------

    def _job(self, number: int, request: Request) -> Job:
        blocks = (request.prompt_tokens + request.output_tokens) // self.block
        shared = self.rules.shared_tokens // self.block
        names = (f"{0 if i < shared else number} {i}" for i in range(blocks))
        return Job(number, request, b"".join(hashlib.blake2b(n.encode(), digest_size=32).digest() for n in names))

    def _charge(self, job: Job) -> int:
        tokens = job.known + max(0, self.rules.reserve_tokens - job.generated)
        return -(-tokens // self.block) - self.rules.shared_tokens // self.block

    def _has_room(self, job: Job) -> bool:
        """Full pages for what all will hold; for windows a bound a sequence, and one step's chunk."""
        pools = self.node.place.pools
        shared = self.rules.shared_tokens // self.block
        if self.charged + self._charge(job) + shared > pools[FULL].capacity:
            return False
        chunk = self.rules.step_tokens // self.block + 1
        windows = (len(self.running) + 1) * held_blocks(self.layout) + chunk
        return not self.rules.recycles or windows <= pools[WINDOW].capacity

    def _admit(self, job: Job) -> None:
        matched = self.node.run(match, job.id, job.keys, (job.known - 1) // self.block)
        job.blocks = job.sealed = matched.device_blocks
        job.computed = job.blocks * self.block
        job.charged = self._charge(job)
        self.charged += job.charged
        self.out.hit_tokens += job.computed
        self.running[job] = None
        self.prefilling[job] = None
        self.out.most_running = max(self.out.most_running, len(self.running))

    def _preempt(self, job: Job) -> None:
        """Take a job off the device, to be computed again as far as its blocks are not found then."""
        if job not in self.prefilling:
            job.computed = self.decode_steps - job.offset
            job.generated = job.computed - job.request.prompt_tokens + 1
            self._stop_decoding(job)
        self._leave(job)
        job.computed = job.blocks = job.sealed = 0
        self.waiting.appendleft(job)
        self.out.preemptions += 1

    def _leave(self, job: Job) -> None:
        self.node.run(release, job.id)
        self.prefilling.pop(job, None)
        del self.running[job]
        self.charged -= job.charged
        job.spares = ()

    # -- pages -------------------------------------------------------------------------------------------------

    def _allocate(self, job: Job, blocks: int) -> bool:
        """Pages up to ``blocks``, preempting the youngest while there are none; False when that was the job itself."""
        while blocks > job.blocks:
            try:
                self.node.run(allocate, job.id, blocks)
            except PoolExhausted:
                youngest = next(reversed(self.running))
                self._preempt(youngest)
                if youngest is job:
                    return False
                continue
            job.blocks = blocks
        over = job.blocks - self.rules.shared_tokens // self.block - job.charged
        if over > 0:
            job.charged += over
            self.charged += over
        return True

    def _seal(self, job: Job) -> None:
        """After a step: publish the full blocks, give back what no window needs."""
        first, last = job.sealed, job.computed // self.block
        if last > first:
            keys = job.keys[first * KEY_BYTES : last * KEY_BYTES]
            published = self.node.run(publish, job.id, first, keys, last - first)
            job.sealed = published.sealed_blocks
            job.spares += published.spares
        computed = job.computed if self.rules.recycles else 0
        if computed or job.spares:
            self.node.run(recycle, job.id, computed, job.spares)
            job.spares = ()

    # -- steps -------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Pages for those whose last block is full."""
        for job in self.due.pop(self.decode_steps, []):
            if job not in self.running or job in self.prefilling:
                continue  # preempted since
            job.computed = self.decode_steps - job.offset
            self._seal(job)
            if self._allocate(job, job.computed // self.block + 1):
                self._schedule(job)

    def _plan_chunks(self) -> list[tuple[Job, int]]:
        """Prefill of this step: the oldest first, as far as the step's tokens go."""
        left = self.rules.step_tokens - self.decoding
        chunks: list[tuple[Job, int]] = []
        for job in list(self.prefilling):
            count = min(left, job.known - job.computed)
            if count <= 0 or job not in self.prefilling:
                continue
            if self._allocate(job, -(-(job.computed + count) // self.block)):
                chunks.append((job, count))
                left -= count
        return [(job, count) for job, count in chunks if job in self.prefilling]

    def _step(self, chunks: list[tuple[Job, int]]) -> None:
        tokens = sum(count for _, count in chunks)
        steps = 1 if chunks or not self.decoding else self._quiet_steps()
        context = steps * self.context + self.decoding * steps * (steps - 1) // 2
        windows = steps * self.decoding * self.reach
        context += sum(job.computed for job, _ in chunks)
        windows += sum(min(job.computed, self.reach) for job, _ in chunks)
        read = context * self.token_bytes[FULL] + windows * self.token_bytes[WINDOW]
        machine = self.machine
        seconds = steps * (machine.fixed_s + self.decoding * machine.token_s) + tokens * machine.token_s
        seconds += read / machine.bytes_per_s
        self.now += seconds
        self.out.steps += steps
        self.out.running_seconds += seconds * len(self.running)
        self.out.output_tokens += steps * self.decoding
        self.out.prefill_tokens += tokens
        self.context += steps * self.decoding
        self.decode_steps += steps
        self._end_decodes()
        for job, count in chunks:
            job.computed += count
            self._seal(job)
            if job.computed == job.known:
                self._start_decoding(job)

    def _quiet_steps(self) -> int:
        """Steps until a table must grow, a request ends, or one arrives."""
        steps = min(self.due) - self.decode_steps
        if self.coming and steps > 1:
            rate = self.machine.fixed_s + self.decoding * self.machine.token_s
            rate += self.context * self.token_bytes[FULL] / self.machine.bytes_per_s
            steps = min(steps, 1 + int((self.coming[0].request.arrival_s - self.now) / rate))
        return max(1, steps)

    def _start_decoding(self, job: Job) -> None:
        """The last chunk of a prompt gives a token too."""
        del self.prefilling[job]
        if not job.generated:
            self.out.first_token_s.append(self.now - job.request.arrival_s)
        job.generated += 1
        self.out.output_tokens += 1
        job.offset = self.decode_steps - job.computed
        self.decoding += 1
        self.context += job.computed
        if job.generated == job.request.output_tokens:
            self.due.setdefault(self.decode_steps, []).append(job)
            self._end_decodes()
        else:
            self._schedule(job)

    def _schedule(self, job: Job) -> None:
        """Time at which the job is looked at next: its last block is full, or it ends. Several entries do no harm."""
        computed = self.decode_steps - job.offset
        end = job.request.prompt_tokens + job.request.output_tokens - 1
        at = min(job.blocks * self.block, end) + job.offset
        assert at >= self.decode_steps, f"job {job.id} should have grown at {computed} tokens"
        self.due.setdefault(at, []).append(job)

    def _end_decodes(self) -> None:
        """Release those whose last token is there."""
        at = self.due.get(self.decode_steps, [])
        for job in at:
            end = job.request.prompt_tokens + job.request.output_tokens - 1
            if job not in self.running or job in self.prefilling or self.decode_steps - job.offset != end:
                continue
            job.computed = end
            self._seal(job)
            self._stop_decoding(job)
            self._leave(job)
            self.out.done += 1

    def _stop_decoding(self, job: Job) -> None:
        self.decoding -= 1
        self.context -= job.computed
