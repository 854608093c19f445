"""A limit that is a setting says which one, and what the caller can do without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.leases import open_lease
from cachesvc.flows.match import match
from cachesvc.model.errors import LimitExceeded
from tests.unit.rigs.ledger_rig import TOKEN, chain, one_group, rig_of


def test_refusals_name_the_setting_the_number_and_the_remedy() -> None:
    rig = rig_of(one_group(), device=[16])
    rig.core.limits = replace(rig.core.limits, blocks_per_sequence=4, sequences_per_lease=1, leases=1)
    lease = rig.lease()
    with pytest.raises(LimitExceeded, match="5 is more than the limit of 4; send fewer, or have the operator raise bl"):
        rig.run(match, lease, 1, chain(*"abcde"), 0)
    rig.run(match, lease, 1, chain("a"), 0)
    with pytest.raises(LimitExceeded, match="ask for fewer, or have the operator raise blocks_per_sequence and reload"):
        rig.run(allocate, lease, 1, 5)
    with pytest.raises(
        LimitExceeded, match=r"2 is more than the limit of 1; release some, .* sequences_per_lease"
    ) as no:
        rig.run(match, lease, 2, chain("b"), 0)
    assert (no.value.got, no.value.limit) == (2, 1)
    with pytest.raises(LimitExceeded, match="close some, or have the operator raise leases and reload"):
        open_lease(rig.core, 1, 0, "b", TOKEN + b"a", 1, 0.0)
