"""Watching callers see their own tenant alone: Verify, streams of events and dumps, salts without tokens."""

from __future__ import annotations

import re
import signal
from typing import Any

import grpc
import pytest
from cachesvc_client import (
    Credentials,
    EventSubscriber,
    LimitExceeded,
    NotFound,
    NotOwned,
    Unauthenticated,
    open_remote,
)
from cachesvc_client.core.errors import error_of
from kvcache.v1 import admin_pb2, admin_pb2_grpc, event_pb2, event_pb2_grpc, inspect_pb2

from tests.e2e.access.test_access import entry, guarded, port_of, refusal, write_tokens
from tests.e2e.access.test_tenants import TOKENS, TWO_TENANTS, channel_of, engine_of, two_tenants
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import FLAGS, Node, short_folder, wait_until
from tests.forked_daemon import ForkedDaemon


def admin_of(channel: grpc.Channel) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(channel)


def test_verify_looks_at_a_viewers_own_tenant_alone() -> None:
    with (
        short_folder() as folder,
        guarded(folder, TWO_TENANTS, "--checksums", "all") as daemon,
        engine_of(daemon.socket, "a") as a,
        engine_of(daemon.socket, "b") as b,
    ):
        a.serve(prompt(1, 2))
        b.serve(prompt(1, 3))
        mine, other = a.registration.model_id, b.registration.model_id
        for view in b.pool.page("full", 0).values():  # as only a broken engine would
            view.reshape(-1).view("uint8")[0] ^= 0xFF
        with channel_of(daemon.socket, "operator") as channel:
            seen = admin_of(channel).Verify(admin_pb2.VerifyRequest(checksums=True))
            assert (seen.blocks_checked, seen.checksums.known_blocks) == (5, 5)
            assert admin_of(channel).GetStatus(admin_pb2.GetStatusRequest()).config["socket"] == daemon.socket
        with channel_of(daemon.socket, "viewer of a") as channel:
            viewer = admin_of(channel)
            seen = viewer.Verify(admin_pb2.VerifyRequest(checksums=True))
            assert (seen.ok, seen.blocks_checked, seen.checksums.known_blocks) == (True, 2, 2)
            assert {re.search(r"model (\d+)", check).group(1) for check in seen.checks} == {str(mine)}  # type: ignore[union-attr]
            assert isinstance(refusal(lambda: viewer.Verify(admin_pb2.VerifyRequest(model_id=other))), NotFound)
            assert viewer.Verify(admin_pb2.VerifyRequest(model_id=mine)).blocks_checked == 2
            assert not viewer.GetStatus(admin_pb2.GetStatusRequest()).config, "files and limits of the whole node"


def test_who_guesses_a_namespace_is_told_the_same_whatever_else_it_names() -> None:
    with two_tenants() as socket, engine_of(socket, "a") as a, channel_of(socket, "b") as channel:
        stub = event_pb2_grpc.EventServiceStub(channel)
        for namespace in (a.registration.namespace, bytes(32)):
            for model_id in (0, a.registration.model_id, 99):
                request = event_pb2.SubscribeRequest(namespace=namespace, model_id=model_id, snapshot=True)
                error = refusal(lambda request=request: next(stub.Subscribe(request)))  # type: ignore[misc]
                assert isinstance(error, NotFound)
                assert namespace.hex() in str(error)


def test_a_stream_of_events_ends_once_its_token_is_revoked() -> None:
    with short_folder() as folder, guarded(folder, TWO_TENANTS) as daemon, engine_of(daemon.socket, "a") as a:
        namespace = a.registration.namespace
        with channel_of(daemon.socket, "viewer of a") as channel:
            stub = event_pb2_grpc.EventServiceStub(channel)
            stream = stub.Subscribe(event_pb2.SubscribeRequest(namespace=namespace))
            assert next(stream).model_id == a.registration.model_id
            write_tokens(folder / "tokens.toml", entry(TOKENS["a"], "engines of a", '["engine"]', 'tenant = "a"'))
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "tokens_read" in daemon.log.read_text(encoding="utf-8"), "the file was read again")
            a.serve(prompt(1, 2))
            with pytest.raises(grpc.RpcError) as refused:
                list(stream)
            assert isinstance(error_of(refused.value), Unauthenticated)


