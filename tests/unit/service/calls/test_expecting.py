"""Peers that a request names and this node may not ask: each is refused, and the log does not fill."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cachesvc.model.numbers import BACKGROUND
from cachesvc.peer.borrower import PeerStorage
from cachesvc.service.calls.lending import WARN_SECONDS, PeerLenders
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of


def test_many_peers_that_may_not_be_asked_are_one_warning_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    rig = rig_of(one_group(), device=[16], host=[16])
    node = SimpleNamespace(core=rig.core, now=lambda: rig.now)
    lenders = PeerLenders(node, PeerStorage([]), lambda: ())  # type: ignore[arg-type]

    def refused(peer: str) -> str:
        return lenders.ask(rig.model, BACKGROUND, chain("a"), peer, 1.0, lambda _: pytest.fail("it is not asked"))

    for host in range(100):
        assert "no peer_allow permits others" in refused(f"10.0.0.{host}:7100")
    assert [record.getMessage() for record in caplog.records] == ["peer_not_asked"]
    rig.now += WARN_SECONDS
    assert refused("10.0.0.1:7100")
    assert len(caplog.records) == 2
