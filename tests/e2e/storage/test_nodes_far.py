"""A prompt that one node prefills and another decodes, over a network that is slow, stalls, or cuts streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until
from tests.e2e.storage.relay import BORROWED_AT, LENDER, Relay, running_relay
from tests.e2e.storage.test_nodes import engine_on, idle
from tests.e2e.storage.test_nodes_expected import ALLOW, BLOCKS, CHUNK, Decode, prefilling


class Far(NamedTuple):
    """Two daemons with a network between them; ``data_port``: of the bytes."""

    lender: Node
    borrower: Node
    one: Engine
    other: Engine
    relay: Relay
    at: str
    data_port: int

    def check(self) -> None:
        """Neither side holds anything, and all adds up."""
        for node in (self.lender, self.borrower):
            wait_until(lambda node=node: idle(node), "no page is held")  # type: ignore[misc]
            assert node.problems() == []


@contextmanager
def far_nodes(delay_s: float) -> Iterator[Far]:
    with ExitStack() as stack:
        lender = stack.enter_context(running_node(["--peer-listen", f"{LENDER}:0"]))
        borrower = stack.enter_context(running_node(ALLOW))
        one, other = (stack.enter_context(engine_on(node)) for node in (lender, borrower))
        relay = stack.enter_context(running_relay(delay_s))
        said = next(json.loads(line) for line in lender.log().splitlines() if '"peers_ready"' in line)
        relay.open(said["port"], said["data_port"])
        yield Far(lender, borrower, one, other, relay, f"{BORROWED_AT}:{said['port']}", said["data_port"])


def test_blocks_come_while_the_prefill_runs_however_far_it_is() -> None:
    with far_nodes(0.02) as far:
        with prefilling(far.one, 1) as prefill:
            decode = Decode(far.other, prefill.keys, far.at)
            for upto in range(CHUNK, BLOCKS + 1, CHUNK):
                prefill.chunk(upto)
                wait_until(lambda upto=upto: decode.look()[0] >= upto, "the chunk has come")  # type: ignore[misc]
        assert decode.bad() == []
        assert far.borrower.counters()["expected_blocks"] == BLOCKS
        far.check()


def test_a_stalled_stream_ends_the_wait_and_nothing_of_it_lands_later() -> None:
    with far_nodes(0.001) as far:
        far.one.serve(prompt(1, BLOCKS))
        far.one.serve(prompt(2, BLOCKS))
        stalled = Decode(far.other, far.other.keys(prompt(1, BLOCKS)), far.at)
        far.relay.stall(far.data_port)
        assert stalled.look(is_computed=True) == (0, BLOCKS)
        wait_until(lambda: stalled.look(is_computed=True) == (0, 0), "it is not waited for any more")
        far.check()
        assert far.other.serve(prompt(1, BLOCKS)).bad == []
        far.relay.go_on(far.data_port)
        after = Decode(far.other, far.other.keys(prompt(2, BLOCKS)), far.at)
        wait_until(lambda: after.look() == (BLOCKS, 0), "the next prompt comes")
        assert after.bad() == []
        assert stalled.bad() == []
        far.check()


def test_what_a_cut_stream_did_not_bring_is_fetched_once_more() -> None:
    with far_nodes(0.001) as far:
        far.one.serve(prompt(1, BLOCKS))
        decode = Decode(far.other, far.other.keys(prompt(1, BLOCKS)), far.at)
        far.relay.cut_after(far.data_port, 1)
        wait_until(lambda: decode.look() == (BLOCKS, 0), "all of it has come")
        assert decode.bad() == []
        assert far.borrower.counters()["expectations_ended_arrived"] == 1
        far.check()
