"""Blocks that one node has computed are a hit on another: real daemons, each with host pages of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from kvcache.v1 import peer_pb2, peer_pb2_grpc

from cachesvc.storage.seam import LAYOUT_ID_BYTES
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

BLOCKS = 8
PROMPTS = 6
LENDING = ("--peer-listen", "127.0.0.1:0")
WAIT = "?wait=5s&deadline=20s"


def peer_port(node: Node) -> int:
    """Address at which a node lends."""
    for line in node.log().splitlines():
        said = json.loads(line)
        if said.get("event") == "peers_ready":
            return int(said["port"])
    raise AssertionError("it does not lend")


@contextmanager
def two_nodes(*flags: str) -> Iterator[tuple[Node, Node]]:
    """One that lends, and one that borrows of it."""
    with running_node([*LENDING, *flags]) as lender, running_node(borrowing_of(lender)) as borrower:
        yield lender, borrower


def borrowing_of(lender: Node) -> list[str]:
    """Flags of a node that asks another one."""
    return ["--peers", f"127.0.0.1:{peer_port(lender)}{WAIT}"]


def idle(node: Node) -> bool:
    return not any(node.held().values())


def engine_on(node: Node) -> Engine:
    return Engine(node.socket, device_pages=64, host_pages=256)


def test_what_one_node_has_computed_is_a_hit_on_the_other() -> None:
    with two_nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        for seed in range(PROMPTS):
            assert one.serve(prompt(seed, BLOCKS)).computed == BLOCKS
        for seed in range(PROMPTS):
            served = other.serve(prompt(seed, BLOCKS))
            assert (served.device, served.host, served.computed, served.bad) == (0, BLOCKS, 0, [])
        assert borrower.counters()["hit_blocks_storage"] == PROMPTS * BLOCKS
        assert lender.counters()["lent_blocks"] == PROMPTS * BLOCKS
        again = other.serve(prompt(0, BLOCKS))
        assert (again.device, again.computed) == (BLOCKS, 0)
        assert lender.counters()["lent_blocks"] == PROMPTS * BLOCKS, "it is the borrower's own by now"
        for node in (lender, borrower):
            wait_until(lambda node=node: idle(node), "no page is held")  # type: ignore[misc]
            assert node.problems() == []


def test_a_longer_prompt_takes_what_is_there_and_computes_the_rest() -> None:
    with two_nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        one.serve(prompt(1, BLOCKS))
        served = other.serve(prompt(1, 2 * BLOCKS))
        assert (served.host, served.computed, served.bad) == (BLOCKS, BLOCKS, [])


def test_another_model_is_not_lent() -> None:
    with two_nodes() as (lender, borrower), engine_on(lender) as one:
        one.serve(prompt(1, BLOCKS))
        with Engine(borrower.socket, model="another", device_pages=64, host_pages=256) as other:
            assert other.serve(prompt(1, BLOCKS)).computed == BLOCKS


def test_a_borrower_that_names_a_part_again_and_again_is_refused() -> None:
    """Each time would be an object for each block."""
    with running_node(["--peer-listen", "127.0.0.1:0"]) as lender, engine_on(lender) as one:
        one.serve(prompt(1, BLOCKS))
        said = next(json.loads(line) for line in lender.log().splitlines() if '"peers_ready"' in line)
        part = peer_pb2.PeerPart(group=0, rank=0, ranks=1)
        request = peer_pb2.BorrowRequest(
            namespace=one.registration.namespace,
            layout_id=one.layout.fingerprint[:LAYOUT_ID_BYTES],
            keys=one.keys(prompt(1, BLOCKS)),
            parts=[part] * 8192,
        )
        address = f"127.0.0.1:{said['port']}"
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match="twice") as refused:
            peer_pb2_grpc.PeerServiceStub(channel).Borrow(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_lender_that_was_killed_is_done_without() -> None:
    with ExitStack() as stack:
        lender, borrower = stack.enter_context(two_nodes())
        with engine_on(lender) as one:
            one.serve(prompt(1, BLOCKS))
            one.serve(prompt(2, BLOCKS))
            with engine_on(borrower) as other:
                assert other.serve(prompt(1, BLOCKS)).computed == 0
                lender.daemon.process.kill()
                lender.daemon.process.wait()
                served = other.serve(prompt(2, BLOCKS))
                assert (served.computed, served.bad) == (BLOCKS, [])
        assert borrower.problems() == []


def test_a_borrower_that_was_killed_leaves_no_pins_behind() -> None:
    with running_node([*LENDING, "--peer-lease-seconds", "1"]) as lender, engine_on(lender) as one:
        with running_node(borrowing_of(lender)) as borrower:
            one.serve(prompt(1, BLOCKS))
            with engine_on(borrower) as other:
                other.serve(prompt(1, BLOCKS))
                borrower.daemon.process.kill()
                borrower.daemon.process.wait()
        wait_until(lambda: is_all_back(lender), "its leases have lapsed")
        assert lender.problems() == []


def is_all_back(node: Node) -> bool:
    counters = node.counters()
    return counters.get("lent_blocks", 0) == counters.get("lent_blocks_back", 0) > 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--peer-listen", "0.0.0.0:0"],
        ["--peers", "10.0.0.1:7000"],
        ["--peers", "127.0.0.1"],
        ["--peers", "127.0.0.1:1,127.0.0.1:1"],
        ["--peers", "127.0.0.1:1?capacity=1"],
        ["--peer-tls-key", "/nowhere"],
        ["--peer-listen", "127.0.0.1:0", "--peer-tokens", "/nowhere"],
        ["--peer-data-port", "70000"],
    ],
)
def test_what_cannot_be_is_refused_at_the_start(flags: list[str]) -> None:
    with pytest.raises(Exception, match="peer"), running_node(flags):
        pass
