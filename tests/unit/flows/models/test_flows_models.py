"""Registering: found or made, refused with numbers, and idle models that are evicted for what they hold."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Core, Limits, tidy_all
from cachesvc.flows.leases import close_lease, lose_silent, open_lease, process_arrived, process_gone
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import (
    MAX_POOL_PAGES,
    STARVED,
    Budget,
    PoolRequest,
    Registered,
    RegisterRequest,
    claimed,
    find,
    host_pages_arrived,
    register,
    registering,
)
from cachesvc.ledger.ledger import LeaseState, Ledger
from cachesvc.model.errors import (
    Conflict,
    InvalidRequest,
    LedgerBroken,
    LimitExceeded,
    PoolExhausted,
    QuotaExceeded,
    Unavailable,
)
from cachesvc.model.layout import Layout, Plane, PlaneGroup, device_bytes
from cachesvc.model.words import PageState, Run, WritePolicy
from cachesvc.policy.eviction import WriteRule, eviction_policy
from tests.conservation import audit
from tests.unit.rigs.ledger_rig import (
    TOKEN,
    CountedVault,
    RecordingMover,
    Rig,
    chain,
    one_group,
    prefill,
    rig_of,
    windowed,
)

PAGES = 100
PAGE_BYTES = 4096


def kib_pages() -> Layout:
    """Pages as wide as whatever is aligned, so that bytes and pages go together."""
    return Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (PAGE_BYTES,), "uint8"),))


HOST_PAGES = 200
NONE = PoolRequest((0,))


class Desk:
    """A core over a budget of ``PAGES`` pages on each of two devices, and ``HOST_PAGES`` of one rank on the host."""

    def __init__(self) -> None:
        self.core = Core(Ledger(), RecordingMover(), eviction_policy("lru"), WriteRule(WritePolicy.WRITE_BACK))
        room = device_bytes(kib_pages(), (PAGES,))
        self.vault = CountedVault({"gpu-0": room, "gpu-1": room}, HOST_PAGES * PAGE_BYTES)

    def register(
        self,
        name: str,
        pages: int | None = None,
        *,
        now: float = 0.0,
        salt: bytes = b"",
        share: float = 1.0,
        gpu: int = 0,
        host: PoolRequest = NONE,
        budget: Budget | None = None,
        layout: Layout | None = None,
        reserved: int = 0,
    ) -> Registered:
        pool = PoolRequest((pages,)) if pages is not None else PoolRequest(share=share)
        budget, devices = budget or Budget(), (f"gpu-{gpu}",)
        request = RegisterRequest(name, layout or kib_pages(), salt, devices, pool, host, budget, reserved)
        return register(self.core, self.vault, request, now)

    def occupy(self, made: Registered) -> None:
        process_arrived(self.core, b"token", 1, 1)
        open_lease(self.core, made.model.id, made.replica.id, "engine", b"token", 0, 0.0)

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.core.ledger.models.values()]

    @property
    def closed(self) -> list[int]:
        return [model for call, model in self.vault.calls if call == "close"]

    def host_pages(self, name: str) -> int:
        (pages,) = (model.host_pages[0] for model in self.core.ledger.models.values() if model.name == name)
        return pages


def test_the_same_model_on_the_same_devices_is_found_again() -> None:
    desk = Desk()
    first = desk.register("m", 40)
    again = desk.register("m", 99)
    assert (again.model, again.replica, again.existed) == (first.model, first.replica, True)
    other = desk.register("m", 40, gpu=1)
    assert other.model is first.model
    assert (other.replica.id, other.existed) == (1, False)
    assert desk.register("m", 20, salt=b"tenant").model is not first.model
    assert audit(desk.core.ledger).problems == []


def test_reserved_pages_are_of_no_pool_and_one_number_for_a_model() -> None:
    desk = Desk()
    made = desk.register("m", 4, reserved=1)
    desk.occupy(made)
    (pool,) = made.replica.place.pools
    assert (made.replica.device_pages, pool.capacity, pool.free) == ((4,), 3, 3)
    assert sorted(pool.take(3, PageState.PRIVATE)) == [1, 2, 3]
    assert made.model.blocks.host.pools[0].withheld == 0
    assert desk.register("m", 4, reserved=1).existed
    for gpu in (0, 1):
        with pytest.raises(Conflict, match="with 1 reserved pages, not 2"):
            desk.register("m", 4, reserved=2, gpu=gpu)
    with pytest.raises(InvalidRequest, match=r"one page in every group beside 4 reserved ones, got \(4,\)"):
        desk.register("all", 4, reserved=4)
    with pytest.raises(LimitExceeded, match="reserved pages"):
        desk.register("many", 4000, reserved=1025)
    with pytest.raises(PoolExhausted, match="wanted 98 pages, free 96"):
        desk.register("share", share=1.0, reserved=97)
    assert (desk.names, len(made.model.replicas)) == (["m"], 1)
    assert desk.register("share", share=1.0, reserved=90).replica.device_pages == (96,)


def test_the_longest_idle_model_is_evicted_first() -> None:
    desk = Desk()
    for now, name in enumerate(("old", "older", "young")):
        desk.register(name, 30, now=float(now))
    desk.register("old", 30, now=9.0)
    desk.core.ledger.models[1].last_used = 9.0
    desk.register("new", 40, now=10.0)
    assert desk.names == ["old", "young", "new"]
    desk.register("newer", 60, now=11.0)
    assert desk.names == ["new", "newer"]


def test_a_model_in_use_stays_and_a_refusal_evicts_nobody() -> None:
    """Found by reading: every idle model was evicted before the newcomer was refused anyway."""
    desk = Desk()
    desk.occupy(desk.register("busy", 60))
    desk.register("idle", 30)
    with pytest.raises(PoolExhausted):
        desk.register("new", 50)
    assert desk.names == ["busy", "idle"]
    assert desk.closed == []
    desk.register("new", 40)
    assert desk.names == ["busy", "new"]


def test_a_share_of_what_is_left() -> None:
    desk = Desk()
    assert 45 <= desk.register("half", share=0.5).replica.device_pages[0] <= 50
    rest = desk.register("rest", share=1.0).replica.device_pages[0]
    assert 45 <= rest <= 55
    desk.occupy(desk.register("half"))
    desk.occupy(desk.register("rest"))
    with pytest.raises(PoolExhausted, match=r"other models have the rest of the pool: .* \(device_share=0.5\)"):
        desk.register("third", share=0.5)
    assert desk.names == ["half", "rest"]


def test_a_block_larger_than_the_pool_is_refused_with_both_sizes() -> None:
    wide = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (PAGE_BYTES, PAGES + 1), "uint8"),))
    with pytest.raises(PoolExhausted, match=r"one block takes .* KiB, the pool has .* KiB: .* larger --device-pool"):
        Desk().register("wide", layout=wide)


def test_what_cannot_be_registered() -> None:
    desk = Desk()
    calls: list[Callable[[], object]] = [
        lambda: desk.register(""),
        lambda: desk.register("m" * 600),
        lambda: desk.register("m", 0),
        lambda: desk.register("m", -1),
        lambda: desk.register("m", share=1.5),
        lambda: desk.register("m", gpu=7),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call()
    with pytest.raises(LimitExceeded):
        desk.register("m", salt=b"s" * 300)
    with pytest.raises(InvalidRequest, match="one for each"):
        desk.register("m", 1, layout=windowed())
    desk.core.ledger.draining = True
    with pytest.raises(Unavailable):
        desk.register("m", 1)
    assert desk.names == []


def test_the_limit_of_models_does_not_bar_a_further_replica() -> None:
    """Found by reading: a known model's second replica was refused where the limit of models was reached."""
    desk = Desk()
    desk.register("m", 10)
    object.__setattr__(desk.core.limits, "models", 1)
    assert desk.register("m", 10, gpu=1).replica.id == 1
    n = desk.register("n", 10)  # m is idle and is evicted
    assert desk.names == ["n"]
    desk.occupy(n)
    with pytest.raises(LimitExceeded, match="models in use"):
        desk.register("o", 10)
    assert desk.names == ["n"]