def test_one_tenant_leaves_room_among_subscribers() -> None:
    with (
        short_folder() as folder,
        guarded(folder, TWO_TENANTS, "--event-subscribers", "4") as daemon,
        engine_of(daemon.socket, "a") as a,
        engine_of(daemon.socket, "b") as b,
        channel_of(daemon.socket, "a") as of_a,
        channel_of(daemon.socket, "b") as of_b,
    ):
        first, second = (event_pb2_grpc.EventServiceStub(channel) for channel in (of_a, of_b))
        mine = event_pb2.SubscribeRequest(namespace=a.registration.namespace)
        held = [first.Subscribe(mine) for _ in range(3)]
        for stream in held:
            next(stream)
        with pytest.raises(grpc.RpcError) as refused:
            next(first.Subscribe(mine))
        assert isinstance(error_of(refused.value), LimitExceeded)
        assert "of this tenant: 4 is more than the limit of 3" in str(error_of(refused.value))
        other = second.Subscribe(event_pb2.SubscribeRequest(namespace=b.registration.namespace))
        assert next(other).model_id == b.registration.model_id
        for stream in (*held, other):
            stream.cancel()


def test_a_salt_stays_a_secret_of_its_engines_where_nobody_logs_in() -> None:
    with (
        short_folder() as folder,
        ForkedDaemon([*FLAGS, "--listen", "127.0.0.1:0"], folder=str(folder)) as daemon,
        Engine(daemon.socket, salt=b"secret of a", device_pages=16) as engine,
        open_remote(f"127.0.0.1:{port_of(daemon)}", Credentials("")) as loopback,
        open_remote(daemon.socket, Credentials("")) as socket,
    ):
        engine.serve(prompt(1, 2))
        model = engine.registration.model_id
        for channel in (loopback, socket):
            (shown,) = admin_of(channel).ListModels(admin_pb2.ListModelsRequest()).models
            assert (shown.namespace, shown.namespace_hex) == (b"", "")
            assert not admin_of(channel).GetStatus(admin_pb2.GetStatusRequest()).tokens
            events = event_pb2_grpc.EventServiceStub(channel)
            request = event_pb2.SubscribeRequest(model_id=model, snapshot=True)
            assert isinstance(refusal(lambda: next(events.Subscribe(request))), NotOwned)  # noqa: B023
        parts = list(admin_of(socket).DumpIndex(inspect_pb2.DumpIndexRequest(model_id=model)))
        assert (parts[0].head.namespace_hex, parts[0].head.blocks) == ("", 2)
        with EventSubscriber(daemon.socket, engine.registration.namespace) as subscriber:
            assert next(subscriber.subscribe()).model == model


def test_who_leaves_in_the_midst_of_a_dump_makes_room_for_another(node: Node) -> None:
    with Engine(node.socket, device_pages=64, host_pages=0) as engine:
        engine.serve(prompt(1, 40))
        request = inspect_pb2.DumpIndexRequest(model_id=1, blocks_per_message=1)
        for _ in range(3):
            held = [node.admin.DumpIndex(request) for _ in range(2)]
            assert [next(stream).head.blocks for stream in held] == [40, 40]
            for stream in held:
                stream.cancel()
            wait_until(lambda: can_dump(node, request), "those who left are forgotten")


def can_dump(node: Node, request: inspect_pb2.DumpIndexRequest) -> bool:
    try:
        return len(list(node.admin.DumpIndex(request))) == 41
    except grpc.RpcError as refused:
        if not isinstance(error_of(refused), LimitExceeded):
            raise
        return False


def test_streams_of_answers_refuse_what_they_cannot_read(node: Node) -> None:
    for method in ("kvcache.v1.EventService/Subscribe", "kvcache.v1.AdminService/DumpIndex"):
        call: Any = node.channel.unary_stream(f"/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(b"\xff\xff\xff"))
        assert "the bytes are not a " in str(refused.value)
