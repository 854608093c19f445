"""The server behind the page of metrics: which clients it answers, and that idle connections cost nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

import pytest

from cachesvc.model.errors import PermissionDenied, Unauthenticated, Unavailable
from cachesvc.telemetry.scrape_server import (
    HEAD_BYTES,
    MOST_CONNECTIONS,
    Admit,
    Answer,
    ScrapeServer,
    is_own_host,
)

PAGE = b"cachesvc_info 1\n"


@contextmanager
def serving(admit: Admit | None = None, exchange_seconds: float = 60.0, page: bytes = PAGE) -> Iterator[int]:
    """A server's port."""
    server = ScrapeServer(
        "127.0.0.1:0", lambda _: Answer(HTTPStatus.OK, {}, page), admit, exchange_seconds=exchange_seconds
    )
    port = server.start()
    try:
        yield port
    finally:
        server.close()
        server.close()


def connected(port: int) -> socket.socket:
    """A connection that has said nothing."""
    return socket.create_connection(("127.0.0.1", port))


def exchange(port: int, text: str) -> bytes:
    """All that comes back."""
    with connected(port) as connection:
        connection.sendall(text.encode())
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionResetError:
        return found
    return found


def ask(port: int, *headers: str, line: str = "GET /metrics HTTP/1.1") -> tuple[int, bytes]:
    """Status and body."""
    head, _, body = exchange(port, "\r\n".join([line, *headers, "", ""])).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_the_page_and_nothing_else_is_served() -> None:
    with serving() as port:
        assert ask(port, "Host: 127.0.0.1") == (200, PAGE)
        assert ask(port, "host: localhost:1", line="GET /metrics?x=1 HTTP/1.1") == (200, PAGE)
        assert ask(port, "Host: 127.0.0.1", line="GET /metrics/x HTTP/1.1")[0] == 404
        assert ask(port, "Host: 127.0.0.1", line="POST /metrics HTTP/1.1")[0] == 405
        assert ask(port, line="nonsense")[0] == 405


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("10.0.0.7:9464", True),
        ("[2001:db8::1]:9464", True),
        ("[::1]", True),
        ("LOCALHOST:9464", True),
        ("node7.example.org", True),
        ("node7.example.org.evil.example", False),
        ("evil.example:9464", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_a_foreign_name_is_none_of_the_host(host: str, is_own: bool) -> None:
    assert is_own_host(host, "node7.example.org:9464") is is_own


def test_a_name_that_was_bound_anew_to_this_address_gets_nothing() -> None:
    with serving() as port:
        assert ask(port, "Host: evil.example")[0] == 421
        assert ask(port)[0] == 421


def test_where_somebody_is_asked_for_only_he_gets_the_page() -> None:
    def admit(token: str) -> None:
        if not token:
            raise Unauthenticated("a token, please")
        if token != "right":
            raise PermissionDenied("not this one")

    with serving(admit) as port:
        assert ask(port, "Host: 127.0.0.1") == (401, b"a token, please\n")
        assert ask(port, "Authorization: Basic right")[0] == 401
        assert ask(port, "Authorization: Bearer wrong") == (403, b"not this one\n")
        assert ask(port, "Host: node7.example.org", "authorization: bearer right") == (200, PAGE), "by any name"


def test_half_requests_take_no_threads_and_keep_nobody_out() -> None:
    before = set(threading.enumerate())  # others' may end meanwhile

    def threads() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before]

    with serving() as port, ExitStack() as held:
        assert threads() == ["metrics"]
        halves = [held.enter_context(connected(port)) for _ in range(300)]
        for half in halves:
            half.send(b"GET /metrics HTTP/1.1\r\nHost:")
        for _ in range(3):
            assert ask(port, "Host: 127.0.0.1") == (200, PAGE), "the oldest made room"
        assert threads() == ["metrics"]
        for half in halves[: 300 - MOST_CONNECTIONS]:
            assert rest(half) == b"", "hung up on"
    assert threads() == []


def test_a_half_request_ends_in_time_and_so_does_an_answer_that_is_not_read() -> None:
    with serving(exchange_seconds=0.05, page=bytes(64 << 20)) as port:
        with connected(port) as half:
            half.send(b"GET /metrics")
            assert rest(half) == b""
        with connected(port) as unread:
            unread.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            unread.recv(1)
            with connected(port) as half:  # which ends after it
                assert rest(half) == b""
            assert len(rest(unread)) < 64 << 20, "cut off"


def test_a_head_without_end_is_cut_off() -> None:
    with serving() as port:
        assert exchange(port, "GET /metrics HTTP/1.1\r\nX: " + "a" * (2 * HEAD_BYTES)) == b""


def test_an_address_in_use_is_said() -> None:
    with serving() as port, pytest.raises(Unavailable, match="choose another address"):
        ScrapeServer(f"127.0.0.1:{port}", lambda _: Answer(HTTPStatus.OK, {}, PAGE)).start()
