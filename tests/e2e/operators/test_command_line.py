"""Start, refused start and end of the daemon and its command line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from cachesvc import __version__
from cachesvc.config import LIVE, SIZES, Config
from tests.e2e.engine import Engine, prompt
from tests.e2e.remote import ROOT
from tests.e2e.rig import BOUND_SECONDS, FLAGS, Node, running_node, wait_until
from tests.forked_command import run_forked
from tests.forked_daemon import daemon_forker
from tests.forked_process import ForkedProcess

BAD_START = 2


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command to its end. It must end by itself."""
    return run_forked(module, *arguments)


def refuse_to_start(folder: Path, *arguments: str) -> str:
    """Start a daemon that must not come up; what it says. It must leave no socket behind."""
    path = folder / "refused.sock"
    ended = run("cachesvc", "--socket", str(path), *arguments)
    assert ended.returncode == BAD_START, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not os.path.lexists(path)
    assert not os.path.lexists(f"{path}.life")
    return ended.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device-pool", "many"], "'many' is not a size; write a number of bytes"),
        (["--host-pool", "-1"], "'-1' is not a size"),
        (["--device-pool", "0"], "device_pool must be positive and finite, got 0"),
        (["--device-pool", "40"], "device_pool: 40 is 40 bytes, and a pool has at least 1048576 (1 MiB); did you mean"),
        (["--host-pool", "64"], "did you mean 64GiB?"),
        (["--listen", "localhost:²"], "'localhost:²' is not HOST:PORT"),
        (["--health-listen", "::1:9465"], "write an IPv6 address in brackets, such as [::1]"),
        (["--metrics-listen", ":::9464"], "write an IPv6 address in brackets"),
        (["--peers", "::1:7100"], "write an IPv6 address in brackets"),
        (["--peers", "127.0.0.1:1, nowhere"], "peers: 'nowhere' is not HOST:PORT"),
        (["--shm-devices", "0"], "shm_devices must be positive and finite, got 0"),
        (["--lease-seconds", "0"], "lease_seconds must be positive"),
        (["--lease-seconds", "nan"], "lease_seconds must be positive"),
        (["--lease-seconds", "inf"], "lease_seconds must be positive and finite, got inf"),
        (["--drain-seconds", "-1"], "drain_seconds must be at least 0"),
        (["--listen", "0.0.0.0:9000"], "0.0.0.0 is not loopback; without TLS"),
        (["--tls-client-ca", "ca.pem"], "tls_client_ca are for listen, which is not set"),
        (["--listen", "localhost"], "'localhost' is not HOST:PORT"),
        (["--listen", "localhost:70000"], "'localhost:70000' is not HOST:PORT"),
        (["--listen", "localhost:0", "--tls-key", "key.pem"], "tls_certificate and tls_key go together"),
        (["--eviction", "newest"], "invalid choice: 'newest' (choose from"),
        (["--write-policy", "never"], "invalid choice: 'never'"),
        (["--backend", "cuda"], "NVIDIA driver"),
        (["--config", "/does/not/exist.toml"], "cannot read the configuration"),
        (["--socket-group", "9" * 20], f"there is no group '{'9' * 20}' here"),
        (["--socket", "/proc/cachesvc.sock"], "cannot make the socket /proc/cachesvc.sock"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_named(folder: Path, flags: list[str], words: str) -> None:
    assert words in refuse_to_start(folder, *flags)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devise_pool = '1GiB'\n", "did you mean 'device_pool'?"),
        ("bad = 1\n", "unknown key 'bad' in "),
        ("bad = 1\n", "; cachesvcd --help lists them"),
        ("eviction = 'newest'\n", "'newest'"),
        ("lease_seconds = 'long'\n", "lease_seconds: 'long' is not a number"),
        ("lease_seconds = true\n", "lease_seconds: True is not a number"),
        ("host_chunk = '3KiB'\n", "chunk"),
        ("socket = 7\n", "socket: 7 is not a text"),
        ("allow_uids = 'root'\n", "allow_uids: 'root' is not a list of numbers"),
        ("allow_uids = '1001'\n", "allow_uids: '1001' is not a list of numbers"),
        ("allow_gids = [1.5]\n", "allow_gids: [1.5] is not a list of numbers, such as"),
        ("leases = 1.5\n", "leases: 1.5 is not a whole number"),
        ("tls_key = 'k'\n", "are for listen, which is not set"),
        ("device_pool = [1]\n", "is not a size"),
        ("device_pool = '" + "9" * 400 + "'\n", "is not a size"),
        ("leases = inf\n", "leases: inf is not a whole number"),
        ("= 3\n", "cannot read the configuration"),
    ],
)
def test_a_bad_line_of_the_configuration_is_named(folder: Path, text: str, words: str) -> None:
    config = folder / "cachesvc.toml"
    config.write_text(text, encoding="utf-8")
    said = run("cachesvc", "--config", str(config), *(() if "socket" in text else ("--socket", str(folder / "s"))))
    assert said.returncode == BAD_START, said.stderr
    assert words in said.stderr
    assert "Traceback" not in said.stderr


