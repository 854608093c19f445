"""Several tiers as one: where blocks are read and written, what is promoted, and that a dead tier slows no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachesvc.storage.objects import Verb
from cachesvc.storage.seam import Caps, Outcome, Use
from cachesvc.storage.spec import TierOptions, WriteWhen
from cachesvc.storage.tier import State
from cachesvc.storage.tiers import Tiers
from tests.sim.sim_storage import SimStorage
from tests.unit.rigs.ledger_rig import chain, one_group
from tests.unit.storage.storage_tier_rig import Bench

OK, MISS, BUSY, FAILED, LATE = Outcome.OK, Outcome.MISS, Outcome.BUSY, Outcome.FAILED, Outcome.LATE
THROUGH, SELECTIVE, NEVER = WriteWhen.THROUGH, WriteWhen.SELECTIVE, WriteWhen.NEVER


class Rig(Bench):
    """Several tiers."""

    def __init__(self, *tiers: tuple[SimStorage, WriteWhen], rate: int = 1 << 30) -> None:
        super().__init__([engine for engine, _ in tiers], one_group())
        options = TierOptions(wait=0.25, deadline=2.0, write_rate=rate)
        made = [self.tier_over(engine, replace(options, write=write)) for engine, write in tiers]
        self.tiers = Tiers(made, lambda: self.now)
        self.owed: list[bytes] = []
        self.gone: list[bytes] = []
        self.tiers.tell = lambda _model, _ticket, _key, news: self.told.extend(news)
        self.tiers.tell_gone = lambda _model, keys: self.gone.extend(keys)
        self.tiers.owed = lambda _model, keys: self.owed.extend(keys)
        self.tiers.start()

    def page(self, number: int) -> memoryview:
        return self.view(1, 0, 0, number)

    def keep(self, prompt: str, only: int | None = None) -> list[Outcome | None]:
        """Write a prompt's blocks; ``only``: to one tier, as another daemon would."""
        keys = chain(*prompt)
        target = self.tiers if only is None else self.tiers.all[only]
        if only is not None:
            self.tiers.all[only].tell = lambda _model, _ticket, _key, news: self.told.extend(news)
        for at in range(len(prompt)):
            self.page(at)[:] = prompt[at].encode() * 8
            target.keep(self.model, keys[32 * at : 32 * at + 32], [at], keys[32 * at - 32 : 32 * at])
        self.settle()
        if only is not None:
            tier = self.tiers.all[only]
            for _ in prompt:
                tier.kept(self.model)
            tier.tell = lambda *news: self.tiers._told(only, *news)  # noqa: SLF001 - as it was
        return self.outcomes()

    def fetch(self, prompt: str, ticket: int = 7) -> list[Outcome | None]:
        """Read a prompt to other pages, and compare every byte of what came."""
        first = 100
        for at in range(len(prompt)):
            self.page(first + at)[:] = bytes(8)
        pages = [[first + at for at in range(len(prompt))]]
        assert self.tiers.fetch(self.model, ticket, chain(*prompt), pages) == [1] * len(prompt)
        self.settle()
        for each in self.told:
            if each.outcome is OK:
                assert bytes(self.page(first + each.block)) == prompt[each.block].encode() * 8
        return self.outcomes()

    def objects(self) -> list[int]:
        return [len(engine.objects) for engine in self.engines]

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tiers.tick()
        self.settle()


def expects(rig: Rig, prompt: str) -> int | None:
    return rig.tiers.expects(rig.model, chain(*prompt))


def test_a_prompt_is_read_from_whichever_tier_has_each_block() -> None:
    rig = Rig((SimStorage(), THROUGH), (SimStorage(), NEVER))
    rig.keep("ab", only=0)
    rig.keep("abcd", only=1)
    assert expects(rig, "abcdef") == 4
    assert rig.fetch("abcd") == [OK] * 4
    gets = [tier.store.counts.items[Verb.GET, OK] for tier in rig.tiers.all]
    assert gets == [2, 2], "the upper one has the first two"


