"""A prompt that one node prefills and another decodes: the second fetches blocks as the first seals them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
from cachesvc_client import Expected, Sequence

from cachesvc.service.calls.lending import GIVEN_UP_SECONDS
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until
from tests.e2e.storage.test_nodes import LENDING, engine_on, idle, peer_port

BLOCKS = 24
CHUNK = 6
ALLOW = ("--peer-allow", "127.0.0.0/8")


class Prefill(NamedTuple):
    """A prompt that an engine computes in chunks, each sealed at once."""

    engine: Engine
    sequence: Sequence
    keys: bytes

    def chunk(self, upto: int) -> None:
        """Compute and seal up to a block."""
        self.engine.fill(self.sequence, self.keys, range(self.sequence.sealed_blocks, upto))
        self.sequence.publish(upto)


class Decode(NamedTuple):
    """The engine that waits for a prompt; ``at``: where its daemon is to look."""

    engine: Engine
    keys: bytes
    at: str

    def look(self, *, is_computed: bool = False, patience: float = 30.0) -> tuple[int, int]:
        """Blocks that are here, and blocks that are coming."""
        expected = Expected(self.at, patience=patience, is_computed=is_computed, waits=False)
        with self.engine.lease.match(self.keys, expected=expected) as sequence:
            return sequence.hit_blocks, sequence.coming_blocks

    def bad(self) -> list[str]:
        """Load the hit and compare every byte of it."""
        with self.engine.lease.match(self.keys) as sequence:
            sequence.allocate(sequence.hit_blocks)
            sequence.wait_loaded(30.0)
            return self.engine.bad(sequence, self.keys, range(sequence.hit_blocks))


@contextmanager
def prefilling(engine: Engine, seed: int) -> Iterator[Prefill]:
    keys = engine.keys(prompt(seed, BLOCKS))
    with engine.lease.match(keys) as sequence:
        sequence.allocate(BLOCKS)
        yield Prefill(engine, sequence, keys)


@contextmanager
def nodes(*flags: str) -> Iterator[tuple[Node, Node]]:
    with running_node([*LENDING, *flags]) as lender, running_node([*ALLOW]) as borrower:
        yield lender, borrower


def address_of(lender: Node) -> str:
    return f"127.0.0.1:{peer_port(lender)}"


def test_blocks_come_while_the_prefill_runs() -> None:
    with nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        with prefilling(one, 1) as prefill:
            decode = Decode(other, prefill.keys, address_of(lender))
            assert decode.look() == (0, BLOCKS)
            for upto in range(CHUNK, BLOCKS + 1, CHUNK):
                prefill.chunk(upto)
                wait_until(lambda upto=upto: decode.look()[0] >= upto, "the chunk has come")  # type: ignore[misc]
        wait_until(lambda: decode.look() == (BLOCKS, 0), "nothing is expected any more")
        assert decode.bad() == []
        assert borrower.counters()["expectations_ended_arrived"] == 1
        assert borrower.counters()["expected_blocks"] == BLOCKS
        for node in (lender, borrower):
            wait_until(lambda node=node: idle(node), "no page is held")  # type: ignore[misc]
            assert node.problems() == []


def test_a_call_that_waits_has_all_of_it() -> None:
    with nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        one.serve(prompt(1, BLOCKS))
        keys = other.keys(prompt(1, BLOCKS))
        with other.lease.match(keys, expected=Expected(address_of(lender), is_computed=True)) as sequence:
            assert (sequence.hit_blocks, sequence.coming_blocks) == (BLOCKS, 0)


def test_what_the_prefiller_has_evicted_is_not_waited_for() -> None:
    with nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        one.serve(prompt(2, BLOCKS))
        decode = Decode(other, other.keys(prompt(1, BLOCKS)), address_of(lender))
        wait_until(lambda: decode.look(is_computed=True) == (0, 0), "the peer lacks it")
        assert borrower.counters()["expectations_ended_absent"] == 1


@pytest.mark.parametrize("sealed", [0, CHUNK])
def test_an_aborted_prefill_is_not_waited_for_longer_whenever_it_ended(sealed: int) -> None:
    with nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        with prefilling(one, 1) as prefill:
            decode = Decode(other, prefill.keys, address_of(lender))
            assert decode.look(patience=600.0) == (0, BLOCKS)
            prefill.chunk(sealed)
        wait_until(lambda: decode.look(patience=600.0) == (sealed, 0), "the rest is not expected any more")
        with prefilling(one, 2) as prefill:
            prefill.chunk(sealed)
        late = Expected(decode.at, patience=600.0)
        with other.lease.match(prefill.keys, expected=late) as sequence:
            assert (sequence.hit_blocks, sequence.coming_blocks) == (sealed, 0)
        assert borrower.counters()["expectations_ended_given_up"] == 2


def test_a_prefill_that_dies_with_its_engine_is_not_waited_for() -> None:
    with nodes() as (lender, borrower), engine_on(borrower) as other:
        with engine_on(lender) as one:
            sequence = one.lease.match(one.keys(prompt(1, BLOCKS)))
            sequence.allocate(BLOCKS)
            decode = Decode(other, one.keys(prompt(1, BLOCKS)), address_of(lender))
            assert decode.look(patience=600.0) == (0, BLOCKS)
        wait_until(lambda: decode.look(patience=600.0) == (0, 0), "it is not expected any more")
        assert borrower.counters()["expectations_ended_given_up"] == 1


def test_a_prefill_that_is_begun_anew_is_waited_for() -> None:
    with nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        with prefilling(one, 1) as prefill:
            decode = Decode(other, prefill.keys, address_of(lender))
            prefill.chunk(CHUNK)
        with prefilling(one, 1) as prefill:  # preempted, or sent again by its client
            began = time.monotonic()
            wait_until(
                lambda: decode.look() == (CHUNK, BLOCKS - CHUNK) and time.monotonic() - began > 3 * GIVEN_UP_SECONDS,
                "what was sealed before has come, and the rest is waited for longer than what is given up",
            )
            prefill.chunk(BLOCKS)
            wait_until(lambda: decode.look() == (BLOCKS, 0), "all of it has come")
        assert "expectations_ended_given_up" not in borrower.counters()
        assert decode.bad() == []


def test_what_an_aborted_request_expected_is_not_fetched_any_more() -> None:
    with nodes() as (lender, borrower), engine_on(lender) as one, engine_on(borrower) as other:
        with prefilling(one, 1) as prefill:
            decode = Decode(other, prefill.keys, address_of(lender))
            prefill.chunk(CHUNK)
            wait_until(lambda: decode.look() == (CHUNK, BLOCKS - CHUNK), "what was sealed has come")
            with other.lease.match(prefill.keys, expected=Expected(decode.at, is_over=True)) as sequence:
                assert (sequence.hit_blocks, sequence.coming_blocks) == (CHUNK, 0)
            prefill.chunk(BLOCKS)
            assert borrower.counters()["expectations_ended_other"] == 1
            assert borrower.counters()["expected_blocks"] == CHUNK
        assert decode.look(is_computed=True)[1] > 0, "a further request begins anew"
        wait_until(lambda: decode.look(is_computed=True) == (BLOCKS, 0), "and has all of it")
        assert decode.bad() == []


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefiller_that_dies_or_freezes_is_waited_for_a_bounded_time(fault: signal.Signals) -> None:
    with ExitStack() as stack:
        lender, borrower = stack.enter_context(nodes())
        one, other = stack.enter_context(engine_on(lender)), stack.enter_context(engine_on(borrower))
        prefill = stack.enter_context(prefilling(one, 1))
        decode = Decode(other, prefill.keys, address_of(lender))
        prefill.chunk(CHUNK)
        wait_until(lambda: decode.look(patience=1.5)[0] == CHUNK, "the first chunk has come")
        lender.daemon.process.send_signal(fault)
        wait_until(lambda: decode.look(patience=1.5) == (CHUNK, 0), "the rest is not expected any more")
        assert borrower.counters()["expectations_ended_silent"] == 1
        if fault is signal.SIGSTOP:
            lender.daemon.process.send_signal(signal.SIGCONT)
        assert decode.bad() == []
        assert borrower.problems() == []
