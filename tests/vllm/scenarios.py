"""Scenarios with engines of any kind over a daemon, through the one face of their processes (``rig.Engine``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from tests.e2e.rig import Node, wait_until
from tests.vllm.rig import BLOCK_TOKENS, Engine, Prompt, random_prompt


@contextmanager
def replaceable(started: list[Engine]) -> Iterator[list[Engine]]:
    """Engines that have started, of which a test may put another in the place of one. All end in order."""
    try:
        for engine in started:
            engine.wait_ready()
        yield started
        assert [engine.stop() for engine in started] == [0] * len(started)
    finally:
        for engine in started:
            engine.kill_if_running()


def answer_alike(two: Sequence[Engine], alone: Engine, requests: Sequence[Prompt], batch: int) -> tuple[int, int]:
    """Ask two engines at once, ``batch`` requests each at a time, and one alone: all say the same. Returns the cached
    tokens of the two, and those of the one."""
    cached = own = 0
    for first in range(0, len(requests), 2 * batch):
        both = requests[first : first + 2 * batch]
        for engine, mine in zip(two, (both[:batch], both[batch:]), strict=True):
            engine.send(*mine)
        answers = [answer for engine in two for answer in engine.collect()]
        expected = alone.ask(*both)
        assert [answer.said for answer in answers] == [answer.said for answer in expected]
        cached += sum(answer.cached for answer in answers)
        own += sum(answer.cached for answer in expected)
    return cached, own


PRIVATE_PAGES = 5
"""Pages that an engine has for itself at rest, and goes on with where its daemon dies."""


def send_and_begin(socket: str, running: Sequence[Engine], prompt: Prompt) -> None:
    """Send each engine a request, and wait until it has the pages of its prompt, or its answer, and each engine
    ``PRIVATE_PAGES``: one that has too few when its daemon dies waits for the next daemon. Nothing is evicted for an
    engine at rest, so what is cached is evicted first."""
    blocks = -(-len(prompt.tokens) // BLOCK_TOKENS)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        admin.Evict(admin_pb2.EvictRequest(tier="device"))
        begun: set[str] = set()
        for number, engine in enumerate(running, 1):
            engine.send(prompt)

            def has_begun(number: int = number, engine: Engine = engine) -> bool:
                found = admin.ListSequences(admin_pb2.ListSequencesRequest()).sequences
                begun.update(each.lease_id for each in found if each.blocks >= blocks)
                return len(begun) == number or engine.has_answered()

            wait_until(has_begun, "its request has pages")

        def can_go_on() -> bool:
            leases = admin.ListLeases(admin_pb2.ListLeasesRequest()).leases
            return all(each.private_pages >= PRIVATE_PAGES for each in leases if each.state == "live")

        wait_until(can_go_on, "each engine has pages for itself")


HEAD = random_prompt(70, 20).tokens
DECODING = [random_prompt(71 + each, 0.5, new=300, head=HEAD) for each in range(4)]
"""Prompts that an engine decodes while it is stopped."""


def stop_until_lost(node: Node, frozen: Engine, other: Engine, expected: Sequence[object]) -> None:
    """Stop an engine that decodes until its lease is lost and ``other`` has written to its pages. It goes on as
    ``expected``; or it ends, where that was between a step and the taking of its output."""
    frozen.ask(random_prompt(90, 0.5, new=1, head=HEAD))
    frozen.send(*DECODING)
    wait_until(lambda: node.counters()["published_blocks"] >= 20 + 4, "all decode behind their hits")
    os.killpg(frozen.process.pid, signal.SIGSTOP)
    wait_until(lambda: list(node.lease_states().values()).count("live") == 1, "its lease is lost")
    for each in range(6):
        other.ask(random_prompt(80 + each, 30.5, new=1))
    os.killpg(frozen.process.pid, signal.SIGCONT)
    answers = frozen.collect_unless_ended()
    assert answers is None or [answer.said for answer in answers] == expected
    assert answers is None or [answer.said for answer in frozen.ask(*DECODING)] == expected
