"""A token goes to the daemon alone: not in plain text on a network, not to a process that took its socket's place."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import CacheClient, Credentials, EventSubscriber, InvalidRequest, UntrustedDaemon, open_remote
from cachesvc_client.core.errors import DaemonUnavailable
from cachesvc_client.layouts.families import opaque
from cachesvc_client.wire.credentials import credentials_from
from cachesvc_client.wire.life import folder_owner, is_loopback, may_show, require_daemon

from cachesvc.wire.status import LIFE_GREETING, LIFE_SUFFIX
from tests.unit.rigs.client_rig import FakeDaemon

STRANGER = 54321
TOKEN = "a-token-of-an-operator-which-nobody-else-may-read"
METHOD = "/kvcache.v1.AdminService/GetStatus"


class Listener:
    """A stranger's socket that records what is sent to it."""

    def __init__(self, listening: socket.socket, greeting: bytes = b"") -> None:
        self.heard = b""
        self._listening = listening
        self._greeting = greeting
        self._ended = threading.Thread(target=self._hear, daemon=True)
        self._ended.start()

    def close(self) -> bytes:
        """End it; all that it has heard."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._ended.join()
        self._listening.close()
        return self.heard

    def _hear(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                try:
                    if self._greeting:
                        connection.send(self._greeting)
                    while part := connection.recv(1 << 16):
                        self.heard += part
                except OSError:
                    continue


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Listener]]]:
    """Path of a socket, with the life socket beside it, that another user than the daemon's has put there."""
    path = tmp_path / "s"
    made = []
    if os.geteuid():
        monkeypatch.setenv("CACHESVC_DAEMON_UID", str(os.geteuid() + 1))
    for name, kind, greeting in (
        (str(path), socket.SOCK_STREAM, b""),
        (f"{path}{LIFE_SUFFIX}", socket.SOCK_SEQPACKET, LIFE_GREETING + bytes(24)),
    ):
        listening = socket.socket(socket.AF_UNIX, kind)
        listening.bind(name)
        with as_stranger():
            listening.listen()
        made.append(Listener(listening, greeting))
    yield str(path), made
    assert [each.close() for each in made] == [b"", b""], "not even a greeting of gRPC"


def ask(channel: grpc.Channel) -> None:
    """One call."""
    call: Any = channel.unary_unary(METHOD)
    call(b"")


@contextmanager
def as_stranger() -> Iterator[None]:
    """Become another user, where this is root."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(STRANGER)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_token_leaves_this_machine_by_tls_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for host in (socket.gethostname(), "10.0.0.7", "dns:///localhost", "ipv4:127.0.0.1", "localhost.evil.example"):
            with pytest.raises(InvalidRequest, match=r"not sent to .* in plain text"):
                open_remote(f"{host}:{port}", Credentials(TOKEN))
            open_remote(f"{host}:{port}", Credentials()).close()  # without a token it may go in plain text
            open_remote(f"{host}:{port}", Credentials(TOKEN, root_ca="system")).close()
        for host in ("127.0.0.1", "localhost", "[::1]"):
            open_remote(f"{host}:{port}", Credentials(TOKEN)).close()


def test_a_proxy_of_the_environment_does_not_see_what_is_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    proxy = Listener(listening)
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with (
            open_remote(f"127.0.0.1:{free.getsockname()[1]}", Credentials(TOKEN)) as channel,
            pytest.raises(grpc.RpcError),
        ):
            ask(channel)
    assert proxy.close() == b""


def test_who_took_the_daemons_place_is_shown_no_token(impostor: tuple[str, list[Listener]]) -> None:
    path, _ = impostor
    with pytest.raises(UntrustedDaemon, match="set CACHESVC_DAEMON_UID="), CacheClient(path, token=TOKEN):
        pass
    with open_remote(path, Credentials(TOKEN)) as channel, pytest.raises(UntrustedDaemon):
        ask(channel)
    with EventSubscriber(path, b"n" * 32, token=TOKEN) as subscriber, pytest.raises(UntrustedDaemon):
        next(subscriber.follow())


def test_where_nobody_listens_the_call_fails_as_ever(tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    assert not may_show(path)
    with open_remote(path, Credentials(TOKEN)) as channel, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        ask(channel)
    with EventSubscriber(path, b"n" * 32, token=TOKEN) as subscriber, pytest.raises(DaemonUnavailable):
        next(subscriber.follow())


def test_a_daemon_of_ones_own_is_shown_it(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.start()
    with CacheClient(daemon.path, token=TOKEN) as client:
        client.register("m", opaque(block_bytes=64, block_tokens=4))
    daemon.close()


def test_whom_the_daemons_user_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "s")
    for uid in (0, os.geteuid()):
        require_daemon(path, uid, {})
    with pytest.raises(UntrustedDaemon, match="user 64010 serves"):
        require_daemon(path, 64010, {})
    require_daemon(path, 64010, {"CACHESVC_DAEMON_UID": "64010"})
    require_daemon(path, 0, {"CACHESVC_DAEMON_UID": "64010"})
    with pytest.raises(UntrustedDaemon):
        require_daemon(path, 64011, {"CACHESVC_DAEMON_UID": "64010"})
    with pytest.raises(InvalidRequest, match="is the number of the daemon's user"):
        require_daemon(path, 1, {"CACHESVC_DAEMON_UID": "cachesvc"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give folders away")
def test_the_owner_of_a_folder_is_the_daemon_where_only_he_or_root_could_have_made_it(tmp_path: Path) -> None:
    root = Path("/run/cachesvc-test-of-trust")  # what lies in /tmp anybody may have made
    root.mkdir(0o755)
    try:
        folder = root / "run"
        folder.mkdir()
        os.chown(folder, 64010, 64010)
        folder.chmod(0o750)
        assert folder_owner(str(folder / "s")) == 64010, "the daemon's folder, as the manifests and systemd make it"
        require_daemon(str(folder / "s"), 64010, {})
        with pytest.raises(UntrustedDaemon):
            require_daemon(str(folder / "s"), STRANGER, {})
        for mode in (0o770, 0o757, 0o1777):
            folder.chmod(mode)
            assert folder_owner(str(folder / "s")) is None, "others may put a socket there"
        folder.chmod(0o750)
        root.chmod(0o1777)
        assert folder_owner(str(folder / "s")) is None, "others may have made the folder"
        link = tmp_path / "link"
        root.chmod(0o755)
        link.symlink_to(folder)
        Path(tmp_path).chmod(0o777)
        assert folder_owner(str(link / "s")) is None, "others may have made the way to it"
        assert folder_owner(str(root / "none" / "s")) is None
    finally:
        (root / "run").rmdir()
        root.rmdir()


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("127.0.0.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("::1:1", True),
        ("10.0.0.1:1", False),
        ("x", False),
    ],
)
def test_what_loopback_is(address: str, is_here: bool) -> None:
    assert is_loopback(address) is is_here


def test_the_environment_names_the_roots(tmp_path: Path) -> None:
    found = credentials_from(None, None, {"CACHESVC_TOKEN": TOKEN, "CACHESVC_TLS_CA": "system"})
    assert (found.token, found.root_ca) == (TOKEN, "system")
    with pytest.raises(InvalidRequest, match="cannot read"):
        open_remote("node7:1", Credentials(TOKEN, root_ca=str(tmp_path / "none.pem")))
