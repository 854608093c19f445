"""Memory pressure: pools full of pinned pages, a host tier that never came, copies that fail."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest
from cachesvc_client import LoadFailed, PoolExhausted

from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.host_pool import HostPool
from cachesvc.memory.numa import MemoryLimit
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest
from tests.contracts.test_backend import DEVICE_BYTES, Bench, flat, host, step
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, check_books, running_node, wait_until


def test_a_pool_full_of_pinned_pages_is_told_at_once_with_numbers_and_others_go_on(node: Node) -> None:
    with (
        Engine(node.socket, name="greedy", device_pages=12) as greedy,
        Engine(node.socket, name="late", device_pages=12) as late,
        ExitStack() as pins,
    ):
        for seed in (1, 2):
            assert greedy.serve(prompt(seed, 4)).computed == 4
            pins.enter_context(greedy.lease.match(greedy.keys(prompt(seed, 4))))
        with late.lease.match(late.keys(prompt(3, 6))) as wants:
            with pytest.raises(PoolExhausted) as told:
                wants.allocate(6)
            numbers = dict(re.findall(r"(wanted|free|evictable|pinned or private|capacity) (\d+)", str(told.value)))
            assert numbers == {
                "wanted": "6",
                "free": "4",
                "evictable": "0",
                "pinned or private": "8",
                "capacity": "12",
            }
            wants.allocate(4)
            assert late.serve(prompt(1, 4)).device == 4, "hits need no room"
        pins.close()
        assert late.serve(prompt(4, 12)).computed == 12
        check_books(node)


def test_write_back_into_a_full_host_tier_goes_on(node: Node) -> None:
    with Engine(node.socket, device_pages=8, host_pages=4) as engine:
        for _ in range(3):
            for seed in range(8):
                served = engine.serve(prompt(seed, 4))
                assert served.bad == []
        counters = node.counters()
        assert counters["host_evictions"] > 0
        assert counters["evictions"] > 0
    check_books(node)


def test_copies_that_all_fail_cost_what_they_should_have_brought_and_nothing_else() -> None:
    with running_node(["--fault-copies", "1"]) as node:
        assert '"copies_are_made_to_fail"' in node.log()
        with Engine(node.socket, device_pages=8, host_pages=64) as engine:
            for seed in range(6):
                assert engine.serve(prompt(seed, 4)).bad == []
            wait_until(lambda: node.pages("in_flight") == 0, "transfers have ended")
            assert node.counters()["tickets_failed"] > 0
            assert engine.serve(prompt(0, 4)).host == 0, "what was not copied is not hit"
            check_books(node)


def test_some_copies_fail_and_no_byte_is_wrong() -> None:
    with (
        running_node(["--fault-copies", "0.3", "--write-policy", "write_through"]) as node,
        Engine(node.socket, device_pages=8, host_pages=64) as engine,
    ):
        hits = failed = 0
        while hits < 10 or failed < 3:
            for seed in range(8):
                wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
                try:
                    served = engine.serve(prompt(seed, 4))
                except LoadFailed:
                    failed += 1
                    continue
                assert served.bad == []
                hits += served.host > 0
        check_books(node)


def test_half_a_copy_fails_its_job_and_does_not_set_its_word() -> None:
    backend = ShmBackend(1, DEVICE_BYTES, timeline_words=64, rules=CopyRules(), fault_copies=1.0)
    backend.start()
    backend.open_sheet("shm-0", 0)
    bench = Bench(backend, lambda: None, backend.devices()[0])
    region, memory = host(bench, 4096)
    slab = backend.create_slab(bench.device, 4096)
    halves = 0
    for ticket in range(32):
        bench.load(bench.job(ticket, [step(flat(region, 0, slab.region, 0, 4096), value=5)], word=2 * ticket % 60))
        bench.settle()
        assert "was made to fail" in str(bench.ended[ticket])
        halves += "half way" in str(bench.ended[ticket])
        assert [backend.timeline(bench.device).read(2 * ticket % 60 + at) for at in (0, 1)] == [9, 9]
    assert 0 < halves < 32
    assert bytes(memory) == backend.read(region, 0, 4096)
    backend.close()


@pytest.mark.parametrize("text", ["1.5", "-0.1"])
def test_a_share_of_faults_that_cannot_be_is_refused(text: str) -> None:
    from cachesvc.config import load_config

    with pytest.raises(InvalidRequest, match="must be from 0 to 1"):
        load_config(None, {"backend": "shm", "fault_copies": float(text)})
    with pytest.raises(InvalidRequest, match="shm alone"):
        load_config(None, {"backend": "auto", "fault_copies": 0.5})


def test_a_host_pool_beyond_the_memory_limit_is_refused_before_it_is_touched() -> None:
    backend = ShmBackend(1, DEVICE_BYTES, timeline_words=64)
    backend.start()
    limits = (MemoryLimit("the cgroup", 1 << 20),)
    pool = HostPool(64 << 20, 1 << 20, 1, None, backend, limits=lambda: limits)
    with pytest.raises(InvalidRequest, match=r"the cgroup leaves 1048576"):
        pool.start()
    pool.close()
    backend.close()


def test_a_host_pool_whose_memory_ends_stays_as_large_as_it_became() -> None:
    """ENOMEM at the third chunk: pages of the first two serve, and asking for more says how many there are."""

    class Ends(ShmBackend):
        chunks = 0

        def register_host(self, buffer: memoryview, fd: int | None = None) -> int:
            self.chunks += 1
            if self.chunks > 2:
                raise OSError(12, "Cannot allocate memory")
            return super().register_host(buffer)

    backend = Ends(1, DEVICE_BYTES, timeline_words=64)
    backend.start()
    pool = HostPool(4 << 20, 1 << 20, 1, None, backend)
    pool.start()
    pool.join_filling()
    slab = pool.reserve(4096, 1024)
    assert sum(run.count for run in pool.ready_pages(slab)) == 512
    assert isinstance(pool.failure, OSError)
    pool.close()
    backend.close()
