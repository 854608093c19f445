"""Operators' view: the command line, health, reflection, channelz, and calls of a grpcurl-like client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from cachesvc_client import DaemonUnavailable
from cachesvc_ctl.main import main
from cachesvc_ctl.status import SIZE_ENDINGS
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachesvc.config import SIZES, Config
from tests.e2e.engine import BLOCK_TOKENS, LAYERS, Engine, prompt
from tests.e2e.remote import ROOT
from tests.e2e.rig import Node, running_node, wait_until

BUF = ROOT / ".tools" / "buf" / "node_modules" / ".bin" / "buf"
OWN_SERVICES = ("AdminService", "CacheService", "EngineService", "EventService", "LeaseService")

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process: exit code and what it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["cachesvc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(str(ended.value.code)), printed.out + printed.err

    return call


@pytest.fixture
def busy(node: Node) -> Iterator[Engine]:
    """An engine with a prefix of three blocks and two branches above it, one open sequence, and stores behind it."""
    with Engine(node.socket, name="busy", device_pages=8, host_pages=16) as engine:
        for seed in range(3):
            engine.serve(prompt(seed, 4))
        wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
        keys = engine.keys(prompt(3, 3))
        with engine.lease.match(keys) as sequence:
            sequence.allocate(3)
            engine.fill(sequence, keys, range(3))
            sequence.publish(1)
            wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
            yield engine


def ask(run: Run, node: Node, name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """A command in both its forms."""
    code, text = run(name, "--socket", node.socket, *arguments)
    assert code == 0, text
    code, raw = run(name, "--socket", node.socket, "--json", *arguments)
    assert code == 0, raw
    answer = json.loads(raw)
    assert isinstance(answer, dict)
    return text, answer


def test_status(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "status")
    assert "backend shm" in text
    assert "host pool: 64.00 MiB of 64.00 MiB ready" in text
    assert answer["epoch"] == busy.client.epoch
    places = {pool["place"]: pool for pool in answer["pools"]}
    assert set(places) == {"host", "replica 0"}
    assert (places["replica 0"]["capacity"], places["replica 0"]["private"]) == (8, 2)
    assert places["replica 0"]["quarantined"] == 0
    assert places["host"]["sealed"] >= 4
    assert answer["config"]["socket"] == node.socket
    assert answer["counters"]["published_blocks"] == 13
    assert "replica 0" in text
    assert len(text.splitlines()) <= 12, "a screen, and no more"
    assert max(map(len, text.splitlines())) <= 100


def test_status_shows_counters_and_settings_on_demand(run: Run, node: Node, busy: Engine) -> None:
    short = run("status", "--socket", node.socket)[1]
    counters = run("status", "--socket", node.socket, "--counters")[1]
    settings = run("status", "--socket", node.socket, "--config")[1]
    for word, where in (("published_blocks", counters), ("lease_seconds", settings)):
        assert [word in text for text in (short, counters, settings)] == [
            text is where for text in (short, counters, settings)
        ]
    assert re.search(r"^device_pool +67108864 \(64.00 MiB\)$", settings, re.MULTILINE)
    assert re.search(r"^leases +1024$", settings, re.MULTILINE)
    sizes = {name for name in (field.name for field in fields(Config)) if name.endswith(SIZE_ENDINGS)}
    assert sizes == set(SIZES), "what is shown with a unit is what is read with one"


def test_models(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "models")
    (model,) = answer["models"]
    assert (model["model"], model["device_pages"], model["host_pages"]) == ("model@1", [8], [16])
    assert (model["layout"]["block_tokens"], len(model["layout"]["planes"])) == (BLOCK_TOKENS, LAYERS)
    assert model["replicas"] == [{"replica": 0, "devices": ["shm-0"], "leases": 1}]
    assert busy.registration.namespace.hex()[:12] in text


def test_leases(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "leases")
    (lease,) = answer["leases"]
    assert (lease["lease_id"], lease["engine"], lease["state"]) == (busy.lease.id, "busy", "live")
    assert (lease["sequences"], lease["private_pages"], lease["replica"]) == (1, 2, 0)
    assert len(lease["process_ids"]) == 1
    assert busy.lease.id[:12] in text
    assert "live" in text


def test_sequences(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "sequences")
    (sequence,) = answer["sequences"]
    assert (sequence["blocks"], sequence["sealed_blocks"], sequence["private_pages"]) == (3, 1, 2)
    assert "device" in text
    assert answer["truncated"] is False


def test_blocks(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "blocks", "--limit", "5")
    assert answer["truncated"] is True
    assert "(more are there; raise --limit)" in text
    assert len(answer["blocks"]) == 5
    newest = answer["blocks"][0]
    assert newest["pins"] == 1
    assert newest["copies"][0]["state"] == "READY"
    assert newest["copies"][0]["place"] == "replica 0"
    assert busy.keys(prompt(3, 1)).hex()[:16] in text.splitlines()[1]


def test_tickets(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "tickets")
    assert {ticket["direction"] for ticket in answer["tickets"]} == {"store"}
    assert {ticket["state"] for ticket in answer["tickets"]} == {"TICKET_STATE_DONE"}
    assert "done" in text


def test_tree(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "tree")
    roots = [n for n in answer["nodes"] if n["depth"] == 0]
    assert len(roots) == 4
    assert roots[0]["descendants"] == 3
    assert {n["tiers"] for n in answer["nodes"]} <= {"device", "host", "device+host"}
    root = busy.keys(prompt(2, 1))
    below_text, below = ask(run, node, "tree", "--key", root.hex(), "--depth", "2")
    assert len(below["nodes"]) == 2
    assert below["truncated"] is True
    assert root.hex()[:16] in text
    assert root.hex()[:16] in below_text


def test_a_tree_says_which_flag_held_something_back(run: Run, node: Node, busy: Engine) -> None:
    whole, _ = ask(run, node, "tree")
    assert len(whole.splitlines()) == 13
    for flags, lines, hint in (
        (("--depth", "2"), 7, "(more are there; raise --depth)"),
        (("--limit", "12"), 12, "(more are there; raise --limit)"),
        (("--limit", "13"), 13, ""),
        (("--limit", "3", "--depth", "2"), 3, "(more are there; raise --depth and --limit)"),
        (("--limit", "7", "--depth", "2"), 7, "(more are there; raise --depth)"),
    ):
        text, answer = ask(run, node, "tree", *flags)
        assert len(answer["nodes"]) == lines
        assert answer["truncated"] is bool(hint)
        assert text.splitlines()[lines:] == ([hint] if hint else [])


def test_evict(run: Run, node: Node, busy: Engine) -> None:
    sealed = node.pages("sealed", "host")
    code, text = run("evict", "--socket", node.socket)
    assert (code, text) == (
        2,
        "cachesvc evict: one of the arguments --model --all is required; see cachesvc evict --help\n",
    )
    assert node.pages("sealed", "host") == sealed, "no cache is dropped by mistake"
    code, text = run("evict", "--socket", node.socket, "--model", "model@1", "--tier", "host", "--blocks", "2")
    assert (code, text.strip()) == (0, "evicted 2 blocks")
    assert node.pages("sealed", "host") == sealed - 2
    _, answer = ask(run, node, "evict", "--model", "1", "--tier", "device")
    assert answer == {"evicted": 0}, "the second of two finds nothing"
    assert run("evict", "--socket", node.socket, "--all") == (0, "evicted none\n")
    assert node.pages("sealed", "replica 0") == 2, "what is pinned stays, and what is the parent of host blocks"
    ask(run, node, "evict", "--all", "--tier", "host")
    ask(run, node, "evict", "--all")
    assert (node.pages("sealed", "host"), node.pages("sealed", "replica 0")) == (0, 1)
    assert busy.serve(prompt(9, 2)).bad == []


def test_verify(run: Run, node: Node, busy: Engine) -> None:
    text, answer = ask(run, node, "verify")
    assert text.startswith("ok: ")
    assert answer["ok"] is True
    assert answer["pages_checked"] == 8 + 16
    assert answer["blocks_checked"] >= 5
    assert answer["checksums"] is None, "they were not asked for"
    assert ask(run, node, "verify", "--model", "model@1")[1]["pages_checked"] == 8 + 16


def test_drain_lets_work_end_and_opens_nothing(run: Run, node: Node, busy: Engine) -> None:
    health = health_pb2_grpc.HealthStub(node.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "kvcache.v1.CacheService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
    text, answer = ask(run, node, "drain")
    assert "draining; 1 leases are still live" in text
    assert answer == {"live_leases": 1}
    for service in ("", "kvcache.v1.CacheService"):
        status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    for call in (lambda: busy.lease.match(b""), lambda: busy.client.open_lease(busy.registration)):
        with pytest.raises(DaemonUnavailable, match="draining") as refused:
            call()
        assert refused.value.is_draining
    assert ", DRAINING" in run("status", "--socket", node.socket)[1]


def test_an_idle_daemon_says_none(run: Run, node: Node) -> None:
    for name in ("models", "leases", "sequences", "tickets", "blocks", "tree"):
        text, answer = ask(run, node, name)
        assert text.strip() == "none"
        assert answer == {**({"truncated": False} if "truncated" in answer else {}), name.replace("tree", "nodes"): []}
    assert "no pools: no model is registered yet" in ask(run, node, "status")[0]
    text, answer = ask(run, node, "evict", "--all")
    assert (text.strip(), answer) == ("evicted none", {"evicted": 0})
    _, answer = ask(run, node, "verify")
    assert (answer["ok"], answer["pages_checked"], answer["problems"]) == (True, 0, [])
    code, said = run("tree", "--socket", node.socket, "--key", "zz")
    assert code == 2
    assert "argument --key: 'zz' is not hexadecimal" in said


@pytest.mark.parametrize("model", ["7", "unknown@1"])
def test_a_model_that_was_named_and_is_not_there_is_an_error(run: Run, node: Node, model: str) -> None:
    said = (2, f"cachesvc: there is no model {model}; cachesvc models lists those that are\n")
    for line in (["blocks"], ["tree"], ["evict"], ["verify"], ["why", "abcd"], ["dump", "x.jsonl"], ["events"]):
        assert run(*line, "--socket", node.socket, "--model", model) == said


def test_models_go_by_name_and_number_and_several_are_asked_about(run: Run, node: Node, busy: Engine) -> None:
    by_name = ask(run, node, "blocks", "--model", "model@1")[1]
    assert by_name == ask(run, node, "blocks", "--model", "1")[1] == ask(run, node, "blocks")[1]
    with Engine(node.socket, model="other@2", device_pages=8):
        code, text = run("blocks", "--socket", node.socket)
        assert (code, text) == (
            2,
            "cachesvc: which of 2 models? name one by its number: 1 (model@1), 2 (other@2)\n",
        )
        assert ask(run, node, "blocks", "--model", "other@2")[1]["blocks"] == []
        assert ask(run, node, "blocks", "--model", "model@1")[1] == by_name


def test_without_a_daemon_the_command_line_says_so(run: Run, folder: Path) -> None:
    code, text = run("status", "--socket", str(folder / "absent"))
    assert code == 2
    assert "is the daemon running on that --socket?" in text


def test_the_console_scripts_are_there(node: Node) -> None:
    scripts = Path(sys.executable).parent
    shown = subprocess.run(
        [scripts / "cachesvc", "status", "--socket", node.socket], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("cachesvcd ")
    told = subprocess.run([scripts / "cachesvcd", "--help"], capture_output=True, text=True, check=True)
    assert "--device-pool SIZE" in told.stdout


def test_channelz_answers(node: Node) -> None:
    with Engine(node.socket) as engine:
        engine.serve(prompt(1, 2))
        channelz = channelz_pb2_grpc.ChannelzStub(node.channel)
        (server,) = channelz.GetServers(channelz_pb2.GetServersRequest()).server
        assert server.data.calls_started > 5
        sockets = channelz.GetServerSockets(channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id))
        assert len(sockets.socket_ref) >= 2


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed here; `make test` does that")
def test_a_client_without_our_protos_calls_by_reflection(node: Node) -> None:
    def curl(*arguments: str) -> str:
        command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--unix-socket", node.socket]
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    listed = curl("--list-services", "http://localhost").split()
    assert {f"kvcache.v1.{name}" for name in OWN_SERVICES} <= set(listed)
    assert {"grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= set(listed)
    assert "kvcache.v1.AdminService/GetStatus" in curl("--list-methods", "http://localhost")
    status = json.loads(curl("--data", "{}", "http://localhost/kvcache.v1.AdminService/GetStatus"))
    assert status["backend"] == "shm"


def test_tcp_on_loopback_serves_the_same() -> None:
    with running_node(["--listen", "127.0.0.1:0"]) as node:
        ready = next(json.loads(line) for line in node.log().splitlines() if '"event": "ready"' in line)
        assert ready["port"] > 0
        with grpc.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING


def test_numbers_that_cannot_be_are_refused_and_a_reader_may_leave(run: Run, node: Node) -> None:
    for flags in (("blocks", "--limit", "-1"), ("tree", "--depth", "0"), ("why", "--events", str(2**40))):
        code, said = run(*flags, "--socket", node.socket)
        assert code == 2
        assert f"{flags[2]!r} is not a number from " in said
    for line, words in (
        (("replay", "t", "--device-blocks", "few"), "'few' is not a number of blocks, such as 5000, a share"),
        (("replay", "t", "--engines", "0"), "'0' is not a number from 1 to"),
        (("top", "--every", "often"), "'often' is not between 0.1 and 3600 seconds"),
    ):
        code, said = run(*line)
        assert (code, words in said) == (2, True), said
    command = f"'{sys.executable}' -m cachesvc_ctl.main status --socket {node.socket} | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("cachesvcd ")


def test_commands_stand_on_one_line_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text = run("--help")
    rows = [line for line in text.splitlines() if line.startswith("    ")]
    assert code == 0
    assert len(rows) == len({line.split()[0] for line in rows if line[4] != " "}) > 15
    assert run("--version") == (0, "cachesvc 0.1.0\n")
