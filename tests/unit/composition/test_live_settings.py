"""Live settings: exactly those that the table names change live, and each of them is a setting."""

from __future__ import annotations

import re
from dataclasses import fields

from cachesvc.config import LIVE, SETTINGS, Config
from cachesvc.memory.shm import ShmBackend
from cachesvc.policy.eviction import EVICTION_POLICIES
from cachesvc.service.access.admission import Admission
from cachesvc.service.admin.admin_service import Administration
from cachesvc.service.calls.dispatcher import Dispatcher
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.host.health import Serving
from cachesvc.service.host.reload import live_settings
from cachesvc.service.lane import Lanes
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.edge import Edge
from cachesvc.service.rpc.services import CacheService
from tests.style.tree import ROOT
from tests.unit.rigs.ledger_rig import one_group, rig_of

DOCS = ROOT / "docs"


async def tell_nobody(_: Serving) -> None:
    """No health checks are answered here."""


def test_the_help_and_the_reload_know_the_same_settings() -> None:
    node = Node(rig_of(one_group(), device=[8]).core, epoch=1, wait_seconds=30.0, lease_seconds=10.0)
    admission = Admission(1024, 4096, 256)
    dispatcher = Dispatcher(node, admission)
    cache = CacheService(Edge(dispatcher), 4096)
    lanes = Lanes(dispatcher, cache, None, None, 8, 64)
    backend = ShmBackend(1, 1 << 20)
    operator = Administration(node, DeviceHealth(backend, node, tell_nobody), 5.0)
    applied = live_settings(node, admission, cache, lanes, backend, operator)
    assert applied.keys() == LIVE
    assert {field.name for field in fields(Config)} >= LIVE


def test_the_page_names_what_changes_live_and_nothing_else() -> None:
    """A table says from when each counts."""
    table = (
        (DOCS / "staying-up.md").read_text(encoding="utf-8").partition("| live | from when |")[2].partition("\n\n")[0]
    )
    assert set(re.findall(r"`(\w+)`", table)) == LIVE


def test_the_settings_name_every_eviction_policy() -> None:
    assert SETTINGS["eviction"].choices == tuple(sorted(EVICTION_POLICIES))
