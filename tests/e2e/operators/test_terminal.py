"""Names that callers choose reach an operator's terminal as text alone."""

from __future__ import annotations

import pytest
from cachesvc_client import CacheClient
from cachesvc_client.layouts.families import opaque

from tests.e2e.rig import Node
from tests.forked_command import run_forked

EVIL = "m\x1b]0;owned\x07\x1b[2J\x1b[1;1Hok: nothing needs attention\r\nfake\t\u202erow"
COMMANDS = (
    *(["models"], ["leases"], ["sequences"], ["status", "--counters", "--config"], ["top", "--once"], ["tenants"]),
    *(["blocks"], ["tree"], ["tickets"], ["storage"], ["verify"], ["evict", "--all"], ["status", "--json"]),
)


@pytest.mark.parametrize("fails", [False, True], ids=["answers", "errors"])
def test_no_command_prints_what_a_terminal_would_act_on(node: Node, fails: bool) -> None:
    with CacheClient(node.socket, engine="e\x1b[31m\nx") as client:
        layout = opaque(block_bytes=4096, block_tokens=16)
        registration = client.register(EVIL, layout, device_pages=[8], host_pages=[0])
        with client.open_lease(registration) as lease, lease.match(b"k" * 32) as sequence:
            sequence.allocate(1)
            sequence.publish(1)
            for command in COMMANDS:
                wrong = ["--model", EVIL + "!"] if fails and command[0] in ("blocks", "tree", "sequences") else []
                ended = run_forked("cachesvc_ctl", *command, *wrong, "--socket", node.socket)
                said = ended.stdout + ended.stderr
                assert "Traceback" not in said, (command, said)
                assert [each for each in said if not each.isprintable() and each != "\n"] == [], command
            models = run_forked("cachesvc_ctl", "models", "--socket", node.socket)
            assert len(models.stdout.splitlines()) == 2
