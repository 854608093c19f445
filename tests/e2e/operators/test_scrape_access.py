"""Access to a daemon's metrics where it has tokens, and the cost of a crowd at that port. Real daemons."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from cachesvc_client import CacheClient, Unauthenticated
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2

from cachesvc.telemetry.scrape_server import MOST_CONNECTIONS
from tests.e2e.access.test_access import ENGINE, GUESS, OPERATOR, PLAIN_FILE, READER, entry, guarded, operator, refusal
from tests.e2e.engine import PLAIN
from tests.e2e.rig import FLAGS, short_folder, wait_until
from tests.e2e.scraping import LISTEN
from tests.forked_daemon import ForkedDaemon

SCRAPER = "scraper-secret-of-enough-letters"
FILE = PLAIN_FILE + entry(SCRAPER, "prometheus", '["metrics"]')


def page(daemon: DaemonProcess, token: str = "") -> tuple[int, str]:
    """Status and text of the page, as ``token`` or without one."""
    asked = urllib.request.Request(f"http://127.0.0.1:{metrics_port(daemon)}/metrics")
    if token:
        asked.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def metrics_port(daemon: DaemonProcess) -> int:
    """URL of the page."""
    *_, ready = (line for line in daemon.log.read_text(encoding="utf-8").splitlines() if '"event": "ready"' in line)
    return int(json.loads(ready)["metrics_port"])


def test_with_tokens_the_page_is_for_a_token_of_its_own() -> None:
    with (
        short_folder() as folder,
        guarded(folder, FILE, *LISTEN) as daemon,
        CacheClient(daemon.socket, token=ENGINE) as client,
    ):
        client.register("secret-model", PLAIN, device_pages=[4], host_pages=[0])
        status, text = page(daemon)
        assert (status, "secret-model" in text) == (401, False), "no reader learns what a tenant hits"
        assert page(daemon, GUESS)[0] == 401
        for other in (READER, OPERATOR, ENGINE):
            status, text = page(daemon, other)
            assert (status, "secret-model" in text) == (403, False), "a token that opens more came in clear"
            assert "Replace this one" in text
        status, text = page(daemon, SCRAPER)
        assert (status, "secret-model" in text) == (200, True)
        with operator(daemon.socket, SCRAPER) as admin:
            assert "takes scope" in str(refusal(lambda: admin.GetStatus(admin_pb2.GetStatusRequest())))
        with pytest.raises(Unauthenticated), CacheClient(daemon.socket) as nobody:
            nobody.register("m", PLAIN)


def test_a_page_of_elsewhere_reads_nothing_through_a_browser_here() -> None:
    with short_folder() as folder, guarded(folder, FILE, *LISTEN) as daemon:
        assert page(daemon)[0] == 401
    with short_folder() as folder, ForkedDaemon([*FLAGS, *LISTEN], folder=str(folder)) as daemon:
        asked = urllib.request.Request(f"http://127.0.0.1:{metrics_port(daemon)}/metrics")
        asked.add_header("Host", "evil.example")
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(asked)
        assert page(daemon)[0] == 200


def test_half_requests_are_neither_threads_nor_descriptors_without_end() -> None:
    with short_folder() as folder, guarded(folder, FILE, *LISTEN) as daemon, ExitStack() as held:
        before = of_process(daemon)
        for _ in range(300):
            half = held.enter_context(socket.create_connection(("127.0.0.1", metrics_port(daemon))))
            half.send(b"GET /metrics HTTP/1.1\r\n")
        assert page(daemon, SCRAPER)[0] == 200, "every scrape is answered"
        threads, descriptors = of_process(daemon)
        assert threads <= before[0] + 1
        assert descriptors <= before[1] + MOST_CONNECTIONS + 1


def test_a_tokens_file_that_is_gone_is_told_wherever_an_operator_looks() -> None:
    with (
        short_folder() as folder,
        guarded(folder, FILE, *LISTEN) as daemon,
        operator(daemon.socket, OPERATOR) as admin,
    ):
        assert "cachesvc_tokens_stale_seconds 0.0\n" in page(daemon, SCRAPER)[1]
        (folder / "tokens.toml").unlink()
        wait_until(lambda: "tokens_not_read" in daemon.log.read_text(encoding="utf-8"), "the log has it")
        [attention] = admin.GetStatus(admin_pb2.GetStatusRequest()).attention
        assert "the tokens' file has not been readable" in attention
        assert "cachesvc_tokens_stale_seconds 0.0\n" not in page(daemon, SCRAPER)[1], "who was known goes on"


def of_process(daemon: DaemonProcess) -> tuple[int, int]:
    """Threads and open descriptors."""
    proc = Path(f"/proc/{daemon.process.pid}")
    return len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))