def test_who_is_refused_for_other_reasons_takes_no_place_in_the_list() -> None:
    desk = Desk()
    desk.register("idle", 10)
    object.__setattr__(desk.core.limits, "models", 1)
    with pytest.raises(QuotaExceeded):
        desk.register("m", 10, budget=Budget("poor", device_bytes=device_bytes(kib_pages(), (5,))))
    with pytest.raises(PoolExhausted):
        desk.register("m", PAGES + 1)
    assert desk.names == ["idle"]
    assert desk.closed == []


def test_host_pages_that_arrive_late_can_be_used_then() -> None:
    desk = Desk()
    desk.vault.arrived = 2
    made = desk.register("m", 4, host=PoolRequest((8,)))
    pool = made.model.blocks.host.pools[0]
    assert (pool.free, pool.usable) == (2, 2)
    host_pages_arrived(desk.core, made.model.id, 0, Run(2, 6))
    assert (pool.free, pool.usable) == (8, 8)
    host_pages_arrived(desk.core, 77, 0, Run(0, 1))
    assert audit(desk.core.ledger).problems == []


# -- host memory -----------------------------------------------------------------------------------------------------


def test_host_pages_of_the_longest_idle_models_make_room_and_no_others() -> None:
    """Found by reading: an idle model's host memory was never given up, and every later one was refused."""
    desk = Desk()
    desk.occupy(desk.register("busy", 10, host=PoolRequest((20,))))
    for now, name, pages in ((1.0, "none", 0), (2.0, "few", 10), (3.0, "many", 120), (4.0, "young", 50)):
        desk.register(name, 10, now=now, host=PoolRequest((pages,)))
    desk.register("new", 10, now=5.0, host=PoolRequest((100,)))
    assert desk.names == ["busy", "none", "few", "young", "new"]
    assert desk.host_pages("new") == 100
    assert audit(desk.core.ledger).problems == []


