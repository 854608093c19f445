"""Cached blocks outlive the daemon: real daemons on one folder, killed and started again."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cachesvc_client import BlockMirror, EventSubscriber
from cachesvc_client.events import CopyLocation
from cachesvc_ctl.core.daemon_process import DaemonProcess

from tests.e2e.engine import Engine, prompt
from tests.e2e.hybrid import HYBRID, STATE, serve_hybrid
from tests.e2e.rig import FLAGS, Node, running_node, wait_until
from tests.forked_command import run_forked

BLOCKS = 8
PROMPTS = 6


@contextmanager
def storing(folder: Path, *flags: str, write: str = "through") -> Iterator[Node]:
    spec = f"file:{folder}/cache?capacity=64MiB&floor=0&write={write}&wait=5s"
    with running_node(["--storage", spec, "--write-policy", "write_through", *flags]) as node:
        yield node


def stored(node: Node, blocks: int) -> bool:
    return node.counters().get("storage_kept_blocks", 0) >= blocks


def test_after_a_kill_every_stored_block_is_a_hit_with_its_bytes(tmp_path: Path) -> None:
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        for seed in range(PROMPTS):
            assert engine.serve(prompt(seed, BLOCKS)).computed == BLOCKS
        wait_until(lambda: stored(node, PROMPTS * BLOCKS), "all is stored")
        assert node.problems() == []
        node.daemon.process.kill()
        node.daemon.process.wait()
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.device, served.host, served.computed, served.bad) == (0, BLOCKS, 0, [])
        counters = node.counters()
        assert counters["hit_blocks_storage"] == PROMPTS * BLOCKS
        assert counters.get("hit_blocks_host", 0) == 0
        assert counters["storage_fetched_blocks"] == PROMPTS * BLOCKS
        again = engine.serve(prompt(0, BLOCKS))
        assert (again.device, again.computed) == (BLOCKS, 0)
        assert counters["hit_blocks_storage"] == node.counters()["hit_blocks_storage"]
        wait_until(lambda: node.held() == {"private": 0, "in_flight": 0, "quarantined": 0}, "no page is held")
        assert node.problems() == []


@pytest.mark.parametrize("is_late", [False, True])
def test_a_hybrid_models_prefix_outlives_the_daemon_with_its_windows_and_states(tmp_path: Path, is_late: bool) -> None:
    device = 256 if is_late else 64
    with storing(tmp_path) as node, Engine(node.socket, layout=HYBRID, device_pages=device, host_pages=256) as engine:
        for seed in range(PROMPTS):
            assert serve_hybrid(engine, prompt(seed, BLOCKS), is_late=is_late).computed == BLOCKS
        states = PROMPTS * BLOCKS // 4
        wait_until(lambda: len(list(tmp_path.glob(f"**/*.{STATE}.0of1"))) == states, "all states are stored")
        wait_until(lambda: stored(node, PROMPTS * BLOCKS), "all is stored")
        node.daemon.process.kill()
        node.daemon.process.wait()
    with storing(tmp_path) as node, Engine(node.socket, layout=HYBRID, device_pages=device, host_pages=256) as engine:
        for seed in range(PROMPTS):
            served = serve_hybrid(engine, prompt(seed, BLOCKS + 1))
            assert (served.device, served.host, served.computed, served.bad) == (0, BLOCKS, 1, [])
        assert node.problems() == []


def test_what_is_damaged_is_computed_again_and_never_served(tmp_path: Path) -> None:
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        engine.serve(prompt(1, BLOCKS))
        wait_until(lambda: stored(node, BLOCKS), "all is stored")
    files = sorted((tmp_path / "cache" / "objects").rglob("*of*"))
    assert len(files) == BLOCKS
    for path in files[::3]:
        content = bytearray(path.read_bytes())
        content[4096 + 17] ^= 1
        path.write_bytes(content)
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        served = engine.serve(prompt(1, BLOCKS))
        assert served.bad == []
        assert 0 < served.computed <= BLOCKS
        wait_until(lambda: stored(node, served.computed - 1), "what was computed is stored again")
        assert node.problems() == []
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        again = engine.serve(prompt(1, BLOCKS))
        assert again.bad == []


def cachesvc(node: Node, *words: str, ask: str = "storage") -> tuple[int, str]:
    """The command line: its exit code and what it said."""
    ended = run_forked("cachesvc_ctl", ask, "--socket", node.socket, *words)
    return ended.returncode, ended.stdout + ended.stderr


def test_what_is_stored_and_what_goes_is_told_and_why_knows_it(tmp_path: Path) -> None:
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        with EventSubscriber(node.socket, engine.registration.namespace, storage=True) as subscriber:
            batches, mirror = subscriber.follow(), BlockMirror()

            def in_storage() -> set[bytes]:
                return {
                    key for key, locations in mirror.locations.items() if CopyLocation(0, "storage", 0) in locations
                }

            while not mirror.is_whole:  # from here on nothing that happens is missed
                mirror.apply(next(batches))
            engine.serve(prompt(1, BLOCKS))
            while len(in_storage()) < BLOCKS:
                mirror.apply(next(batches))
            keys = in_storage()
            assert cachesvc(node, "--purge-all") == (0, f"removed {BLOCKS} objects\n")
            while in_storage():
                mirror.apply(next(batches))
            engine.serve(prompt(2, BLOCKS))
            while len(in_storage()) < BLOCKS:
                mirror.apply(next(batches))
            assert not keys & in_storage(), "what was purged is still in memory, and was not used again"
            with EventSubscriber(node.socket, engine.registration.namespace, storage=True) as late:
                snapshot, later = late.follow(), BlockMirror()
                while not later.is_whole:
                    later.apply(next(snapshot))
            assert later.locations == mirror.locations, "a snapshot has of storage what is in memory too"
            key = next(iter(in_storage())).hex()
        code, said = cachesvc(node, key, ask="why")
        assert code == 0
        assert "; storage has it: written, or seen there, " in said
        assert "stored" in said
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256):
        wait_until(
            lambda: "; storage has it, from before" in cachesvc(node, key, ask="why")[1], "it has looked through"
        )


def test_operators_see_check_and_purge_what_is_kept(tmp_path: Path) -> None:
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        engine.serve(prompt(1, BLOCKS))
        wait_until(lambda: stored(node, BLOCKS), "all is stored")
        code, said = cachesvc(node)
        assert code == 0
        assert "engine     used, given up 0 times" in said
        assert re.search(rf"kept +{BLOCKS} objects, .* of 64.00 MiB", said)
        assert re.search(rf"model@1 +\w{{12}} +{BLOCKS} ", said)
        assert json.loads(cachesvc(node, "--json")[1])["kept_blocks"] == BLOCKS
        code, said = cachesvc(node, "--verify")
        assert (code, said.startswith(f"ok: {BLOCKS} objects")) == (0, True)
        path = next((tmp_path / "cache" / "objects").rglob("*of*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        code, said = cachesvc(node, "--verify")
        assert (code, said.startswith("NOT ok"), "1 were wrong" in said) == (1, True, True)
        code, said = cachesvc(node, "--purge", "another model")
        assert (code, "unknown stored model" in said) == (2, True)
        assert cachesvc(node, "--purge", "model@1") == (0, f"removed {BLOCKS - 1} objects\n")
        assert cachesvc(node, "--purge-all") == (0, "there was nothing to remove\n")
        assert engine.serve(prompt(1, BLOCKS)).computed == 0, "memory has it still"


def test_one_namespace_of_the_listing_is_purged_alone(tmp_path: Path) -> None:
    with (
        storing(tmp_path) as node,
        Engine(node.socket, device_pages=64, host_pages=256) as one,
        Engine(node.socket, model="another", device_pages=64, host_pages=256) as other,
    ):
        one.serve(prompt(1, BLOCKS))
        other.serve(prompt(1, BLOCKS))
        wait_until(lambda: stored(node, 2 * BLOCKS), "all is stored")
        (namespace,) = re.findall(r"model@1 +(\w{12}) ", cachesvc(node)[1])
        assert cachesvc(node, "--purge", namespace[:-1])[0] == 2, "too little of it to be sure"
        assert cachesvc(node, "--purge", namespace) == (0, f"removed {BLOCKS} objects\n")
        assert re.search(rf"another +\w{{12}} +{BLOCKS} ", cachesvc(node)[1])
        assert cachesvc(node, "--purge", namespace)[0] == 2


def test_a_name_of_two_namespaces_is_not_guessed_at(tmp_path: Path) -> None:
    """Two tenants with one name of a model: a purge by the name would take both."""
    with (
        storing(tmp_path) as node,
        Engine(node.socket, salt=b"a" * 16, device_pages=64, host_pages=256) as one,
        Engine(node.socket, salt=b"b" * 16, device_pages=64, host_pages=256) as other,
    ):
        one.serve(prompt(1, BLOCKS))
        other.serve(prompt(1, 2 * BLOCKS))
        wait_until(lambda: stored(node, 3 * BLOCKS), "all is stored")
        numbers = dict(re.findall(r"model@1 +(\w{12}) +(\d+) ", cachesvc(node)[1]))
        assert sorted(numbers.values()) == ["16", "8"]
        code, said = cachesvc(node, "--purge", "model@1")
        assert code == 2
        assert "2 namespaces, of tenants or versions of weights, are called 'model@1'" in said
        assert all(number in said for number in numbers)
        (small,) = (number for number, objects in numbers.items() if objects == "8")
        assert cachesvc(node, "--purge", small) == (0, f"removed {BLOCKS} objects\n")
        assert re.search(rf"model@1 +\w{{12}} +{2 * BLOCKS} ", cachesvc(node)[1])


def test_without_storage_the_command_says_so(node: Node) -> None:
    assert cachesvc(node) == (0, "no storage is configured; see cachesvcd --storage\n")
    assert cachesvc(node, "--verify")[0] == 2
    assert "start the daemon with --storage" in cachesvc(node, "--purge-all")[1]


def test_another_layout_another_model_another_tenant_find_nothing(tmp_path: Path) -> None:
    with storing(tmp_path) as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        engine.serve(prompt(1, BLOCKS))
        wait_until(lambda: stored(node, BLOCKS), "all is stored")
    with (
        storing(tmp_path) as node,
        Engine(node.socket, model="another", device_pages=64, host_pages=256) as engine,
    ):
        assert engine.serve(prompt(1, BLOCKS)).computed == BLOCKS


def test_never_writes_nothing(tmp_path: Path) -> None:
    with storing(tmp_path, write="never") as node, Engine(node.socket, device_pages=64, host_pages=256) as engine:
        for _ in range(3):
            engine.serve(prompt(1, BLOCKS))
    assert list((tmp_path / "cache" / "objects").rglob("*of*")) == []


@pytest.mark.parametrize("spec", ["file:cache?capacity=1GiB", "tape:/dev/st0", "file:/cache"])
def test_a_storage_that_cannot_be_is_refused_at_the_start(spec: str) -> None:
    with pytest.raises(Exception, match="storage"), running_node(["--storage", spec]):
        pass


def test_a_frozen_disk_costs_one_bounded_wait_and_nothing_after_it(tmp_path: Path) -> None:
    """Its beats and other calls go on, calls after the first ask nothing of it, and the daemon still ends."""
    under = [sys.executable, "-m", "benchmarks.storage.daemon"]
    spec = f"file:{tmp_path}/cache?capacity=64MiB&wait=200ms&deadline=1s&write=through"
    flags = [*FLAGS, "--storage", spec, "--write-policy", "write_through"]
    with (
        DaemonProcess(flags, under=under, whole=True) as daemon,
        Engine(daemon.socket, device_pages=64, host_pages=256) as engine,
    ):
        began = time.monotonic()
        for seed in range(PROMPTS):
            served = engine.serve(prompt(seed, BLOCKS))
            assert (served.computed, served.bad) == (BLOCKS, [])
        for seed in range(PROMPTS):
            assert engine.serve(prompt(seed, BLOCKS)).device == BLOCKS
        said = run_forked("cachesvc_ctl", "storage", "--socket", daemon.socket).stdout
        assert "engine     NOT used" in said
        assert "nothing came within 0.2 s" in said
        assert time.monotonic() - began < PATIENCE_SECONDS, "no call waited for the disk without end"


PATIENCE_SECONDS = 60.0
"""Far from the time that it takes, and far from endless."""
