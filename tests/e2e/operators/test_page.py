"""The page in a real browser: it shows what the daemon says, keeps up, and is stopped by nothing of its own policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvcache.v1 import admin_pb2

from tests.e2e.engine import Engine, prompt
from tests.e2e.operators.test_inspection import WEB, web_port
from tests.e2e.rig import running_node
from tools.pictures import find_browser

BROWSER = find_browser()
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium is installed here (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_a_browser_shows_pools_hits_and_leases_and_sees_the_daemon_go(chromium: Any) -> None:
    told: list[str] = []
    page = chromium.new_page()
    page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    with running_node(WEB) as node, Engine(node.socket, name="<b>seen</b>", device_pages=8) as engine:
        engine.serve(prompt(1, 4))
        engine.serve(prompt(1, 4))
        page.goto(f"http://127.0.0.1:{web_port(node)}/")
        page.get_by_text("serving").wait_for()
        page.get_by_text("4 of 8 blocks", exact=True).wait_for()
        assert page.locator("#ratio-device").inner_text() == "50.0 %"
        row = page.locator("#leases tr")
        assert row.locator("td").first.inner_text() == "<b>seen</b>", "text, never markup"
        sealed = page.locator(".pool", has_text="replica 0").locator(".bar i").first
        assert sealed.get_attribute("title") == "sealed: 4 pages"
        assert sealed.evaluate("one => one.getBoundingClientRect().width") > 20
        assert page.locator("#attention").is_hidden()
        with engine.lease.match(b"") as sequence:
            sequence.allocate(8)
            page.get_by_text("8 of 8 pages are in use and cannot be evicted").wait_for()
        engine.serve(prompt(2, 5))
        page.locator("#hits rect").first.wait_for(state="attached")
        node.admin.Drain(admin_pb2.DrainRequest())
        page.get_by_text("draining", exact=True).wait_for()
        assert told == [], "no error, and nothing that the content policy had to stop"
    page.get_by_text("no answer; the daemon may have ended").wait_for()
    page.close()
