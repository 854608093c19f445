"""Two tenants on one daemon: nothing crosses, no caller gets in by guessing, and none takes more than its quota."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from cachesvc_client import CacheClient, Credentials, NotFound, QuotaExceeded, Timeouts, open_remote
from cachesvc_client.core.errors import error_of
from cachesvc_client.wire.life import LifeConnection
from kvcache.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    engine_pb2,
    engine_pb2_grpc,
    inspect_pb2,
    lease_pb2,
    storage_pb2,
)
from kvcache.v1.lease_pb2_grpc import LeaseServiceStub

from tests.e2e.access.test_access import entry, guarded
from tests.e2e.engine import PLAIN, WAIT_SECONDS, Engine, prompt
from tests.e2e.rig import Node, short_folder, wait_until

pytestmark = pytest.mark.usefixtures("each_way")

TOKENS = {
    "a": "secret-of-a-with-enough-letters",
    "b": "secret-of-b-with-enough-letters",
    "viewer of a": "sees-a-with-enough-letters",
    "operator": "sees-all-with-enough-letters",
}
TWO_TENANTS = (
    entry(TOKENS["a"], "engines of a", '["engine"]', 'tenant = "a"')
    + entry(TOKENS["b"], "engines of b", '["engine"]', 'tenant = "b"')
    + entry(TOKENS["viewer of a"], "viewer of a", '["read-only"]', 'tenant = "a"')
    + entry(TOKENS["operator"], "operator", '["admin"]')
)


@contextmanager
def two_tenants(quotas: str = "", *flags: str) -> Iterator[str]:
    """A daemon for tenants a and b; its socket."""
    with short_folder() as folder, guarded(folder, TWO_TENANTS + quotas, *flags) as daemon:
        yield daemon.socket


def engine_of(socket: str, tenant: str, device_pages: int = 16, host_pages: int = 0, instance: str = "") -> Engine:
    """An engine with that tenant's token; all of them have one model, one layout and one (empty) salt."""
    name = f"engine of {tenant}"
    made = Engine(socket, name=name, device_pages=device_pages, host_pages=host_pages, instance=instance)
    patient = Timeouts(connect_s=WAIT_SECONDS, call_s=WAIT_SECONDS)
    made.client = CacheClient(socket, engine=name, token=TOKENS[tenant], timeouts=patient)
    return made


@contextmanager
def channel_of(socket: str, who: str) -> Iterator[grpc.Channel]:
    """Bare calls with a token."""
    with open_remote(socket, Credentials(TOKENS[who])) as channel:
        yield channel


@contextmanager
def known_process(socket: str) -> Iterator[bytes]:
    """The token of a process that the life socket knows."""
    life = LifeConnection(socket, WAIT_SECONDS, lambda: None)
    life.start()
    try:
        yield life.process_token
    finally:
        life.close()


def test_two_tenants_with_the_same_prompts_share_nothing() -> None:
    tokens = prompt(1, 6)
    with two_tenants() as socket, engine_of(socket, "a") as a, engine_of(socket, "b") as b:
        assert a.registration.namespace != b.registration.namespace
        assert a.registration.model_id != b.registration.model_id
        assert a.serve(tokens).device == 0
        keys = a.keys(tokens)
        with b.lease.match(keys) as guessed:
            assert (guessed.hit_blocks, guessed.computing_blocks) == (0, 0), "not even with the other's keys"
        with a.lease.match(a.keys(prompt(2, 4))) as open_one:
            open_one.allocate(4)
            with b.lease.match(a.keys(prompt(2, 4))) as other:
                assert other.computing_blocks == 0, "nor that it is being computed"
        assert b.serve(tokens).device == 0
        assert b.serve(tokens).device == 6, "its own"
        assert a.serve(tokens).device == 6
        with engine_of(socket, "a") as again:
            assert again.serve(tokens).device == 6, "engines of one tenant share"


