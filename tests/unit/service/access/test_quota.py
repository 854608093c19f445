"""Buckets, quotas and scopes, without a daemon."""

from __future__ import annotations

from typing import Any

import pytest

from cachesvc.model.errors import InvalidRequest, QuotaExceeded
from cachesvc.model.numbers import Bucket
from cachesvc.service.access.auth import EVERYONE, LOOPBACK, Caller, Scope, scopes_of
from cachesvc.service.access.quota import Meter, Quota, parse_quota
from tests.fuzz.target import list_rpcs


def test_a_bucket_saves_up_one_second_and_no_more() -> None:
    bucket = Bucket(10)
    assert [bucket.take(1, 100.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(1, 100.0) == pytest.approx(0.1)
    assert bucket.take(1, 100.05) == pytest.approx(0.05)
    assert bucket.take(1, 100.15) == 0.0
    assert [bucket.take(1, 500.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(1, 500.0) > 0


def test_what_is_larger_than_a_bucket_goes_through_a_full_one_and_leaves_a_debt() -> None:
    bucket = Bucket(10)
    assert bucket.take(25, 100.0) == 0.0
    assert bucket.take(1, 101.0) == pytest.approx(0.6)
    assert bucket.take(1, 101.7) == 0.0


def test_a_meter_says_when_to_come_again() -> None:
    meter = Meter("a", Quota(calls_per_second=1, operations_per_second=4))
    meter.admit("calls_per_second", 1, 1.0)
    with pytest.raises(QuotaExceeded, match=r"calls_per_second of tenant 'a': asked more often.*try again in 0\.500 s"):
        meter.admit("calls_per_second", 1, 1.5)
    meter.admit("operations_per_second", 4, 1.0)
    with pytest.raises(QuotaExceeded, match="operations_per_second") as refused:
        meter.admit("operations_per_second", 4, 1.25)
    assert (refused.value.limit, refused.value.got, meter.refused) == (4, None, 2)


@pytest.mark.parametrize("table", [{"leases": -1}, {"leases": "many"}, {"leases": True}, {"unknown": 1}, 7])
def test_a_quota_that_cannot_be_is_refused(table: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_quota(table, "here")


def test_sizes_of_quotas_take_units() -> None:
    assert parse_quota({"device_bytes": "2GiB", "leases": 3}, "here") == Quota(device_bytes=2 << 30, leases=3)


def test_every_rpc_has_its_scope_and_what_no_rule_names_is_closed() -> None:
    reading = {name for name, rpc in list_rpcs().items() if LOOPBACK.may(scopes_of(rpc.path))}
    assert {"GetStatus", "ListModels", "ListBlocks", "GetTree", "Verify", "ListTenants"} <= reading
    assert not reading & {"Register", "Attach", "Open", "Match", "Step", "Drain", "Evict", "Publish"}
    engine = Caller("engine", frozenset({Scope.ENGINE}), "a")
    working = {name for name, rpc in list_rpcs().items() if engine.may(scopes_of(rpc.path))}
    assert not working & {"GetStatus", "ListLeases", "Drain", "Evict"}
    assert all(EVERYONE.may(scopes_of(rpc.path)) for rpc in list_rpcs().values())
    for closed in (
        "/kvcache.v1.NewService/Do",
        "/kvcache.v1.AdminService/Forget",
        "/grpc.channelz.v1.Channelz/GetServers",
    ):
        assert scopes_of(closed) == (Scope.ADMIN,)
    assert set(scopes_of("/grpc.health.v1.Health/Check")) == {Scope.ENGINE, Scope.READ, Scope.ADMIN}


def test_a_caller_sees_its_tenant_or_all() -> None:
    assert Caller("x", frozenset({Scope.READ}), "a").sees("a")
    assert not Caller("x", frozenset({Scope.READ}), "a").sees("")
    assert Caller("x", frozenset({Scope.READ})).sees("a")
    assert Caller("x", frozenset({Scope.ADMIN}), "a").sees("b")
