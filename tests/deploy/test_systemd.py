"""The unit and the sample configuration: what the daemon reads, and what systemd takes."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from cachesvc.__main__ import check, read_flags
from cachesvc.config import Config, load_config
from tests.style.tree import ROOT

UNIT = ROOT / "deploy/systemd/cachesvcd.service"
SAMPLE = ROOT / "deploy/config.toml"


def unit() -> configparser.SectionProxy:
    """Section of the service."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


def test_the_sample_is_a_configuration_also_with_what_it_leaves_out(tmp_path: Path) -> None:
    assert "write_policy = write_through" in check(load_config(str(SAMPLE), {}))
    text = SAMPLE.read_text(encoding="utf-8").replace("/etc/cachesvc/tokens.toml", str(tmp_path / "tokens.toml"))
    whole = "\n".join(
        line.removeprefix("# ") if " = " in line.partition("#")[2] else line for line in text.splitlines()
    )
    path = tmp_path / "whole.toml"
    path.write_text(whole, encoding="utf-8")
    config = load_config(str(path), {})
    assert (config.allow_uids, config.metrics_listen) == ((1001, 1002), "0.0.0.0:9464"), (
        "each commented line is one too"
    )


def test_the_unit_starts_the_daemon_with_the_sample_where_it_expects_its_socket() -> None:
    service = unit()
    words = service["ExecStart"].split()
    path, _, _ = read_flags(words[1:])
    assert (words[0], path) == ("/opt/cachesvc/bin/cachesvcd", "/etc/cachesvc/config.toml")
    config = load_config(str(SAMPLE), {})
    assert f"/run/{service['RuntimeDirectory']}/cachesvc.sock" == config.socket == Config().socket
    assert int(service["TimeoutStopSec"]) > config.drain_seconds, "a drain must fit into the time that systemd gives"
    storage = "/var/cache/" + service["CacheDirectory"]
    assert f"file:{storage}?" in SAMPLE.read_text(encoding="utf-8")


def test_systemd_knows_each_setting_of_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    copy = tmp_path / "cachesvcd.service"
    text = UNIT.read_text(encoding="utf-8").replace("/opt/cachesvc/bin/cachesvcd", "/bin/true")
    copy.write_text(text.replace("/opt/cachesvc/bin/cachesvc", "/bin/true"), encoding="utf-8")
    said = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert "cachesvcd.service:" not in said.stderr, said.stderr
