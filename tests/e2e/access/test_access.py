"""Access: tokens, scopes, tenants, processes, certificates. Real daemons, real sockets."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import (
    CacheClient,
    Credentials,
    EventSubscriber,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    open_remote,
)
from cachesvc_client.core.errors import error_of
from cachesvc_client.events import Part
from cachesvc_ctl.core.daemon_process import DaemonProcess
from cachesvc_ctl.main import main
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc, event_pb2, event_pb2_grpc

from tests.e2e.engine import PLAIN
from tests.e2e.rig import FLAGS, short_folder, wait_until
from tests.forked_command import run_forked
from tests.forked_daemon import ForkedDaemon

ENGINE, READER, OPERATOR, OLD, FRESH, SECOND, GUESS = (
    f"{name}-secret-of-enough-letters" for name in ("engine", "reader", "operator", "old", "fresh", "second", "guess")
)


def entry(token: str, name: str, scopes: str, more: str = "") -> str:
    """One [[token]] of the file."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\nscopes = {scopes}\n{more}\n'


PLAIN_FILE = (
    entry(ENGINE, "engines", '["engine"]', 'tenant = "team-a"')
    + entry(READER, "router", '["read-only"]')
    + entry(OPERATOR, "operator", '["admin"]')
    + entry(OLD, "left", '["admin"]', "expires = 2020-01-01T00:00:00Z")
)


def write_tokens(path: Path, text: str) -> None:
    """Put a tokens' file in its place at once, as an operator's tool would."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)


@contextmanager
def guarded(folder: Path, text: str = PLAIN_FILE, *flags: str, under: Sequence[str] = ()) -> Iterator[DaemonProcess]:
    """A daemon with that tokens' file."""
    write_tokens(folder / "tokens.toml", text)
    every = [*FLAGS, "--tokens", str(folder / "tokens.toml"), *flags]
    with ForkedDaemon(every, folder=str(folder), under=under, whole=True) as daemon:
        yield daemon


