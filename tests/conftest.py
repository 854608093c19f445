"""Every run of tests: a test whose process ended is a failed one, for ``--last-failed`` too."""

from __future__ import annotations

import pytest

FAILED = "cache/lastfailed"
ended: list[str] = []
"""Tests whose process ended."""


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Note it. ``pytest-xdist`` runs it again in a new process and forgets the failure where it passes there. But the
    run has failed, and ``--last-failed`` would find nothing."""
    ended.append(crashitem)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add those that ended to what failed."""
    cache = session.config.cache
    if ended and cache is not None:
        cache.set(FAILED, {**cache.get(FAILED, {}), **dict.fromkeys(ended, True)})
