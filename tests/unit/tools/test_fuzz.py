"""A short run of the fuzzer, and what longer ones have found."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import InvalidRequest
from cachesvc.service.access.auth import readable, require_read
from tests.fuzz.__main__ import load, messages_of, save, table
from tests.fuzz.fuzzer import Findings, Fuzzer
from tests.fuzz.messages import mutate
from tests.fuzz.runs import fuzz_socket, verdict
from tests.fuzz.target import Target, list_rpcs, running_target
from tests.unit.rigs.client_rig import cells

RPCS = list_rpcs()


@pytest_asyncio.fixture(loop_scope="session")
async def target() -> Any:
    async with running_target() as made:
        yield made


@pytest.mark.parametrize("seed", [1, 2])
async def test_some_thousand_messages_break_nothing(target: Target, seed: int) -> None:
    found = await Fuzzer(target, seed).run(3000)
    assert verdict(found, []) == []
    assert found.messages >= 3000
    assert min(found.sensible, found.mutated, found.random) > 300
    assert set(found.rpcs) >= {"Match", "Step", "Publish", "Swap", "Open", "Register", "KeepAlive"}
    assert {"GetTree", "GetStatus", "DumpIndex"} & set(found.rpcs), (
        "an operator's calls are among them, each of them seldom"
    )
    assert found.statuses["OK"] > 1000, "most of it must get deep"


@pytest.mark.parametrize("guarded", [False, True], ids=["without tokens", "with tokens"])
def test_a_daemon_lives_through_several_clients_messages_and_garbage_on_its_sockets(guarded: bool) -> None:
    found, broken = fuzz_socket(600, 3, clients=2, guarded=guarded)
    assert verdict(found, broken) == []
    assert found.messages >= 600
    assert found.statuses["OK"] > 120
    assert (found.statuses.get("UNAUTHENTICATED", 0) > 0) == guarded


def test_counts_are_kept_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    parts, rounds, broken = load(path)
    parts["with_tokens"].add(Findings(messages=7, statuses={"OK": 5, "INTERNAL": 2}, crashes=["Match: it broke"]))
    save(path, parts, rounds + 1, ["Match: it broke"])
    again, rounds, broken = load(path)
    assert (again, rounds, broken) == (parts, 1, ["Match: it broke"])
    assert messages_of(again) == 7
    assert "answered INTERNAL" in table(again)


def test_mutations_change_bytes_and_are_the_same_under_one_seed() -> None:
    raw = bytes(range(40))
    changed = [mutate(random.Random(seed), raw) for seed in range(50)]
    assert sum(each != raw for each in changed) > 40
    assert changed == [mutate(random.Random(seed), raw) for seed in range(50)]


async def ask(target: Target, name: str, request: Message) -> tuple[grpc.StatusCode, Any]:
    code, answers = await target.call(RPCS[name], [request.SerializeToString()])
    assert target.crashes == []
    return code, answers[0] if answers else None


async def test_one_request_id_for_two_operations_is_refused_though_their_bytes_are_equal(target: Target) -> None:
    lease = await target.open_lease()
    await ask(target, "Match", cache_pb2.MatchRequest(lease_id=lease, request_id=1, sequence_id=7))
    release = cache_pb2.ReleaseRequest(lease_id=lease, request_id=2, sequence_id=7)
    swap = cache_pb2.SwapRequest(lease_id=lease, request_id=2, sequence_id=7)
    assert release.SerializeToString() == swap.SerializeToString()
    code, answer = await ask(target, "Release", release)
    assert (code, type(answer)) == (grpc.StatusCode.OK, cache_pb2.ReleaseResponse)
    assert (await ask(target, "Swap", swap))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await ask(target, "Release", release))[0] is grpc.StatusCode.OK, "the first answer again"
    step = cache_pb2.StepRequest(lease_id=lease, request_id=2)
    code, answer = await ask(target, "Step", step)
    assert answer.error.code == "INVALID"


async def test_extend_refuses_a_group_beyond_the_layout(target: Target) -> None:
    lease = await target.open_lease()
    await ask(target, "Match", cache_pb2.MatchRequest(lease_id=lease, sequence_id=7))
    step = cache_pb2.StepRequest(lease_id=lease, request_id=1)
    step.operations.add().extend.CopyFrom(cache_pb2.ExtendRequest(sequence_id=7, pages=[cells(9, [0])]))
    _, answer = await ask(target, "Step", step)
    assert answer.results[0].error.code == "INVALID"


async def test_bytes_that_are_no_message_are_refused_by_name() -> None:
    handler = readable(grpc.unary_unary_rpc_method_handler(print, cache_pb2.MatchRequest.FromString), lambda _: None)
    assert handler.request_deserializer(b"\xff") == cache_pb2.MatchRequest()
    with pytest.raises(InvalidRequest, match="not a MatchRequest"):
        require_read()
    require_read()  # told once