@contextmanager
def operator(address: str, token: str = "", **files: str) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    """AdminService, with a token."""
    with open_remote(address, Credentials(token, **files)) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def refusal(call: Callable[[], object]) -> Exception:
    """The typed error of a call that must be refused."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return error_of(refused.value)


def test_without_tokens_whoever_may_open_the_socket_does_everything() -> None:
    with short_folder() as folder, ForkedDaemon(FLAGS, folder=str(folder)) as daemon, operator(daemon.socket) as admin:
        status = admin.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.caller, list(status.scopes), status.tokens) == (
            "everyone",
            ["admin", "engine", "read-only"],
            False,
        )
        assert not admin.Drain(admin_pb2.DrainRequest()).live_leases


def test_each_scope_opens_its_own_calls_and_no_other() -> None:
    with short_folder() as folder, guarded(folder) as daemon:
        with pytest.raises(Unauthenticated, match="needs a token"), CacheClient(daemon.socket) as client:
            client.register("m", PLAIN)
        with pytest.raises(Unauthenticated, match="not known"), CacheClient(daemon.socket, token=GUESS) as client:
            client.register("m", PLAIN)
        with pytest.raises(Unauthenticated, match="expired"), CacheClient(daemon.socket, token=OLD) as client:
            client.register("m", PLAIN)
        with pytest.raises(PermissionDenied, match="takes scope engine"), CacheClient(daemon.socket, token=READER) as c:
            c.register("m", PLAIN)
        with CacheClient(daemon.socket, token=ENGINE) as client:
            model_id = client.register("m", PLAIN, device_pages=[4], host_pages=[0]).model_id
        with operator(daemon.socket, ENGINE) as admin:
            assert isinstance(refusal(lambda: admin.ListLeases(admin_pb2.ListLeasesRequest())), PermissionDenied)
        with operator(daemon.socket, READER) as admin:
            assert admin.GetStatus(admin_pb2.GetStatusRequest()).caller == "router"
            assert admin.Verify(admin_pb2.VerifyRequest()).ok
            for call in (
                lambda: admin.Drain(admin_pb2.DrainRequest()),
                lambda: admin.Evict(admin_pb2.EvictRequest(model_id=model_id, tier="device")),
                lambda: admin.SetWeightsVersion(
                    admin_pb2.SetWeightsVersionRequest(model_id=model_id, version="step-1")
                ),
            ):
                assert isinstance(refusal(call), PermissionDenied)
        with operator(daemon.socket, OPERATOR) as admin:
            assert admin.Evict(admin_pb2.EvictRequest(model_id=model_id, tier="device")).evicted == 0
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest()
            assert isinstance(refusal(lambda: health.Check(asked)), Unauthenticated), "probes have a port of their own"
            proof = (("authorization", f"Bearer {READER}"),)
            assert health.Check(asked, metadata=proof).status == health_pb2.HealthCheckResponse.SERVING
            stream = event_pb2_grpc.EventServiceStub(channel).Subscribe(event_pb2.SubscribeRequest())
            assert isinstance(refusal(lambda: next(stream)), Unauthenticated), "streams too"
        log = daemon.log.read_text(encoding="utf-8")
        assert not [token for token in (ENGINE, READER, OPERATOR, OLD, GUESS) if token in log]


def test_a_new_file_counts_at_once_and_a_revoked_token_ends_open_streams() -> None:
    with short_folder() as folder, guarded(folder, PLAIN_FILE, "--lease-seconds", "1.5") as daemon:
        path = folder / "tokens.toml"
        with CacheClient(daemon.socket, token=ENGINE) as client:
            registration = client.register("m", PLAIN, device_pages=[4], host_pages=[0])
            lease = client.open_lease(registration)
            revoked = entry(ENGINE, "engines", '["engine"]', 'tenant = "team-a"\nrevoked = true')
            write_tokens(path, revoked + entry(FRESH, "engines", '["engine"]', 'tenant = "team-a"'))
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "tokens_read" in daemon.log.read_text(encoding="utf-8"), "the file was read again")
            with pytest.raises(Unauthenticated, match="no longer accepted"):
                lease.match(b"")
            wait_until(lambda: lease.is_lost or "Unauthenticated" in str(lease.record.loss), "its beats are refused")
        with CacheClient(daemon.socket, token=FRESH) as client:
            assert client.register("m", PLAIN).existed
        write_tokens(path, "[[token]]\nname = 1\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "tokens_not_read" in daemon.log.read_text(encoding="utf-8"), "the daemon reports a bad file")
        with CacheClient(daemon.socket, token=FRESH) as client:
            assert client.register("m", PLAIN).existed, "and changes nothing"
        log = daemon.log.read_text(encoding="utf-8")
        assert (lease.id[:12] in log, lease.id in log) == (True, False), "a whole lease id would be a way in"


def test_a_client_reads_its_token_file_again_when_it_is_refused() -> None:
    with short_folder() as folder, guarded(folder) as daemon:
        mine = folder / "token"
        mine.write_text(f"{ENGINE}\n", encoding="utf-8")
        with CacheClient(daemon.socket, token_file=str(mine)) as client:
            client.register("m", PLAIN, device_pages=[4], host_pages=[0])
            write_tokens(folder / "tokens.toml", entry(SECOND, "engines", '["engine"]', 'tenant = "team-a"'))
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "tokens_read" in daemon.log.read_text(encoding="utf-8"), "the file was read again")
            mine.write_text(f"{SECOND}\n", encoding="utf-8")
            assert client.register("m", PLAIN).existed


def test_a_subscriber_proves_itself_and_reads_its_token_file_again(capsys: pytest.CaptureFixture[str]) -> None:
    with short_folder() as folder, guarded(folder) as daemon, CacheClient(daemon.socket, token=ENGINE) as client:
        registration = client.register("m", PLAIN, device_pages=[4], host_pages=[0])
        namespace = registration.namespace
        with (
            EventSubscriber(daemon.socket, namespace) as stranger,
            pytest.raises(Unauthenticated, match="needs a token"),
        ):
            next(stranger.follow())
        mine = folder / "token"
        mine.write_text(READER, encoding="utf-8")
        with EventSubscriber(daemon.socket, namespace, token_file=str(mine)) as subscriber:
            batches = subscriber.follow()
            assert next(batches).part is Part.FIRST
            assert next(batches).part is Part.LAST
            engines = entry(ENGINE, "engines", '["engine"]', 'tenant = "team-a"')
            write_tokens(folder / "tokens.toml", engines + entry(SECOND, "router", '["read-only"]'))
            mine.write_text(SECOND, encoding="utf-8")
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "tokens_read" in daemon.log.read_text(encoding="utf-8"), "the file was read again")
            with client.open_lease(registration) as lease, lease.match(b"k" * 32) as sequence:
                sequence.allocate(1)
                sequence.publish(1)
            parts = [next(batches).part for _ in range(2)]
            assert parts == [Part.FIRST, Part.LAST], "the old token gets nothing any more, the new one all anew"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CACHESVC_TOKEN", SECOND)
            patch.setattr("sys.argv", ["cachesvc", "events", "--socket", daemon.socket, "--model", "9"])
            with pytest.raises(SystemExit):
                main()
        assert "there is no model 9" in "".join(capsys.readouterr())


def test_a_process_is_known_by_its_user_or_group() -> None:
    by_user = f'[[peer]]\nuid = {os.getuid()}\nscopes = ["engine"]\ntenant = "local"\n'
    by_group = f'[[peer]]\ngid = {os.getgid()}\nscopes = ["engine"]\ntenant = "local"\n'
    for text in (by_user, by_group):
        with short_folder() as folder, guarded(folder, text) as daemon, CacheClient(daemon.socket) as client:
            client.register("m", PLAIN, device_pages=[4], host_pages=[0])
            with operator(daemon.socket) as admin:
                refused = refusal(lambda: admin.GetStatus(admin_pb2.GetStatusRequest()))
                assert isinstance(refused, Unauthenticated), "it has no life connection"


def test_only_groups_that_may_attach_are_greeted() -> None:
    with short_folder() as folder:
        flags = [*FLAGS, "--allow-gid", "54321"]
        with (
            ForkedDaemon(flags, folder=str(folder)) as daemon,
            pytest.raises(Exception, match="greets like no daemon"),
        ):
            CacheClient(daemon.socket).connect()
        with ForkedDaemon([*FLAGS, "--allow-gid", str(os.getgid())], folder=str(folder)) as daemon:
            CacheClient(daemon.socket).connect().close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[token]]\nname = 'a'\nscopes = ['engine']\n", "sha256 must be 64 hexadecimal digits"),
        (entry("a", "a", '["root"]'), "scopes are a list of admin, engine, metrics, read-only"),
        (entry("a", "a", '["engine"]') * 2, "the same token is there twice"),
        ("[[peer]]\nscopes = ['engine']\n", "needs a uid or a gid"),
        ("[quota.default]\nleases = -1\n", "leases: -1 is no whole number"),
        ("[quota.default]\nlease = 1\n", "known quotas are"),
        (entry("a", "a", '["engine"]', 'expires = "soon"'), "expires is a time with its zone"),
        ("[tokens]\n", "known tables are token, peer, certificate and quota"),
        ("[[token]\n", "cannot be read"),
    ],
)
def test_a_bad_tokens_file_stops_the_start_and_says_why(text: str, message: str) -> None:
    with short_folder() as folder, pytest.raises(Exception, match=message), guarded(folder, text):
        pass


def test_a_tokens_file_that_others_may_write_is_refused() -> None:
    with short_folder() as folder:
        (folder / "tokens.toml").write_text(PLAIN_FILE, encoding="utf-8")
        (folder / "tokens.toml").chmod(0o666)
        daemon = ForkedDaemon([*FLAGS, "--tokens", str(folder / "tokens.toml")], folder=str(folder))
        with pytest.raises(Exception, match="chmod go-w"):
            daemon.start()


NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1"  # an RSA key takes up to a second


class Authority:
    """Certificates for a test, made by openssl: a root, and what it signs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run(f"req -x509 {NEW_KEY} -nodes -days 2 -subj /CN=root -keyout root.key -out root.pem")

    def sign(self, name: str, serial: int, alternative: str = "") -> tuple[str, str]:
        """Paths of a certificate for ``name`` (also for localhost, unless ``alternative`` names are given) and of its
        key."""
        names = alternative or f"DNS:localhost,DNS:{name}"
        (self.folder / "names").write_text(f"subjectAltName={names}", encoding="utf-8")
        self._run(f"req {NEW_KEY} -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr")
        self._run(
            f"x509 -req -in {name}.csr -CA root.pem -CAkey root.key -set_serial {serial} -days 2 -extfile names "
            f"-out {name}.pem"
        )
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")

    def _run(self, command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=self.folder, check=True, capture_output=True)


