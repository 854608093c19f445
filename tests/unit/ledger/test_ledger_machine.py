"""A Hypothesis state machine: flows over a mover that lands in any order, against plain dicts, sets and lists.

The model never looks at the ledger's structures to predict: it replays the answers that the flows gave, and what it
believes resident, held or private is compared with what the ledger says, after every rule, beside the audit.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachesvc.flows.allocate import allocate, swap_in, swap_out
from cachesvc.flows.leases import close_lease
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match, prefetch
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.tickets import TicketState
from cachesvc.model.answers import Wait
from cachesvc.model.errors import CacheError, Conflict, LoadFailed, PoolExhausted
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState, WritePolicy
from tests.long_cases import IS_LONG
from tests.unit.rigs.ledger_rig import BLOCK_TOKENS, Rig, chain, one_group, rig_of, windowed
from tests.unit.rigs.pin_rules import PROMPTS, PinRules


@dataclass
class Told:
    """Answers of the flows to one sequence. ``sealed``: prompt prefixes that it must be able to rely on."""

    id: int
    lease: str
    replica: int
    prompt: str
    tables: list[list[int]]
    hit: int
    sealed: int
    allocated: int = 0
    tickets: list[int] = field(default_factory=list)
    swap: int = 0
    swapped: bool = False
    broken: bool = False


class LedgerMachine(PinRules, RuleBasedStateMachine):
    """Rules draw; the invariants compare."""

    @initialize(
        windows=st.booleans(),
        replicas=st.integers(1, 2),
        device=st.integers(4, 16),
        device_window=st.integers(4, 12),
        host=st.integers(0, 16),
        policy=st.sampled_from(list(WritePolicy)),
        sinks=st.sampled_from((0, 4)),
        eviction=st.sampled_from(("lru", "hazard")),
        reserved_pages=st.integers(0, 2),
        pool=st.sampled_from(("", "one")),
    )
    def begin(
        self,
        windows: bool,
        replicas: int,
        device: int,
        device_window: int,
        host: int,
        policy: WritePolicy,
        sinks: int,
        eviction: str,
        reserved_pages: int,
        pool: str,
    ) -> None:
        layout = windowed(sink_tokens=sinks, pool=pool) if windows else one_group()
        groups = len(layout.groups)
        self.rig: Rig = rig_of(
            layout,
            device=(device, device if pool else device_window)[:groups],
            host=(host,) * groups,
            policy=policy,
            replicas=replicas,
            eviction=eviction,
            reserved_pages=reserved_pages,
        )
        self.leases = [(self.rig.lease(f"e{i}", i % replicas), i % replicas) for i in range(2)]
        self.told: dict[int, Told] = {}
        self.ids = 0

    # -- the naive model -------------------------------------------------------------------------------------

    def resident(self, replica: int) -> set[bytes]:
        return self.rig.device_keys(replica)

    def naive_hit(self, prompt: str, replica: int) -> int:
        """Longest prefix by walking, without windows: device first, then what the host can bring."""
        keys = chain(*prompt)
        device, host = self.resident(replica), self.rig.host_keys()
        count = 0
        for source in (device, host):
            while count < len(prompt) and keys[count * KEY_BYTES : (count + 1) * KEY_BYTES] in source:
                count += 1
        return count

    def call(self, flow: Any, *arguments: Any) -> Any:
        """One try. A refusal, or a wait, must have changed nothing that the model can see."""
        before = self.snapshot()
        try:
            answer = self.rig.once(flow, *arguments)
        except PoolExhausted:
            assert self.snapshot() == before, "a refusal evicts nothing"
            return None
        except (LoadFailed, Conflict) as error:
            assert self.snapshot() == before
            return error
        return answer

    def snapshot(self) -> object:
        free = [self.rig.free(replica.id) for replica in self.rig.model.replicas]
        keys = [self.resident(replica.id) for replica in self.rig.model.replicas]
        return free, keys, self.rig.host_keys(), set(self.rig.mover.transfers)

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, lease=st.integers(0, 1), limit=st.sampled_from((0, 0, 2)))
    def matches(self, prompt: str, lease: int, limit: int) -> None:
        if len(self.told) >= 6:
            return
        lease_id, replica = self.leases[lease]
        expected = self.naive_hit(prompt, replica)
        self.ids += 1
        answer = self.rig.run(match, lease_id, self.ids, chain(*prompt), limit)
        hit = answer.device_blocks + answer.host_blocks
        if not self.rig.model.layout.window_groups:
            assert hit == (min(expected, limit) if limit else expected)
        assert hit <= expected
        tables: list[list[int]] = [[] for _ in self.rig.model.layout.groups]
        for cells in answer.tables:
            tables[cells.group] = list(cells.pages)
        self.told[self.ids] = Told(self.ids, lease_id, replica, prompt, tables, hit, answer.device_blocks)

    @rule(prompt=PROMPTS, lease=st.integers(0, 1), near=st.booleans(), data=st.data())
    def matches_with_peers(self, prompt: str, lease: int, near: bool, data: st.DataObject) -> None:
        """A match whose transfers land in any way; in the end it has a hit, and begun one transfer of its own."""
        if len(self.told) >= 6:
            return
        lease_id, replica = self.leases[lease]
        self.rig.mover.reachable = near
        self.ids += 1
        flow = partial(match, sharing=Sharing())
        waits = 0
        while isinstance(answer := self.rig.once(flow, lease_id, self.ids, chain(*prompt), 0), Wait):
            waits += 1
            flying = [ticket for ticket in answer.tickets if ticket in self.rig.mover.transfers]
            if data.draw(st.booleans()) and flying:
                self.rig.land(flying[0], data.draw(st.sampled_from(("", "", "broken"))))
        assert waits <= self.rig.core.limits.peer_waits
        tables: list[list[int]] = [[] for _ in self.rig.model.layout.groups]
        for cells in answer.tables:
            tables[cells.group] = list(cells.pages)
        hit = answer.device_blocks + answer.host_blocks
        self.told[self.ids] = Told(self.ids, lease_id, replica, prompt, tables, hit, answer.device_blocks)
        self.catch_up()

    def one(self, data: st.DataObject, **wanted: object) -> Told | None:
        fitting = [t for t in self.told.values() if all(getattr(t, name) == value for name, value in wanted.items())]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(data=st.data(), more=st.integers(0, 2))
    def allocates(self, data: st.DataObject, more: int) -> None:
        told = self.one(data, swapped=False, swap=0, broken=False)
        if told is None:
            return
        blocks = max(len(told.prompt), told.hit, told.allocated) + more
        answer = self.call(allocate, told.lease, told.id, blocks)
        if answer is None or isinstance(answer, (Wait, CacheError)):
            return
        for cells in answer.tables:
            assert cells.first_block == len(told.tables[cells.group])
            told.tables[cells.group] += cells.pages
        told.allocated = blocks
        told.tickets += [ticket.id for ticket in answer.tickets]
        if not told.tickets:
            told.sealed = max(told.sealed, told.hit)

    @rule(data=st.data(), count=st.integers(1, 4))
    def publishes(self, data: st.DataObject, count: int) -> None:
        told = self.one(data, swapped=False, swap=0, broken=False)
        if told is None or told.allocated == 0:
            return
        first = max(told.sealed, told.hit)
        last = min(first + count, len(told.prompt), told.allocated)
        if last <= first:
            return
        keys = chain(*told.prompt)[first * KEY_BYTES : last * KEY_BYTES]
        present = self.resident(told.replica)
        answer = self.call(publish, told.lease, told.id, first, keys, 0)
        if isinstance(answer, (Wait, CacheError)):
            assert isinstance(answer, Wait) == bool(self.running(told))
            return
        wanted = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        sealed = wanted[: answer.sealed_blocks - first]
        assert answer.pending == (len(sealed) < len(wanted))
        assert list(answer.duplicate_positions) == [first + i for i, key in enumerate(sealed) if key in present]
        assert set(sealed) <= self.resident(told.replica)
        told.sealed = answer.sealed_blocks
        for cells in answer.duplicates:
            for position, page in zip(answer.duplicate_positions, cells.pages, strict=True):
                told.tables[cells.group][position] = page

    @rule(data=st.data())
    def recycles(self, data: st.DataObject) -> None:
        told = self.one(data, swapped=False, swap=0, broken=False)
        if told is None or not told.allocated or told.tickets:
            return
        tokens = max(told.sealed, told.hit) * BLOCK_TOKENS
        if not tokens:
            return
        self.rig.once(recycle, told.lease, told.id, tokens, ())
        layout = self.rig.model.layout
        for group in layout.window_groups:
            window = layout.groups[group].window_tokens or 0
            for block in range(layout.sink_blocks(group), told.allocated):
                if (block + 1) * BLOCK_TOKENS <= tokens - window + 1:
                    told.tables[group][block] = NO_PAGE

    @rule(data=st.data())
    def swaps_out(self, data: st.DataObject) -> None:
        told = self.one(data, swapped=False, swap=0, broken=False)
        if told is None or not told.allocated or self.running(told):
            return
        answer = self.call(swap_out, told.lease, told.id)
        if answer is not None and not isinstance(answer, (Wait, CacheError)):
            told.swap = answer.tickets[0].id
            self.catch_up()

    @rule(data=st.data())
    def swaps_in(self, data: st.DataObject) -> None:
        told = self.one(data, swapped=True, swap=0)
        if told is None:
            return
        answer = self.call(swap_in, told.lease, told.id)
        if answer is not None and not isinstance(answer, (Wait, CacheError)):
            told.swap = answer.tickets[0].id
            told.tables = [list(cells.pages) for cells in answer.tables]
            self.catch_up()

    @rule(prompt=PROMPTS, lease=st.integers(0, 1))
    def prefetches(self, prompt: str, lease: int) -> None:
        self.call(prefetch, self.leases[lease][0], chain(*prompt))

    @rule(data=st.data())
    def releases(self, data: st.DataObject) -> None:
        told = self.one(data)
        if told is not None:
            del self.told[told.id]
            self.rig.once(release, told.lease, told.id)

    @rule(lease=st.integers(0, 1), quiesced=st.booleans())
    def loses_a_lease(self, lease: int, quiesced: bool) -> None:
        lease_id, replica = self.leases[lease]
        close_lease(self.rig.core, lease_id, quiesced=False)
        self.rig.check()
        if quiesced:
            close_lease(self.rig.core, lease_id, quiesced=True)
        self.leases[lease] = (self.rig.lease(f"e{lease}", replica), replica)
        self.told = {told.id: told for told in self.told.values() if told.lease != lease_id}

    @precondition(lambda self: self.rig.mover.transfers)
    @rule(data=st.data(), error=st.sampled_from(("", "", "", "broken")))
    def lands(self, data: st.DataObject, error: str) -> None:
        self.rig.land(data.draw(st.sampled_from(sorted(self.rig.mover.transfers))), error)
        self.catch_up()

    @rule(refusing=st.sampled_from((False, False, True)))
    def mover_refuses(self, refusing: bool) -> None:
        self.rig.mover.refusing = refusing

    # -- what must hold --------------------------------------------------------------------------------------

    def running(self, told: Told) -> list[int]:
        return [ticket for ticket in told.tickets if self.rig.core.ledger.tickets.is_running(ticket)]

    def catch_up(self) -> None:
        book = self.rig.core.ledger.tickets
        for told in self.told.values():
            if told.tickets and not self.running(told):
                told.broken = any(book.get(ticket).state is TicketState.FAILED for ticket in told.tickets)
                told.sealed = told.sealed if told.broken else max(told.sealed, told.hit)
                told.tickets.clear()
            if told.swap and not book.is_running(told.swap):
                failed = book.get(told.swap).state is TicketState.FAILED
                told.swapped ^= not failed
                told.swap = 0

    @invariant()
    def adds_up(self) -> None:
        self.rig.check()
        self.catch_up()

    @invariant()
    def what_is_relied_on_is_there(self) -> None:
        """A sequence's sealed prefix is on its device (or on the host while swapped out), page by page."""
        index = self.rig.model.blocks.index
        for told in self.told.values():
            keys = chain(*told.prompt)
            rows = [index.rows.get(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]) for at in range(told.sealed)]
            assert None not in rows
            place = self.rig.place(told.replica)
            if told.swapped:
                assert all(self.rig.host.is_hittable(row) for row in rows if row is not None)
            elif not told.swap and not told.broken:
                for group in place.full_groups:
                    pages = [place.pages[group][row] for row in rows if row is not None]
                    assert told.tables[group][: told.sealed] == pages

    @invariant()
    def tables_in_pieces_are_those_of_a_walk(self) -> None:
        """All that is in place is asked for after every rule, so each piece is there when something happens to it."""
        index = self.rig.model.blocks.index
        for replica in self.rig.model.replicas:
            place = replica.place
            for row in index.rows.values():
                if place.is_hittable(row):
                    path = index.path(row)
                    walked = [array("i", [place.pages[group][each] for each in path]) for group in place.full_groups]
                    assert place.pieces.tables(row, len(path)) == walked

    @invariant()
    def nobody_shares_a_private_page(self) -> None:
        for replica in self.rig.model.replicas:
            held: set[tuple[int, int]] = set()
            for told in self.told.values():
                if told.replica != replica.id or told.swapped or told.swap:
                    continue
                for group, table in enumerate(told.tables):
                    for page in table[max(told.sealed, told.hit) :]:
                        if page != NO_PAGE:
                            assert (group, page) not in held
                            assert replica.place.pools[group].states[page] == PageState.PRIVATE
                            held.add((group, page))

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.mover.refusing = False
        for lease_id, _ in self.leases:
            close_lease(self.rig.core, lease_id, quiesced=True)
        self.rig.settle()
        for lease_id in list(self.rig.core.ledger.leases):
            close_lease(self.rig.core, lease_id, quiesced=True)
        self.rig.check()
        for place in self.rig.model.blocks.index.places:
            for pool in place.pools:
                assert pool.counts[PageState.FREE] + pool.counts[PageState.SEALED] == pool.usable


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=200 if IS_LONG else 120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
