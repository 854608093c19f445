"""Explain looks at one model after another and lets others run between: what it tells is of one moment each."""

from __future__ import annotations

from functools import partial

from kvcache.v1 import admin_pb2, lease_pb2

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import resolve
from cachesvc.flows.leases import close_lease
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.model.answers import Matched
from cachesvc.questions.explanation import explain
from cachesvc.questions.view import EVERYTHING, View
from tests.fuzz.target import Target, list_rpcs
from tests.fuzz.workload import registers

KEY = b"k" * 32


async def holder_of(target: Target, register: int) -> str:
    """A lease whose sequence holds a block under ``KEY`` in a model of its own."""
    rpcs = list_rpcs()
    _, made = await target.call(rpcs["Register"], [registers()[register].SerializeToString()])
    request = lease_pb2.OpenRequest(
        model_id=made[0].model_id, process_token=await target.new_process(), namespace=made[0].namespace
    )
    _, opened = await target.call(rpcs["Open"], [request.SerializeToString()])
    lease = str(opened[0].lease_id)
    call = resolve(target.core.ledger, lease, 0.0)
    found = target.node.run(partial(match, target.core, call, 1, KEY, 0))
    assert isinstance(found, Matched)
    if not found.device_blocks:
        target.node.run(partial(allocate, target.core, call, 1, 1))
        target.node.run(partial(publish, target.core, call, 1, 0, KEY, 1))
    return lease


async def test_a_holder_may_leave_while_the_next_model_is_looked_at() -> None:
    target = Target()
    await target.start()
    try:
        leaving = await holder_of(target, 0)
        await holder_of(target, 3)
        left_at = 0
        while await leave_at(target, leaving, left_at):
            leaving = await holder_of(target, 0)
            left_at += 1
        assert left_at >= 2, "it lets others run between the models"
    finally:
        await target.close()


async def leave_at(target: Target, lease: str, turn: int) -> bool:
    """Explain, with ``lease`` ended where others run for that time; False: it had told all before."""
    asked = explain(View(target.core, EVERYTHING, target.node.now), 0, KEY)
    turns = 0
    try:
        while True:
            asked.send(None)  # up to where it lets others run
            if turns == turn:
                target.node.run(partial(close_lease, target.core, lease, quiesced=True))
            turns += 1
    except StopIteration as told:
        parts: list[admin_pb2.ExplainResponse] = told.value
        assert sum(len(part.stories) for part in parts) == 2
    return turns > turn
