"""An operator's first hour: help, slips of the pen, where the daemon is, whether it is ready, and what TLS wants."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.access.test_access import Authority, port_of
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import BOUND_SECONDS, FLAGS, Node, running_node
from tests.forked_command import run_forked
from tests.forked_daemon import ForkedDaemon

Ended = subprocess.CompletedProcess[str]
AS_USERS_DO = ("env",)


def cachesvc(*arguments: str, before: tuple[str, ...] = (), **variables: str) -> Ended:
    """The command line in a process of its own; ``variables`` are all of CACHESVC_* and GRPC_* that it sees.

    ``before``: what runs it, in place of code between fork and exec, where gRPC's handlers may abort the child. Without
    it the process is forked from one with its imports.
    """
    if not before:
        return run_forked("cachesvc_ctl", *arguments, environment=environment(**variables))
    command = [*before, sys.executable, "-m", "cachesvc_ctl", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=BOUND_SECONDS, env=environment(**variables),
    )  # fmt: skip


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CACHESVC_", "GRPC_"))}
    return kept | variables


@pytest.mark.parametrize("line", [[], ["help"], ["--help"]], ids=" ".join)
def test_help_is_not_an_error(line: list[str]) -> None:
    ended = cachesvc(*line, before=AS_USERS_DO)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: cachesvc ")
    assert "    status " in ended.stdout


def test_help_of_a_command() -> None:
    assert cachesvc("help", "tree").stdout == cachesvc("tree", "--help").stdout
    assert "--depth N" in cachesvc("help", "tree").stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["stauts"], "cachesvc: there is no command 'stauts', did you mean 'status'? see cachesvc --help"),
        (["lease"], "cachesvc: there is no command 'lease', did you mean 'leases'? see cachesvc --help"),
        (["help", "evcit"], "cachesvc: there is no command 'evcit', did you mean 'evict'? see cachesvc --help"),
        (["frob"], "cachesvc: there is no command 'frob'; see cachesvc --help"),
        (
            ["tree", "--detph", "3"],
            "cachesvc tree: unknown argument --detph, did you mean '--depth'? see cachesvc tree",
        ),
        (["leases", "--bad"], "cachesvc leases: unknown argument --bad; see cachesvc leases --help"),
        (["leases", "now"], "cachesvc leases: unknown argument now; see cachesvc leases --help"),
        (["tree", "--limit", "0"], "cachesvc tree: argument --limit: '0' is not a number from 1 to 4096; see"),
        (["tree", "--socket", "s", "--address", "a:1"], "argument --address: not allowed with argument --socket"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_gets_one_line(line: list[str], said: str) -> None:
    ended = cachesvc(*line)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_environment_names_the_daemon_and_flags_win(node: Node) -> None:
    found = cachesvc("leases", CACHESVC_SOCKET=node.socket)
    assert (found.returncode, found.stdout) == (0, "none\n")
    missed = cachesvc("leases", "--socket", "absent.sock", CACHESVC_SOCKET=node.socket)
    assert missed.returncode == 2
    assert "no answer from ./absent.sock" in missed.stderr
    with running_node(["--listen", "127.0.0.1:0"]) as other:
        address = f"127.0.0.1:{port_of(other.daemon)}"
        over_tcp = cachesvc("status", "--json", CACHESVC_ADDRESS=address, CACHESVC_SOCKET=node.socket)
        assert json.loads(over_tcp.stdout)["config"]["socket"] == other.socket
        by_flag = cachesvc("status", "--json", "--socket", node.socket, CACHESVC_ADDRESS=address)
        assert json.loads(by_flag.stdout)["config"]["socket"] == node.socket
    assert "no answer from /run/cachesvc/" in cachesvc("leases").stderr


# -- whether it is ready -----------------------------------------------------------------------------------------------


def test_wait_is_over_when_the_daemon_is_ready(folder: Path) -> None:
    """It waits before there is anything to connect to."""
    path = folder / "cachesvc.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        line = [sys.executable, "-m", "cachesvc_ctl", "wait", "--ready"]
        with subprocess.Popen(line, env=environment(CACHESVC_SOCKET=str(path)), stdout=subprocess.PIPE) as waiting:
            silent.accept()[0].close()  # it has tried
            silent.close()
            path.unlink()
            with running_node(folder=folder):
                assert waiting.communicate(timeout=BOUND_SECONDS)[0] == b"ready\n"
            assert waiting.returncode == 0


def test_wait_says_why_it_was_in_vain(folder: Path) -> None:
    silent = cachesvc("wait", "--ready", "--timeout", "0.5", "--socket", str(folder / "absent.sock"))
    assert silent.returncode == 1
    assert silent.stdout.startswith(f"not ready after 0.5 s: no answer from {folder}/absent.sock (")
    with running_node(["--drain-seconds", "60"], folder=folder) as node:
        where = ("--socket", node.socket)
        assert cachesvc("wait", *where).stdout == "ready\n"
        with Engine(node.socket):
            assert cachesvc("drain", *where).returncode == 0
            drains = cachesvc("wait", "--ready", "--timeout", "0.5", *where)
            assert (drains.returncode, drains.stderr) == (1, "")
            assert (
                drains.stdout
                == f"not ready after 0.5 s: {node.socket} answers NOT_SERVING: it starts, drains or is broken\n"
            )


def test_wait_shows_what_it_has_and_any_scope_is_enough(folder: Path) -> None:
    token = "an engine's own, of enough letters"
    digest = hashlib.sha256(token.encode()).hexdigest()
    (folder / "tokens.toml").write_text(f'[[token]]\nname = "x"\nsha256 = "{digest}"\nscopes = ["engine"]\n')
    (folder / "tokens.toml").chmod(0o600)
    with ForkedDaemon([*FLAGS, "--tokens", str(folder / "tokens.toml")], folder=str(folder)) as daemon:
        assert cachesvc("status", "--socket", daemon.socket, CACHESVC_TOKEN=token).returncode == 2
        ready = cachesvc("wait", "--socket", daemon.socket, CACHESVC_TOKEN=token)
        assert (ready.returncode, ready.stdout) == (0, "ready\n")


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_mistakes_with_tls_are_told_as_such_and_the_log_stays_json(folder: Path) -> None:
    made = Authority(folder)
    certificate, key = made.sign("server", 1)
    mine, my_key = made.sign("client", 2)
    root = str(folder / "root.pem")
    tls = ("--tls-certificate", certificate, "--tls-key", key, "--tls-client-ca", root)
    own = ("--tls-certificate", mine, "--tls-key", my_key)

    (folder / "tokens.toml").write_text('[[certificate]]\nname = "client"\n')
    tokens = ("--tokens", str(folder / "tokens.toml"))
    with ForkedDaemon([*FLAGS, "--listen", "localhost:0", *tls, *tokens], folder=str(folder)) as daemon:
        port = port_of(daemon)
        for flags, hint in (
            ((), "it hung up: a TLS port wants --tls-ca, and where it asks for them --tls-certificate and --tls-key"),
            (("--tls-ca", root), "does it ask for a client's TLS certificate (--tls-certificate, --tls-key)?"),
            (("--tls-ca", mine), "by a certificate of --tls-ca?"),
            (own, "by a certificate of --tls-ca?"),
        ):
            told = cachesvc("leases", "--address", f"localhost:{port}", *flags)
            assert (told.returncode, hint in told.stderr) == (2, True), told.stderr
            assert told.stderr.count("\n") == 1
        other_name = cachesvc("leases", "--address", f"127.0.0.1:{port}", "--tls-ca", root, *own)
        assert "does it speak TLS, for that name" in other_name.stderr
        right = cachesvc("leases", "--address", f"localhost:{port}", "--tls-ca", root, *own)
        assert (right.returncode, right.stdout, right.stderr) == (0, "none\n", "")
        assert_json_lines(daemon.log)
    refused = cachesvc("leases", "--address", f"localhost:{port}", "--tls-ca", root, *own)
    assert "is the daemon running with that --listen?" in refused.stderr


def test_tls_to_a_port_without_it_is_told_as_such(folder: Path) -> None:
    Authority(folder)
    with ForkedDaemon([*FLAGS, "--listen", "localhost:0"], folder=str(folder)) as daemon:
        told = cachesvc("leases", "--address", f"localhost:{port_of(daemon)}", "--tls-ca", str(folder / "root.pem"))
        assert (told.returncode, "does it speak TLS" in told.stderr) == (2, True), told.stderr
        assert_json_lines(daemon.log)


# -- files that are there whole or not at all --------------------------------------------------------------------------


LITTLE_DISK = ("sh", "-c", 'ulimit -f 4 && exec "$@"', "sh")
"""No file of the process may grow beyond 4 blocks of 512 bytes or 1 KiB."""


@pytest.mark.parametrize("before", [None, "what was there\n"])
def test_a_full_disk_leaves_no_half_a_file(node: Node, folder: Path, before: str | None) -> None:
    with Engine(node.socket, device_pages=64) as engine:
        for seed in range(8):
            engine.serve(prompt(seed, 8))
        for line in (["synth", "t.jsonl", "--requests", "200"], ["dump", "t.jsonl", "--socket", node.socket]):
            target = folder / "t.jsonl"
            if before is not None:
                target.write_text(before)
            ended = cachesvc(line[0], str(target), *line[2:], before=LITTLE_DISK)
            assert (ended.returncode, "File too large" in ended.stderr) == (2, True), ended.stderr
            assert (target.read_text() if target.exists() else None) == before
            assert [path.name for path in folder.iterdir() if path != target] == []


def test_a_pipe_is_written_as_it_is(node: Node, folder: Path) -> None:
    pipe = folder / "t.jsonl"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        assert cachesvc("synth", str(pipe), "--requests", "3").returncode == 0
        assert reader.communicate(timeout=BOUND_SECONDS)[0].count("\n") == 3
    assert pipe.is_fifo()


def test_synth_says_what_its_flags_are() -> None:
    shown = cachesvc("synth", "--help").stdout
    for words in ("prompts in it (default 1000)", "(default 0)", "cachesvc replay t.jsonl"):
        assert words in " ".join(shown.split())


def assert_json_lines(log: Path) -> None:
    """A log that a machine can read: every line is one object."""
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines
    assert [line for line in lines if not isinstance(json.loads(line), dict)] == []