def port_of(daemon: DaemonProcess) -> int:
    """TCP address of the daemon."""
    *_, ready = (line for line in daemon.log.read_text(encoding="utf-8").splitlines() if '"ready"' in line)
    return int(ready.split('"port": ')[1].split(",")[0])


def serial_of(address: str, folder: Path) -> str:
    """Serial number of the certificate that is served there now."""
    command = ["openssl", "s_client", "-connect", address, "-alpn", "h2", "-cert", "client.pem", "-key", "client.key"]
    shown = subprocess.run(command, cwd=folder, input=b"", check=False, capture_output=True).stdout
    parsed = subprocess.run(
        ["openssl", "x509", "-noout", "-serial"], input=shown, check=True, capture_output=True, text=False
    )
    return parsed.stdout.decode().strip()


def ask_status(admin: Any) -> str:
    """The caller's name in the daemon."""
    return str(admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=10).caller)


def test_a_client_certificate_says_who_calls_and_a_new_certificate_is_served_without_a_restart() -> None:
    text = PLAIN_FILE + '[[certificate]]\nname = "client"\n'  # read-only, as it does not say more
    with short_folder() as folder:
        made = Authority(folder)
        certificate, key = made.sign("server", 17)
        mine, my_key = made.sign("client", 18)
        strange, strange_key = made.sign("stranger", 19)
        mailed, mailed_key = made.sign("mailed", 20, "email:client")
        root = str(folder / "root.pem")
        tls = ("--listen", "localhost:0", "--tls-certificate", certificate, "--tls-key", key, "--tls-client-ca", root)
        with guarded(folder, text, *tls) as daemon:
            address = f"localhost:{port_of(daemon)}"
            with operator(address, root_ca=root, certificate=mine, key=my_key) as before:
                assert ask_status(before) == "client"
                assert isinstance(refusal(lambda: before.Drain(admin_pb2.DrainRequest())), PermissionDenied)
                with open_remote(address, Credentials(root_ca=root, certificate=mine, key=my_key)) as channel:
                    follow = event_pb2_grpc.EventServiceStub(channel).Subscribe
                    unknown = refusal(lambda: next(follow(event_pb2.SubscribeRequest(model_id=7))))
                    assert isinstance(unknown, NotFound), unknown
                assert serial_of(address, folder) == "serial=11"
                with operator(address, root_ca=root, certificate=strange, key=strange_key) as admin:
                    assert isinstance(refusal(lambda: ask_status(admin)), Unauthenticated), "signed, but not named"
                with operator(address, root_ca=root, certificate=mailed, key=mailed_key) as admin:
                    assert isinstance(refusal(lambda: ask_status(admin)), Unauthenticated), "a name of another kind"
                with operator(address, OPERATOR, root_ca=root, certificate=strange, key=strange_key) as admin:
                    assert ask_status(admin) == "operator", "a token counts before the certificate"
                with operator(address, OPERATOR, root_ca=root) as admin:
                    assert "no way to the daemon" in str(refusal(lambda: ask_status(admin))), "no certificate at all"
                made.sign("server", 33)
                assert serial_of(address, folder) == "serial=21", "the new one"
                assert ask_status(before) == "client", "who was connected stays"
                with operator(address, root_ca=root, certificate=mine, key=my_key) as after:
                    assert ask_status(after) == "client"
                Path(key).write_text("no key", encoding="utf-8")
                assert serial_of(address, folder) == "serial=21", "a pair that does not fit changes nothing"
                assert "certificate_not_read" in daemon.log.read_text(encoding="utf-8")


