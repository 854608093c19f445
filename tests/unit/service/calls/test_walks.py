"""Way of a call from the dispatcher to its flow, and through it."""

from __future__ import annotations

from kvcache.v1 import cache_pb2

from tests.unit.rigs.dispatch_rig import Desk
from tests.unit.rigs.ledger_rig import chain
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
