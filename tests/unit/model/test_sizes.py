"""Sizes as people write them, and unknown names."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.config import Config, load_config
from cachesvc.flows.allocate import allocate
from cachesvc.flows.leases import open_lease
from cachesvc.flows.match import match
from cachesvc.model.errors import InvalidRequest, LimitExceeded
from cachesvc.model.numbers import Rounds, most_of
from cachesvc.model.text import (
    MOST_BYTES,
    Address,
    did_you_mean,
    module_command,
    parse_address,
    parse_addresses,
    parse_amount,
    parse_size,
    unix_target,
)
from cachesvc.storage.file.engine import file_options
from cachesvc.storage.mooncake.native import mooncake_options
from cachesvc.storage.s3.client import s3_options
from cachesvc.storage.spec import StorageSpec, parse_storage
from tests.unit.rigs.ledger_rig import TOKEN, chain, one_group, rig_of

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (4096, 4096),
        ("7 B", 7),
        ("2k", 2 * KIB),
        ("2g", 2 * GIB),
        ("2GB", 2 * 10**9),
        ("2GiB", 2 * GIB),
        ("16Gi", 16 * GIB),
        ("512Mi", 512 * MIB),
        ("1.5 MiB", 3 * MIB // 2),
        (" 2tib ", 2 * TIB),
        ("0.3KB", 300),
        (str(MOST_BYTES), MOST_BYTES),
    ],
)
def test_a_size_is_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "1e9", "8 XB", "KiB", "2 Ki Ki", "1.", ".5GiB", "2ib", "2i", "٣", [1], None, "9" * 400]
)
def test_what_is_not_a_size_is_said(text: object) -> None:
    with pytest.raises(InvalidRequest, match="is not a size; write a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", [str(MOST_BYTES + 1), "1048577TiB", "9" * 40])
def test_more_than_memory_can_have_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is more than memory can have"):
        parse_size(text)


@given(st.integers(0, MOST_BYTES))
def test_every_number_of_bytes_is_exact(size: int) -> None:
    assert parse_size(str(size)) == parse_size(f"{size}b") == size


@pytest.mark.parametrize(
    ("text", "meant"),
    [(40, "40GiB"), ("40", "40GiB"), (" 200 ", "200GiB"), ("65536", "65536MiB"), (MIB - 1, "1048575MiB")],
)
def test_a_number_without_its_unit_is_refused_with_what_was_meant(text: str | int, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {meant}"):
        parse_amount(text)


@pytest.mark.parametrize("text", ["0", 0, "40B", "512KiB", MIB, "1048576", "40GiB"])
def test_a_size_with_its_unit_or_a_large_one_is_taken(text: str | int) -> None:
    assert parse_amount(text) == parse_size(text)


@pytest.mark.parametrize("name", ["host_chunk", "load_limit", "store_limit", "slice_bytes", "checksum_limit"])
def test_every_size_of_the_settings_is_held_to_it(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}: 10 is 10 bytes; did you mean 10GiB"):
        load_config(None, {name: "10"})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (file_options, "file:/c?capacity=200"),
        (file_options, "file:/c?capacity=200GiB&floor=5"),
        (file_options, "file:/c?capacity=200GiB&write_rate=100"),
        (s3_options, "s3://bucket?part=8"),
        (s3_options, "s3://bucket?capacity=9"),
        (mooncake_options, "mooncake:a:1?segment=64"),
    ],
)
def test_every_size_of_storage_is_held_to_it(kind: Callable[[StorageSpec], object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is \d+ bytes; did you mean \d+GiB"):
        kind(parse_storage(text, ("file", "s3", "mooncake")))


def test_storage_without_host_pages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="host_pool is 0: nothing would be kept; give it a host_pool"):
        load_config(None, {"host_pool": "0", "storage": "file:/c?capacity=1GiB"})


SETTINGS = [field.name for field in fields(Config)]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("devise_pool", "device_pool"), ("laeses", "leases"), ("evicton", "eviction"), ("hostpool", "host_pool")],
)
def test_a_slip_of_the_pen_is_understood(name: str, meant: str) -> None:
    assert did_you_mean(name, SETTINGS, "see --help") == f"did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["bad", "x", "frobnicate", "cache", ""])
def test_a_name_that_is_like_none_is_not_guessed(name: str) -> None:
    assert did_you_mean(name, SETTINGS, "see --help") == "see --help"


# HOST:PORT as people type it: one grammar, and words for everything that is outside of it.


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


# Child processes of the product import nothing from the folder that their parent was started in.

ROOT = Path(__file__).parents[3]
DECOY = "open('was_imported', 'w').close()"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("cachesvc.mover", ["--list"]), ("cachesvc", ["--version"]), ("cachesvc_lab.replay", ["{}"])],
)
def test_a_file_of_the_working_directory_is_not_imported(module: str, arguments: list[str], tmp_path: Path) -> None:
    for name in ("random", "nt", "socket", "json", "argparse", "numpy", "cachesvc"):
        (tmp_path / f"{name}.py").write_text(DECOY)
    subprocess.run(
        module_command(module, *arguments), cwd=tmp_path, capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    assert not (tmp_path / "was_imported").exists()


def test_every_child_of_the_product_is_started_that_way() -> None:
    product = [path for folder in ("cachesvc", "client") for path in (ROOT / folder).rglob("*.py")]
    starts = [path for path in product if "sys.executable" in path.read_text(encoding="utf-8")]
    unsafe = [path for path in starts if '[sys.executable, "-P"' not in path.read_text(encoding="utf-8")]
    assert not [str(path.relative_to(ROOT)) for path in unsafe]


# A limit that is a setting says which one, and what the caller can do without it.


def test_refusals_name_the_setting_the_number_and_the_remedy() -> None:
    rig = rig_of(one_group(), device=[16])
    rig.core.limits = replace(rig.core.limits, blocks_per_sequence=4, sequences_per_lease=1, leases=1)
    lease = rig.lease()
    with pytest.raises(LimitExceeded, match="5 is more than the limit of 4; send fewer, or have the operator raise bl"):
        rig.run(match, lease, 1, chain(*"abcde"), 0)
    rig.run(match, lease, 1, chain("a"), 0)
    with pytest.raises(LimitExceeded, match="ask for fewer, or have the operator raise blocks_per_sequence and reload"):
        rig.run(allocate, lease, 1, 5)
    with pytest.raises(
        LimitExceeded, match=r"2 is more than the limit of 1; release some, .* sequences_per_lease"
    ) as no:
        rig.run(match, lease, 2, chain("b"), 0)
    assert (no.value.got, no.value.limit) == (2, 1)
    with pytest.raises(LimitExceeded, match="close some, or have the operator raise leases and reload"):
        open_lease(rig.core, 1, 0, "b", TOKEN + b"a", 1, 0.0)


# Leases and models without quotas: no tenant takes all, and a late tenant gets in.


@pytest.mark.parametrize(
    ("held", "most"),
    [
        ({}, 768),
        ({"a": 700}, 768),
        ({"b": 0}, 768),
        ({"b": 100}, 512),
        ({"b": 768}, 192),
        ({"b": 768, "c": 192}, 48),
        ({"b": 300, "c": 1}, 341),
        ({"b": 1024}, 1),
    ],
)
def test_what_a_tenant_may_hold(held: dict[str, int], most: int) -> None:
    assert most_of("a", Counter(held), 1024) == most


@given(st.lists(st.sampled_from("abcdef"), max_size=400), st.integers(64, 200))
def test_some_are_left_for_the_next_one(asked: list[str], limit: int) -> None:
    """Whatever tenants ask for in whatever order: three of them cannot take all."""
    held: Counter[str] = Counter()
    for tenant in asked[:limit]:
        if held[tenant] < most_of(tenant, held, limit) and held.total() < limit:
            held[tenant] += 1
    tenants = len(+held)
    assert held.total() < limit or tenants > 3
    assert most_of("new", held, limit) >= 1


def test_each_party_has_one_item_before_any_has_two() -> None:
    rounds: Rounds[str, str] = Rounds()
    for item in ("a0", "a1", "a2", "b0", "b1", "c0"):
        rounds.add(item[0], item)
    rounds.add_first("d", "d0")
    assert (len(rounds), sorted(rounds)) == (7, ["a0", "a1", "a2", "b0", "b1", "c0", "d0"])
    assert [rounds.take() for _ in range(7)] == ["d0", "a0", "b0", "c0", "a1", "b1", "a2"]
    assert not rounds