def test_host_pages_that_do_not_fit_are_refused_with_the_numbers_and_evict_nobody() -> None:
    desk = Desk()
    desk.occupy(desk.register("busy", 10, host=PoolRequest((80,))))
    desk.register("idle", 10, host=PoolRequest((50,)))
    with pytest.raises(PoolExhausted, match="host pool") as told:
        desk.register("new", 10, host=PoolRequest((121,)))
    numbers = told.value.wanted, told.value.free, told.value.evictable, told.value.pinned, told.value.capacity
    assert numbers == (121, 70, 50, 80, 200)
    assert (desk.names, desk.closed) == (["busy", "idle"], [])
    desk.register("new", 10, host=PoolRequest((120,)))
    assert desk.names == ["busy", "new"]


def test_what_the_device_refuses_evicts_nobody_for_the_host_either() -> None:
    desk = Desk()
    desk.occupy(desk.register("busy", 90))
    desk.register("idle", 1, host=PoolRequest((HOST_PAGES,)))
    with pytest.raises(PoolExhausted, match="device pool of gpu-0") as told:
        desk.register("new", 20, host=PoolRequest((10,)))
    assert (told.value.wanted, told.value.free, told.value.evictable, told.value.pinned) == (20, 9, 1, 90)
    assert desk.names == ["busy", "idle"]


def test_a_share_that_idle_models_leave_nothing_of_evicts_them() -> None:
    """Found by reading: with the default share, a second model had no host tier for its life, without a report."""
    desk = Desk()
    desk.register("first", 10, host=PoolRequest())
    assert desk.host_pages("first") == HOST_PAGES
    desk.register("second", 10, now=1.0, host=PoolRequest())
    assert desk.names == ["second"]
    assert desk.host_pages("second") == HOST_PAGES
    desk.register("third", 10, now=2.0, host=PoolRequest(share=0.0))
    assert desk.names == ["second", "third"]
    desk.occupy(desk.register("second"))
    desk.register("fourth", 10, now=3.0, host=PoolRequest())  # no idle model holds any: it goes without
    assert desk.names == ["second", "third", "fourth"]
    assert desk.host_pages("fourth") == 0


