"""Two tenants without quotas: the one that asks first and for everything leaves room for the other."""

from __future__ import annotations

import pytest
from cachesvc_client import CacheClient, QuotaExceeded
from cachesvc_client.layouts.families import opaque

from tests.e2e.access.test_access import ENGINE, FRESH, OPERATOR, entry, guarded
from tests.e2e.engine import PLAIN
from tests.e2e.rig import short_folder

ALONE = entry(ENGINE, "engines of a", '["engine"]', 'tenant = "a"') + entry(OPERATOR, "operator", '["admin"]')
SECOND_TENANT = entry(FRESH, "engines of b", '["engine"]', 'tenant = "b"')


def test_a_tenant_that_opens_all_it_can_leaves_leases_for_the_next_one() -> None:
    with (
        short_folder() as folder,
        guarded(folder, ALONE + SECOND_TENANT, "--leases", "16") as daemon,
        CacheClient(daemon.socket, token=ENGINE) as greedy,
        CacheClient(daemon.socket, token=FRESH) as other,
    ):
        model = greedy.register("m", PLAIN, device_pages=[4], host_pages=[0])
        held = [greedy.open_lease(model) for _ in range(12)]
        with pytest.raises(QuotaExceeded, match="leases of tenant 'a'"):
            greedy.open_lease(model)
        mine = other.register("m", PLAIN, device_pages=[4], host_pages=[0])
        opened = [other.open_lease(mine) for _ in range(3)]
        with pytest.raises(QuotaExceeded, match="leases of tenant 'b'"):
            other.open_lease(mine)
        for lease in held[4:]:
            lease.close()
        opened += [other.open_lease(mine) for _ in range(5)]
        with pytest.raises(QuotaExceeded):
            other.open_lease(mine)
        assert len(opened) == 8, "half of them"


def test_who_works_alone_or_has_a_quota_is_held_to_no_share() -> None:
    for text in (ALONE, ALONE + SECOND_TENANT + "[quota.tenants.a]\nleases = 16\n"):
        with (
            short_folder() as folder,
            guarded(folder, text, "--leases", "16") as daemon,
            CacheClient(daemon.socket, token=ENGINE) as client,
        ):
            model = client.register("m", PLAIN, device_pages=[4], host_pages=[0])
            assert len([client.open_lease(model) for _ in range(16)]) == 16


def test_a_tenant_that_registers_all_it_can_leaves_models_for_the_next_one() -> None:
    tiny = opaque(block_bytes=1024, block_tokens=16)
    with (
        short_folder() as folder,
        guarded(folder, ALONE + SECOND_TENANT) as daemon,
        CacheClient(daemon.socket, token=ENGINE) as greedy,
        CacheClient(daemon.socket, token=FRESH) as other,
    ):
        for number in range(48):
            model = greedy.register(f"m{number}", tiny, device_pages=[1], host_pages=[0])
            greedy.open_lease(model)  # so that it is not idle
        with pytest.raises(QuotaExceeded, match="models of tenant 'a'"):
            greedy.register("more", tiny, device_pages=[1], host_pages=[0])
        assert other.register("m", tiny, device_pages=[1], host_pages=[0]).model_id