def test_loopback_without_tls_may_only_read_and_tls_alone_is_refused() -> None:
    with short_folder() as folder:
        with (
            ForkedDaemon([*FLAGS, "--listen", "127.0.0.1:0"], folder=str(folder)) as daemon,
            operator(f"127.0.0.1:{port_of(daemon)}") as admin,
        ):
            assert ask_status(admin) == "loopback"
            assert isinstance(refusal(lambda: admin.Drain(admin_pb2.DrainRequest())), PermissionDenied)
        certificate, key = Authority(folder).sign("server", 1)
        tls = ["--listen", "localhost:0", "--tls-certificate", certificate, "--tls-key", key]
        for roots in ((), ("--tls-client-ca", str(folder / "root.pem"))):
            with pytest.raises(Exception, match="TLS says who calls, not who may"):
                ForkedDaemon([*FLAGS, *tls, *roots], folder=str(folder)).start()
        with guarded(folder, PLAIN_FILE, *tls) as daemon:
            address = f"localhost:{port_of(daemon)}"
            with operator(address, READER, root_ca=str(folder / "root.pem")) as admin:
                assert ask_status(admin) == "router"
            with operator(address, root_ca=str(folder / "root.pem")) as admin:
                assert isinstance(refusal(lambda: ask_status(admin)), Unauthenticated)