def test_a_share_of_crumbs_is_none_and_half_a_pool_is_something() -> None:
    desk = Desk()
    crumbs = HOST_PAGES // STARVED
    desk.register("large", 10, host=PoolRequest((HOST_PAGES - crumbs,)))
    desk.register("half", 10, now=1.0, host=PoolRequest(share=0.5))
    assert (desk.names, desk.host_pages("half")) == (["half"], HOST_PAGES // 2)
    desk.register("quarter", 10, now=2.0, host=PoolRequest(share=0.5))
    assert (desk.names, desk.host_pages("quarter")) == (["half", "quarter"], HOST_PAGES // 4)


def test_a_tenant_gets_what_its_quota_leaves_of_the_host_and_evicts_its_own() -> None:
    desk = Desk()
    budget = Budget("a", host_bytes=60 * PAGE_BYTES)
    desk.register("others", 10, host=PoolRequest((50,)))
    desk.register("first", 10, now=1.0, host=PoolRequest(), budget=budget)
    assert desk.host_pages("first") == 60
    with pytest.raises(QuotaExceeded, match="host_bytes"):
        desk.register("second", 10, host=PoolRequest((61,)), budget=budget)
    desk.register("second", 10, now=2.0, host=PoolRequest((40,)), budget=budget)
    assert desk.names == ["others", "second"]
    desk.register("third", 10, now=3.0, host=PoolRequest(), budget=budget)
    assert (desk.names, desk.host_pages("third")) == (["others", "second", "third"], 20)
    desk.register("fourth", 10, now=4.0, host=PoolRequest(), budget=budget)
    assert (desk.names, desk.host_pages("fourth")) == (["others", "third", "fourth"], 40)


def test_a_pool_of_more_pages_than_the_daemon_can_keep_book_of_is_refused_with_nothing_made() -> None:
    desk = Desk()
    desk.vault = CountedVault({"gpu-0": 1 << 30, "gpu-1": 1 << 30}, 1 << 30)
    tiny = Layout(1, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (1,), "uint8"),))
    for pages, share, host in ((MAX_POOL_PAGES + 1, 1.0, NONE), (None, 1.0, NONE), (1, 1.0, PoolRequest())):
        with pytest.raises(LimitExceeded, match=r"pages of one group of the (device|host) pool.*use larger blocks"):
            desk.register("tiny", pages, share=share, host=host, layout=tiny)
    assert (desk.names, desk.vault.calls) == ([], [])


def test_a_tenants_pages_are_bounded_whatever_their_size() -> None:
    desk = Desk()
    budget = Budget("a", pages=50)
    with pytest.raises(QuotaExceeded, match=r"pages of tenant 'a'.*51"):
        desk.register("many", 40, host=PoolRequest((11,)), budget=budget)
    desk.register("some", 30, host=PoolRequest((10,)), budget=budget)
    with pytest.raises(QuotaExceeded, match="pages"):
        desk.register("some", 11, gpu=1, budget=budget)
    desk.register("shares", host=PoolRequest(), budget=Budget("b", pages=20), gpu=1)
    assert (desk.host_pages("shares"), desk.core.ledger.models[2].replicas[0].device_pages) == (10, (10,))


# -- in parts --------------------------------------------------------------------------------------------------------


def ask(name: str, pages: int = 40, host: int = 0) -> RegisterRequest:
    return RegisterRequest(name, kib_pages(), b"", ("gpu-0",), PoolRequest((pages,)), PoolRequest((host,)))


def finished(parts: Generator[Any, Any, Registered], result: Any) -> Registered:
    """Do the rest of a registration; ``result``: of the work that it has yielded."""
    try:
        while True:
            result = parts.send(result)()
    except StopIteration as ended:
        made: Registered = ended.value
        return made