def test_a_file_that_is_no_text_is_named(folder: Path) -> None:
    config = folder / "cachesvc.toml"
    config.write_bytes(b"\xff\xfe\x00")
    assert "cannot read the configuration" in refuse_to_start(folder, "--config", str(config))


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--host-pool", "900TiB", "--device-pool", "1MiB"], "989560464998400"),
        (["--device-pool", "900TiB", "--host-pool", "0"], "989560464998400"),
        (
            ["--device-pool", "225TiB", "--shm-devices", "4", "--host-pool", "0"],
            "4 shm device pools of 247390",
        ),
    ],
)
def test_pools_larger_than_memory_are_refused_with_the_numbers(folder: Path, flags: list[str], numbers: str) -> None:
    said = refuse_to_start(folder, *flags)
    assert numbers in said
    assert "leaves" in said


def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    ended = run("cachesvc", "--socket", str(folder / "nowhere" / "s"))
    assert ended.returncode == BAD_START
    assert f"the folder of the socket {folder}/nowhere/s does not exist; make it" in ended.stderr


@pytest.mark.parametrize("name", ["a b.sock", "k%41v.sock", "node%i.sock", "ünï.sock", "q?x.sock", "h#x.sock"])
def test_a_socket_may_have_any_name(folder: Path, name: str) -> None:
    path = folder / name
    with Path(os.devnull).open("r+b") as null:
        arguments, streams = ("--socket", str(path), *FLAGS), (null.fileno(),) * 3
        daemon = ForkedProcess(daemon_forker().socket, "cachesvc", arguments, os.environ, streams)
    try:
        wait_until(path.is_socket, "the socket is there")
        assert run("cachesvc_ctl", "wait", "--socket", str(path)).stdout == "ready\n"
        assert run("cachesvc_ctl", "status", "--socket", f"unix:{path}").returncode == 0
        with Engine(str(path)) as engine:
            assert engine.serve(prompt(1, 2)).computed == 2
        assert sorted(each.name for each in folder.iterdir() if each.is_socket()) == [name, f"{name}.life"]
    finally:
        daemon.terminate()
        daemon.wait()


def test_a_path_that_no_socket_can_have_is_refused_by_clients_in_words() -> None:
    for path in ("/tmp/" + "d" * 120 + "/kv.sock", "unix:"):
        said = run("cachesvc_ctl", "status", "--socket", path)
        assert said.returncode == BAD_START
        assert "the path of a daemon's socket has 1 to 102 bytes" in said.stderr
        assert "Traceback" not in said.stderr


def test_a_path_that_is_too_long_for_a_socket_is_named(folder: Path) -> None:
    ended = run("cachesvc", "--socket", str(folder / ("s" * 100)))
    assert ended.returncode == BAD_START
    assert "1 to 100 bytes" in ended.stderr


def test_the_longest_path_that_is_allowed_works(folder: Path) -> None:
    path = str(folder / "s").ljust(100, "s")
    with subprocess.Popen([sys.executable, "-m", "cachesvc", "--socket", path], cwd=ROOT, stderr=-1) as daemon:
        assert daemon.stderr is not None
        line = daemon.stderr.readline()
        while b'"ready"' not in line:
            assert line, "it did not start"
            line = daemon.stderr.readline()
        with Engine(path) as engine:
            assert engine.serve(prompt(1, 2)).bad == []
        daemon.terminate()
        daemon.stderr.read()
    assert daemon.returncode == 0


