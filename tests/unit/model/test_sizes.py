"""Sizes as people write them, and unknown names."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.config import Config
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text.nearest import did_you_mean
from cachesvc.model.text.sizes import MOST_BYTES, parse_size

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