def test_memory_is_touched_only_when_pools_are_made_and_the_model_is_there_at_the_end() -> None:
    desk = Desk()
    old = desk.register("old", 80)
    desk.vault.calls.clear()
    parts = registering(desk.core, desk.vault, ask("new", host=8), lambda: 1.0)
    plan = next(parts)()
    assert (desk.names, desk.vault.calls) == (["old"], [])
    reserve = parts.send(plan)
    assert (desk.names, desk.vault.calls) == ([], []), "no lease opens on what will be closed"
    desk.vault.arrived = 2
    assert parts.send(reserve()) is claimed
    assert (desk.names, desk.vault.calls) == ([], [("open host", 2)])
    pools = next(parts)()
    assert desk.vault.calls[1:] == [("close", old.model.id), ("open replica", 2)]
    assert desk.names == []
    desk.vault.news(2, Run(2, 3))  # between making and entering
    made = finished(parts, pools)
    assert (desk.names, made.existed) == (["new"], False)
    host_pages_arrived(desk.core, 2, 0, Run(5, 3))
    assert made.model.blocks.host.pools[0].free == 8
    assert find(desk.core, desk.vault, ask("new")) == (made.model, made.replica, True)
    assert audit(desk.core.ledger).problems == []


def test_who_is_in_use_by_the_time_it_would_be_evicted_stays() -> None:
    desk = Desk()
    first, second = desk.register("first", 40), desk.register("second", 40, now=1.0)
    parts = registering(desk.core, desk.vault, ask("new"), lambda: 2.0)
    plan = next(parts)()
    desk.occupy(first)
    plan = parts.send(plan)()
    reserve = parts.send(plan)
    assert desk.names == ["first"]
    finished(parts, reserve())
    parts = registering(desk.core, desk.vault, ask("third", 50), lambda: 2.0)
    plan = next(parts)()
    desk.occupy(desk.register("new"))
    with pytest.raises(PoolExhausted):
        parts.send(plan)()
    assert desk.names == ["first", "new"]
    assert desk.closed == [second.model.id]


def test_pools_that_cannot_be_made_leave_nothing_behind() -> None:
    desk = Desk()
    desk.register("m", 10)
    desk.vault.breaks = Unavailable("no memory")
    for request in (ask("new", host=8), replace(ask("m", 10), devices=("gpu-1",))):
        with pytest.raises(Unavailable):
            register(desk.core, desk.vault, request, 0.0)
    assert desk.names == ["m"]
    assert len(desk.core.ledger.models[1].replicas) == 1
    assert desk.vault.host.free_bytes == HOST_PAGES * PAGE_BYTES
    desk.vault.breaks = None
    desk.register("m", 10, gpu=1)
    desk.register("new", 10)
    assert audit(desk.core.ledger).problems == []


# Names that operators see beside a model's identity.


def test_a_display_name_is_no_part_of_the_namespace_and_the_first_one_stays() -> None:
    desk, wish = Desk(), ask("m", 10)
    made = register(desk.core, desk.vault, wish, 0.0)
    assert made.model.shown == "m"
    for name in ("llama", "another"):
        again = register(desk.core, desk.vault, replace(wish, display_name=name), 0.0)
        assert again.model is made.model
        assert made.model.shown == "llama"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\u202e", "x" * 129, "\u00e9" * 65])
def test_a_display_name_that_terminals_would_obey_or_that_is_too_long_is_refused(name: str) -> None:
    desk = Desk()
    with pytest.raises(InvalidRequest, match="display_name must be at most 128 bytes of printable text"):
        register(desk.core, desk.vault, replace(ask("m", 10), display_name=name), 0.0)
    assert desk.names == []


# A model between the Register of its engine and the Open: it is not idle, for a while.