def test_listings_show_a_tenant_its_own_alone_and_readers_no_key_to_a_lease() -> None:
    with two_tenants() as socket, engine_of(socket, "a") as a, engine_of(socket, "b") as b:
        a.serve(prompt(1, 2))
        b.serve(prompt(1, 3))
        mine, other = a.registration.model_id, b.registration.model_id
        with channel_of(socket, "viewer of a") as channel:
            viewer = admin_pb2_grpc.AdminServiceStub(channel)
            assert [m.model_id for m in viewer.ListModels(admin_pb2.ListModelsRequest()).models] == [mine]
            leases = viewer.ListLeases(admin_pb2.ListLeasesRequest()).leases
            assert [(lease.engine, lease.lease_id) for lease in leases] == [("engine of a", a.lease.id[:12])]
            status = viewer.GetStatus(admin_pb2.GetStatusRequest())
            assert {pool.model_id for pool in status.pools} == {mine}
            assert status.counters["blocks"] == 2
            assert "match_requests" not in status.counters, "what is counted over all tenants"
            assert [t.tenant for t in viewer.ListTenants(inspect_pb2.ListTenantsRequest()).tenants] == ["a"]
            for call in (
                lambda: viewer.ListBlocks(admin_pb2.ListBlocksRequest(model_id=other)),
                lambda: viewer.GetTree(admin_pb2.GetTreeRequest(model_id=other)),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert isinstance(error_of(refused.value), NotFound)
        with channel_of(socket, "operator") as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            assert {m.model_id for m in admin.ListModels(admin_pb2.ListModelsRequest()).models} == {mine, other}
            assert a.lease.id in [lease.lease_id for lease in admin.ListLeases(admin_pb2.ListLeasesRequest()).leases]
            assert admin.GetStatus(admin_pb2.GetStatusRequest()).counters["match_requests"] == 2


def test_a_tenants_reader_sees_of_storage_what_its_tenant_keeps_and_no_text(tmp_path: Path) -> None:
    flags = (
        "--host-pool",
        "16MiB",
        "--write-policy",
        "write_through",
        "--storage",
        f"file:{tmp_path}/c?capacity=8MiB&floor=0&write=through",
    )
    with ExitStack() as stack:
        socket = stack.enter_context(two_tenants("", *flags))
        a, b = (stack.enter_context(engine_of(socket, tenant, host_pages=16)) for tenant in "ab")
        operator = admin_pb2_grpc.AdminServiceStub(stack.enter_context(channel_of(socket, "operator")))
        viewer = admin_pb2_grpc.AdminServiceStub(stack.enter_context(channel_of(socket, "viewer of a")))
        a.serve(prompt(1, 2))
        b.serve(prompt(1, 3))
        asked = storage_pb2.GetStorageRequest()
        wait_until(lambda: operator.GetStorage(asked).kept_blocks == 5, "both tenants' blocks are kept")
        every, mine = operator.GetStorage(asked), viewer.GetStorage(asked)
        [tier] = mine.tiers
        [scope] = tier.scopes
        assert (scope.tenant, scope.namespace_hex, scope.objects) == ("a", "", tier.objects)
        assert 0 < tier.objects < every.tiers[0].objects
        shown = {field.name for field, _ in tier.ListFields()}
        own = {"storage", "engine", "breaker", "objects", "size_bytes", "capacity_bytes", "complete", "scopes", "write"}
        assert shown <= own, "neither totals of all tenants nor text"
        assert {field.name for field, _ in mine.ListFields()} <= own | {"tiers", "waiting_blocks"}


def test_another_tenants_lease_model_and_tickets_are_not_there_even_by_their_names() -> None:
    with (
        two_tenants() as socket,
        engine_of(socket, "a", host_pages=16, instance="a's") as a,
        engine_of(socket, "b", instance="a's") as b,
    ):
        assert a.lease.id != b.lease.id
        sequence = a.lease.match(a.keys(prompt(1, 2)))
        sequence.allocate(2)
        ticket = sequence.swap_out().tickets[0].id
        lease = a.lease.id
        with channel_of(socket, "b") as channel, known_process(socket) as token:
            cache = cache_pb2_grpc.CacheServiceStub(channel)
            engines, leases = engine_pb2_grpc.EngineServiceStub(channel), LeaseServiceStub(channel)
            calls: list[Callable[[], object]] = [
                lambda: cache.Match(cache_pb2.MatchRequest(lease_id=lease, sequence_id=9)),
                lambda: cache.Release(cache_pb2.ReleaseRequest(lease_id=lease, sequence_id=sequence.id, request_id=5)),
                lambda: cache.WaitTickets(cache_pb2.WaitTicketsRequest(lease_id=b.lease.id, tickets=[ticket])),
                lambda: engines.Attach(engine_pb2.AttachRequest(lease_id=lease, process_token=token)),
                lambda: engines.Detach(engine_pb2.DetachRequest(lease_id=lease, process_token=token)),
                lambda: leases.Close(lease_pb2.CloseRequest(lease_id=lease, quiesced=True)),
                lambda: list(leases.KeepAlive(iter([lease_pb2.KeepAliveRequest(lease_id=lease)]))),
                lambda: leases.Open(
                    lease_pb2.OpenRequest(
                        model_id=a.registration.model_id,
                        process_token=token,
                        namespace=a.registration.namespace,
                        instance_id="a's",
                    )
                ),
            ]
            for call in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert isinstance(error_of(refused.value), NotFound), str(refused.value)
            step = cache_pb2.StepRequest(lease_id=lease, request_id=1)
            assert next(cache.Step(iter([step]))).error.code == "NOT_FOUND"
        sequence.release()


def test_a_salt_cannot_be_guessed_around_where_no_tokens_are_configured(node: Node) -> None:
    with (
        Engine(node.socket, salt=b"secret of a", device_pages=16) as a,
        Engine(node.socket, device_pages=16) as b,
        known_process(node.socket) as token,
    ):
        opener = LeaseServiceStub(node.channel)
        for namespace in (b"", b.registration.namespace, b"x" * 32):
            request = lease_pb2.OpenRequest(model_id=a.registration.model_id, process_token=token, namespace=namespace)
            with pytest.raises(grpc.RpcError) as refused:
                opener.Open(request)
            assert isinstance(error_of(refused.value), NotFound)
        shown = {m.model_id: m.namespace for m in node.admin.ListModels(admin_pb2.ListModelsRequest()).models}
        assert shown == {a.registration.model_id: b"", b.registration.model_id: b.registration.namespace}
        assert set(node.lease_states()) == {a.lease.id[:12], b.lease.id}


def test_a_page_that_changes_tenant_reads_as_zeros() -> None:
    pages = 12_000  # most of the device pool: the second tenant must get the first one's memory
    with two_tenants() as socket:
        with engine_of(socket, "a", device_pages=pages) as a:
            assert a.serve(prompt(6, 64)).computed == 64
            for plane in a.pool.planes.values():
                plane[...] = 0xA5 if plane.dtype.itemsize == 1 else 1
        with engine_of(socket, "b", device_pages=pages) as b:
            assert not b.registration.existed
            assert len(b.pool.planes) == len(PLAIN.planes)
            assert not any(plane.any() for plane in b.pool.planes.values())
        with channel_of(socket, "operator") as channel:
            status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
            assert status.counters["models_dismissed"] == 1


def test_quotas_name_what_was_too_much() -> None:
    per_block = sum(PLAIN.page_bytes(group) for group in range(len(PLAIN.groups)))
    quotas = f"""
    [quota.tenants.a]
    device_bytes = "{40 * per_block}B"
    leases = 2
    sequences = 3
    private_pages = 8
    lease_private_pages = 6
    """
    with two_tenants(quotas) as socket, engine_of(socket, "a", device_pages=20) as a, engine_of(socket, "b") as b:
        with pytest.raises(QuotaExceeded, match="quota device_bytes of tenant 'a'"):
            a.client.register("other@1", PLAIN, device_pages=[30], host_pages=[0])
        small = a.client.register("small@1", PLAIN, host_pages=[0])
        assert 0 < small.device_pages[0] <= 20, "a share comes to what the quota leaves"
        held = [a.lease.match(b"") for _ in range(3)]
        with pytest.raises(QuotaExceeded, match="sequences of tenant 'a': 4 is more than the limit of 3"):
            a.lease.match(b"")
        held[0].allocate(5)
        with pytest.raises(QuotaExceeded, match="lease_private_pages of tenant 'a': 7 is more than the limit of 6"):
            held[1].allocate(2)
        second = a.client.open_lease(a.registration, instance="shared")
        with pytest.raises(QuotaExceeded, match="leases of tenant 'a': 3 is more than the limit of 2"):
            a.client.open_lease(a.registration)
        with CacheClient(socket, token=TOKENS["a"]) as worker:
            joined = worker.open_lease(worker.register("model@1", PLAIN), instance="shared")
            assert (joined.id, joined.joined) == (second.id, True), "which is no lease more"
        held[2].release()
        with second.match(b"") as more, pytest.raises(QuotaExceeded, match="private_pages of tenant 'a': 9 is more"):
            more.allocate(4)
        for sequence in held[:2]:
            sequence.release()
        free = [b.lease.match(b"") for _ in range(5)]
        free[0].allocate(12)
        for sequence in free:
            sequence.release()
        with channel_of(socket, "operator") as channel:
            tenants = admin_pb2_grpc.AdminServiceStub(channel).ListTenants(inspect_pb2.ListTenantsRequest()).tenants
        told = {tenant.tenant: tenant for tenant in tenants}
        assert (told["a"].limits["sequences"], told["a"].used["leases"], told["a"].used["refused"]) == (3, 2, 4)
        assert not told["b"].limits


def open_many(engine: Engine, count: int) -> None:
    """Open and release sequences, as fast as can be."""
    for _ in range(count):
        engine.lease.match(b"").release()


def test_one_tenants_rate_is_no_others() -> None:
    quotas = "[quota.tenants.a]\ncalls_per_second = 20\n"
    with two_tenants(quotas) as socket, engine_of(socket, "a") as a, engine_of(socket, "b") as b:
        with pytest.raises(QuotaExceeded, match=r"calls_per_second of tenant 'a'.*limit of 20; try again in 0\.\d+ s"):
            open_many(a, 200)
        open_many(b, 60)
