"""Columns against operations: two daemons in the same state are sent the same steps, one by columns, the other entry by
entry, and answer and become the same. The accounting of both is audited after each."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvcache.v1 import cache_pb2, common_pb2

from cachesvc.model.words import KEY_BYTES, WritePolicy
from tests.long_cases import IS_LONG
from tests.step_operations import with_columns, without_columns
from tests.unit.rigs.dispatch_rig import Desk, turns
from tests.unit.rigs.ledger_rig import BLOCK_TOKENS, chain, one_group, rig_of, windowed

PROMPTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map("".join)
IDS = st.integers(1, 5)


class ColumnsMachine(RuleBasedStateMachine):
    """``desks``: the first is sent columns, the second operations."""

    @initialize(
        windows=st.booleans(),
        device=st.integers(8, 24),
        host=st.sampled_from((0, 12)),
        policy=st.sampled_from(list(WritePolicy)),
        sinks=st.sampled_from((0, 4)),
    )
    def begin(self, windows: bool, device: int, host: int, policy: WritePolicy, sinks: int) -> None:
        layout = windowed(sink_tokens=sinks) if windows else one_group()
        self.groups = len(layout.groups)
        self.loop = asyncio.new_event_loop()
        self.desks = [
            Desk(rig_of(layout, device=(device,) * self.groups, host=(host,) * self.groups, policy=policy))
            for _ in range(2)
        ]
        for desk in self.desks:
            self.loop.run_until_complete(desk.__aenter__())
        self.leases = [desk.lease() for desk in self.desks]
        self.stock: list[list[tuple[int, int]]] = [[] for _ in layout.groups]
        self.prompts: dict[int, str] = {}
        self.request_id = 0
        self.waiting: list[tuple[Any, Any, cache_pb2.StepRequest]] = []

    # -- both alike -------------------------------------------------------------------------------------------------

    def both(self, name: str, **fields: Any) -> Any:
        """A call of its own to both; what waits is landed."""
        kinds = {"match": cache_pb2.MatchRequest, "allocate": cache_pb2.AllocateRequest, "swap": cache_pb2.SwapRequest}
        answers = []
        for desk, lease in zip(self.desks, self.leases, strict=True):
            served = desk.ask(getattr(desk.cache, name), kinds[name](lease_id=lease, **fields))
            if isinstance(served, asyncio.Future):
                self.loop.run_until_complete(self.land_all(desk))
                served = self.loop.run_until_complete(served)
            answers.append(served)
        assert answers[0] == answers[1]
        return answers[0]

    async def land_all(self, desk: Desk) -> None:
        while desk.rig.mover.transfers:
            await desk.land(min(desk.rig.mover.transfers))

    @rule(sequence=IDS, prompt=PROMPTS)
    def matches(self, sequence: int, prompt: str) -> None:
        answer = self.both("match", sequence_id=sequence, keys=chain(*prompt))
        if isinstance(answer, cache_pb2.MatchResponse):
            self.prompts[sequence] = prompt

    @rule(sequence=IDS, blocks=st.integers(1, 6))
    def allocates(self, sequence: int, blocks: int) -> None:
        self.both("allocate", sequence_id=sequence, blocks=blocks)

    @rule(sequence=IDS, direction=st.sampled_from((1, 2)))
    def swaps(self, sequence: int, direction: int) -> None:
        self.both("swap", sequence_id=sequence, direction=direction)

    @rule(error=st.sampled_from((None, None, OSError("broken"))))
    def lands(self, error: Exception | None) -> None:
        for desk in self.desks:
            if desk.rig.mover.transfers:
                self.loop.run_until_complete(desk.land(min(desk.rig.mover.transfers), error))
        self.collect()

    # -- steps ------------------------------------------------------------------------------------------------------

    def growth(self, data: st.DataObject) -> dict[str, Any]:
        """Stock pages for some sequences, now and then ones that are not in the stock."""
        ids: list[int] = []
        counts: list[int] = []
        pages: list[list[tuple[int, int]]] = [[] for _ in self.stock]
        one_each = data.draw(st.booleans())
        while len(ids) < 5 and data.draw(st.booleans()):
            count = 1 if one_each else data.draw(st.sampled_from((1, 1, 1, 2)))
            if min(map(len, self.stock)) < count:
                break
            ids.append(data.draw(IDS))
            counts.append(count)
            kind = data.draw(st.sampled_from(("good",) * 6 + ("old", "twice", "other")))
            for group, held in enumerate(self.stock):
                taken = [held.pop(0) for _ in range(count)]
                if kind == "old":
                    taken = [(page, generation + 1) for page, generation in taken]
                elif kind == "twice":
                    taken = [taken[0]] * count if count > 1 else (pages[group][:1] or taken)
                elif kind == "other":
                    taken = [(page - 1, generation) for page, generation in taken]
                pages[group] += taken
        cells = [
            common_pb2.GroupPages(
                group=group,
                pages=array("i", [page for page, _ in mine]).tobytes(),
                generations=array("I", [generation for _, generation in mine]).tobytes(),
            )
            for group, mine in enumerate(pages)
        ]
        return {"grow_sequences": longs(ids), "grow_counts": counted(counts), "grow": cells} if ids else {}

    def publishes(self, data: st.DataObject) -> dict[str, Any]:
        """The next blocks of some sequences, or others; with keys that others publish too."""
        ids: list[int] = []
        first: list[int] = []
        counts: list[int] = []
        keys = b""
        known, one_each = data.draw(st.booleans()), data.draw(st.booleans())
        sequences = self.desks[0].rig.core.ledger.leases[self.leases[0]].sequences
        while len(ids) < 5 and data.draw(st.booleans()):
            number = data.draw(IDS)
            sealed = sequences[number].sealed if number in sequences else 0
            ids.append(number)
            first.append(sealed + data.draw(st.sampled_from((0,) * 8 + (1,))))
            counts.append(1 if one_each else data.draw(st.sampled_from((1, 1, 1, 2, 3))))
            prompt = self.prompts.get(number, "") + data.draw(st.sampled_from(("ababab", "bbbbbb")))
            keys += chain(*prompt[: first[-1] + counts[-1]])[first[-1] * KEY_BYTES :].ljust(
                counts[-1] * KEY_BYTES, b"x"
            )
        fields = {"publish_sequences": longs(ids), "publish_first": ints(first), "publish_counts": counted(counts)}
        return fields | {"publish_keys": b"" if known else keys} if ids else {}

    @rule(data=st.data(), no_wait=st.booleans(), stock=st.integers(0, 6))
    def steps(self, data: st.DataObject, no_wait: bool, stock: int) -> None:
        recycled = data.draw(st.lists(IDS, max_size=3))
        columns = cache_pb2.StepColumns(
            **self.growth(data),
            **self.publishes(data),
            recycle_sequences=longs(recycled),
            recycle_tokens=longs([data.draw(st.integers(0, 8)) * BLOCK_TOKENS for _ in recycled]),
            release_sequences=longs(data.draw(st.lists(IDS, max_size=2))),
        )
        self.request_id += 1
        request = cache_pb2.StepRequest(
            request_id=self.request_id, columns=columns, no_wait=no_wait, stock_pages=[stock] * self.groups
        )
        for number in data.draw(st.lists(IDS, max_size=2)):
            request.operations.add().release.sequence_id = number
        request.lease_id = self.leases[0]
        one = self.desks[0].ask(self.desks[0].cache.step, request)
        plain = without_columns(request, self.groups)
        plain.lease_id = self.leases[1]
        other = self.desks[1].ask(self.desks[1].cache.step, plain)
        self.waiting.append((one, other, request))
        self.collect()

    def collect(self) -> None:
        """Hold the answers of steps against each other that have ended."""
        still = []
        for one, other, request in self.waiting:
            self.loop.run_until_complete(turns())
            answers = [ended(each) for each in (one, other)]
            assert (answers[0] is None) == (answers[1] is None), "both wait, or none"
            if answers[0] is None:
                still.append((one, other, request))
                continue
            mine, its = answers
            theirs = cache_pb2.StepResponse()
            theirs.CopyFrom(its)
            assert in_order(mine) == in_order(with_columns(theirs, request))
            for cells in mine.stock:
                self.stock[cells.group] += zip(array("i", cells.pages), array("I", cells.generations), strict=True)
        self.waiting = still

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def both_are_the_same_and_sound(self) -> None:
        if not hasattr(self, "desks"):
            return
        for desk in self.desks:
            desk.rig.check()
        one, other = (state(desk, lease) for desk, lease in zip(self.desks, self.leases, strict=True))
        assert one == other

    @precondition(lambda self: hasattr(self, "desks"))
    @rule()
    def everything_lands(self) -> None:
        for desk in self.desks:
            self.loop.run_until_complete(self.land_all(desk))
        self.collect()

    def teardown(self) -> None:
        if hasattr(self, "desks"):
            self.everything_lands()
            for desk in self.desks:
                self.loop.run_until_complete(desk.__aexit__())
            self.loop.close()


def ended(served: Any) -> Any:
    """An answer; None while it waits."""
    if not isinstance(served, asyncio.Future):
        return served
    return served.result() if served.done() else None


def longs(numbers: list[int]) -> bytes:
    return array("Q", numbers).tobytes()


def ints(numbers: list[int]) -> bytes:
    return array("I", numbers).tobytes()


def counted(counts: list[int]) -> bytes:
    """Counts as clients write them: nothing where all are 1."""
    return ints(counts) if counts and max(counts) > 1 else b""


def in_order(response: cache_pb2.StepResponse) -> cache_pb2.StepResponse:
    """Entries of a step in order; those that waited end later."""
    told = cache_pb2.StepResponse()
    told.CopyFrom(response)
    odd = sorted(told.columns.odd, key=lambda each: (each.column, each.index))
    del told.columns.odd[:]
    told.columns.odd.extend(odd)
    told.columns.SetInParent()
    return told


def state(desk: Desk, lease: str) -> dict[str, object]:
    """All observable state."""
    rig, index = desk.rig, desk.rig.model.blocks.index
    core, model = rig.core, rig.model
    sequences = core.ledger.leases[lease].sequences
    return {
        "tables": {number: [list(table) for table in each.tables] for number, each in sequences.items()},
        "sealed": {number: (each.sealed, bytes(each.keys), each.anchor) for number, each in sequences.items()},
        "own": {number: each.own for number, each in sequences.items()},
        "stock": core.ledger.leases[lease].stock,
        "grown": core.ledger.leases[lease].grown,
        "rows": dict(index.rows),
        "columns": [list(column) for column in (index.stamp, index.hits, index.depth, index.head, index.reuses)],
        "orders": [list(order) for order in index.orders],
        "events": events(desk),
        "computing": model.computing,
        "reuse": (model.reuse.published, model.reuse.recomputed, dict(model.remembered)),
        "counters": core.counters,
        "counts": [(place.counts.states, place.counts.pinned, list(place.used)) for place in index.places],
        "pools": [[pool.counts for pool in place.pools] for place in index.places],
        "flying": sorted(rig.mover.transfers),
        "operations": desk.cache.operations,
    }


def events(desk: Desk) -> list[tuple[int, int, bytes, bytes]]:
    """Events of copies, group by group."""
    journal = desk.rig.model.blocks.journal
    told = [(each.group, int(each.kind), each.key, each.parent) for each in journal.read(journal.first, 1 << 20)]
    return sorted(told, key=lambda each: each[0])


TestColumns = ColumnsMachine.TestCase
TestColumns.settings = settings(
    max_examples=100 if IS_LONG else 60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
