"""Every run of tests: a test whose process ended is a failed one, and a skip has a reason that is listed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.skips import unlisted

FAILED = "cache/lastfailed"
ended: list[str] = []
"""Tests whose process ended."""
skipped: dict[str, str] = {}
"""Tests, and files, that were skipped, each with its reason."""


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """Note it. ``pytest-xdist`` runs it again in a new process and forgets the failure where it passes there. But the
    run has failed, and ``--last-failed`` would find nothing."""
    ended.append(crashitem)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a skipped test. With ``pytest-xdist`` every report comes to the process that leads the others."""
    note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that skips itself; only the process that collects it hears of it."""
    note(report)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add what a worker of ``pytest-xdist`` has skipped as whole files."""
    skipped.update(getattr(node, "workeroutput", {}).get("skipped", {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add those that ended to what failed, and fail a run whose skips are not listed."""
    config = session.config
    if (output := getattr(config, "workeroutput", None)) is not None:
        output["skipped"] = skipped
        return
    cache = getattr(config, "cache", None)  # absent with ``-p no:cacheprovider``
    if ended and cache is not None:
        cache.set(FAILED, {**cache.get(FAILED, {}), **dict.fromkeys(ended, True)})
    if os.environ.get("CACHESVC_SKIPS") == "listed" and unlisted(skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the skips that failed the run."""
    if os.environ.get("CACHESVC_SKIPS") == "listed" and (found := unlisted(skipped)):
        terminalreporter.section("skipped for reasons that tests/skips.py does not list", red=True)
        for test, reason in sorted(found.items()):
            terminalreporter.line(f"{test}: {reason}")


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Keep the reason of a skip; an expected failure is none."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[report.nodeid] = reason.removeprefix("Skipped: ")
