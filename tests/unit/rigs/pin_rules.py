"""Rules of operators' pins for the ledger's state machine, and what must hold of them after every rule."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cachesvc.flows.pinning import expire_pins, pin
from cachesvc.ledger.pins import keepable
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.errors import Conflict, NotFound, QuotaExceeded
from cachesvc.model.words import KEY_BYTES
from tests.unit.rigs.ledger_rig import Rig, chain

PROMPTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=6).map("".join)


class PinRules:
    """Beside the rules of a machine that has ``rig``."""

    rig: Rig

    @rule(prompt=PROMPTS, share=st.sampled_from((0.5, 1.0)), seconds=st.sampled_from((1.0, 9.0)))
    def an_operator_pins(self, prompt: str, share: float, seconds: float) -> None:
        core = self.rig.core
        core.limits = replace(core.limits, pin_share=share)
        with contextlib.suppress(NotFound, Conflict, QuotaExceeded):
            pin(core, self.rig.model, chain(*prompt)[-KEY_BYTES:], seconds, 0.0)

    @rule(now=st.sampled_from((5.0, 10.0)))
    def pins_end(self, now: float) -> None:
        expire_pins(self.rig.core, now)

    @invariant()
    def what_is_pinned_is_there_and_counted_once(self) -> None:
        """Each pinned prefix is a hit of some replica, and the pages that pins keep are counted once each."""
        blocks, pins = self.rig.model.blocks, self.rig.model.pins
        kept: dict[int, set[tuple[int, int]]] = {}
        for made in pins.by_key.values():
            assert any(keepable(blocks, made.row, replica.place) for replica in self.rig.model.replicas)
            for place, tip, windows in made.kept:
                mine = kept.setdefault(place.number, set())
                rows = blocks.index.path(tip) if tip != NO_ROW else ()
                mine |= {(group, row) for group in place.full_groups for row in rows}
                mine |= {(group, row) for group, each in windows.items() for row in each.values()}
        for place in blocks.index.places:
            assert sum(pins.pages(blocks, place).by_pool()) == len(kept.get(place.number, set()))
