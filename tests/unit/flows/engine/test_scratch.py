"""Groups of scratch: granted and given back with a sequence, never shared, and of no use to a hit."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import recycle, release
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE
from cachesvc.questions.audit import verify_at_once
from cachesvc.wire.convert import layout_from_proto, layout_to_proto
from tests.conservation import audit
from tests.unit.rigs.ledger_rig import BLOCK_TOKENS, Rig, chain, rig_of

SCRATCH = 1
LAYOUT = Layout(
    BLOCK_TOKENS,
    1,
    (PlaneGroup("full", pool="kv"), PlaneGroup("ring", 0, pool="kv")),
    tuple(Plane("k", 0, group, (8,), "uint8") for group in ("full", "ring")),
)


@pytest.fixture
def rig() -> Rig:
    return rig_of(LAYOUT, device=(10, 10), host=(0, 0))


def serve(rig: Rig, lease: str, number: int, prompt: str) -> OpenSequence:
    """Match, allocate, publish."""
    keys = chain(*prompt)
    rig.run(match, lease, number, keys, 0)
    rig.run(allocate, lease, number, len(prompt))
    sequence = rig.core.ledger.leases[lease].sequences[number]
    first = sequence.sealed
    rig.run(publish, lease, number, first, keys[first * KEY_BYTES :], len(prompt) - first)
    return sequence


def test_its_pages_stay_the_sequences_own_and_no_hit_needs_them(rig: Rig) -> None:
    lease = rig.lease()
    sequence = serve(rig, lease, 1, "abc")
    assert NO_PAGE not in sequence.tables[SCRATCH]
    assert sequence.own == [set(), set(sequence.tables[SCRATCH])]
    other = serve(rig, lease, 2, "abcd")
    assert other.hit_blocks == 3
    assert list(other.tables[SCRATCH][:3]) == [NO_PAGE] * 3
    assert len(other.own[SCRATCH]) == 1
    assert rig.free()[0] == 10 - 4 - 4
    rig.run(release, lease, 1)
    rig.run(release, lease, 2)
    assert rig.free()[0] == 10 - 4
    assert not any(rig.place().states[SCRATCH])
    assert not audit(rig.core.ledger).problems
    assert not verify_at_once(rig.core)


def test_a_sequence_that_lost_the_race_to_seal_keeps_its_own(rig: Rig) -> None:
    lease = rig.lease()
    for number in (1, 2):
        rig.run(match, lease, number, chain(*"ab"), 0)
        rig.run(allocate, lease, number, 2)
    rig.run(publish, lease, 1, 0, chain(*"ab"), 2)
    told = rig.run(publish, lease, 2, 0, chain(*"ab"), 2)
    assert told.duplicate_positions == (0, 1)
    assert [len(cells.pages) for cells in told.spares] == [2, 0]
    sequence = rig.core.ledger.leases[lease].sequences[2]
    assert set(sequence.tables[SCRATCH]) <= sequence.own[SCRATCH]
    assert not audit(rig.core.ledger).problems


def test_only_its_engine_says_how_long_it_is_used(rig: Rig) -> None:
    lease = rig.lease()
    sequence = serve(rig, lease, 1, "abc")
    rig.run(recycle, lease, 1, 3 * BLOCK_TOKENS, ())
    assert NO_PAGE not in sequence.tables[SCRATCH], "computed tokens say nothing of it"
    rig.run(partial(recycle, dead_blocks=(2,)), lease, 1, 0, ())
    assert [page == NO_PAGE for page in sequence.tables[SCRATCH]] == [True, True, False]
    assert rig.free()[0] == 10 - 3 - 1
    assert not audit(rig.core.ledger).problems


def test_a_layout_says_which_groups_are_scratch() -> None:
    assert layout_from_proto(layout_to_proto(LAYOUT)) == LAYOUT
    full = Layout(BLOCK_TOKENS, 1, (LAYOUT.groups[0], PlaneGroup("ring", pool="kv")), LAYOUT.planes)
    assert full.fingerprint != LAYOUT.fingerprint
    assert (LAYOUT.scratch_groups, full.scratch_groups) == ((SCRATCH,), ())


def test_a_policy_for_copies_has_none_of_scratch() -> None:
    groups = (*LAYOUT.groups, PlaneGroup("state", pool="kv", is_state=True))
    planes = (*LAYOUT.planes, Plane("k", 0, "state", (8,), "uint8"))
    rig = rig_of(Layout(BLOCK_TOKENS, 1, groups, planes), device=(12,) * 3, host=(0,) * 3)
    assert [kin.groups for kin in rig.place().kin] == [(2,)]
