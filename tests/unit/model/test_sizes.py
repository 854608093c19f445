"""Sizes as people write them, and unknown names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.config import Config, load_config
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import MOST_BYTES, did_you_mean, parse_amount, parse_size
from cachesvc.storage.file.engine import file_options
from cachesvc.storage.mooncake.native import mooncake_options
from cachesvc.storage.s3.client import s3_options
from cachesvc.storage.spec import StorageSpec, parse_storage

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
