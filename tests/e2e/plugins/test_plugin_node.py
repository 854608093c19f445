"""A vLLM process and its daemon: sizes that do not fit, and the daemon that comes again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_client.plugins.node import RETRY_S, Node, Share, new_instance
from cachesvc_vllm.cache_groups import GROUP, slab_layout
from cachesvc_vllm.settings import FLAGS, Settings

from tests.e2e.movers import kill_mover_of
from tests.e2e.rig import Node as Daemon
from tests.e2e.rig import running_node, wait_until
from tests.style.tree import ROOT
from tests.unit.rigs.vllm_rig import layers_outermost

SHARE = Share("m", slab_layout(layers_outermost(64)), 64)


def test_another_number_of_blocks_is_refused_with_both(node: Daemon) -> None:
    first = Node(Settings(socket=node.socket), "first", SHARE, flags=FLAGS, attaches=True)
    second = Node(Settings(socket=node.socket), "second", replace(SHARE, pages=32), flags=FLAGS, attaches=True)
    first.start()
    try:
        with pytest.raises(ConnectorRefused, match=r"has 64 blocks, and this engine has 32.*override 64"):
            second.start()
        assert list(first.started_in.seconds) == ["connect", "register", "lease", "attach"]
        assert list(second.started_in.seconds) == ["connect"], "what it was refused at is the next part"
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize(("parts", "is_missing"), [((None, None), True), ((64, None), False), ((None, 0), False)])
def test_operators_are_warned_of_a_model_that_finds_the_host_pool_given_away(
    folder: Path, parts: tuple[int | None, int | None], is_missing: bool
) -> None:
    """By default the first model has all of it; engines that name their part leave the rest, or want none."""
    with running_node(folder=folder) as node:
        started = [
            Node(
                Settings(socket=node.socket, host_blocks=part),
                name,
                replace(SHARE, model=name),
                flags=FLAGS,
                attaches=False,
            )
            for name, part in zip(("first", "second"), parts, strict=True)
        ]
        try:
            for each in started:
                assert "host_tier_missing" not in node.log()
                each.start()
            assert ("host_tier_missing" in node.log()) is is_missing
        finally:
            for each in started:
                each.close()


@pytest.fixture
def staying(folder: Path) -> Iterator[Daemon]:
    """A daemon whose socket is where it was when it comes again."""
    with running_node(folder=folder) as running:
        yield running


def test_after_a_restart_the_tensors_lie_on_the_next_daemon_s_slab(staying: Daemon) -> None:
    node = staying
    scheduler = Node(Settings(socket=node.socket), "engine", SHARE, flags=FLAGS, attaches=False)
    worker = Node(Settings(socket=node.socket), "engine", SHARE, flags=FLAGS, attaches=True)
    worker.start()
    scheduler.start()
    try:
        tensor = worker.pool.slab(GROUP)
        worker.keep_address()
        tensor[100] = 7
        before = worker.lease.id
        assert scheduler.lease.id == before
        node.daemon.process.kill()
        node.daemon.process.wait()
        wait_until(lambda: worker.lease.is_lost and scheduler.lease.is_lost, "both know")
        assert tensor[100] == 7  # what it had stays in reach until it has moved
        node.daemon.start()
        for each in (scheduler, worker):
            assert each.wait_back(60)
            assert each.move(each.back_id)
        assert worker.lease.id == scheduler.lease.id != before
        assert tensor[100] == 0
        np.asarray(worker.pool.slab(GROUP))[200] = 9
        assert tensor[200] == 9
    finally:
        scheduler.close()
        worker.close()


def test_a_daemon_that_goes_again_before_anybody_has_moved_is_waited_for(staying: Daemon) -> None:
    """A rank that was asked to follow into a lease of the daemon that went takes no other, and goes on."""
    scheduler = Node(Settings(socket=staying.socket), "engine", SHARE, flags=FLAGS, attaches=False)
    worker = Node(Settings(socket=staying.socket), "engine", SHARE, flags=FLAGS, attaches=True)
    worker.start()
    scheduler.start()
    try:
        worker.keep_address()
        first, followed = worker.lease.id, ""
        for _ in range(2):
            staying.daemon.process.kill()
            staying.daemon.process.wait()
            wait_until(lambda: worker.lease.is_lost and not worker.back_id, "it knows")
            staying.daemon.start()
            assert worker.wait_back(60)
            if not followed:
                assert scheduler.wait_back(60)
                followed = scheduler.back_id
                assert scheduler.move(followed)
        assert worker.follow(followed) == first
        wait_until(lambda: scheduler.back_id not in ("", followed), "the scheduler has found the next one")
        assert worker.follow(scheduler.back_id) == scheduler.back_id
        assert scheduler.move(scheduler.back_id)
        assert worker.lease.id == scheduler.lease.id
        assert not worker.lease.is_lost
    finally:
        scheduler.close()
        worker.close()


def test_a_rank_that_moved_alone_before_the_daemon_went_again_moves_on_with_the_others(folder: Path) -> None:
    """The scheduler uses pages of a daemon once all ranks are there; one that is not yet has its old memory."""
    share = replace(SHARE, layout=slab_layout(layers_outermost(64), ranks=2))
    with running_node(["--shm-devices", "2"], folder=folder) as node:
        settings = Settings(socket=node.socket)
        ranks = [Node(settings, "engine", share, flags=FLAGS, attaches=True, rank=rank) for rank in range(2)]
        for each in ranks:
            each.start()
        try:
            tensors = [each.pool.slab(GROUP) for each in ranks]
            for each, tensor in zip(ranks, tensors, strict=True):
                each.keep_address()
                tensor[100] = 7
            first = ranks[0].lease.id
            node.daemon.kill()
            node.daemon.start()
            assert ranks[0].wait_back(60)
            second = ranks[0].back_id
            assert ranks[0].follow(second) == second
            node.daemon.kill()
            wait_until(lambda: ranks[0].lease.is_lost and not ranks[1].back_id, "they know")
            assert [each.follow(second) for each in ranks] == [second, first]
            assert [tensor[100] for tensor in tensors] == [0, 7]
            node.daemon.start()
            assert ranks[0].wait_back(60)
            third = ranks[0].back_id
            wait_until(lambda: [each.follow(third) for each in ranks] == [third, third], "both have moved")
            assert [tensor[100] for tensor in tensors] == [0, 0]
        finally:
            for each in ranks:
                each.close()


def test_a_rank_whose_next_daemon_goes_while_it_attaches_stays_where_it_is(staying: Daemon) -> None:
    worker = Node(Settings(socket=staying.socket), "engine", SHARE, flags=FLAGS, attaches=True)
    worker.start()
    try:
        tensor = worker.pool.slab(GROUP)
        worker.keep_address()
        tensor[100] = 7
        first = worker.lease.id
        staying.daemon.kill()
        staying.daemon.start()
        assert worker.wait_back(60)
        second = worker.back_id
        staying.daemon.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as step:
            following = step.submit(worker.follow, second)
            wait_until(lambda: following.running() or following.done(), "it attaches")
            staying.daemon.kill()
            assert following.result() == first
        assert tensor[100] == 7
        staying.daemon.start()
        assert worker.wait_back(60)
        assert worker.follow(worker.back_id) == worker.lease.id not in (first, second)
        assert tensor[100] == 0
    finally:
        worker.close()


def test_an_operator_is_told_once_why_an_engine_does_not_come_back(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cachesvc_client.plugins.node")

    def refusals(level: int) -> list[str]:
        said = [each.getMessage() for each in caplog.records if each.levelno == level]
        return [each for each in said if each.startswith("daemon_not_back why=device pool")]

    with running_node(folder=folder) as large:
        share = Share("m", slab_layout(layers_outermost(64, page_bytes=1 << 14)), 64)
        engine = Node(Settings(socket=large.socket), "engine", share, flags=FLAGS, attaches=True)
        engine.start()
        try:
            large.daemon.kill()
            with running_node(["--device-pool", "1MiB"], folder=folder):
                wait_until(lambda: len(refusals(logging.DEBUG)) > 2, "it tries again and again")
                assert len(refusals(logging.WARNING)) == 1
        finally:
            engine.close()


class Attempts(logging.Filter):
    """Counts attempts to reconnect; a test that reports a lost lease goes on once there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._was_one = threading.Event()

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if said.startswith("daemon_not_back"):
            self.count += 1
            self._was_one.set()
        elif said.startswith("lease_lost"):
            self._was_one.wait(60)
        return True


