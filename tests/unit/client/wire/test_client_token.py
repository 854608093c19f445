"""A token file is read again by whatever the daemon refuses: calls, beats and steps, of both clients."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cachesvc_client import CacheClient, Credentials, Unauthenticated
from cachesvc_client.layouts.families import opaque
from cachesvc_client.wire.credentials import Metadata, Proof
from grpc import Call, RpcError, StatusCode
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import ErrorCode
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER
from tests.unit.rigs.client_rig import FakeDaemon, refuse

LAYOUT = opaque(block_bytes=64, block_tokens=4)
PROMPT_S = 10.0


class Refused(RpcError, Call):
    """A call that was refused for its token."""

    def code(self) -> StatusCode:
        return StatusCode.UNAUTHENTICATED

    def initial_metadata(self) -> Any:
        return ()

    trailing_metadata = initial_metadata

    def details(self) -> str:
        return "no"

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Any) -> bool:
        return False


class Guard:
    """Lets calls with the newest token through, and tells when one has come."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "token"
        self.token = ""
        self.came = threading.Event()
        self.rotate("first")

    def rotate(self, token: str) -> None:
        self.file.write_text(token, encoding="utf-8")
        self.token = token
        self.came.clear()

    def check(self, context: Any) -> None:
        sent = dict(context.invocation_metadata())[AUTHORIZATION_METADATA_KEY]
        if sent != BEARER + self.token:
            refuse(ErrorCode.UNAUTHENTICATED, "the token is no longer accepted")(context)
        self.came.set()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path, silence_limit_ms=3000)
    fake.start()
    yield fake
    fake.close()


def metadata_of(token: str) -> Metadata:
    return ((AUTHORIZATION_METADATA_KEY, BEARER + token),)


def test_a_token_that_another_thread_has_read_is_worth_a_try_too(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    proof = Proof(Credentials(token_file=str(guard.file)))
    proof.start(b"")
    old = proof.metadata
    assert not proof.renew(Refused(), old), "the file holds the same"
    guard.rotate("second")
    assert proof.renew(Refused(), old)
    assert proof.renew(Refused(), old), "refused with the old one, while another call had read the new one"
    assert proof.metadata == metadata_of("second")
    assert not proof.renew(Refused(), proof.metadata)
    guard.file.unlink()
    assert not proof.renew_stream(Refused(), proof.metadata), "a stream has no caller to raise to"


def test_beats_and_steps_go_on_under_a_new_token(daemon: FakeDaemon, tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    with CacheClient(daemon.path, token_file=str(guard.file)) as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        guard.rotate("second")
        daemon.faults["KeepAlive"].extend([guard.check] * 100)
        lease.pause_write_backs(0.1)  # a beat at once
        assert guard.came.wait(PROMPT_S), "beats go on by themselves"
        assert not lease.is_lost
        stream = lease.step()
        guard.rotate("third")
        daemon.faults["Step"].extend([guard.check] * 100)
        daemon.step_answers.append(cache_pb2.StepResponse())
        assert stream.submit() == []
        guard.token = "not in the file"
        with pytest.raises(Unauthenticated):
            stream.submit()
        daemon.faults.clear()


def is_behind(shown: dict[str, Any], token: str) -> int:
    """The grace that a beat is answered with, where it does not show ``token``."""
    return 0 if shown[AUTHORIZATION_METADATA_KEY] == BEARER + token else 60_000


def test_a_beat_that_is_told_of_a_grace_reads_the_file_again(
    daemon: FakeDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cachesvc_client")
    guard, beats = Guard(tmp_path), daemon.beats
    with CacheClient(daemon.path, token_file=str(guard.file)) as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        daemon.token_grace_ms = lambda shown: is_behind(shown, "second")

        def told_of() -> list[str]:
            return [each.getMessage() for each in caplog.records if each.getMessage().startswith("token_replaced")]

        while not told_of():
            lease.pause_write_backs(0.1)
            assert beats.acquire(timeout=PROMPT_S)
        for _ in range(2):
            lease.pause_write_backs(0.1)
            assert beats.acquire(timeout=PROMPT_S)
        told = told_of()
        assert len(told) == 1, "once a token"
        assert "grace_s=60" in told[0]
        assert str(guard.file) in told[0], "what to do"
        guard.rotate("second")
        lease.pause_write_backs(0.1)
        while not any(each.getMessage() == "token_renewed" for each in caplog.records):
            assert beats.acquire(timeout=PROMPT_S)
        daemon.faults["KeepAlive"].extend([guard.check] * 100)
        assert guard.came.wait(PROMPT_S), "beats go on with the new one"
        assert not lease.is_lost


def test_a_client_that_was_given_its_token_says_so(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with CacheClient(daemon.path, token="first") as client:
        lease = client.open_lease(client.register("m", LAYOUT))
        daemon.token_grace_ms = lambda shown: is_behind(shown, "second")
        lease.pause_write_backs(0.1)
        while not any("restart it with the new one" in each.getMessage() for each in caplog.records):
            assert daemon.beats.acquire(timeout=PROMPT_S)
        assert not lease.is_lost


def test_what_a_call_was_traced_with_is_no_part_of_its_token(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    proof = Proof(Credentials(token_file=str(guard.file)))
    proof.start(b"")
    traced: Metadata = (("traceparent", "00-1-2-01"), *proof.metadata)
    assert not proof.renew(Refused(), traced), "the file holds the same: asked again at once it would be refused again"
    guard.rotate("second")
    assert proof.renew(Refused(), traced)
