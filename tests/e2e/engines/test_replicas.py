"""Two replicas of one model on two devices: what one has computed the other copies and does not compute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cachesvc_client import Sequence
from kvcache.v1 import admin_pb2

from tests.e2e.engine import LAYOUTS, PLAIN, Engine, prompt
from tests.e2e.remote import RemoteEngine
from tests.e2e.rig import Node, running_node

pytestmark = pytest.mark.usefixtures("each_way")

FIRST, SECOND = ["shm-0"], ["shm-1"]
BLOCKS = 12


@contextmanager
def replicas(layout: str = "plain", *, second_pages: int = 64) -> Iterator[tuple[Node, RemoteEngine, Engine]]:
    """A daemon with two devices, an engine on the first in a process of its own, and one on the second."""
    with (
        running_node(("--shm-devices", "2")) as node,
        RemoteEngine(node.socket, name="first", layout=layout, devices=FIRST) as first,
        Engine(node.socket, name="second", layout=LAYOUTS[layout], devices=SECOND, device_pages=second_pages) as second,
    ):
        first.ask("start")
        assert second.registration.devices == tuple(SECOND)
        yield node, first, second


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_on_another_device_is_copied_and_not_computed_again(layout: str) -> None:
    with replicas(layout) as (node, first, second):
        first.ask("serve", tokens=prompt(1, BLOCKS))
        served = second.serve(prompt(1, BLOCKS + 2))
        assert (served.device, served.host, served.computed, served.bad) == (BLOCKS, 0, 2, [])
        again = second.serve(prompt(1, BLOCKS + 2))
        assert (again.device, again.bad) == (BLOCKS + 2, [])
        back = first.ask("serve", tokens=prompt(1, BLOCKS + 2))
        assert (back["device"], back["computed"], back["bad"]) == (BLOCKS + 2, 0, [])
        counters = node.counters()
        assert (counters["peer_loads"], counters["peer_blocks"]) == (2, BLOCKS + 2)
        of_all_blocks = sum(map(LAYOUTS[layout].page_bytes, LAYOUTS[layout].full_groups))
        assert counters["p2p_bytes"] >= (BLOCKS + 2) * of_all_blocks
        assert (counters.get("h2d_bytes", 0), counters.get("d2h_bytes", 0)) == (0, 0)


def test_a_match_in_a_step_is_shared_too_and_the_step_goes_on() -> None:
    with replicas() as (_, first, second), second.lease.step() as steps:
        for seed in (1, 2):
            first.ask("serve", tokens=prompt(seed, BLOCKS))
        keys = [second.keys(prompt(seed, BLOCKS)) for seed in (1, 3, 2)]
        batch = steps.batch()
        for one in keys:
            batch.match(one)
        sequences: list[Sequence] = steps.submit(batch)
        assert [sequence.device_blocks for sequence in sequences] == [BLOCKS, 0, BLOCKS]
        for sequence, one in zip(sequences, keys, strict=True):
            assert second.bad(sequence, one, range(sequence.device_blocks)) == []
            sequence.release()


def test_a_replica_without_room_computes_for_itself() -> None:
    with replicas(second_pages=8) as (node, first, second):
        first.ask("serve", tokens=prompt(1, BLOCKS))
        with second.lease.match(second.keys(prompt(1, BLOCKS))) as sequence:
            assert sequence.hit_blocks == 0
        served = second.serve(prompt(1, 8))
        assert (served.device, served.bad) == (8, [])
        assert node.counters()["p2p_bytes"] == 8 * PLAIN.page_bytes(0)


def test_what_the_first_replica_loses_the_second_one_keeps() -> None:
    with replicas() as (node, first, second):
        first.ask("serve", tokens=prompt(1, BLOCKS))
        second.serve(prompt(1, BLOCKS))
        model = second.registration.model_id
        node.admin.Evict(admin_pb2.EvictRequest(model_id=model, tier="device", blocks=BLOCKS))  # of the first replica
        assert node.pages("sealed") == BLOCKS
        back = first.ask("serve", tokens=prompt(1, BLOCKS))
        assert (back["device"], back["bad"]) == (BLOCKS, [])
