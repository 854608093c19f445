"""What is said to change live is what does, and each of it is a setting."""

from __future__ import annotations

from dataclasses import fields

from cachesvc.config import LIVE, Config
from cachesvc.memory.shm import ShmBackend
from cachesvc.service.calls import CallGate
from cachesvc.service.host.reload import live_settings
from cachesvc.service.node import Node
from cachesvc.service.rpc.cache_service import CacheService
from tests.unit.ledger_rig import one_group, rig_of


def test_the_help_and_the_reload_know_the_same_settings() -> None:
    node = Node(rig_of(one_group(), device=[8]).core, epoch=1, wait_seconds=30.0, lease_seconds=10.0)
    gate = CallGate(1024)
    applied = live_settings(node, gate, CacheService(node, gate, 4096), ShmBackend(1, 1 << 20))
    assert applied.keys() == LIVE
    assert {field.name for field in fields(Config)} >= LIVE