def test_a_daemon_that_is_away_is_looked_for_now_and_then(staying: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """The connection tells of the loss, then the lease: a thread that looked without a pause held the interpreter."""
    worker = Node(Settings(socket=staying.socket), "engine", SHARE, flags=FLAGS, attaches=True)
    worker.start()
    attempts = Attempts()
    names = ("cachesvc_client.plugins.node", "cachesvc_client.records.lease_record")
    for name in names:
        caplog.set_level(logging.DEBUG, name)
        logging.getLogger(name).addFilter(attempts)
    try:
        began_s = time.monotonic()
        staying.daemon.process.kill()
        staying.daemon.process.wait()
        wait_until(lambda: attempts.count > 2, "it is looked for")
        staying.daemon.start()
        assert worker.wait_back(60)
        assert attempts.count <= 3 + (time.monotonic() - began_s) / RETRY_S
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(attempts)
        worker.close()


def test_a_process_ends_while_the_daemon_that_is_away_is_looked_for(
    staying: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Node(Settings(socket=staying.socket), "engine", SHARE, flags=FLAGS, attaches=True)
    worker.start()
    closing = threading.Thread(target=worker.close)

    def close_meanwhile(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("daemon_not_back") and closing.ident is None:
            closing.start()
            wait_until(worker._wake.is_set, "the end was asked for")  # noqa: SLF001 - by now it waits
        return True

    caplog.set_level(logging.DEBUG, "cachesvc_client.plugins.node")
    logging.getLogger("cachesvc_client.plugins.node").addFilter(close_meanwhile)
    try:
        staying.daemon.process.kill()
        staying.daemon.process.wait()
        wait_until(lambda: closing.ident is not None, "it is looked for")
        closing.join(60)
        assert not closing.is_alive()
    finally:
        logging.getLogger("cachesvc_client.plugins.node").removeFilter(close_meanwhile)


def test_after_a_mover_s_death_the_tensors_lie_on_the_next_one_s_slab() -> None:
    """The daemon is there, but the pools that were registered are not."""
    with running_node(("--movers", "process")) as node:
        scheduler = Node(Settings(socket=node.socket), "engine", SHARE, flags=FLAGS, attaches=False)
        worker = Node(Settings(socket=node.socket), "engine", SHARE, flags=FLAGS, attaches=True)
        worker.start()
        scheduler.start()
        try:
            tensor = worker.pool.slab(GROUP)
            worker.keep_address()
            tensor[100] = 7
            before = worker.lease.registration.replica
            kill_mover_of(node, "shm-0")
            for each in (scheduler, worker):
                assert each.wait_back(60)
                assert each.move(each.back_id)
                assert each.lease.registration.replica != before
            assert worker.lease.id == scheduler.lease.id
            assert tensor[100] == 0
        finally:
            scheduler.close()
            worker.close()


HOLD = """
import ctypes, sys
from cachesvc_client.plugins.node import Node, Share
from cachesvc_vllm.settings import FLAGS, Settings
from cachesvc_vllm.cache_groups import slab_layout
from tests.unit.rigs.vllm_rig import layers_outermost
share = Share("m", slab_layout(layers_outermost(64)), 64)
node = Node(Settings(socket=sys.argv[1]), "e", share, flags=FLAGS, attaches=False)
node.start()
ctypes.PyDLL(None).sleep(6)  # holds the interpreter: no other thread of this process runs
print("lost" if node.lease.is_lost else "lives", flush=True)
node.lease.match(b"").release()
node.close()
"""


def test_an_engine_that_holds_its_interpreter_keeps_its_lease() -> None:
    with running_node(["--lease-seconds", "2"]) as node:
        done = subprocess.run(
            [sys.executable, "-c", HOLD, node.socket], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.stdout == "lives\n", done.stderr
        assert done.returncode == 0, done.stderr


def test_a_keeper_imports_nothing_from_the_working_directory(folder: Path) -> None:
    """A file there may be called as one of its modules; the engine itself, a console script, looks elsewhere."""
    for name in ("grpc.py", "json.py", "cachesvc_client.py"):
        (folder / name).write_text("raise SystemExit(1)", encoding="utf-8")
    with running_node(["--lease-seconds", "1"]) as node:
        done = subprocess.run(
            [sys.executable, "-P", "-c", HOLD, node.socket],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in (".", "client", "proto/gen")),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "lives\n", done.stderr


def test_two_starts_of_an_engine_under_one_id_have_a_lease_each(node: Daemon) -> None:
    nodes = [
        Node(Settings(socket=node.socket), new_instance("an-id-" * 20), SHARE, flags=FLAGS, attaches=attaches)
        for attaches in (True, True)
    ]
    try:
        for each in nodes:
            each.start()
        assert nodes[0].lease.id != nodes[1].lease.id
    finally:
        for each in nodes:
            each.close()


def test_a_daemon_whose_sequences_are_shorter_than_the_engine_s_requests_is_refused() -> None:
    with running_node(["--blocks-per-sequence", "8"]) as node:
        short = Node(
            Settings(socket=node.socket), "short", replace(SHARE, longest_blocks=8), flags=FLAGS, attaches=True
        )
        long = Node(Settings(socket=node.socket), "long", replace(SHARE, longest_blocks=9), flags=FLAGS, attaches=True)
        try:
            short.start()
            with pytest.raises(ConnectorRefused, match=r"has 9 blocks.*one have 8.*--max-model-len of at most 256"):
                long.start()
        finally:
            long.close()
            short.close()
