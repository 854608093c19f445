"""Operators' questions: answers show a caller its own tenant's things alone, and nothing where there is nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import pairwise
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, lease_pb2

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import resolve
from cachesvc.flows.leases import process_gone
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.words import KEY_BYTES, Tier
from cachesvc.questions.audit import verify
from cachesvc.questions.dump import dump
from cachesvc.questions.explanation import explain
from cachesvc.questions.query import blocks, models, sequences, tickets, tree
from cachesvc.questions.status import SEQUENCES_A_STEP, lease_lines, leases, status
from cachesvc.questions.view import (
    EVERYTHING,
    LINES_A_STEP,
    SHOWN_LETTERS,
    Question,
    Sight,
    View,
    answer_at_once,
    listed,
)
from cachesvc.service.admin.admin_service import EVICTED_AT_ONCE, Administration
from cachesvc.service.host.device_health import DeviceHealth
from tests.fuzz.target import Target, list_rpcs, running_target
from tests.fuzz.workload import DEVICE_PAGES, registers
from tests.unit.rigs.ledger_rig import TOKEN, one_group, rig_of

TENANTS = ("team-a", "team-b")
BLOCKS = 3

Ask = Callable[[View], Any]


def now(question: Question[Any]) -> Any:
    return answer_at_once(question)


def whole(question: Question[Any]) -> Any:
    """An answer in one piece, of parts that were sent one after another."""
    parts = answer_at_once(question)
    return type(parts[0]).FromString(b"".join(part.SerializeToString() for part in parts))


QUESTIONS: dict[str, Ask] = {
    "models": lambda view: now(models(view)),
    "leases": lambda view: now(leases(view)),
    "sequences": lambda view: now(sequences(view)),
    "tickets": lambda view: now(tickets(view)),
    "status": lambda view: now(status(view, 10.0)),
    "explain": lambda view: now(explain(view, 0, b"key of ")),
    "verify": lambda view: now(verify(view, 0)),
    "blocks": lambda view: now(blocks(view, 0)),
    "tree": lambda view: now(tree(view, 0)),
    "dump": lambda view: now(dump(view, 0)).head,
}

OF_A_MODEL: dict[str, Callable[[View, int], Any]] = {
    "explain": lambda view, model: now(explain(view, model, b"key of ")),
    "verify": lambda view, model: now(verify(view, model)),
    "blocks": lambda view, model: now(blocks(view, model)),
    "tree": lambda view, model: now(tree(view, model)),
    "dump": lambda view, model: now(dump(view, model)),
}


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    """A daemon without a server, and nothing in it."""
    async with running_target() as made:
        yield made


async def serve(target: Target, register: int, tenant: str) -> str:
    """A tenant's model with a lease, a sequence with blocks of its own, and transfers behind it: the lease's id."""
    rpcs = list_rpcs()
    _, made = await target.call(rpcs["Register"], [registers()[register].SerializeToString()])
    request = lease_pb2.OpenRequest(
        model_id=made[0].model_id,
        engine=f"engine of {tenant}",
        process_token=await target.new_process(),
        namespace=made[0].namespace,
    )
    _, opened = await target.call(rpcs["Open"], [request.SerializeToString()])
    lease = str(opened[0].lease_id)
    keys = b"".join(f"key of {tenant} {i}".encode().ljust(KEY_BYTES) for i in range(BLOCKS))
    call = resolve(target.core.ledger, lease, 0.0)
    for flow in (
        partial(match, target.core, call, 1, keys, 0),
        partial(allocate, target.core, call, 1, BLOCKS),
        partial(publish, target.core, call, 1, 0, keys, BLOCKS),
    ):
        target.node.run(flow)
    call.model.tenant = tenant
    return lease


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_caller_is_shown_its_own_tenant_alone(target: Target, name: str) -> None:
    own_leases = dict(zip(TENANTS, [await serve(target, 0, "team-a"), await serve(target, 2, "team-b")], strict=True))
    for own, other in (TENANTS, reversed(TENANTS)):
        told = repr(QUESTIONS[name](View(target.core, Sight(tenant=own), target.node.now)))
        assert own_leases[other][:SHOWN_LETTERS] not in told
        assert f"engine of {other}" not in told
        assert f"key of {other}" not in told
        assert f"model_id: {TENANTS.index(other) + 1}\n" not in told


@pytest.mark.parametrize("name", OF_A_MODEL)
async def test_another_tenants_model_is_not_there(target: Target, name: str) -> None:
    await serve(target, 0, "team-a")
    await serve(target, 2, "team-b")
    with pytest.raises(NotFound):
        OF_A_MODEL[name](View(target.core, Sight(tenant="team-a"), target.node.now), 2)
    OF_A_MODEL[name](View(target.core, EVERYTHING, target.node.now), 2)


async def test_counters_of_all_tenants_are_for_those_who_see_them_all(target: Target) -> None:
    await serve(target, 0, "team-a")
    assert View(target.core, EVERYTHING, float).counters["published_blocks"] == BLOCKS
    assert View(target.core, Sight(tenant="team-a"), float).counters == {}


async def test_ids_and_namespaces_are_shown_to_those_who_may_use_them(target: Target) -> None:
    await serve(target, 3, "")  # its engine keeps a salt
    (model,) = target.core.ledger.models.values()
    (lease,) = target.core.ledger.leases.values()
    shown = {
        sight: (View(target.core, sight, float).lease_id(lease), View(target.core, sight, float).namespace_of(model))
        for sight in (EVERYTHING, Sight(salted=False), Sight(whole_ids=False))
    }
    short = lease.id[:SHOWN_LETTERS]
    assert list(shown.values()) == [(lease.id, model.namespace), (short, b""), (short, model.namespace)]


# -- questions without a daemon
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "request_", "answer"),
    [
        ("ListBlocks", admin_pb2.ListBlocksRequest(), admin_pb2.ListBlocksResponse()),
        ("GetTree", admin_pb2.GetTreeRequest(), admin_pb2.GetTreeResponse()),
        ("Evict", admin_pb2.EvictRequest(tier="host"), admin_pb2.EvictResponse()),
    ],
)
async def test_without_a_model_there_is_nothing(target: Target, name: str, request_: Message, answer: Message) -> None:
    code, answers = await target.call(list_rpcs()[name], [request_.SerializeToString()])
    assert (code, answers) == (grpc.StatusCode.OK, [answer])


async def test_the_only_model_needs_no_number_and_one_of_several_does(target: Target) -> None:
    await serve(target, 0, "")
    view = View(target.core, EVERYTHING, target.node.now)
    assert len(whole(blocks(view, 0)).blocks) == len(whole(tree(view, 0)).nodes) == BLOCKS
    await serve(target, 2, "")
    with pytest.raises(InvalidRequest, match=r"there are 2 models; name one by model_id: 1 \(model@1\), 2 \(model@2\)"):
        now(blocks(view, 0))
    assert len(whole(blocks(view, 2)).blocks) == BLOCKS


async def test_a_tree_begins_at_a_key_or_at_how_one_begins(target: Target) -> None:
    await serve(target, 0, "")
    view = View(target.core, EVERYTHING, target.node.now)
    key = b"key of  1".ljust(KEY_BYTES)
    for begin in (key, key[:-1], key[:9]):
        assert [line.position for line in whole(tree(view, 0, key=begin)).nodes] == [1, 2]
    with pytest.raises(InvalidRequest, match="names several blocks"):
        now(tree(view, 0, key=key[:4]))
    with pytest.raises(NotFound, match="no resident block's key begins so"):
        now(tree(view, 0, key=b"nothing"))
    with pytest.raises(InvalidRequest, match="is not 4 to 64 hexadecimal digits"):
        now(tree(view, 0, key=b"k"))


async def test_a_tier_that_is_not_one_is_refused_without_a_model_too(target: Target) -> None:
    request = admin_pb2.EvictRequest(tier="moon").SerializeToString()
    code, _ = await target.call(list_rpcs()["Evict"], [request])
    assert code is grpc.StatusCode.INVALID_ARGUMENT


# -- operators wait, engines do not ------------------------------------------------------------------------------------


async def test_others_get_their_turn_while_an_operator_evicts_everything(target: Target) -> None:
    lease = await serve(target, 0, "")
    call = resolve(target.core.ledger, lease, 0.0)
    held = DEVICE_PAGES - BLOCKS
    keys = b"".join(f"another {i}".encode().ljust(KEY_BYTES) for i in range(held))
    target.node.run(partial(match, target.core, call, 2, keys, 0))
    target.node.run(partial(allocate, target.core, call, 2, held))
    target.node.run(partial(publish, target.core, call, 2, 0, keys, held))
    for sequence in (1, 2):
        target.node.run(partial(release, target.core, call, sequence))
    health = DeviceHealth(target.backend, target.node, target.tell)
    operator = Administration(target.node, health, 0.0)
    request = admin_pb2.EvictRequest(request_id=7, model_id=1, tier=Tier.DEVICE.value)
    view = View(target.core, EVERYTHING, target.node.now)
    evicting = asyncio.ensure_future(operator.evict(view, request))
    again = asyncio.ensure_future(operator.evict(view, request))
    left = [len(call.model.blocks.index)]
    while not evicting.done():
        await asyncio.sleep(0)
        left.append(len(call.model.blocks.index))
    assert (left[0], left[-1], (await evicting).evicted) == (DEVICE_PAGES, 0, DEVICE_PAGES)
    assert max(before - after for before, after in pairwise(left)) <= EVICTED_AT_ONCE < DEVICE_PAGES
    assert await again == await evicting, "one request is carried out once, also while it is"


# -- a model that met a defect -----------------------------------------------------------------------------------------


async def verify_all(target: Target, **fields: bool) -> admin_pb2.VerifyResponse:
    request = admin_pb2.VerifyRequest(**fields)
    _, answers = await target.call(list_rpcs()["Verify"], [request.SerializeToString()])
    answer: admin_pb2.VerifyResponse = answers[0]
    return answer


async def out_of_service(target: Target) -> list[str]:
    """Models that ListModels and GetStatus say are out of service: both or neither."""
    _, listed = await target.call(list_rpcs()["ListModels"], [b""])
    _, told = await target.call(list_rpcs()["GetStatus"], [b""])
    why = [model.out_of_service for model in listed[0].models]
    assert [reason for reason in why if reason and not any(reason in line for line in told[0].attention)] == []
    assert sum("is out of service" in line for line in told[0].attention) == sum(map(bool, why))
    return why


async def test_a_model_that_met_a_defect_is_shown_and_a_clean_verify_puts_it_back(target: Target) -> None:
    await serve(target, 0, "")
    await serve(target, 2, "")
    assert await out_of_service(target) == ["", ""]
    target.node.distrust(2, "IllegalMove: page 3")
    assert await out_of_service(target) == ["", "IllegalMove: page 3"]
    assert (await verify_all(target)).ok
    assert await out_of_service(target) == ["", ""]
    target.core.ledger.model(2).require_trusted()


async def test_a_model_that_is_not_sound_stays_out_of_service_and_keeps_no_other_out(target: Target) -> None:
    await serve(target, 0, "")
    await serve(target, 2, "")
    for number in (1, 2):
        target.node.distrust(number, f"defect {number}")
    pins = target.core.ledger.models[2].blocks.host.pins
    pins[0] += 1
    assert not (await verify_all(target)).ok
    assert await out_of_service(target) == ["", "defect 2"]
    pins[0] -= 1
    assert (await verify_all(target)).ok
    assert await out_of_service(target) == ["", ""]


async def test_a_model_that_breaks_while_it_is_verified_stays_out_of_service(target: Target) -> None:
    await serve(target, 0, "")
    target.node.distrust(1, "the first")
    asked = asyncio.ensure_future(verify_all(target))
    while not asked.done():
        await asyncio.sleep(0)
        target.node.distrust(1, "another")
    assert (await asked).ok
    assert await out_of_service(target) == ["the first"]


def test_leases_are_walked_some_sequences_at_a_time_and_may_end_meanwhile() -> None:
    rig = rig_of(one_group(), device=(4,))
    first, second = rig.lease("a"), rig.lease("b")
    with rig.unaudited():
        for number in range(3 * SEQUENCES_A_STEP):
            rig.run(match, first, number + 1, b"", 0)
    rig.run(allocate, first, 1, 3)
    rig.run(match, second, 1, b"", 0)
    question = lease_lines(View(rig.core, EVERYTHING, lambda: 0.0))
    assert next(question) is None
    process_gone(rig.core, TOKEN + b"b")
    assert next(question) is next(question) is None, "a step for each part"
    lines = answer_at_once(question)
    assert [(line.sequences, line.private_pages) for line in lines] == [(3 * SEQUENCES_A_STEP, 3), (0, 0)]


def test_lines_are_made_in_steps_and_parts_of_an_answer_are_the_answer() -> None:
    def line(at: int) -> admin_pb2.TreeNode | None:
        return admin_pb2.TreeNode(position=at) if at != 1 else None

    question = listed(admin_pb2.GetTreeResponse, "nodes", range(2 * LINES_A_STEP + 6), line, truncated=True)
    parts = answer_at_once(question)
    assert [len(part.nodes) for part in parts] == [0, LINES_A_STEP - 1, LINES_A_STEP, 6]
    again = listed(admin_pb2.GetTreeResponse, "nodes", range(2 * LINES_A_STEP + 6), line, truncated=True)
    answer = whole(again)
    assert answer.truncated
    assert [node.position for node in answer.nodes] == [at for at in range(2 * LINES_A_STEP + 6) if at != 1]
    steps = listed(admin_pb2.GetTreeResponse, "nodes", range(2 * LINES_A_STEP), line)
    assert [next(steps), next(steps)] == [None, None], "others may run after each part"
