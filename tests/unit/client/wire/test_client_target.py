"""Address of a client's daemon: the given one, else the environment's, else the default of every installation."""

from __future__ import annotations

import pytest
from cachesvc_client import (
    CacheClient,
    DaemonUnavailable,
    EventSubscriber,
    NotSupported,
    default_socket,
    default_target,
    open_remote,
)
from cachesvc_client.aio import AsyncCacheClient
from cachesvc_client.wire.settings import DEFAULT_SOCKET
from kvcache.v1 import lease_pb2, lease_pb2_grpc

from tests.unit.rigs.client_rig import EPOCH, LEASE_ID, FakeDaemon


def test_the_environment_names_the_socket_and_the_address() -> None:
    assert default_socket({}) == default_target({}) == DEFAULT_SOCKET
    assert default_socket({"CACHESVC_SOCKET": "/tmp/kv.sock"}) == "/tmp/kv.sock"
    both = {"CACHESVC_SOCKET": "/tmp/kv.sock", "CACHESVC_ADDRESS": "node-1:7070"}
    assert (default_socket(both), default_target(both)) == ("/tmp/kv.sock", "node-1:7070")


def test_a_variable_that_is_empty_names_nothing() -> None:
    empty = {"CACHESVC_SOCKET": "", "CACHESVC_ADDRESS": ""}
    assert default_target(empty) == DEFAULT_SOCKET


def test_a_path_is_never_read_as_an_address() -> None:
    assert default_target({"CACHESVC_SOCKET": "kv.sock"}) == "./kv.sock"


async def test_clients_without_arguments_find_the_daemon_of_the_environment(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.path)
    with CacheClient() as client:
        assert (client.socket_path, client.epoch) == (daemon.path, EPOCH)
    async with AsyncCacheClient() as awaited:
        assert awaited.epoch == EPOCH
    with open_remote() as channel:
        opened = lease_pb2_grpc.LeaseServiceStub(channel).Open(lease_pb2.OpenRequest())
        assert opened.lease_id == LEASE_ID
    with EventSubscriber(None, b"n" * 32) as events, pytest.raises(NotSupported):
        next(events.subscribe())


def test_what_is_given_wins(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC_SOCKET", "/nowhere/kv.sock")
    with pytest.raises(DaemonUnavailable, match=r"/nowhere/kv\.sock"):
        CacheClient().connect()
    with CacheClient(daemon.path) as client:
        assert client.connected
