"""A lease that processes of one engine share: whichever comes first, and for as long as one of them lives."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cachesvc_client import Lease, Reattacher
from kvcache.v1 import admin_pb2

from tests.e2e.engine import Engine, prompt
from tests.e2e.remote import RemoteEngine
from tests.e2e.rig import Node, running_node, wait_until

pytestmark = pytest.mark.usefixtures("each_way")

PAGES = 12


def process(node: Node, name: str) -> RemoteEngine:
    return RemoteEngine(node.socket, name=name, device_pages=PAGES, instance="one engine")


def hold_and_write(engine: RemoteEngine) -> None:
    """Four sealed blocks, one of them pinned, and four that are being written when this returns."""
    assert engine.ask("serve", tokens=prompt(1, 4))["computed"] == 4
    assert engine.ask("match", name="hit", tokens=prompt(1, 1))["device"] == 1
    engine.ask("match", name="open", tokens=prompt(2, 4))
    engine.ask("allocate", name="open", blocks=4)
    engine.ask("fill_forever", name="open", first=0, last=4)


@pytest.mark.parametrize("first", ["scheduler", "worker"])
def test_the_lease_goes_on_without_a_process_that_was_killed(node: Node, first: str) -> None:
    with process(node, "scheduler") as scheduler, process(node, "worker") as worker:
        named = {"scheduler": scheduler, "worker": worker}
        opened = named.pop(first).ask("start")
        (other,) = named.values()
        joined = other.ask("start")
        assert (opened["lease"], opened["joined"], joined["joined"]) == (joined["lease"], False, True)
        (line,) = node.admin.ListLeases(admin_pb2.ListLeasesRequest()).leases
        assert sorted(line.process_ids) == sorted((scheduler.process.pid, worker.process.pid))
        assert line.instance_id == "one engine"

        hold_and_write(scheduler)
        assert worker.ask("serve", tokens=prompt(1, 4))["device"] == 4, "each has requests of its own"
        scheduler.send_signal(signal.SIGKILL)
        wait_until(lambda: node.pages("quarantined") == 4, "what it wrote waits: the worker has it mapped")
        assert node.lease_states() == {opened["lease"]: "live"}
        assert node.problems() == []
        (line,) = node.admin.ListLeases(admin_pb2.ListLeasesRequest()).leases
        assert (line.sequences, line.pinned_blocks, node.pages("private")) == (0, 0, 0)
        assert worker.ask("serve", tokens=prompt(1, 6))["computed"] == 2

        with process(node, "the next one") as successor:
            assert successor.ask("start") == {**joined, "existed": True}
            assert successor.ask("serve", tokens=prompt(1, 6))["device"] == 6
            worker.send_signal(signal.SIGKILL)
            assert successor.ask("serve", tokens=prompt(1, 6))["device"] == 6
            assert node.lease_states() == {opened["lease"]: "live"}
            successor.send_signal(signal.SIGKILL)
        wait_until(lambda: not node.lease_states(), "the last one has gone")
    assert not any(node.held().values())


def test_a_worker_that_was_killed_costs_the_scheduler_nothing(node: Node) -> None:
    with process(node, "scheduler") as scheduler:
        with process(node, "worker") as worker:
            worker.ask("start")
            scheduler.ask("start")
            scheduler.ask("match", name="open", tokens=prompt(2, 4))
            before = scheduler.ask("allocate", name="open", blocks=4)
            worker.send_signal(signal.SIGKILL)
        wait_until(lambda: '"process_ended"' in node.log(), "the daemon has seen it")
        assert scheduler.ask("allocate", name="open", blocks=5)[0][:4] == before[0]
        scheduler.ask("fill", name="open", first=0, last=4)
        assert scheduler.ask("publish", name="open", blocks=4)["sealed"] == 4
        assert node.problems() == []


def test_processes_leave_one_by_one(node: Node) -> None:
    with Engine(node.socket, device_pages=PAGES, instance="one") as first:
        with Engine(node.socket, device_pages=PAGES, instance="one", name="second") as second:
            assert first.lease.id == second.lease.id
            second.lease.match(second.keys(prompt(3, 3))).allocate(3)
            assert node.pages("private") == 3
        wait_until(lambda: node.pages("quarantined") == 3, "it left, and the first may write them for it")
        assert first.serve(prompt(1, 3)).computed == 3
        assert list(node.lease_states().values()) == ["live"]
        with Engine(node.socket, device_pages=PAGES, instance="two") as stranger:
            assert stranger.lease.id != first.lease.id
            assert not stranger.lease.joined
    assert node.lease_states() == {}
    assert not any(node.held().values())


def test_processes_of_an_instance_meet_again_after_a_restart(folder: Path) -> None:
    with running_node(folder=folder) as node:
        engines = [Engine(node.socket, device_pages=PAGES, instance="one").start() for _ in range(2)]
        back: list[Lease] = []
        with Reattacher(engines[0].client, back.extend), Reattacher(engines[1].client, back.extend):
            node.daemon.process.send_signal(signal.SIGKILL)
            node.daemon.process.wait()
            with running_node(folder=folder) as again:
                wait_until(lambda: len(back) == 2, "both are back")
                assert {lease.id for lease in back} == set(again.lease_states())
                assert sorted(lease.joined for lease in back) == [False, True]
                for engine in engines:
                    (lease,) = [each for each in back if each in engine.client.reconnect()]
                    engine.take(lease)
                assert [engine.serve(prompt(1, 4)).device for engine in engines] == [0, 4]
                for engine in engines:
                    engine.close()
                assert again.lease_states() == {}
