"""Way of a call from the dispatcher to its flow, and through it."""

from __future__ import annotations

from array import array
from typing import Any

from google.protobuf.message import Message
from kvcache.v1 import cache_pb2

from cachesvc.service.calls.dispatcher import Operation
from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of
from tests.unit.rigs.walks import Walk, walk


def matched(desk: Desk, lease: str, sequence: int) -> Walk:
    """Way of a Match whose lease has remembered answers, and whose message was checked before."""
    request = cache_pb2.MatchRequest(lease_id=lease, sequence_id=sequence, keys=chain(*"abcd"), request_id=sequence)
    return walk(lambda: desk.ask(desk.cache.match, request))


async def test_a_match_enters_its_flow_after_twelve_functions_and_its_lease_is_looked_up_once() -> None:
    async with Desk() as desk:
        lease = desk.lease("a")
        matched(desk, lease, 1)
        way = matched(desk, lease, 2)
        assert way.before("match") <= 12
        assert way.entries("Ledger.hear") == 1
        assert way.entries("Ledger.lease") == way.entries("Lease.heard") == 0


CEILINGS = {
    "match": (64, 24, 43),
    "allocate": (66, 20, 37),
    "publish": (68, 24, 50),
    "swap": (140, 30, 129),
    "step of 32 publishes": (82, 26, 60),
}
"""Most functions, files and changes of file of a call, some 7 % above those of today: a longer way has a reason."""


async def test_calls_keep_to_their_ways() -> None:
    rig = rig_of(one_group(), device=(512,), host=(512,))
    async with Desk(rig) as desk:
        lease, prompt = desk.lease("a"), chain(*range(40))
        ids = iter(range(1, 1000))
        ways: dict[str, Walk] = {}
        cache = desk.cache
        of: dict[str, Any] = {"lease_id": lease}

        def ask(name: str, operation: Operation[Any, Any], message: Message) -> None:
            answers: list[Any] = []
            ways[name] = walk(lambda: answers.append(desk.ask(operation, message)))
            assert not isinstance(answers[0], cache_pb2.OperationError), answers[0]

        for sequence in (1, 2, 3):  # the last round finds what the first has published, and all tables made
            of["sequence_id"] = sequence
            ask("match", cache.match, cache_pb2.MatchRequest(**of, request_id=next(ids), keys=prompt))
            ask("allocate", cache.allocate, cache_pb2.AllocateRequest(**of, request_id=next(ids), blocks=41))
            if sequence == 1:
                ask("publish", cache.publish, cache_pb2.PublishRequest(**of, request_id=next(ids), blocks=40))
        out = cache_pb2.SWAP_DIRECTION_OUT
        ask("swap", cache.swap, cache_pb2.SwapRequest(**of, request_id=next(ids), direction=out))
        for sequence in range(100, 132):
            desk.fill(lease, sequence, chr(sequence) + "xy")
        columns = cache_pb2.StepColumns(
            publish_sequences=array("Q", range(100, 132)).tobytes(), publish_first=array("I", [0] * 32).tobytes()
        )
        step = cache_pb2.StepRequest(lease_id=lease, request_id=next(ids), columns=columns)
        ask("step of 32 publishes", desk.cache.step, step)
        found = {name: (way.functions, way.files, way.moves) for name, way in ways.items()}
        longer = {
            name: (found[name], most)
            for name, most in CEILINGS.items()
            if any(have > least for have, least in zip(found[name], most, strict=True))
        }
        assert not longer, "more functions, files or changes of file than the ceiling"
        assert ways["step of 32 publishes"].entries("classify") == 1, "all of its entries at once"
