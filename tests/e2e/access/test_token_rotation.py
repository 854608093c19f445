"""Tokens are replaced as docs/deploying.md says: the daemon's file first, the engines' later. That loses no lease."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from cachesvc_client import CacheClient, EventSubscriber, Transport, Unauthenticated
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2

from tests.e2e.access.test_access import OPERATOR, entry, guarded, operator, write_tokens
from tests.e2e.engine import PLAIN
from tests.e2e.rig import short_folder, wait_until

OLD, NEW = "old-secret-of-enough-letters", "new-secret-of-enough-letters"
LEASE_SECONDS = 2.0
OF_A = 'tenant = "team-a"'
STANDING = entry(OPERATOR, "operator", '["admin"]')
BEFORE = STANDING + entry(OLD, "engines of a", '["engine"]', OF_A)
AFTER = STANDING + entry(NEW, "engines of a, new", '["engine"]', OF_A)


def said(daemon: DaemonProcess, event: str) -> list[dict[str, Any]]:
    """Lines of the log with this event."""
    lines = [json.loads(line) for line in daemon.log.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == event]


def is_said(daemon: DaemonProcess, event: str) -> Callable[[], bool]:
    """Predicate: the log has the event."""
    return lambda: bool(said(daemon, event))


def status(daemon: DaemonProcess) -> admin_pb2.GetStatusResponse:
    """Ask as the operator."""
    with operator(daemon.socket, OPERATOR) as admin:
        return admin.GetStatus(admin_pb2.GetStatusRequest())


def outlive(daemon: DaemonProcess, leases: int) -> None:
    """Let this many times pass as a silent lease lives."""
    until = status(daemon).uptime_seconds + leases * LEASE_SECONDS
    wait_until(lambda: status(daemon).uptime_seconds > until, "time passes")


@pytest.mark.parametrize("transport", list(Transport))
def test_a_lease_and_its_requests_live_through_a_rotation(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cachesvc_client")
    flags = ("--lease-seconds", str(LEASE_SECONDS))
    with short_folder() as folder, guarded(folder, BEFORE, *flags) as daemon:
        mine = folder / "token"
        mine.write_text(OLD, encoding="utf-8")
        with CacheClient(daemon.socket, token_file=str(mine), transport=transport) as client:
            registration = client.register("m", PLAIN, device_pages=[16], host_pages=[0])
            lease = client.open_lease(registration)
            sequence = lease.match(b"")
            sequence.allocate(2)
            stream = lease.step()
            write_tokens(folder / "tokens.toml", AFTER)
            wait_until(is_said(daemon, "token_retired_shown"), "the daemon names the caller that is behind")
            outlive(daemon, 2)
            assert not lease.is_lost
            sequence.allocate(3)
            with lease.match(b""):
                assert stream.submit() == []
            with pytest.raises(Unauthenticated, match=r"'engines of a' was replaced.*Register needs the new one"):
                client.register("m", PLAIN)
            with pytest.raises(Unauthenticated, match="Open needs the new one"):
                client.open_lease(registration)
            with (
                EventSubscriber(daemon.socket, registration.namespace, token_file=str(mine)) as follower,
                pytest.raises(Unauthenticated, match="Subscribe needs the new one"),
            ):
                next(follower.follow())
            shown = [line for line in status(daemon).attention if "token" in line]
            assert len(shown) == 1
            assert "'engines of a' of tenant team-a was replaced, and callers still show it: in " in shown[0]
            mine.write_text(NEW, encoding="utf-8")
            wait_until(lambda: "token_renewed" in caplog.messages, "the next beat reads the file")
            assert client.register("m", PLAIN).existed
            sequence.allocate(4)
            assert stream.submit() == []
            assert not lease.is_lost
        for event in ("token_retired", "token_retired_shown"):
            assert [line["caller"] for line in said(daemon, event)] == ["engines of a"], "once"
        assert not said(daemon, "lease_silent")
        assert not said(daemon, "token_refused")
        warned = [each for each in caplog.messages if each.startswith("token_replaced")]
        assert len(warned) == 1
        assert str(mine) in warned[0]


def test_after_the_grace_an_engine_that_is_behind_is_refused_and_named(caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--lease-seconds", "1", "--token-grace-seconds", "2")
    with short_folder() as folder, guarded(folder, BEFORE, *flags) as daemon:
        with CacheClient(daemon.socket, token=OLD) as client:
            lease = client.open_lease(client.register("m", PLAIN, device_pages=[16], host_pages=[0]))
            write_tokens(folder / "tokens.toml", AFTER)
            wait_until(is_said(daemon, "token_refused"), "its grace is over")
            with pytest.raises(Unauthenticated, match="was replaced, and its grace is over"):
                client.register("m", PLAIN)
            wait_until(lambda: lease.is_lost, "a lease needs beats that are accepted")
            assert any("is not accepted any more" in line for line in status(daemon).attention)
        assert any("restart it with the new one" in each for each in caplog.messages)
        assert [line["caller"] for line in said(daemon, "token_refused")] == ["engines of a"]


def test_without_a_grace_a_token_that_is_taken_out_ends_at_once() -> None:
    with (
        short_folder() as folder,
        guarded(folder, BEFORE, "--token-grace-seconds", "0") as daemon,
        CacheClient(daemon.socket, token=OLD) as client,
    ):
        lease = client.open_lease(client.register("m", PLAIN, device_pages=[16], host_pages=[0]))
        write_tokens(folder / "tokens.toml", AFTER)
        wait_until(is_said(daemon, "tokens_read"), "the file was read again")
        with pytest.raises(Unauthenticated, match="no longer accepted"):
            lease.match(b"")
        wait_until(is_said(daemon, "token_refused"), "and the log says why")
