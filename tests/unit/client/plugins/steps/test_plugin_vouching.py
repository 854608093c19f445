"""Steps of vLLM that may give out tokens, by the lease that they were computed under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cachesvc_client import Lease
from cachesvc_client.plugins.outbox import Dropped, PagesLapsed, Vouching

from cachesvc.model.errors import ErrorCode
from tests.unit.rigs.client_rig import FakeDaemon, refuse
from tests.unit.rigs.tenure_rig import expire, sure_lease


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    fake.start()
    yield fake
    fake.close()


@pytest.fixture
def lease(daemon: FakeDaemon) -> Iterator[Lease]:
    """One that is sure."""
    with sure_lease(daemon) as made:
        yield made


def lost_by_silence(daemon: FakeDaemon, lease: Lease) -> None:
    expire(lease)
    daemon.faults["KeepAlive"].append(refuse(ErrorCode.LEASE_LOST, "silent"))


def test_vllm_s_steps_give_out_nothing_that_was_read_without_a_lease(daemon: FakeDaemon, lease: Lease) -> None:
    vouching = Vouching(lambda: lease)
    vouching.begin_step(computes=True)
    vouching.end_step(Dropped.NOT)
    vouching.begin_step(computes=True)
    vouching.begin_step(computes=False)
    lost_by_silence(daemon, lease)
    with pytest.raises(PagesLapsed, match="longer than its lease of 30 s"):
        vouching.end_step(Dropped.NOT)
    vouching.end_step(Dropped.NOT)  # it computes nothing


def test_what_vllm_computes_again_is_given_out_by_nobody(daemon: FakeDaemon, lease: Lease) -> None:
    vouching = Vouching(lambda: lease)
    vouching.begin_step(computes=True)
    lost_by_silence(daemon, lease)
    vouching.end_step(Dropped.REPEATED)
    assert lease.is_lost  # or it would be computed again where it was


def test_a_step_cannot_be_computed_again_once_the_next_is_scheduled(daemon: FakeDaemon, lease: Lease) -> None:
    vouching = Vouching(lambda: lease)
    vouching.begin_step(computes=True)
    vouching.begin_step(computes=True)
    lost_by_silence(daemon, lease)
    with pytest.raises(PagesLapsed):
        vouching.end_step(Dropped.REPEATED)


def test_a_void_step_that_vllm_was_not_told_of_ends_the_engine(daemon: FakeDaemon, lease: Lease) -> None:
    vouching = Vouching(lambda: lease)
    vouching.begin_step(computes=True)
    lost_by_silence(daemon, lease)
    with pytest.raises(PagesLapsed):
        vouching.end_step(Dropped.LOST)


def test_a_step_is_not_computed_again_in_pages_of_a_lease_that_lives(lease: Lease) -> None:
    vouching = Vouching(lambda: lease)
    vouching.begin_step(computes=True)
    with pytest.raises(PagesLapsed, match="a worker says so"):
        vouching.end_step(Dropped.REPEATED)


def test_a_look_before_a_step_finds_the_loss_once_in_an_iteration(daemon: FakeDaemon, lease: Lease) -> None:
    vouching = Vouching(lambda: lease)
    assert [vouching.look(), vouching.look()] == [True, False]
    vouching.begin_step(computes=False)
    lost_by_silence(daemon, lease)
    assert vouching.look()
    assert lease.is_lost