def test_what_comes_from_below_is_owed_to_the_tiers_above_and_written_there() -> None:
    rig = Rig((SimStorage(), SELECTIVE), (SimStorage(), SELECTIVE))
    rig.keep("abc", only=1)
    assert rig.fetch("abc") == [OK] * 3
    rig.tick(0.2)
    assert set(rig.owed) == {chain(*"abc")[at : at + 32] for at in (0, 32, 64)}
    assert rig.keep("abc") == [OK] * 3
    assert rig.objects() == [3, 3]
    assert rig.tiers.all[1].store.counts.items[Verb.PUT, OK] == 3, "where it was it is not written again"
    rig.owed.clear()
    assert rig.fetch("abc") == [OK] * 3
    rig.tick(0.2)
    assert rig.owed == []
    assert rig.tiers.all[0].store.counts.items[Verb.GET, OK] == 3


def test_a_tier_that_never_writes_is_owed_nothing() -> None:
    rig = Rig((SimStorage(), NEVER), (SimStorage(), SELECTIVE))
    rig.keep("ab", only=1)
    assert rig.fetch("ab") == [OK] * 2
    rig.tick(0.2)
    assert rig.owed == []


def test_each_tier_follows_its_own_write_policy() -> None:
    rig = Rig((SimStorage(), THROUGH), (SimStorage(), SELECTIVE))
    assert rig.keep("abc") == [OK] * 3
    assert rig.objects() == [3, 0], "it came to the host: for the first tier that is enough"
    keys = chain(*"abc")
    rig.tiers.used(rig.model, [Use(keys[64:], 0)], None)
    rig.tiers.owe(rig.model, 3, lambda depth: keys[32 * depth : 32 * depth + 32])
    rig.tick(0.2)
    assert len(rig.owed) == 3, "used again, with all above it"
    assert rig.keep("abc") == [OK] * 3
    assert rig.objects() == [3, 3]


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_tier_does_not_bring_is_asked_of_the_next(knows: bool) -> None:
    rig = Rig((SimStorage(knows=knows), THROUGH), (SimStorage(knows=knows), THROUGH))
    assert rig.keep("abcd") == [OK] * 8 or rig.objects() == [4, 4]
    rig.engines[0].objects.pop(next(name for name in rig.engines[0].objects if name.key == chain(*"abcd")[32:64]))
    assert rig.fetch("abcd") == [OK] * 4
    rig.engines[0].odds = {"fail": 1.0}
    assert rig.fetch("abcd", ticket=8) == [OK] * 4, "errors above cost nothing but time"
    rig.engines[1].objects.clear()
    assert set(rig.fetch("abcd", ticket=9)) <= {MISS, BUSY, FAILED}, "and each object ends once"


def test_two_tiers_that_must_be_asked_are_asked_one_after_the_other() -> None:
    rig = Rig((SimStorage(knows=False), THROUGH), (SimStorage(knows=False), THROUGH))
    rig.keep("ab", only=1)
    assert expects(rig, "abcd") is None
    assert rig.fetch("abcd") == [OK, OK, BUSY, BUSY]


def test_a_dead_tier_below_is_given_up_by_what_it_does_not_bring_and_passed_over() -> None:
    """Blocks of the upper tier came meanwhile: a call that waits sees only that something has."""
    rig = Rig((SimStorage(), THROUGH), (SimStorage(), THROUGH))
    rig.keep("ab", only=0)
    rig.keep("abcd", only=1)
    rig.engines[1].frozen = True
    assert rig.fetch("abcd") == [OK, OK]
    rig.tick(0.3)
    assert [tier.breaker.state for tier in rig.tiers.all] == [State.CLOSED, State.OPEN]
    assert expects(rig, "abcd") == 2
    assert rig.fetch("ab", ticket=8) == [OK, OK]
    room = rig.tiers.room()
    assert room > 0
    assert rig.keep("xyz") == [OK] * 3, "writes go on above"
    rig.tick(2.5)
    assert rig.outcomes() == [LATE, LATE], "of the frozen ones, by their deadline"
    rig.engines[1].frozen = False
    rig.engines[1].land_late()
    rig.settle()
    assert rig.outcomes() == [None, None]
    for _ in range(40):
        rig.tick(1.0)
    assert rig.tiers.all[1].breaker.state is State.CLOSED
    assert expects(rig, "abcd") == 4


