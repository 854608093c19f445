"""A mover is killed: engines of its device get errors and come back, the others notice nothing, and no page is
wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cachesvc_client import CacheClientError, DaemonUnavailable, LeaseLost, LoadFailed, PoolExhausted

from tests.e2e.engine import PLAIN, Engine, prompt
from tests.e2e.movers import kill_mover_of, movers, said
from tests.e2e.rig import Node, running_node, wait_until

BLOCKS = 12
PROCESSES = ("--movers", "process", "--shm-devices", "2")


@contextmanager
def two_devices(*flags: str) -> Iterator[tuple[Node, Engine, Engine]]:
    """A daemon with a mover for each of two devices, and an engine on each."""
    with (
        running_node((*PROCESSES, *flags)) as node,
        Engine(node.socket, name="first", devices=["shm-0"], host_pages=64) as first,
        Engine(node.socket, name="second", devices=["shm-1"], host_pages=64) as second,
    ):
        yield node, first, second


def come_back(engine: Engine) -> None:
    """Register again and go on under another lease, as an engine does that lost its own."""
    engine.pool.close()
    engine.start_again()


def test_the_engine_is_told_and_finds_on_the_host_what_was_saved() -> None:
    with two_devices("--write-policy", "write_through") as (node, first, second):
        assert first.serve(prompt(1, BLOCKS)).bad == []
        assert second.serve(prompt(2, BLOCKS)).bad == []
        wait_until(
            lambda: node.counters().get("d2h_bytes", 0) >= 2 * BLOCKS * PLAIN.page_bytes(0), "both prompts are saved"
        )
        wait_until(lambda: node.pages("in_flight") == 0, "and all of them have landed")
        replica = first.registration.replica
        kill_mover_of(node, "shm-0")
        assert [line["device"] for line in said(node, "device_memory_lost")] == ["shm-0"]
        with pytest.raises(LeaseLost, match="register again"):
            first.serve(prompt(1, BLOCKS))
        again = second.serve(prompt(2, BLOCKS))
        assert (again.device, again.computed, again.bad) == (BLOCKS, 0, [])
        come_back(first)
        assert first.registration.replica != replica
        served = first.serve(prompt(1, BLOCKS + 2))
        assert (served.device, served.host, served.computed, served.bad) == (0, BLOCKS, 2, [])
        assert first.serve(prompt(1, BLOCKS + 2)).device == BLOCKS + 2
        back = second.serve(prompt(1, BLOCKS + 2))
        assert (back.computed, back.bad) == (0, [])
        kill_mover_of(node, "shm-1")  # whose engine closes a lease that it has lost


def test_movers_killed_under_load_bring_no_wrong_page() -> None:
    """Prompts are loaded, evicted and computed all the while; the daemon reports each death, and every served byte is
    checked."""
    with two_devices("--write-policy", "write_through") as (node, first, second):
        stop, bad, served = threading.Event(), list[str](), [0, 0]

        def work(number: int, engine: Engine) -> None:
            seed = 0
            while not stop.is_set():
                seed += 1
                try:
                    bad.extend(engine.serve(prompt(seed % 9, BLOCKS)).bad)
                    served[number] += 1
                except (LeaseLost, LoadFailed, DaemonUnavailable):
                    come_back_at_last(engine, stop)
                except PoolExhausted:  # on a slow machine: what is being stored cannot be evicted yet
                    stop.wait(0.02)

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for turn in range(4):
            before = list(served)
            wait_until(
                lambda before=before: min(now - then for now, then in zip(served, before, strict=True)) >= 10,  # type: ignore[misc]
                "both engines are served",
            )
            kill_mover_of(node, f"shm-{turn % 2}")
        before = list(served)
        wait_until(lambda: min(now - then for now, then in zip(served, before, strict=True)) >= 10, "both go on")
        stop.set()
        for thread in threads:
            thread.join()
        assert bad == []
        assert len(said(node, "device_memory_lost")) >= 4


def come_back_at_last(engine: Engine, stop: threading.Event) -> None:
    """Call ``come_back`` again and again while the device has no mover."""
    while not stop.is_set():
        try:
            come_back(engine)
        except CacheClientError:
            stop.wait(0.02)
        else:
            return


def test_a_daemon_takes_movers_that_run_already(folder: Path) -> None:
    path = str(folder / "mover.sock")
    mover = subprocess.Popen([sys.executable, "-m", "cachesvc.mover", "--socket", path])
    try:
        wait_until(lambda: Path(path).exists(), "the mover listens")
        for _ in range(2):  # one daemon after another
            with (
                running_node(("--movers", "process", "--mover", path)) as node,
                Engine(node.socket, host_pages=64) as engine,
            ):
                assert engine.serve(prompt(1, BLOCKS)).computed == BLOCKS
                assert engine.serve(prompt(1, BLOCKS)).device == BLOCKS
                assert movers(node) == {}
    finally:
        mover.terminate()
        assert mover.wait() == 0


def test_a_daemon_serves_before_all_of_its_movers_are_there(folder: Path) -> None:
    paths = [str(folder / f"mover-{number}.sock") for number in range(2)]
    running: list[subprocess.Popen[bytes]] = []

    def start(path: str) -> None:
        running.append(subprocess.Popen([sys.executable, "-m", "cachesvc.mover", "--socket", path]))
        wait_until(lambda: Path(path).exists(), "the mover listens")

    try:
        start(paths[0])
        flags = (*PROCESSES, "--mover", paths[0], "--mover", paths[1])
        with running_node(flags) as node, Engine(node.socket, devices=["shm-0"], host_pages=64) as engine:
            assert engine.serve(prompt(1, BLOCKS)).bad == []
            with pytest.raises(DaemonUnavailable, match="register on shm-0"):
                Engine(node.socket, name="second", devices=["shm-1"], host_pages=64).start()
            start(paths[1])
            wait_until(lambda: bool(said(node, "device_back")), "the second device is there")
            with Engine(node.socket, name="second", devices=["shm-1"], host_pages=64) as second:
                served = second.serve(prompt(1, BLOCKS + 2))
                assert (served.host + served.device + served.computed, served.bad) == (BLOCKS + 2, [])
            assert [line["device"] for line in said(node, "device_lost")] == ["shm-1"]
            assert said(node, "device_memory_lost") == []
    finally:
        for mover in running:
            mover.terminate()
            assert mover.wait() == 0


def test_movers_end_with_a_daemon_that_is_killed() -> None:
    with running_node(PROCESSES) as node:
        pids = list(movers(node).values())
        assert len(pids) == 2
        node.daemon.process.kill()
        node.daemon.process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the movers are gone")