def test_a_registered_model_is_kept_until_its_engine_has_had_time_to_open() -> None:
    """Engines that started together evicted each other's pools in turns, and each Open was NOT_FOUND."""
    desk = Desk()
    desk.core.limits = Limits(open_seconds=30.0)
    desk.core.ledger.moment.seconds = 1000.0
    first = desk.register("first", 60)
    with pytest.raises(PoolExhausted):
        desk.register("second", 60)
    desk.core.ledger.moment.seconds = 1029.0
    assert desk.register("first", 60).existed, "another engine of it, or the same one again"
    desk.occupy(first)
    end_leases(desk)
    with pytest.raises(PoolExhausted):
        desk.register("second", 60)
    desk.core.ledger.moment.seconds = 1059.0
    desk.register("second", 60)
    assert desk.names == ["second"]


def test_a_model_is_idle_as_soon_as_the_leases_of_all_who_registered_have_ended() -> None:
    desk = Desk()
    desk.core.limits = Limits(open_seconds=30.0)
    desk.occupy(desk.register("first", 60))
    end_leases(desk)
    desk.register("second", 60)
    assert desk.names == ["second"]


def end_leases(desk: Desk) -> None:
    for lease in list(desk.core.ledger.leases):
        close_lease(desk.core, lease, quiesced=True)


# A defect of the daemon's own half-way through a change: the model is out of service, and the others go on.


def test_nothing_is_served_of_a_model_out_of_service_until_it_is_trusted() -> None:
    rig = rig_of(one_group(), device=(8,))
    a = rig.lease()
    prefill(rig, a, 1, "ab")
    rig.model.distrust("row 7 is not pinned")
    rig.model.distrust("and another thing")
    says = r"model 1 is out of service until it is verified: row 7 is not pinned; go on without the cache"
    calls = ((match, a, 2, chain("a"), 0), (allocate, a, 1, 3), (publish, a, 1, 2, b"", 0), (release, a, 1))
    for flow, *arguments in calls:
        with pytest.raises(Unavailable, match=says):
            rig.run(flow, *arguments)
    with pytest.raises(Unavailable, match=says):
        open_lease(rig.core, 1, 0, "b", TOKEN + b"a", 0, 0.0)
    with pytest.raises(Unavailable, match=says):
        register(rig.core, rig.vault, RegisterRequest("m", one_group()), 0.0)
    rig.model.suspect = ""
    assert rig.run(match, a, 2, chain(*"ab"), 0).device_blocks == 2


def broken(rig: Rig, lease: str) -> None:
    """The daemon has lost a pin that a sequence of the lease has."""
    rig.model.blocks.unpin(rig.place(), rig.core.ledger.leases[lease].sequences[1].anchor)


def test_a_lease_whose_end_breaks_is_lost_and_takes_its_model_out_of_service_and_nobody_with_it() -> None:
    """The first broken lease ended the sweep, so no silent engine of the node was lost any more."""
    rig = rig_of(one_group(), device=(16,))
    a, b = rig.lease("a"), rig.lease("b")
    prefill(rig, a, 1, "ab")
    prefill(rig, b, 1, "xy")
    broken(rig, a)
    assert set(lose_silent(rig.core, 10.0, 60.0)) == {a, b}
    leases = rig.core.ledger.leases
    assert [leases[lease].state for lease in (a, b)] == [LeaseState.QUARANTINED] * 2
    tidy_all(rig.core)
    assert "is not pinned" in rig.model.suspect
    assert leases[b].sequences == {}
    process_gone(rig.core, TOKEN + b"a")
    process_gone(rig.core, TOKEN + b"b")
    assert leases == {}


def test_a_page_that_is_not_there_is_a_defect_and_not_somebody_elses_page() -> None:
    rig = rig_of(one_group(), device=(4,))
    row = rig.model.blocks.index.insert(b"k" * 32, -1, 1)
    for page in (-1, 0):
        with pytest.raises(LedgerBroken):
            rig.place().seal(0, row, page)
    assert (rig.free(), rig.place().pages[0][row]) == ([4], -1)