def test_wait_ends_at_once_where_the_daemon_refuses_its_caller_for_good() -> None:
    with short_folder() as folder, guarded(folder, PLAIN_FILE) as daemon:
        line = ("wait", "--timeout", "3600", "--socket", daemon.socket)
        for variables in ({}, {"CACHESVC_TOKEN": "x" * 32}):
            ended = run_forked("cachesvc_ctl", *line, environment={**os.environ, **variables})
            assert ended.returncode == 2
            assert "token" in ended.stderr
            assert "is the daemon running" not in ended.stderr


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["status"], "cachesvcd "),
        (["top", "--once"], "nothing was looked up yet"),
        (["why", "abcd"], "no block that begins with abcd"),
        (["describe"], "kvcache.v1.AdminService"),
        (["dump", "index.jsonl"], "no model is registered yet"),
        (["events"], "no model is registered yet"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_command_proves_who_asks(command: list[str], shown: str) -> None:
    with short_folder() as folder, guarded(folder, PLAIN_FILE, "--listen", "127.0.0.1:0") as daemon:
        (folder / "operator.token").write_text(OPERATOR, encoding="utf-8")

        def say(*flags: str, typed: str = "") -> str:
            ended = run_forked("cachesvc_ctl", *command, *flags, folder=folder, typed=typed)
            assert "Traceback" not in ended.stderr
            return ended.stdout + ended.stderr

        proof = ("--token-file", "operator.token")
        assert shown in say("--socket", daemon.socket, *proof)
        assert shown in say("--address", f"127.0.0.1:{port_of(daemon)}", *proof)
        if command == ["status"]:
            assert shown in say("--socket", "cachesvc.sock", *proof), "a path without a slash in it"
            assert shown in say("--socket", daemon.socket, "--token-file", "-", typed=f"{OPERATOR}\n")
        assert "needs a token" in say("--socket", daemon.socket)
