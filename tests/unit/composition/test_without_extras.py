"""Every program and library starts with the base packages alone: what needs an extra imports it when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXTRAS = (
    "cupy",
    "cupyx",
    "matplotlib",
    "mooncake",
    "msgspec",
    "numa",
    "obstore",
    "opentelemetry",
    "paddle",
    "prometheus_client",
    "rich",
    "sglang",
    "starlette",
    "textual",
    "torch",
    "uvicorn",
    "uvloop",
    "vllm",
    "xxhash",
    "zmq",
    "zstandard",
)
SERVER = ("grpc_health", "grpc_reflection", "grpc_channelz")
"""Extra of the daemon alone."""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cachesvc_client.client", EXTRAS + SERVER),
        ("cachesvc_client.aio", EXTRAS + SERVER),
        ("cachesvc_ctl.main", EXTRAS + SERVER),
        ("cachesvc_lab", EXTRAS + SERVER),
        ("cachesvc.__main__", EXTRAS + SERVER),
        ("cachesvc.daemon", EXTRAS),
        ("cachesvc.mover.__main__", EXTRAS + SERVER),
    ],
)
def test_what_is_started_needs_no_extra(module: str, absent: tuple[str, ...]) -> None:
    script = (
        f"import sys, importlib\nfor name in {absent!r}: sys.modules[name] = None\nimportlib.import_module({module!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_command_tells_its_flags_without_an_extra() -> None:
    script = (
        f"import sys\nfor name in {EXTRAS + SERVER!r}: sys.modules[name] = None\n"
        "from cachesvc_ctl.main import COMMANDS, parse\n"
        "for command in COMMANDS:\n"
        "    try: parse([command.name, '--help'])\n"
        "    except SystemExit as end: assert not end.code, command.name\n"
        "print(len(COMMANDS))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 10
