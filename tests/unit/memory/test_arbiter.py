"""The rules of the arbiter, over a link in virtual time."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.memory.arbiter import SLICE_BYTES, STALE, Arbiter, Queued, Rivals
from cachesvc.memory.interface import CopyJob
from cachesvc.model.errors import LimitExceeded
from tests.unit.memory.arbiter_rig import (
    AWAITED,
    BACKGROUND,
    BYTES_PER_SECOND,
    LOAD,
    MIB,
    STORE,
    TOKEN_BYTES,
    Link,
    copy_rules,
    job_of,
    tokens_job,
)
from tests.work import counted

SHORT, LONG = 4096, 32768
SHORT_ALONE_S = SHORT * TOKEN_BYTES / BYTES_PER_SECOND
LONG_ALONE_S = LONG * TOKEN_BYTES / BYTES_PER_SECOND
PROBE = 1_000_000


def endless(link: Link, tokens: int, outstanding: int) -> None:
    """For every job that ends another one of its size comes."""
    tickets = itertools.count(1)
    for _ in range(outstanding):
        link.push(tokens_job(next(tickets), tokens))

    def again(ticket: int) -> None:
        if ticket != PROBE:
            link.push(tokens_job(next(tickets), tokens))

    link.on_end = again


@pytest.mark.parametrize(("depth", "slice_bytes"), [(1, 16 * MIB), (3, 16 * MIB), (2, SLICE_BYTES)])
def test_a_short_load_behind_endless_long_ones_takes_less_than_twice_its_time_alone(
    depth: int, slice_bytes: int
) -> None:
    took = []
    for phase in range(64):  # wherever in the life of a long one it comes
        link = Link(copy_rules(slice_bytes), depth=depth)
        endless(link, LONG, 4)
        arrives = LONG_ALONE_S * (1 + phase / 64)
        link.run(arrives)
        link.push(tokens_job(PROBE, SHORT))
        link.run_until_end_of(PROBE)
        took.append((link.ended[PROBE] - arrives) / SHORT_ALONE_S)
    assert max(took) <= 2.0
    assert sum(took) / len(took) <= 1.65


@pytest.mark.parametrize("depth", [1, 3])
def test_the_oldest_gets_a_third_however_many_short_ones_come(depth: int) -> None:
    link = Link(depth=depth)
    link.push(tokens_job(PROBE, LONG))
    endless(link, SHORT, 4)
    link.run_until_end_of(PROBE)
    assert link.ended[PROBE] <= 3.05 * LONG_ALONE_S
    assert link.ended[PROBE] >= 2.5 * LONG_ALONE_S  # and no more, while shorter ones wait


def test_one_job_alone_gets_everything_at_once() -> None:
    for urgency in (AWAITED, BACKGROUND):
        for way in (LOAD, STORE):
            link = Link(depth=3)
            link.push(job_of(1, 1 << 30, urgency), way)
            link.run()
            assert link.ended[1] == pytest.approx((1 << 30) / BYTES_PER_SECOND)


def test_shares_are_of_bytes_not_of_slices() -> None:
    link = Link()
    link.push(job_of(1, 4096 * MIB, copy_bytes=16 * MIB))
    link.push(job_of(2, 1024 * MIB, copy_bytes=5 * MIB, steps=64))  # slices of 15 MiB and of 1 MiB
    link.run(900 * MIB / BYTES_PER_SECOND)
    assert link.moved[1] == pytest.approx(300 * MIB, abs=20 * MIB)
    assert link.moved[2] == pytest.approx(600 * MIB, abs=20 * MIB)


def test_jobs_of_one_size_go_in_order_and_steps_in_theirs() -> None:
    link = Link(depth=3)
    for ticket in range(20):
        link.push(job_of(ticket, 64 * MIB, steps=3))
    link.run()
    assert list(link.ended) == list(range(20))
    assert link.order == sorted(link.order)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 64), st.integers(1, 5), st.booleans(), st.booleans(), st.floats(0, 0.01)), max_size=25
    ),
    depth=st.integers(1, 4),
    limit=st.sampled_from((0, 1 << 30)),
)
def test_every_job_ends_once_with_all_its_bytes(
    jobs: list[tuple[int, int, bool, bool, float]], depth: int, limit: int
) -> None:
    rules = copy_rules(load_bytes_per_second=limit, store_bytes_per_second=limit)
    link = Link(rules, depth=depth)
    for ticket, (size, steps, is_background, is_store, gap_s) in enumerate(jobs):
        job = job_of(ticket, size * MIB, BACKGROUND if is_background else AWAITED, copy_bytes=MIB, steps=steps)
        link.push(job, STORE if is_store else LOAD)
        link.run(link.now + gap_s)
    link.run()
    assert Counter(link.ended) == Counter(dict.fromkeys(range(len(jobs)), pytest.approx(0, abs=1e9)))
    assert all(link.moved[ticket] == job[0] * MIB for ticket, job in enumerate(jobs))


def test_background_waits_for_awaited_ones_but_not_for_ever() -> None:
    link = Link()
    link.push(job_of(0, 64 * MIB, BACKGROUND))
    endless(link, LONG, 2)
    link.run(0.2)
    assert 0 not in link.begun
    link.run(1.3)
    assert link.begun[0] == pytest.approx(0.25, abs=1e-3)
    assert 0.99 <= link.ended[0] <= 1.01  # a slice each quarter of a second, four in all
    assert link.order.count(0) == 4


def test_many_background_jobs_take_no_more_than_one() -> None:
    link = Link()
    for ticket in range(-100, 0):
        link.push(job_of(ticket, 64 * MIB, BACKGROUND))
    endless(link, LONG, 2)
    link.run(1.1)
    assert sum(ticket < 0 for ticket in link.order) == 4


def test_background_stores_wait_for_awaited_loads_and_awaited_stores_do_not() -> None:
    link = Link(depth=2)
    link.push(tokens_job(1, SHORT))
    link.push(job_of(2, 64 * MIB, BACKGROUND), STORE)
    link.push(job_of(3, 64 * MIB, AWAITED), STORE)
    link.run()
    assert link.begun[3] == 0.0
    assert link.begun[2] == link.ended[1]  # also while its last slice was on its way
    link.push(job_of(4, 1 << 30, BACKGROUND))
    link.push(job_of(5, 64 * MIB, BACKGROUND), STORE)
    now = link.now
    link.run()
    assert link.begun[5] == now  # background loads delay no other


def test_the_store_side_is_told_when_the_last_awaited_load_has_landed() -> None:
    arbiter = Arbiter("gpu", copy_rules())
    arbiter.push(LOAD, job_of(1, 32 * MIB), 0.0)
    arbiter.push(STORE, job_of(2, MIB, BACKGROUND), 0.0)
    first, last = arbiter.pop(LOAD, 0.0), arbiter.pop(LOAD, 0.0)
    assert first is not None
    assert last is not None
    assert arbiter.pop(STORE, 0.0) is None
    assert arbiter.next_time(STORE, 0.0) == 0.25
    assert not arbiter.landed(LOAD, first)
    assert arbiter.landed(LOAD, last)
    assert arbiter.next_time(STORE, 0.0) == 0.0
    assert arbiter.pop(STORE, 0.0) is not None
    assert arbiter.next_time(STORE, 0.0) is None


def test_an_expedited_job_is_awaited_and_keeps_its_age() -> None:
    link = Link()
    link.push(tokens_job(7, LONG, BACKGROUND))
    endless(link, LONG, 2)
    link.run(0.1)
    assert 7 not in link.begun
    link.arbiter.expedite(7)
    link.arbiter.expedite(99)
    link.run_until_end_of(7)
    assert link.ended[7] <= 0.1 + 3 * LONG_ALONE_S


def test_paused_background_stores_get_nothing_until_it_is_over() -> None:
    link = Link()
    link.push(job_of(1, 256 * MIB, BACKGROUND), STORE)
    link.run(1e-3)
    link.arbiter.pause_background(STORE, 0.9)
    link.arbiter.pause_background(STORE, 0.2)  # the longer one stays
    link.run(0.8)
    moved = link.moved[1]
    assert 0 < moved <= 64 * MIB
    link.push(job_of(2, MIB), STORE)
    link.push(job_of(3, MIB, BACKGROUND), LOAD)
    link.run(0.85)
    assert {2, 3} <= link.ended.keys()
    assert link.moved[1] == moved
    link.run()
    assert link.ended[1] >= 0.9


def test_an_expedited_store_goes_on_in_a_pause() -> None:
    link = Link()
    link.push(job_of(1, 256 * MIB, BACKGROUND), STORE)
    link.arbiter.pause_background(STORE, 1.0)
    link.arbiter.expedite(1)
    link.run()
    assert link.ended[1] < 0.01


@pytest.mark.parametrize("slice_bytes", [MIB, 16 * MIB])
def test_the_byte_budget_is_kept_within_five_percent(slice_bytes: int) -> None:
    rate = 1 << 30
    link = Link(copy_rules(slice_bytes=slice_bytes, load_bytes_per_second=rate), depth=3)
    link.push(job_of(1, 16 << 30, copy_bytes=3 * MIB))
    link.push(job_of(2, 1 << 30), STORE)
    link.run(5.0)
    assert link.moved[1] == pytest.approx(5.0 * rate, rel=0.05)
    assert link.ended[2] < 0.1  # the other direction has none
    link.run(10.0)
    assert link.moved[1] == pytest.approx(10.0 * rate, rel=0.05)


def test_a_full_bucket_is_two_slices() -> None:
    link = Link(copy_rules(load_bytes_per_second=16 * MIB), depth=4)
    link.now = 100.0
    link.push(job_of(1, 64 * MIB))
    link.run(100.1)
    assert link.moved[1] == 32 * MIB
    link.run()
    assert link.ended[1] == pytest.approx(102.0, rel=1e-3)


def test_a_limit_that_comes_later_starts_with_a_full_bucket() -> None:
    """Bytes that went without a limit are no debt."""
    arbiter = Arbiter("device", copy_rules(16 * MIB))
    arbiter.push(LOAD, job_of(1, 1024 * MIB), 0.0)
    while arbiter.pop(LOAD, 0.0) is not None:
        pass
    arbiter.limit(LOAD, MIB, 1.0)
    arbiter.push(LOAD, job_of(2, 16 * MIB), 1.0)
    assert arbiter.pop(LOAD, 1.0) is not None


def test_the_queue_has_a_limit_over_both_directions() -> None:
    arbiter = Arbiter("gpu", copy_rules(queued_jobs=2))
    arbiter.push(LOAD, job_of(1, MIB), 0.0)
    arbiter.push(STORE, job_of(2, MIB), 0.0)
    with pytest.raises(LimitExceeded, match="copy jobs waiting on gpu: 3 is more than the limit of 2"):
        arbiter.push(STORE, job_of(3, MIB), 0.0)
    assert arbiter.pop(LOAD, 0.0) is not None
    arbiter.push(STORE, job_of(3, MIB), 0.0)


def test_a_failed_job_is_forgotten_and_the_others_are_not() -> None:
    link = Link()
    jobs: dict[int, CopyJob] = {ticket: job_of(ticket, 64 * MIB) for ticket in range(3)}
    for job in jobs.values():
        link.push(job)
    first = link.arbiter.pop(LOAD, 0.0)
    assert first is not None
    link.arbiter.landed(LOAD, first)
    link.arbiter.fail(jobs[0])
    link.run()
    assert list(link.ended) == [1, 2]
    assert link.order.count(0) == 0


def test_draining_takes_out_all_that_is_left_of_one_direction() -> None:
    arbiter = Arbiter("gpu", copy_rules())
    for ticket in range(3):
        arbiter.push(STORE, job_of(ticket, 64 * MIB, BACKGROUND), 0.0)
    arbiter.push(LOAD, job_of(9, MIB), 0.3)
    assert arbiter.pop(STORE, 0.3) is not None  # overdue
    assert [job.ticket for job in arbiter.drain(STORE)] == [0, 1, 2]
    assert arbiter.pop(STORE, 0.3) is None
    assert arbiter.next_time(STORE, 0.3) is None
    assert arbiter.next_time(LOAD, 0.3) == 0.3


def test_whose_slice_comes_next_is_told_without_taking_it() -> None:
    arbiter = Arbiter("gpu", copy_rules())
    assert arbiter.next_up(LOAD, 0.0) is None
    arbiter.push(LOAD, job_of(1, 64 * MIB), 0.0)
    arbiter.push(LOAD, job_of(2, 32 * MIB), 0.0)
    for _ in range(2):
        queued = arbiter.next_up(LOAD, 0.0)
        assert queued is not None
        assert queued.job.ticket == 2
    assert arbiter.queued(LOAD) == 2


def test_a_choice_costs_as_much_among_thousands_as_among_few() -> None:
    steps = []
    for jobs in (20, 2000):
        arbiter = Arbiter("gpu", copy_rules())
        for ticket in range(jobs):
            arbiter.push(STORE, job_of(ticket, (1 + ticket % 7) * MIB, (AWAITED, BACKGROUND)[ticket % 2]), 0.0)
        assert arbiter.pop(STORE, 0.0) is not None
        with counted() as work:
            for _ in range(5):
                assert arbiter.pop(STORE, 0.0) is not None
        steps.append(work.steps)
    assert steps[1] <= steps[0] + 10


def test_what_a_heavy_job_weighed_before_is_not_kept_beneath_lighter_ones() -> None:
    rivals = Rivals()
    for number, size in enumerate((1 << 40, 1)):
        rivals.add(Queued(job_of(number, MIB), AWAITED, size, size, iter(()), number=number))
    heavy, light = rivals
    for _ in range(10 * STALE):
        heavy.left_bytes -= 1
        rivals.weigh(heavy)
        assert rivals.lightest is light
    assert len(rivals._by_weight) <= STALE + 2 * len(rivals)  # noqa: SLF001
    rivals.remove(light)
    assert rivals.lightest is heavy


def test_what_is_expedited_keeps_its_age() -> None:
    arbiter = Arbiter("gpu", copy_rules())
    arbiter.push(STORE, job_of(1, MIB, BACKGROUND), 0.0)
    arbiter.push(STORE, job_of(2, MIB), 0.0)
    arbiter.push(STORE, job_of(3, MIB, BACKGROUND), 0.0)
    arbiter.expedite(3)
    arbiter.expedite(1)
    assert [piece.job.ticket for _ in range(3) if (piece := arbiter.pop(STORE, 0.0)) is not None] == [1, 2, 3]
