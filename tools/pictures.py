"""Takes the pictures of the documents from a daemon at work: ``python -m tools.pictures``.

``docs/images/top.svg`` is what ``cachesvc top`` draws, ``docs/images/web.png`` the page in a real Chromium, which
has to be installed (``chromium`` on PATH) beside the Python module playwright.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

from cachesvc_client.wire.credentials import Credentials
from cachesvc_ctl.core.command import Target
from cachesvc_ctl.core.daemon_process import DaemonProcess
from cachesvc_ctl.top_app import TopApp

from tools.lively import lively_daemon

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
LOOKS = 45
WEB_COLUMNS = 60
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Take both."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with lively_daemon() as daemon:
        (IMAGES / "top.svg").write_text(asyncio.run(draw_top(daemon.socket)), encoding="utf-8")
        browser = find_browser()
        if browser is None:
            sys.exit("no Chromium on PATH: top.svg was drawn, web.png was not taken")
        take_page(browser, web_port(daemon), IMAGES / "web.png")


def find_browser() -> str | None:
    """A Chromium of this machine."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def web_port(daemon: DaemonProcess) -> int:
    """Port of the web page, from the daemon's log."""
    for line in daemon.log.read_text(encoding="utf-8").splitlines():
        if '"event": "ready"' in line:
            return int(json.loads(line)["web_port"])
    raise RuntimeError("the daemon is not ready")


async def draw_top(socket: str) -> str:
    """Watch for a while in a terminal of 100 x 30; the drawing."""
    app = TopApp(Target(socket, Credentials()), every=0.4)
    async with app.run_test(size=(100, 30)) as pilot:
        while app.looks < LOOKS:
            await pilot.pause(0.1)
        drawn = app.export_screenshot(title="cachesvc top")
    return re.sub(r",?\s*url\([^)]*\) format\([^)]*\)", "", drawn)  # fonts of the reader's own machine


def take_page(browser: str, port: int, path: Path) -> None:
    """Look at the page until its timeline has a minute, then take it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        # The page's policy forbids the waiting below, which is a script of ours.
        page = chromium.new_page(viewport={"width": 1120, "height": 900}, bypass_csp=True)
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_function(
            f"Number(document.getElementById('hits').dataset.columns) >= {WEB_COLUMNS}", timeout=180_000
        )
        page.screenshot(path=str(path), full_page=True)
        chromium.close()


if __name__ == "__main__":
    main()
