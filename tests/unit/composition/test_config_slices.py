"""Refused configurations: slices too small to copy, one port for two listeners, a key given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import MIN_SLICE_BYTES, Config, load_config
from cachesvc.model.errors import InvalidRequest


def test_slices_have_a_least_size() -> None:
    assert Config(slice_bytes=MIN_SLICE_BYTES).slice_bytes == 1 << 20
    for size_bytes in (MIN_SLICE_BYTES - 1, 1, 0, -1):
        with pytest.raises(InvalidRequest, match=f"slice_bytes must be at least 1048576 .*, got {size_bytes}"):
            Config(slice_bytes=size_bytes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"metrics_listen": "127.0.0.1:9464"}, {"web_listen": "localhost:9464"}),
        ({"listen": "127.0.0.1:9464"}, {"metrics_listen": "0.0.0.0:9464"}),
        ({"health_listen": "10.0.0.1:9464"}, {"metrics_listen": "10.0.0.1:9464"}),
    ],
)
def test_two_listeners_have_two_ports(one: dict[str, Any], other: dict[str, Any]) -> None:
    Config(**one)
    Config(**other)
    with pytest.raises(InvalidRequest, match="are both port 9464; give each a port of its own"):
        Config(**one, **other)


def test_any_port_and_one_port_of_two_addresses_are_no_conflict() -> None:
    Config(metrics_listen="127.0.0.1:0", web_listen="127.0.0.1:0")
    Config(health_listen="10.0.0.1:9464", metrics_listen="127.0.0.1:9464")
    Config(metrics_listen="127.0.0.1:9464", web_listen="127.0.1.1:9464")


@pytest.mark.parametrize("text", ['host_pool = "1GiB"\nhost_pool = "2GiB"\n', "[token]\n[token]\n"])
def test_what_is_given_twice_is_said_to_be(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"line 2.*given twice: keep one") as refused:
        load_config(str(tmp_path / "config.toml"), {})
    assert "quotes" not in str(refused.value)


def test_a_size_without_quotes_is_told_of_quotes(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("host_pool = 1GiB\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="stand in quotes"):
        load_config(str(tmp_path / "config.toml"), {})
