"""Two engines on one daemon, through everything that may befall them: each answer is that of vLLM without any cache."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from cachesvc_ctl.core.daemon_process import DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from tests.e2e.rig import FLAGS, short_folder
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, check_daemon, random_prompt, random_requests
from tests.vllm.scenarios import answer_alike, replaceable, send_and_begin

REQUESTS = 300
BATCH = 12
DEVICE_BLOCKS = 160
"""Fewer than the random requests have different blocks: what is coldest goes, and requests are preempted."""


class Node:
    """A daemon that can come again behind the same socket, with engines of one model on it."""

    def __init__(self, fleet: Fleet, folder: str) -> None:
        self.daemon = DaemonProcess(FLAGS, folder=folder)
        self.daemon.start()
        self._fleet = fleet

    def engine(self, *, is_split: bool = False) -> Engine:
        return self._fleet.engine(self.daemon.socket, DEVICE_BLOCKS, is_split=is_split)


@pytest.fixture(scope="module")
def node(fleet: Fleet) -> Iterator[Node]:
    """A daemon; at its end nothing is held, and its accounting adds up."""
    with short_folder() as folder:
        made = Node(fleet, str(folder))
        try:
            yield made
            check_daemon(made.daemon.socket)
        finally:
            assert made.daemon.stop() == 0


@pytest.fixture(scope="module")
def two(node: Node, plain: Engine) -> Iterator[list[Engine]]:
    """An engine in one process, and one whose core and worker have each their own, as vLLM has it on a GPU."""
    with replaceable([node.engine(), node.engine(is_split=True)]) as running:
        yield running


def test_random_requests_are_answered_alike_by_two_engines_and_without_a_cache(
    two: list[Engine], plain: Engine
) -> None:
    cached, _ = answer_alike(two, plain, random_requests(7, REQUESTS), BATCH)
    assert cached > REQUESTS * BLOCK_TOKENS


def test_an_engine_killed_in_mid_request_leaves_what_it_sealed_to_the_next(
    node: Node, two: list[Engine], plain: Engine
) -> None:
    told, long = random_prompt(50, 6.5), random_prompt(51, 8.5, new=1500)
    expected, answer = plain.ask(told, random_prompt(51, 8.5)), two[0].ask(told)[0]
    assert answer.said == expected[0].said
    two[0].send(long)  # 1,500 tokens take it long enough
    assert two[1].ask(told)[0].cached == 6 * BLOCK_TOKENS
    two[0].kill()
    assert two[1].ask(told)[0].said == expected[0].said
    two[0] = node.engine()
    two[0].wait_ready()
    answer = two[0].ask(told)[0]
    assert (answer.said, answer.cached) == (expected[0].said, 6 * BLOCK_TOKENS)
    assert two[0].ask(random_prompt(51, 8.5))[0].said == expected[1].said


def test_requests_under_way_end_well_when_the_daemon_dies_and_what_comes_after_finds_the_next(
    node: Node, two: list[Engine], plain: Engine
) -> None:
    under_way = [random_prompt(60, 2.5, new=60), random_prompt(61, 2.5, new=400)]
    later = random_prompt(62, 5.5)
    expected = plain.ask(*under_way, later)
    send_and_begin(node.daemon.socket, two, under_way[0])
    node.daemon.process.kill()
    node.daemon.process.wait()
    for engine in two:
        assert engine.collect()[0].said == expected[0].said
    assert two[1].ask(random_prompt(63, 1.5))[0].cached == 0  # in private pages, with no daemon at all
    for engine in two:
        engine.send(*under_way)  # more than these are
    node.daemon.start()
    for engine in two:
        assert [answer.said for answer in engine.collect()] == [answer.said for answer in expected[:2]]
    answers = [engine.ask(later)[0] for engine in two]
    assert [answer.said for answer in answers] == [expected[2].said] * 2
    assert [answer.cached for answer in answers] == [0, 5 * BLOCK_TOKENS]


def test_after_a_reset_nothing_older_is_found_and_nothing_newer_by_others(two: list[Engine], plain: Engine) -> None:
    prompt = random_prompt(90, 4.5)
    expected = plain.ask(prompt)[0].said
    answers = [engine.ask(prompt)[0] for engine in two]
    assert two[0].reset()
    answers += [two[0].ask(prompt)[0], two[0].ask(prompt)[0]]
    assert [answer.cached for answer in answers] == [0, 4 * BLOCK_TOKENS, 0, 4 * BLOCK_TOKENS]
    assert two[1].reset()
    answers.append(two[1].ask(prompt)[0])
    assert answers[-1].cached == 0
    assert {answer.said for answer in answers} == {expected}


def test_engines_that_are_reset_after_an_announcement_share_again(node: Node, two: list[Engine], plain: Engine) -> None:
    prompt = random_prompt(91, 4.5)
    expected = plain.ask(prompt)[0].said
    with grpc.insecure_channel(f"unix:{node.daemon.socket}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        (model,) = admin.ListModels(admin_pb2.ListModelsRequest()).models
        for version in ("step-1", "step-2"):
            admin.SetWeightsVersion(admin_pb2.SetWeightsVersionRequest(model_id=model.model_id, version=version))
            assert [engine.reset() for engine in two] == [True, True]
            answers = [engine.ask(prompt)[0] for engine in two]
            assert [answer.cached for answer in answers] == [0, 4 * BLOCK_TOKENS]
            assert {answer.said for answer in answers} == {expected}
        # a sleeping engine frees its weights alone: another one uses the pool meanwhile, and waking finds its blocks
        admin.SetWeightsVersion(admin_pb2.SetWeightsVersionRequest(model_id=model.model_id, version="step-3"))
        assert two[1].reset()
        two[0].sleep(level=1)
        answers = [two[1].ask(prompt)[0]]
        two[0].wake()
        answers.append(two[0].ask(prompt)[0])
        assert [answer.cached for answer in answers] == [0, 4 * BLOCK_TOKENS]
        assert {answer.said for answer in answers} == {expected}