@pytest.mark.parametrize("name", ["s", "s.life"])
def test_a_file_in_a_sockets_place_is_left_alone(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text("mine", encoding="utf-8")
    ended = run("cachesvc", "--socket", str(folder / "s"))
    assert ended.returncode == BAD_START
    assert f"{path} exists and is not a socket; move it away" in ended.stderr
    assert path.read_text(encoding="utf-8") == "mine"
    assert [entry.name for entry in folder.iterdir()] == [name]


def test_a_socket_in_use_is_left_to_its_daemon(node: Node) -> None:
    ended = run("cachesvc", "--socket", node.socket)
    assert ended.returncode == BAD_START
    assert f"socket {node.socket} is in use by a running daemon; stop it or choose another --socket" in ended.stderr
    with Engine(node.socket) as engine:
        assert engine.serve(prompt(1, 2)).bad == []


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag, words in (("--listen", "cannot listen on"), ("--health-listen", "cannot answer probes on")):
            said = refuse_to_start(folder, flag, listen)
            *_, last = [json.loads(line) for line in said.splitlines()]
            assert (last["event"], last["level"]) == ("start_refused", "error"), "and every line is JSON"
            assert f"{words} {listen}" in last["reason"]


def test_a_bad_flag_gets_one_line() -> None:
    for flags, words in (
        (["--evicton", "lru"], "unknown argument --evicton, did you mean '--eviction'? see cachesvcd --help\n"),
        (
            ["--eviction", "newest"],
            "(choose from 'deepest_first', 'hazard', 'hazard_cost', 'lfu', 'lru'); see cachesvcd --help\n",
        ),
        (["--leases", "few"], "argument --leases: invalid int value: 'few'; see cachesvcd --help\n"),
    ):
        ended = run("cachesvc", *flags)
        assert ended.returncode == BAD_START
        assert ended.stderr.startswith("cachesvcd: ")
        assert ended.stderr.endswith(words)
        assert ended.stderr.count("\n") == 1


def test_a_configuration_is_checked_without_a_start(folder: Path, node: Node) -> None:
    config = folder / "cachesvc.toml"
    config.write_text(f"socket = '{node.socket}'\nleases = 7\nhost_pool = '16Gi'\n", encoding="utf-8")
    checked = run("cachesvc", "--check-config", "--config", str(config), "--lease-seconds", "3")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.splitlines() == [
        "the configuration is valid; it differs from the defaults by",
        f"socket = {node.socket}",
        f"host_pool = {16 << 30}",
        "lease_seconds = 3.0",
        "leases = 7",
    ]
    assert run("cachesvc", "--check-config").stdout.endswith("differs from the defaults by\nnothing\n")
    tls = "listen = '127.0.0.1:0'\ntls_certificate = '/a'\ntls_key = '/b'\n"
    tokens = folder / "tokens.toml"
    tokens.touch(0o600)
    for text, words in (
        ("leases = 0\n", "leases must be positive"),
        ("socket_group = 'no-such-group'\n", "there is no group 'no-such-group' here"),
        ("tokens = '/no/such/file'\n", "cannot read the tokens' file /no/such/file"),
        (f"{tls}tls_client_ca = '/c'\n", "TLS says who calls, not who may: name tokens too"),
        (f"{tls}tokens = '{tokens}'\n", "the certificate cannot be used"),
    ):
        config.write_text(text, encoding="utf-8")
        ended = run("cachesvc", "--check-config", "--config", str(config))
        assert (ended.returncode, ended.stdout) == (BAD_START, "")
        assert words in ended.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["cachesvc.toml", "tokens.toml"]


def test_too_few_files_are_said_before_anything_breaks(folder: Path) -> None:
    start = [sys.executable, "-m", "cachesvc", "--socket", str(folder / "s")]
    ended = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *start],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == BAD_START
    assert "this process may open 20 files; raise the limit (ulimit -n) to 128 or more" in ended.stderr