def test_a_dead_tier_above_is_passed_over_too() -> None:
    rig = Rig((SimStorage(), THROUGH), (SimStorage(), THROUGH))
    rig.keep("ab")
    rig.tiers.all[0].breaker.open("test", rig.now)
    assert expects(rig, "ab") == 2
    assert rig.fetch("ab") == [OK, OK]
    assert rig.tiers.room() > 0
    rig.keep("cd")
    assert rig.objects() == [2, 4]


def test_a_slow_tier_below_holds_up_no_write_above_and_gets_its_own_later() -> None:
    rig = Rig((SimStorage(), THROUGH), (SimStorage(), THROUGH))
    rig.tiers.all[1].rate.tokens -= 1 << 40  # no room for now
    rig.tiers.all[1].under_way += 1 << 40
    assert rig.keep("abc") == [OK] * 3
    assert rig.objects() == [3, 0]
    rig.tick(0.2)
    assert rig.owed == []
    rig.tiers.all[1].under_way -= 1 << 40
    rig.tick(3000.0)
    assert len(rig.owed) == 3
    rig.keep("abc")
    assert rig.objects() == [3, 3]


def test_a_failed_copy_below_is_no_failed_write() -> None:
    rig = Rig((SimStorage(), THROUGH), (SimStorage(odds={"fail": 1.0}), THROUGH))
    assert set(rig.keep("abc")) == {OK}
    assert rig.objects() == [3, 0]
    assert [tier.under_way for tier in rig.tiers.all] == [0, 0]


def test_what_one_tier_evicts_is_gone_only_where_no_other_has_it() -> None:
    rig = Rig((SimStorage(), THROUGH), (SimStorage(), THROUGH))
    rig.keep("abc")
    names = {name.key: name for name in rig.engines[0].objects}
    keys = [chain(*"abc")[at : at + 32] for at in (0, 32, 64)]
    rig.engines[1].objects.pop(next(name for name in rig.engines[1].objects if name.key == keys[2]))
    rig.engines[0].evict([names[key] for key in keys])
    rig.settle()
    assert rig.gone == [keys[2]]
    assert rig.tiers.has(rig.model, keys[0])
    assert not rig.tiers.has(rig.model, keys[2])


def other_nodes(**settings: object) -> SimStorage:
    """An engine that stands for the other nodes: it knows by itself which of them can be used."""
    caps = Caps(is_shared=True, survives="daemon", keeps_health=True)
    return SimStorage(caps=caps, **settings)  # type: ignore[arg-type]


def test_failures_of_other_nodes_give_up_neither_them_nor_the_store() -> None:
    rig = Rig((other_nodes(knows=False), NEVER), (SimStorage(knows=False), THROUGH))
    rig.keep("abcd", only=1)
    rig.keep("abcdefgh", only=0)
    rig.engines[0].odds = {"fail": 1.0}
    for ticket in range(1, 21):
        assert rig.fetch("abcd", ticket) == [OK] * 4, "what they fail to send is read from the store"
        rig.tiers.lagged()
    assert [tier.breaker.state for tier in rig.tiers.all] == [State.CLOSED, State.CLOSED]
    rig.engines[0].odds = {}
    assert rig.fetch("abcdefgh", 50) == [OK] * 8


def test_other_nodes_are_asked_while_the_store_is_given_up() -> None:
    rig = Rig((other_nodes(knows=False), NEVER), (SimStorage(), THROUGH))
    rig.keep("abcd", only=0)
    rig.engines[1].frozen = True
    rig.tiers.all[1].breaker.open("it is dead", rig.now)
    assert expects(rig, "abcd") is None
    assert rig.fetch("abcd") == [OK] * 4


def test_other_nodes_beside_one_store_are_written_nothing_and_owed_nothing() -> None:
    rig = Rig((other_nodes(), NEVER), (SimStorage(), THROUGH))
    assert rig.keep("abc") == [OK] * 3
    assert rig.objects() == [0, 3]
    assert rig.keep("abc") == [OK] * 3, "one store is written as without other nodes"
    assert rig.fetch("abc") == [OK] * 3
    rig.tick(0.2)
    assert rig.owed == []
    assert not rig.tiers.are_several
