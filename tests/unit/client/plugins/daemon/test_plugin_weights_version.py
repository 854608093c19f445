"""Engines share under a version of weights that was announced, and under none that may be wrong."""

from __future__ import annotations

import logging

import pytest
from cachesvc_client import DaemonUnavailable
from cachesvc_client.plugins.keeper import Announced, ConnectorRefused, WeightsVersion


class Daemon:
    """Answers with the last announcement, or with an error. ``restart`` forgets announcements."""

    def __init__(self, version: str = "") -> None:
        self.version = version
        self.epoch = 1
        self.error: Exception | None = None

    def restart(self) -> None:
        self.epoch, self.version = self.epoch + 1, ""

    def announced(self) -> Announced:
        if self.error is not None:
            raise self.error
        return Announced((self.epoch, 1), self.version)


def engine(daemon: Daemon, initial: str = "") -> WeightsVersion:
    return WeightsVersion(initial, daemon.announced(), daemon.announced)


def test_engines_that_load_what_was_announced_share_and_never_across_versions() -> None:
    daemon = Daemon()
    one, two = engine(daemon), engine(daemon)
    assert one.salt == two.salt == b""
    seen = {b""}
    for version in ("step-1", "step-2", "step-3"):
        daemon.version = version
        one.reset()
        assert one.salt != two.salt
        two.reset()
        assert (one.salt, one.version, one.is_shared) == (two.salt, version, True)
        assert one.salt not in seen
        seen.add(one.salt)


def test_an_engine_whose_weights_are_unknown_shares_with_no_other_until_the_next_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon = Daemon()
    one, two = engine(daemon), engine(daemon)
    with caplog.at_level(logging.WARNING):
        one.reset()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cachesvc weights MODEL VERSION" in caplog.text
    two.reset()
    assert not one.is_shared
    assert len({one.salt, two.salt, b""}) == 3
    daemon.version = "step-1"
    for each in (one, two):
        each.reset()
    assert one.salt == two.salt


def test_a_reset_without_a_new_announcement_keeps_the_version_of_engines_with_the_setting() -> None:
    daemon = Daemon()
    one, started = engine(daemon), engine(daemon, "step-1")
    started.reset()
    assert (started.version, started.is_shared) == ("step-1", True)
    daemon.version = "step-1"
    one.reset()
    salt = one.salt
    started.reset()
    started.reset()
    assert (salt, started.is_shared) == (started.salt, True)
    daemon.version = "step-2"
    for each in (one, started, started):
        each.reset()
    assert one.salt == started.salt != salt
    one.reset()  # it may have loaded other weights
    assert (one.is_shared, started.is_shared) == (False, True)


def test_what_was_announced_before_an_engine_started_is_not_what_it_has() -> None:
    daemon = Daemon("step-5")
    one = engine(daemon)
    one.reset()
    assert (one.version, one.is_shared) == ("", False)


def test_an_engine_that_started_with_another_version_than_the_announced_one_may_have_either_after_a_reset() -> None:
    daemon = Daemon("step-5")
    one, same = engine(daemon, "step-4"), engine(daemon, "step-5")
    one.reset()
    same.reset()
    assert (one.version, one.is_shared) == ("", False)
    assert (same.version, same.is_shared) == ("step-5", True)


@pytest.mark.parametrize("initial", ["", "step-1"])
def test_a_daemon_that_forgot_an_announcement_leaves_the_weights_unknown(initial: str) -> None:
    daemon = Daemon()
    one = engine(daemon, initial)
    if not initial:
        daemon.version = "step-1"
        one.reset()
    assert one.version == "step-1"
    daemon.version = "step-2"  # the engine loads it, and the daemon is replaced meanwhile
    daemon.restart()
    one.reset()
    assert (one.version, one.is_shared) == ("", False)
    daemon.version = "step-2"
    one.reset()
    assert (one.version, one.is_shared) == ("step-2", True)


def test_a_version_that_is_announced_again_to_the_next_daemon_goes_on() -> None:
    daemon = Daemon()
    one = engine(daemon)
    daemon.version = "step-1"
    one.reset()
    salt = one.salt
    daemon.restart()
    daemon.version = "step-1"
    one.reset()
    assert (one.salt, one.is_shared) == (salt, True)


@pytest.mark.parametrize("error", [DaemonUnavailable("gone"), ConnectorRefused("another size")])
def test_a_reset_that_the_daemon_does_not_answer_is_safe_and_does_not_adopt_an_old_version_later(
    error: Exception,
) -> None:
    daemon = Daemon()
    one = engine(daemon)
    daemon.version = "step-1"
    one.reset()
    shared, daemon.error = one.salt, error
    one.reset()
    assert (one.is_shared, one.salt == shared) == (False, False)
    daemon.error = None
    one.reset()
    assert not one.is_shared
    daemon.version = "step-2"
    one.reset()
    assert (one.version, one.is_shared) == ("step-2", True)


def test_an_engine_that_does_not_have_what_it_is_named_by_shares_again_with_an_announced_version() -> None:
    daemon = Daemon()
    one, two = engine(daemon, "step-0"), engine(daemon, "step-0")
    one.lose("files were replaced")
    assert (one.is_shared, one.version) == (False, "")
    assert len({one.salt, two.salt, b""}) == 3
    lost = one.salt
    one.reset()
    assert not one.is_shared
    assert one.salt not in (lost, two.salt)
    daemon.version = "step-1"
    for each in (one, two):
        each.reset()
    assert one.salt == two.salt
