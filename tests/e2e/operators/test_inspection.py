"""Looking into a live daemon: checksums, dumps, the page on loopback and the terminal view, against real engines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cachesvc_lab.index_file import IndexFileError, read_index
from cachesvc_lab.study import hottest, next_out
from kvcache.v1 import admin_pb2, inspect_pb2

from tests.e2e.engine import PLAIN, WINDOWED, Engine, prompt
from tests.e2e.rig import LOOK_SECONDS, Node, running_node, wait_until
from tests.forked_command import run_forked

WEB = ("--web-listen", "127.0.0.1:0")


def ctl(*arguments: str) -> tuple[int, str]:
    """The command line in a process of its own: exit code and all that it printed."""
    ended = run_forked("cachesvc_ctl", *arguments)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def checked() -> Iterator[Node]:
    """A daemon that takes checksums of everything and copies what is sealed to the host."""
    with running_node(["--checksums", "all", "--write-policy", "write_through"]) as node:
        yield node


def compared(node: Node) -> inspect_pb2.ChecksumStatus:
    return node.admin.Verify(admin_pb2.VerifyRequest(checksums=True)).checksums


def corrupt(engine: Engine, group: str, page: int) -> None:
    """Write into a sealed page as only a broken engine would."""
    for view in engine.pool.page(group, page).values():
        view.reshape(-1).view("uint8")[0] ^= 0xFF
        return


@pytest.mark.parametrize("layout", [PLAIN, WINDOWED], ids=["plain", "windowed"])
def test_verify_names_exactly_the_page_that_was_changed_after_its_publish(checked: Node, layout: Any) -> None:
    with Engine(checked.socket, layout=layout, host_pages=32) as engine:
        tokens = prompt(1, 6)
        served = engine.serve(tokens)
        engine.serve(prompt(2, 3))
        wait_until(lambda: checked.pages("sealed", "host") >= 9, "all is on the host too")
        sound = compared(checked)
        assert (sound.mode, sound.known_blocks, len(sound.mismatches)) == ("all", 9, 0)
        assert sound.pages_checked >= 18, "devices and host"
        group, page = engine.layout.groups[0].name, served.pages[0][4]
        corrupt(engine, group, page)
        answer = checked.admin.Verify(admin_pb2.VerifyRequest(checksums=True))
        (found,) = answer.checksums.mismatches
        assert not answer.ok
        assert (found.place, found.group, found.rank, found.page) == ("replica 0", group, 0, page)
        assert bytes.fromhex(found.key_hex) == engine.keys(tokens)[4 * 32 : 5 * 32]
        assert found.published != found.found
        code, text = ctl("verify", "--checksums", "--socket", checked.socket)
        assert code == 1
        assert f"replica 0, group {group}, rank 0, page {page}: the bytes of block {found.key_hex} changed" in text
        corrupt(engine, group, page)
        assert not compared(checked).mismatches, "put right, it is right"


def test_pages_that_were_evicted_are_passed_over_and_new_ones_are_not_taken_for_them(checked: Node) -> None:
    with Engine(checked.socket, device_pages=8, host_pages=8) as engine:
        for seed in range(12):
            engine.serve(prompt(seed, 5))
            assert not compared(checked).mismatches
        found = compared(checked)
        assert found.pages_checked > 0
        assert not found.mismatches


def test_without_the_setting_verify_says_how_to_get_checksums(node: Node) -> None:
    with Engine(node.socket) as engine:
        engine.serve(prompt(1, 3))
        assert compared(node).mode == "off"
        code, text = ctl("verify", "--checksums", "--socket", node.socket)
        assert (code, "--checksums all" in text) == (2, True)


def test_an_operator_pins_a_prefix_from_the_command_line() -> None:
    with running_node(["--pin-share", "0.5"]) as node, Engine(node.socket, device_pages=16) as engine:
        engine.serve(prompt(1, 6))
        key = engine.keys(prompt(1, 6)).hex()[-64:]
        at = ("--socket", node.socket)
        code, text = ctl("pin", key[:16], "--seconds", "600", *at)
        assert (code, key[:16] in text, "replica 0" in text) == (0, True, True), text
        for seed in range(2, 12):
            engine.serve(prompt(seed, 8))
        assert engine.serve(prompt(1, 6)).device == 6
        assert (key[:16] in ctl("status", *at)[1], "an operator has pinned" in ctl("why", key, *at)[1]) == (True, True)
        code, text = ctl("pin", engine.keys(prompt(11, 8)).hex()[-64:], *at)
        assert (code, "14 is more than the limit of 8; unpin another prefix" in text) == (2, True), text
        assert ctl("unpin", key, *at) == (0, "unpinned 6 blocks of " + text_of_model(node) + "\n")
        code, text = ctl("unpin", key, *at)
        assert (code, "unknown pin" in text) == (2, True)


def text_of_model(node: Node) -> str:
    """Name of the only model."""
    (model,) = node.admin.ListModels(admin_pb2.ListModelsRequest()).models
    return model.display_name or model.model


def test_a_sample_is_a_sample() -> None:
    with running_node(["--checksums", "sample"]) as node, Engine(node.socket, device_pages=512) as engine:
        for seed in range(8):
            engine.serve(prompt(seed, 32))
        keys = [engine.keys(prompt(seed, 32)) for seed in range(8)]
        sampled = sum(key[at] % 16 == 0 for key in keys for at in range(0, len(key), 32))
        found = compared(node)
        assert 0 < sampled < 128
        assert (found.known_blocks, found.pages_checked) == (sampled, sampled)


@pytest.mark.parametrize("name", ["index.jsonl", "index.jsonl.zst"])
def test_a_dump_is_the_index(node: Node, folder: Path, name: str) -> None:
    with Engine(node.socket, device_pages=16, host_pages=64) as engine:
        for seed in (1, 2, 3, 1, 2, 1):
            engine.serve(prompt(seed, 6))
        blocks = node.admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=1, limit=100)).blocks
        file = folder / name
        code, text = ctl("dump", str(file), "--socket", node.socket)
        assert (code, text.startswith(f"{len(blocks)} blocks in ")) == (0, True)
        index = read_index(file)
        stored = {index.key(block): block for block in range(len(index))}
        assert stored.keys() == {block.key_hex for block in blocks}
        for block in blocks:
            at = stored[block.key_hex]
            parent = index.key(index.parent[at]) if index.parent[at] >= 0 else ""
            facts = (index.position[at], index.children[at], index.hits[at], index.stamp[at], parent)
            assert facts == (block.position, block.children, block.hits, block.stamp, block.parent_key_hex)
            there = [
                (index.head["places"][place], index.head["groups"][group], index.head["states"][states[at]], pages[at])
                for (place, group), (states, pages) in index.copies.items()
                if states[at]
            ]
            assert there == [(copy.place, copy.group, copy.state, copy.page) for copy in block.copies]
        assert index.hits[hottest(index, 1)[0]] == max(block.hits for block in blocks)
        offline_tells_what_the_daemon_does(node, file)


def offline_tells_what_the_daemon_does(node: Node, file: Path) -> None:
    """``next_out`` of a dump is the order in which Evict really takes blocks from the device."""
    index = read_index(file)
    expected = [index.key(block) for block in next_out(index, 1)]
    assert len(expected) > 4

    def resident() -> set[str]:
        blocks = node.admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=1, limit=100)).blocks
        return {b.key_hex for b in blocks if any(copy.place == "replica 0" for copy in b.copies)}

    before = resident()
    for key in expected[:4]:
        host_only = node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier="device", blocks=1)).evicted
        if not host_only:
            break
        assert before - resident() == {key}
        before = resident()


def test_loading_a_dump_needs_no_daemon(node: Node, folder: Path) -> None:
    file = folder / "index.jsonl"
    with Engine(node.socket) as engine:
        for seed in (1, 2, 1):
            engine.serve(prompt(seed, 5))
        root = engine.keys(prompt(1, 1)).hex()
        assert ctl("dump", str(file), "--socket", node.socket)[0] == 0
    code, text = ctl("load", str(file))
    assert code == 0
    assert "model@1: 10 blocks of 16 tokens" in text
    assert "replica 0" in text
    assert "hottest prefixes" in text
    code, text = ctl("load", str(file), "tree", "--key", root[:8], "--depth", "2")
    assert text.splitlines()[0].startswith(f"{root[:16]}  block 0, replica 0, 1 children, 4 below")
    assert "more are there" in text
    for view in ("blocks", "next"):
        code, text = ctl("load", str(file), view, "--limit", "3")
        assert (code, len(text.splitlines())) == (0, 4)
    assert ctl("load", str(file), "next", "--place", "moon") == (
        2,
        "cachesvc: this dump has no place 'moon'; it has host, replica 0\n",
    )


def test_a_broken_dump_is_told_by_its_line(folder: Path, node: Node) -> None:
    file = folder / "index.jsonl"
    with Engine(node.socket) as engine:
        engine.serve(prompt(1, 4))
        ctl("dump", str(file), "--socket", node.socket)
    lines = file.read_text().splitlines(keepends=True)
    for broken, reason in (
        (lines[:-1], "holds 3 of 4 blocks"),
        ([*lines[:2], "{}\n", *lines[3:]], "line 3: this is no line of a dump"),
        (["[]\n"], "line 1"),
        ([], "line 1"),
    ):
        file.write_text("".join(broken))
        with pytest.raises(IndexFileError, match=reason):
            read_index(file)
    code, text = ctl("load", str(folder / "nothing.jsonl"))
    assert (code, "there is no such file" in text) == (2, True)


def test_dumping_an_unknown_model_leaves_no_file(node: Node, folder: Path) -> None:
    code, text = ctl("dump", str(folder / "x.jsonl"), "--socket", node.socket, "--model", "9")
    assert (code, text) == (2, "cachesvc: there is no model 9; cachesvc models lists those that are\n")
    assert [path.name for path in folder.iterdir() if "x.jsonl" in path.name] == []


# -- what operators ask first ------------------------------------------------------------------------------------------


def test_status_says_who_holds_a_full_pool(node: Node) -> None:
    with Engine(node.socket, name="hoarder", device_pages=8) as engine:
        calm = node.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert list(calm.attention) == []
        engine.serve(prompt(1, 4))
        engine.serve(prompt(1, 6))
        with engine.lease.match(b"") as sequence:
            sequence.allocate(8)
            status = node.admin.GetStatus(admin_pb2.GetStatusRequest())
            (line,) = status.attention
            assert "8 of 8 pages are in use" in line
            assert "most is held by hoarder" in line
            assert [(h.engine, h.private_pages) for h in status.holders] == [("hoarder", 8)]
            assert f"! {line}" in ctl("status", "--socket", node.socket)[1]
        hits = status.hits
        assert (hits.looked_up_blocks, hits.device_blocks, hits.missed_blocks) == (10, 4, 6)
        assert hits.device_ratio == pytest.approx(0.4)


def test_keys_are_found_by_their_first_digits(node: Node) -> None:
    with Engine(node.socket) as engine:
        engine.serve(prompt(1, 3))
        key = engine.keys(prompt(1, 3))[32:64].hex()
        for digits in (key, key[:12].upper(), key[:9]):
            (block,) = node.admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=1, key_hex=[digits])).blocks
            assert (block.key_hex, block.position) == (key, 1)
            nodes = node.admin.GetTree(admin_pb2.GetTreeRequest(model_id=1, key_hex=digits)).nodes
            assert [n.position for n in nodes] == [1, 2]
        code, text = ctl("tree", "--socket", node.socket, "--key", "00000000")
        assert (code, "no resident block's key begins so" in text) == (2, True)
        code, text = ctl("tree", "--socket", node.socket, "--key", "0")
        assert (code, "is not 4 to 64 hexadecimal digits" in text) == (2, True)


def test_hits_order_the_hottest_first(node: Node) -> None:
    with Engine(node.socket) as engine:
        for seed in (1, 2, 2, 2, 1):
            engine.serve(prompt(seed, 3))
        request = admin_pb2.ListBlocksRequest(model_id=1, order=admin_pb2.BLOCK_ORDER_HITS, limit=2)
        first, second = node.admin.ListBlocks(request).blocks
        assert first.key_hex == engine.keys(prompt(2, 3))[64:].hex()
        assert first.hits > second.hits


# -- the page ----------------------------------------------------------------------------------------------------------


def web_port(node: Node) -> int:
    ready = next(json.loads(line) for line in node.log().splitlines() if '"event": "ready"' in line)
    return int(ready["web_port"])


def fetch(port: int, path: str = "/status.json", host: str = "", method: str = "GET") -> tuple[int, Any, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    request.add_header("Host", host or f"127.0.0.1:{port}")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_the_page_tells_status_pools_and_a_timeline() -> None:
    with running_node(WEB) as node, Engine(node.socket, name="seen") as engine:
        port = web_port(node)
        engine.serve(prompt(1, 4))
        engine.serve(prompt(1, 4))

        def samples(since: int = 0) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(fetch(port, f"/status.json?since={since}")[2])["samples"]
            return found

        wait_until(lambda: samples()[-1]["device"] == 4, "a sample has seen the hit")
        status = json.loads(fetch(port)[2])
        assert status["hits"]["looked_up_blocks"] == 8
        assert [pool["sealed"] for pool in status["pools"] if pool["place"] == "replica 0"] == [4]
        assert [lease["engine"] for lease in status["leases"]] == ["seen"]
        last = samples()[-1]["number"]
        assert all(sample["number"] > last for sample in samples(last))
        text = json.dumps(status)
        assert engine.lease.id not in text, "a whole lease id would be a way in"
        assert engine.keys(prompt(1, 1)).hex()[:16] not in text


def test_the_page_is_for_this_machine_and_for_reading_alone() -> None:
    with running_node(WEB) as node:
        port = web_port(node)
        code, headers, page = fetch(port, "/")
        assert (code, "<title>cachesvc</title>" in page) == (200, True)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing from elsewhere"
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1].evil.example"):
            assert fetch(port, host=host)[0] == 421
        for host in ("localhost", "127.0.1.1", "[::1]"):
            assert fetch(port, host=f"{host}:{port}")[0] == 200
        assert fetch(port, "/nothing")[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            assert fetch(port, "/status.json", method=method)[0] == 405
        assert fetch(port, "/status.json?since=no")[0] == 200
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"\x00\xff nonsense\r\n\r\n")
            assert b"400" in rude.recv(64)
        assert fetch(port)[0] == 200


def test_a_page_beyond_loopback_is_refused(folder: Path) -> None:
    command = [sys.executable, "-m", "cachesvc", "--socket", str(folder / "s"), "--web-listen", "0.0.0.0:8080"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "served on loopback alone" in ended.stderr


# -- top ---------------------------------------------------------------------------------------------------------------


def test_top_once_is_text_of_80_columns(node: Node) -> None:
    with Engine(node.socket, name="shown") as engine:
        for _ in range(3):
            engine.serve(prompt(1, 6))
        code, text = ctl("top", "--once", "--socket", node.socket)
        assert code == 0
        assert "18 blocks looked up, 66.7% in place" in text
        assert engine.keys(prompt(1, 6)).hex()[320:330] in text
        pools = [line for line in text.splitlines() if line.startswith(("host ", "replica "))]
        assert len(pools) > 1
        assert max(map(len, pools)) <= 80
    code, text = ctl("top", "--once", "--socket", "/nowhere.sock")
    assert (code, "is the daemon running" in text) == (2, True)


async def test_top_shows_a_live_daemon_survives_its_restart_and_obeys_keys(folder: Path) -> None:
    pytest.importorskip("textual")
    from cachesvc_client.wire.credentials import Credentials
    from cachesvc_ctl.core.command import Target
    from cachesvc_ctl.top_app import TopApp
    from textual.widgets import DataTable, Static

    def text(app: TopApp, name: str) -> str:
        return str(app.query_one(name, Static).render())

    app = TopApp(Target(str(folder / "cachesvc.sock"), Credentials()), every=0.1)
    async with app.run_test(size=(80, 24)) as pilot:

        async def until(holds: Any, what: str) -> None:
            for _ in range(int(60 / LOOK_SECONDS)):
                if holds():
                    return
                await pilot.pause(LOOK_SECONDS)
            pytest.fail(f"still not so: {what}; {text(app, '#head')}")

        await until(lambda: "NO ANSWER" in text(app, "#head"), "no daemon is there")
        with running_node(folder=folder) as node, Engine(node.socket, name="shown") as engine:
            for _ in range(3):
                engine.serve(prompt(1, 6))
            await until(lambda: "18 blocks looked up" in text(app, "#head"), "hits are shown")
            await until(lambda: "shown" in str(app.query_one("#leases", DataTable).get_row_at(0)), "the lease is shown")
            assert str(app.query_one("#hot", DataTable).get_row_at(0)[2]) == "3"
            assert "replica 0" in text(app, "#pools")
            await pilot.press("s")
            await until(lambda: "sorted by private" in text(app, "#head"), "s sorts")
            await pilot.press("t")
            hot = app.query_one("#hot", DataTable)
            await until(lambda: "ticket" in str([column.label for column in hot.columns.values()]), "t shows tickets")
        await until(lambda: "NO ANSWER" in text(app, "#head"), "the daemon is gone")
        with running_node(folder=folder):
            await until(lambda: "nothing was looked up yet" in text(app, "#head"), "the new daemon is shown")
            assert "NO ANSWER" not in text(app, "#head")
        await pilot.press("q")
    assert not app.is_running
