"""A read-only page for a browser on this machine: status, pools, and a timeline of hits and transfers.

It is served on loopback alone, answers GET for three paths, and only to requests that name loopback as their host: a
page from elsewhere whose name was rebound to 127.0.0.1 gets nothing. It holds no whole keys, no tokens and no switch.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import socket
import time
from asyncio import Task, create_task
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.text import parse_address
from cachesvc.questions.status import STATES, by_pool, hits, lease_lines, overview, pools, transfers
from cachesvc.questions.view import Sight, View
from cachesvc.service.access.auth import EVERYONE
from cachesvc.service.host.device_health import Facts
from cachesvc.service.loop.line import TimeSlices
from cachesvc.service.loop.node import Node
from cachesvc.wire.plain import plain

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


MOST_LISTED = 64
CONNECTIONS_MAX = 32


class WebPage:
    """Runs on the daemon's loop. ``listen``: HOST:PORT, checked to be loopback; empty: nowhere. ``port``: 0 there."""

    def __init__(self, node: Node, listen: str, facts: Facts) -> None:
        self._view = node.view(Sight(whole_ids=False))
        host, _, port = listen.rpartition(":")
        self._host, self._wanted_port = host.strip("[]"), port
        self._facts = facts
        self._loop_watch = node.loop_watch
        self.port = 0
        self._samples = Samples(self._view)
        self._server: Any = None
        self._task: Task[None] | None = None

    async def start(self) -> None:
        """Listen and serve. Raises Unavailable: packages missing, or the port taken."""
        if not self._wanted_port:
            return
        try:
            import uvicorn
        except ImportError as error:
            raise Unavailable(
                f"web_listen needs the Python module {error.name}; pip install 'cachesvc[web]', or serve without it"
            ) from error
        listening = self._listen()
        self.port = int(listening.getsockname()[1])
        config = uvicorn.Config(
            self._app(self.port),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
        )

        class QuietServer(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Generator[None, None, None]:
                yield

        self._samples.start()
        self._server = QuietServer(config)
        self._task = create_task(self._server.serve([listening]))

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1" if self._host == "localhost" else self._host, int(self._wanted_port)))
            listening.listen(CONNECTIONS_MAX)
        except OSError as error:
            listening.close()
            raise Unavailable(
                f"cannot serve the page on {self._host}:{self._wanted_port}: {error}; choose another --web-listen"
            ) from error
        listening.setblocking(False)
        return listening

    async def close(self) -> None:
        await self._samples.close()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task

    def _app(self, port: int) -> Starlette:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.responses import Response as Answer
        from starlette.routing import Route

        page = resources.files("cachesvc.service.host").joinpath("web_page.html").read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": content_policy(page), **FIXED_HEADERS}

        async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
            if not names_loopback(request.headers.get("host", ""), port):
                return PlainTextResponse("this page is for this machine's own address\n", 421, headers)
            answer = await go_on(request)
            answer.headers.update(headers)
            return answer

        async def show_page(_: Request) -> Response:
            return Answer(page, media_type="text/html; charset=utf-8")

        async def show_status(request: Request) -> Response:
            since = request.query_params.get("since", "0")
            return JSONResponse(await self.status(int(since) if re.fullmatch(r"\d{1,15}", since) else 0))

        return Starlette(
            routes=[Route("/", show_page), Route("/status.json", show_status)],
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        )

    async def status(self, since: int) -> dict[str, Any]:
        """Contents of the page; samples only after the one numbered ``since``."""
        facts, view = self._facts, self._view
        leases = await TimeSlices(self._loop_watch).answer(lease_lines(view))
        shown = plain(facts.complete(overview(view, leases, facts.lease_seconds), EVERYONE))
        return {
            **{name: shown[name] for name in SHOWN},
            "epoch": str(facts.epoch),
            "lease_seconds": facts.lease_seconds,
            "models": [
                {"id": model.id, "name": model.shown, "blocks": len(model.blocks.index)} for model in view.models()
            ],
            "pools": shown["pools"][:MOST_LISTED],
            "leases": [plain(line) for line in leases[:MOST_LISTED]],
            "sample_seconds": SAMPLE_SECONDS,
            "samples": self._samples.since(since),
        }


SHOWN = ("version", "backend", "uptime_seconds", "draining", "attention", "hits", "transfers")
"""Fields of a status that the page shows. It shows no whole keys, which pins have, and no settings."""
FIXED_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def names_loopback(host: str, port: int) -> bool:
    """True for a Host header that names loopback, and the port that is served."""
    try:
        address = parse_address("Host", host)
    except InvalidRequest:
        return False
    return address.is_loopback and address.port == port


def content_policy(page: str) -> str:
    """Nothing but this page's own script and style, by their digests, and its own status."""

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        sums = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{one}'" for one in sums)

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


SAMPLE_SECONDS = 1.0
KEPT_SAMPLES = 600
"""Number of samples of ten minutes."""


class Samples:
    """A ring of samples, one a second; costs some ten microseconds each."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._ring: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    def start(self) -> None:
        self._take(0.0)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(SAMPLE_SECONDS)
            self._take(max(0.0, time.monotonic() - began - SAMPLE_SECONDS))

    def _take(self, late_seconds: float) -> None:
        models = self._view.models()
        found, moved = hits(models), transfers(self._view.running(), self._view.counters)
        device, host = dict.fromkeys(STATES, 0), dict.fromkeys(STATES, 0)
        for pool in by_pool(pools(models)):
            into = host if pool.place == "host" else device
            for state in STATES:
                into[state] += getattr(pool, state)
        self._number += 1
        self._ring.append(
            {
                "number": self._number,
                "unix_seconds": round(time.time(), 3),
                "looked_up": found.looked_up_blocks,
                "device": found.device_blocks,
                "host": found.host_blocks,
                "storage": found.storage_blocks,
                "loaded_bytes": moved.loaded_bytes,
                "stored_bytes": moved.stored_bytes,
                "peer_bytes": moved.peer_bytes,
                "tickets": moved.running_loads + moved.running_stores,
                "device_pages": device,
                "host_pages": host,
                "late_ms": round(late_seconds * 1e3, 2),
            }
        )

    def since(self, number: int) -> list[dict[str, Any]]:
        """Samples after the one of that number, oldest first; counts are totals since the daemon's start."""
        return [sample for sample in self._ring if sample["number"] > number]
