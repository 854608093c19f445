"""HOST:PORT as people type it: one grammar, and words for everything that is outside of it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import Address, parse_address, parse_addresses, unix_target


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:0", Address("localhost", 0)),
        ("127.0.0.1:65535", Address("127.0.0.1", 65535)),
        ("[::1]:9464", Address("::1", 9464)),
        ("[0:0::1]:9464", Address("::1", 9464)),
        ("[fe80::1%eth0]:9464", Address("fe80::1%eth0", 9464)),
        ("kv-0.kv.svc.cluster.local.:7100", Address("kv-0.kv.svc.cluster.local.", 7100)),
    ],
)
def test_an_address_is_parsed(text: str, expected: Address) -> None:
    assert parse_address("listen", text) == expected
    assert parse_address("listen", text).is_loopback == (expected.host in ("localhost", "127.0.0.1", "::1"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("localhost", "is not HOST:PORT"),
        ("localhost:²", "is not HOST:PORT"),
        ("localhost:\N{ARABIC-INDIC DIGIT ONE}", "is not HOST:PORT"),
        ("localhost:65536", "a port from 0 to 65535"),
        ("localhost:-1", "is not HOST:PORT"),
        (":9464", "is not HOST:PORT"),
        ("::1:7100", "write an IPv6 address in brackets"),
        (":::9464", "write an IPv6 address in brackets"),
        ("[fe80::1%a\nb]:1", "no name of a network interface"),
        ("[fe80::1%\ud800]:1", "no name of a network interface"),
        ("[::g]:1", "no IPv6 address between its brackets"),
        (" localhost:1", "no name or address of a host"),
        ("local host:1", "no name or address of a host"),
        ("a\nb:1", "no name or address of a host"),
    ],
)
def test_anything_else_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        parse_address("listen", text)
    assert str(refused.value).startswith("listen: ")


@settings(deadline=None)
@given(st.text())
def test_no_text_is_a_traceback(text: str) -> None:
    for parse in (parse_address, lambda what, given: parse_addresses(what, given, most=4)):
        with contextlib.suppress(InvalidRequest):
            parse("peers", text)


def test_blanks_around_a_comma_do_not_matter_and_a_list_has_a_limit() -> None:
    assert parse_addresses("peers", "a:1, b:2 ,c:3", most=3) == ("a:1", "b:2", "c:3")
    for text in ("", "a:1,", "a:1, a:1", "a:1,b:2,c:3,d:4", "a:0"):
        with pytest.raises(InvalidRequest, match=r"^peers: "):
            parse_addresses("peers", text, most=3)


def test_a_path_reaches_grpc_as_it_was_typed() -> None:
    assert unix_target("/run/a b/k%41v?x#y.sock") == "unix:/run/a%20b/k%2541v%3Fx%23y.sock"


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *((each, True) for each in ("127.0.0.1", "127.0.1.1", "127.255.0.9", "::1", "localhost", "LocalHost")),
        *((each, False) for each in ("10.0.0.1", "0.0.0.0", "::", "node-1", "127.0.0.1.example")),
        *(("::ffff:127.0.1.1", True), ("::ffff:10.0.0.1", False)),
    ],
)
def test_all_addresses_of_loopback_are_loopback(host: str, is_here: bool) -> None:
    assert Address(host, 1).is_loopback is is_here