def test_the_configuration_is_read_and_flags_win(folder: Path) -> None:
    config = folder / "cachesvc.toml"
    config.write_text("host-pool = '8MiB'\ndevice_pool = '3MiB'\nlease_seconds = 3\n", encoding="utf-8")
    with running_node(["--config", str(config), "--device-pool", "5MiB"], folder=folder) as node:
        shown = next(json.loads(line) for line in node.log().splitlines() if '"event": "config"' in line)
        assert (shown["device_pool"], shown["host_pool"]) == (str(5 << 20), str(64 << 20))
        assert shown["lease_seconds"] == "3.0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_daemon_well_and_removes_its_sockets(folder: Path, number: signal.Signals) -> None:
    with running_node(folder=folder) as node:
        with Engine(node.socket) as engine:
            engine.serve(prompt(1, 2))
        node.daemon.process.send_signal(number)
        assert node.daemon.process.wait() == 0
        assert '"stopped"' in node.log()
        assert "Traceback" not in node.log()
        assert [path.name for path in folder.iterdir()] == ["cachesvcd.log"]


def test_a_signal_with_engines_at_work_waits_for_them(folder: Path) -> None:
    with running_node(["--drain-seconds", "60"], folder=folder) as node:
        engine = Engine(node.socket).start()
        sequence = engine.lease.match(engine.keys(prompt(1, 2)))
        node.daemon.process.terminate()
        wait_until(lambda: engine.lease.is_draining, "the engine was told")
        keys = engine.keys(prompt(1, 2))
        sequence.allocate(2)
        engine.fill(sequence, keys, range(2))
        assert sequence.publish(2).sealed_blocks == 2
        sequence.release()
        engine.close()
        assert node.daemon.process.wait() == 0


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("cachesvc_ctl", "replay", *arguments)


def test_a_broken_line_of_a_trace_is_named(folder: Path) -> None:
    trace = folder / "broken.jsonl"
    good = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    trace.write_text(good + '{"timestamp": 1, "input_length":\n', encoding="utf-8")
    ended = replay(str(trace))
    assert ended.returncode == 2
    assert "broken.jsonl" in ended.stderr
    assert "line 2" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device-blocks", "0"], "--device-blocks must be at least 1"),
        (["--block-bytes", "12"], "must be a multiple of 8 times --layers 1"),
        (["--eviction", "newest"], "newest"),
        (["--engines", "0"], "is not a number from 1 to"),
        (["--device-blocks", "900000000000"], "leaves"),
        (["--socket", "/absent/daemon.sock"], "is the daemon running on that --socket?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_of_a_replay_is_named(folder: Path, arguments: list[str], words: str) -> None:
    trace = folder / "good.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n', encoding="utf-8")
    ended = replay(str(trace), *arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_trace_that_is_not_there_is_named() -> None:
    ended = replay("/no/such/trace.jsonl")
    assert ended.returncode == 2
    assert "trace.jsonl" in ended.stderr


def test_every_setting_is_a_flag_that_the_help_lists_with_its_default() -> None:
    shown = run("cachesvc", "--help").stdout
    plural = {"allow_uids": "allow-uid", "allow_gids": "allow-gid"}
    settings = {field.name for field in fields(Config)} - {"fault_copies"}
    flags = {f"--{plural.get(name, name.replace('_', '-'))}" for name in settings}
    assert flags | {"--config", "--check-config", "--check-machine", "--help", "--version"} == set(
        re.findall(r"^  (?:-h, )?(--[\w-]+)", shown, re.MULTILINE)
    )
    assert run("cachesvc", "--version").stdout == f"cachesvcd {__version__}\n"
    told = {
        name: int(text) for name, text in re.findall(r"^  --([\w-]+) N\b[^(]*?\(default\s+(\d+)\)", shown, re.MULTILINE)
    }
    defaults = Config()
    assert told == {name: getattr(defaults, name.replace("-", "_")) for name in told}
    numbers = {field.name for field in fields(Config) if field.type == "int"} - set(SIZES)
    assert {name.replace("-", "_") for name in told} == numbers
    listed = shown.partition("Sizes are bytes")[0]
    marked = re.findall(r"^  --([\w-]+)(?:(?!^  --).)*?\[live\]", listed, re.MULTILINE | re.DOTALL)
    assert {name.replace("-", "_") for name in marked} == LIVE


def test_a_daemon_without_its_extra_says_which_one(folder: Path) -> None:
    start = "import sys; sys.modules['grpc_reflection'] = None; from cachesvc.__main__ import main; main()"
    command = [sys.executable, "-c", start, "--socket", str(folder / "s")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=BOUND_SECONDS)
    assert ended.returncode == BAD_START
    assert "pip install 'cachesvc[server]'" in ended.stderr
    assert "Traceback" not in ended.stderr
