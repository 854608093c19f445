"""Probes of a kubelet, and engines of other users: the port for probes, and sockets that a group may open."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import grpc
import pytest
from cachesvc_ctl.core.daemon_process import DaemonFailed
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvcache.v1 import admin_pb2, cache_pb2, engine_pb2, event_pb2, lease_pb2

from cachesvc.wire.status import LIFE_SUFFIX
from tests.e2e.engine import Engine
from tests.e2e.rig import FLAGS, running_node, wait_until
from tests.forked_daemon import ForkedDaemon

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROTOS = (admin_pb2, cache_pb2, engine_pb2, event_pb2, lease_pb2)
GROUP = 64010
MEMBER = """
import os, sys, numpy.random
from tests.e2e.engine import Engine, prompt
groups, uid = [int(word) for word in sys.argv[2].split(",") if word], int(sys.argv[3])
os.setgroups(groups)
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
with Engine(sys.argv[1]) as engine:
    served = engine.serve(prompt(7, 4))
print("served", served.computed, "bad", served.bad)
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_address() -> str:
    """An address that others could reach, as a pod's address is; loopback on a machine that has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel says from where it would
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@contextmanager
def probing(port: int) -> Iterator[grpc.Channel]:
    """A kubelet's way in: TCP to the pod's address, without TLS."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"{own_address()}:{port}", options=options) as channel:
        yield channel


def check(channel: grpc.Channel, service: str) -> int:
    """Answer of a gRPC probe of that service."""
    request = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


def silence(until: Event) -> Iterator[bytes]:
    """Messages of a caller that sends none."""
    until.wait()
    yield from ()


def code_of(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """Status code of a call of a method."""
    call = channel.unary_unary(method, request_serializer=Empty.SerializeToString, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as refused:
        call(Empty(), timeout=10)
    code: grpc.StatusCode = refused.value.code()
    return code


def test_the_port_for_probes_answers_checks_and_nothing_else() -> None:
    methods = [
        f"/{service.full_name}/{method.name}"
        for proto in PROTOS
        for service in proto.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    methods += [
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
    ]
    port = free_port()
    with running_node(["--health-listen", f"0.0.0.0:{port}"]) as node, probing(port) as channel:
        assert [check(channel, service) for service in ("", "live", "kvcache.v1.CacheService")] == [SERVING] * 3
        assert code_of(channel, "/grpc.health.v1.Health/Watch") is grpc.StatusCode.UNIMPLEMENTED
        assert {code_of(channel, method) for method in methods} == {grpc.StatusCode.UNIMPLEMENTED}
        with pytest.raises(grpc.RpcError) as unknown:
            check(channel, "no.such.Service")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert check(node.channel, "live") == SERVING


def test_calls_that_somebody_holds_open_keep_no_probe_out() -> None:
    port = free_port()
    with running_node(["--health-listen", f"0.0.0.0:{port}"]), ExitStack() as stack:
        never = Event()
        stack.callback(never.set)
        for _ in range(16):
            channel = stack.enter_context(probing(port))
            stuck: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
                "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes
            )
            assert check(channel, "live") == SERVING  # it is connected
            calls = [stuck.future(silence(never), timeout=60) for _ in range(8)]
            assert not any(call.done() for call in calls)
        with probing(port) as channel:
            assert [check(channel, service) for service in ("", "live")] == [SERVING] * 2


def test_a_drain_ends_readiness_and_not_liveness() -> None:
    port = free_port()
    with running_node(["--health-listen", f"0.0.0.0:{port}"]) as node, probing(port) as channel:
        node.admin.Drain(admin_pb2.DrainRequest())
        assert check(channel, "") == NOT_SERVING
        assert check(channel, "live") == SERVING


def test_sigterm_waits_for_engines_alive_and_not_ready() -> None:
    port = free_port()
    flags = ["--health-listen", f"0.0.0.0:{port}", "--drain-seconds", "600"]
    with running_node(flags) as node, probing(port) as channel:
        with Engine(node.socket):
            node.daemon.process.send_signal(signal.SIGTERM)
            wait_until(lambda: '"event": "draining"' in node.log(), "the daemon drains")
            assert check(channel, "") == NOT_SERVING
            assert check(channel, "live") == SERVING
        assert node.daemon.process.wait(60) == os.EX_OK  # the last lease was closed: long before its 600 s


def test_a_taken_port_for_probes_is_said_and_leaves_no_socket(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        daemon = ForkedDaemon([*FLAGS, "--health-listen", f"0.0.0.0:{taken.getsockname()[1]}"], folder=str(folder))
        with pytest.raises(DaemonFailed, match="another --health-listen"):
            daemon.start()
    assert not list(folder.glob("*.sock*"))


@pytest.mark.parametrize(("address", "said"), [("9465", "is not HOST:PORT"), ("0.0.0.0:99999", "is not HOST:PORT")])
def test_an_address_that_is_none_is_said(folder: Path, address: str, said: str) -> None:
    with pytest.raises(DaemonFailed, match=f"health_listen: .*{said}"):
        ForkedDaemon(["--health-listen", address], folder=str(folder)).start()


def test_sockets_belong_to_the_daemon_alone_or_to_a_group_too(folder: Path) -> None:
    for flags, mode in (([], 0o600), (["--socket-group", str(os.getgid())], 0o660)):
        with running_node(flags, folder) as node:
            for path in (Path(node.socket), Path(node.socket + LIFE_SUFFIX)):
                assert stat.S_IMODE(path.stat().st_mode) == mode
                assert path.stat().st_gid == os.getgid()


def test_a_group_that_is_none_is_said(folder: Path) -> None:
    with pytest.raises(DaemonFailed, match="there is no group 'no-such-group' here"):
        ForkedDaemon([*FLAGS, "--socket-group", "no-such-group"], folder=str(folder)).start()
    assert not list(folder.glob("*.sock*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
@pytest.mark.parametrize(
    ("groups", "uid", "is_served"), [("64010", 64011, True), ("", 64011, False), ("64010", 64012, False)]
)
def test_members_of_the_group_with_a_listed_uid_are_engines(
    folder: Path, groups: str, uid: int, is_served: bool
) -> None:
    """Group and uid both count: the file's mode lets members connect, and ``allow_uids`` names the users that may map
    memory."""
    folder.chmod(0o755)
    config = folder / "config.toml"
    config.write_text(f'socket_group = "{GROUP}"\nallow_uids = [0, 64011]\n')
    with running_node(["--config", str(config)], folder) as node:
        command = [sys.executable, "-c", MEMBER, node.socket, groups, str(uid)]
        engine = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (engine.returncode == 0) is is_served, engine.stderr
        assert ("served 4 bad []" in engine.stdout) is is_served
        assert node.problems() == []
