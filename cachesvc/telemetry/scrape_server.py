"""One page over HTTP for scrapers: a GET, an answer, and the connection ends. On a thread and a loop of its own.

Unauthenticated connections get minimal resources: no thread, one of ``MOST_CONNECTIONS`` sockets, ``HEAD_BYTES`` of
memory, ``EXCHANGE_SECONDS`` in all. When the sockets are taken, the oldest connection without a request is closed, so
that silent connections cannot keep a scraper out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import os
import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from cachesvc.model.errors import CacheError, PermissionDenied, Unauthenticated, Unavailable
from cachesvc.model.text.addresses import parse_address
from cachesvc.telemetry import events

MOST_CONNECTIONS = 32
HEAD_BYTES = 16 << 10
EXCHANGE_SECONDS = 10.0
PATH = "/metrics"
_BEARER = "bearer "
_STATUS_OF = {Unauthenticated: HTTPStatus.UNAUTHORIZED, PermissionDenied: HTTPStatus.FORBIDDEN}


class Answer(NamedTuple):
    """Response: a status, headers beside those of its length and end, and the body."""

    status: HTTPStatus
    headers: dict[str, str]
    body: bytes


Page = Callable[[dict[str, str]], Answer]
"""The page for a request's headers, by their names in lower case; made on the server's thread."""
Admit = Callable[[str], None]
"""Check of a request's bearer token (empty: none). Raises Unauthenticated, PermissionDenied."""


class ScrapeServer:
    """Serves ``page`` at ``PATH`` of one address.

    ``admit``: None lets in every request that names the host by an address or by its own name. A foreign page whose
    name was rebound to this address, in a user's browser, does neither.
    """

    def __init__(
        self, address: str, page: Page, admit: Admit | None = None, exchange_seconds: float = EXCHANGE_SECONDS
    ) -> None:
        """``exchange_seconds``: that a connection may last, from its begin to the end of the answer."""
        self._address = address
        self._page = page
        self._admit = admit
        self._exchange_seconds = exchange_seconds
        self._asking: dict[asyncio.StreamWriter, None] = {}
        self._connections = 0
        self._began: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._end: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> int:
        """Listen and serve; returns the port. Raises Unavailable for an address that cannot be had."""
        self._thread.start()
        try:
            return self._began.result()
        except OSError as error:
            self._thread.join()
            raise Unavailable(f"cannot serve metrics on {self._address}: {error}; choose another address") from error

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._end is not None:
            self._end()
            self._end = None
            self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        address = parse_address("metrics_listen", self._address)
        try:
            server = await asyncio.start_server(
                self._serve, address.host, address.port, limit=HEAD_BYTES, backlog=MOST_CONNECTIONS
            )
        except OSError as error:
            self._began.set_exception(error)
            return
        ending = asyncio.Event()
        self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, ending.set)
        self._began.set_result(int(server.sockets[0].getsockname()[1]))
        await ending.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MOST_CONNECTIONS and not self._make_room():
            writer.transport.abort()
            return
        self._connections += 1
        self._asking[writer] = None
        try:
            async with asyncio.timeout(self._exchange_seconds):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                finally:
                    self._asking.pop(writer, None)
                writer.transport.set_write_buffer_limits(0)  # so that drain waits until all was sent
                writer.write(_encoded(self._answer(head)))
                await writer.drain()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()
        except Exception:  # noqa: BLE001 - the root of a task
            events.failure("scrape_failed")
            writer.transport.abort()
        finally:
            self._connections -= 1
            writer.close()

    def _make_room(self) -> bool:
        """End the oldest connection that has not asked for anything yet; False where all have."""
        oldest = next(iter(self._asking), None)
        if oldest is None:
            return False
        del self._asking[oldest]
        oldest.transport.abort()
        return True

    def _answer(self, head: bytes) -> Answer:
        line, *rest = head.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
        if method != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "GET alone")
        if target.partition(" ")[0].partition("?")[0] != PATH:
            return _plain(HTTPStatus.NOT_FOUND, f"the page is {PATH}")
        if self._admit is None:
            if not is_own_host(headers.get("host", ""), self._address):
                return _plain(HTTPStatus.MISDIRECTED_REQUEST, "ask by an address, or by the name of --metrics-listen")
            return self._page(headers)
        said = headers.get("authorization", "")
        try:
            self._admit(said[len(_BEARER) :].strip() if said.lower().startswith(_BEARER) else "")
        except CacheError as refusal:
            status = _STATUS_OF.get(type(refusal), HTTPStatus.FORBIDDEN)
            return _plain(status, str(refusal), {"WWW-Authenticate": "Bearer"})
        return self._page(headers)


def is_own_host(host: str, address: str) -> bool:
    """True for a Host header that no foreign name can be behind: a literal address, localhost, the machine's own name,
    or that of the ``address`` served on."""
    name = _without_port(host).lower()
    if name in ("localhost", os.uname().nodename.lower(), _without_port(address).lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]")


def _plain(status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, {"Content-Type": "text/plain; charset=utf-8", **(headers or {})}, f"{text}\n".encode())


def _encoded(answer: Answer) -> bytes:
    headers = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
    head = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        *(f"{name}: {it}" for name, it in headers.items()),
    ]
    return "\r\n".join([*head, "", ""]).encode() + answer.body
