"""Engines share under a version of weights that was announced, and under none that may be wrong."""

from __future__ import annotations

from cachesvc_client import DaemonUnavailable
from cachesvc_vllm.weights_version import WeightsVersion


class Daemon:
    """Says what was announced."""

    def __init__(self, version: str = "") -> None:
        self.version = version
        self.is_gone = False

    def announced(self) -> str:
        if self.is_gone:
            raise DaemonUnavailable("gone")
        return self.version


def engine(daemon: Daemon, initial: str = "") -> WeightsVersion:
    return WeightsVersion(initial, daemon.version, daemon.announced)


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


def test_an_engine_whose_weights_are_unknown_shares_with_no_other_until_the_next_version() -> None:
    daemon = Daemon()
    one, two = engine(daemon), engine(daemon)
    one.reset()
    two.reset()
    assert not one.is_shared
    assert len({one.salt, two.salt, b""}) == 3
    daemon.version = "step-1"
    for each in (one, two):
        each.reset()
    assert one.salt == two.salt


def test_where_versions_are_in_use_a_reset_without_a_new_one_changes_nothing() -> None:
    daemon = Daemon()
    one, started = engine(daemon), engine(daemon, "step-1")
    daemon.version = "step-1"
    one.reset()
    salt = one.salt
    one.reset()
    started.reset()
    assert salt == one.salt == started.salt
    assert one.is_shared
    daemon.version = ""  # the next daemon knows of none
    one.reset()
    assert (one.salt, one.is_shared) == (salt, True)


def test_what_was_announced_before_an_engine_started_is_not_what_it_has() -> None:
    daemon = Daemon("step-5")
    one = engine(daemon)
    one.reset()
    assert (one.version, one.is_shared) == ("", False)


def test_a_reset_that_the_daemon_does_not_answer_is_safe_and_does_not_adopt_an_old_version_later() -> None:
    daemon = Daemon()
    one = engine(daemon)
    daemon.version = "step-1"
    one.reset()
    shared, daemon.is_gone = one.salt, True
    one.reset()
    assert (one.is_shared, one.salt == shared) == (False, False)
    daemon.is_gone = False
    one.reset()
    assert not one.is_shared
    daemon.version = "step-2"
    one.reset()
    assert (one.version, one.is_shared) == ("step-2", True)
