"""Refusals of a start, and lines of the log, that name cause, limit and remedy."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cachesvc_lab.replay import MOVED, Tally

from cachesvc.config import Config, load_config
from cachesvc.flows.allocate import allocate
from cachesvc.flows.leases import open_lease, process_arrived, process_gone
from cachesvc.flows.match import match
from cachesvc.hardware import WAYS_IN, check_ports
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.text import module_command
from cachesvc.service.loop.node import tell_left
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of


@pytest.mark.parametrize("name", [name for name, _ in WAYS_IN])
def test_a_taken_port_names_the_flag_and_who_has_it(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings: dict[str, Any] = {name: f"127.0.0.1:{port}", "peer_tokens": "tokens"}
        config = Config(**settings)
        with pytest.raises(Unavailable) as refused:
            check_ports(config)
    flag = "--" + name.replace("_", "-")
    assert f"127.0.0.1:{port}: Address already in use; choose another {flag} (ss -ltnp" in str(refused.value)
    check_ports(config)  # the port is free again, and left free
    check_ports(config)


def test_a_configuration_without_quotes_says_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("device_pool = 4GiB\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r'sizes stand in quotes, as in device_pool = "4GiB"'):
        load_config(str(path), {})


def test_the_log_says_what_a_killed_engine_held(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_of(one_group(), device=(8,))
    process_arrived(rig.core, b"token", 1, 1)
    lease = open_lease(rig.core, 1, 0, "engine-7", b"token", 5, 0.0).id
    rig.run(match, lease, 1, chain(*"abcd"), 0)
    rig.run(allocate, lease, 1, 4)
    rig.core.on_left = tell_left
    with caplog.at_level(logging.INFO):
        process_gone(rig.core, b"token")
        process_gone(rig.core, b"another")
    (line,) = caplog.records
    fields = {"lease": lease[:12], "engine": "engine-7", "sequences": 1, "private_pages": 4}
    assert (line.message, line.__dict__["fields"]) == ("lease_process_ended", fields)


def test_bytes_of_a_replay_by_the_second_add_up_to_its_totals() -> None:
    tally = Tally()
    tally.note_bytes(1, {"h2d_bytes": 10, "d2h_bytes": 5})
    tally.note_bytes(1, {"h2d_bytes": 12, "d2h_bytes": 5})
    tally.note_bytes(2, {"h2d_bytes": 3})  # the next daemon counts anew
    tally.note_bytes(3, {"h2d_bytes": 20, "d2h_bytes": 6})
    by_second = {second: tuple(getattr(each, name) for name in MOVED) for second, each in tally.samples.items()}
    assert by_second == {1: (12, 5), 2: (0, 0), 3: (8, 1)}


def test_a_refusal_is_text_on_a_terminal_and_a_json_line_elsewhere(tmp_path: Path) -> None:
    command = module_command("cachesvc", "--backend", "shm", "--socket", str(tmp_path / "absent" / "kv.sock"))
    reader, terminal = os.openpty()
    ended = subprocess.run(command, stderr=terminal, check=False)
    os.close(terminal)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    assert (ended.returncode, said.startswith("cachesvcd: the folder of the socket")) == (2, True), said
    piped = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert b'"event": "start_refused"' in piped.stderr
