"""Answers of health checks, and that looking at devices goes on whatever a look met."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cachesvc.flows.pinning import drain
from cachesvc.memory.shm import ShmBackend
from cachesvc.service.host.device_health import DeviceHealth
from cachesvc.service.host.health import Serving
from tests.fuzz.target import Target, running_target


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    async with running_target() as made:
        yield made


async def test_a_drain_is_told_once_and_the_daemon_lives_on(target: Target) -> None:
    told: list[Serving] = []

    async def tell(serving: Serving) -> None:
        told.append(serving)

    health = DeviceHealth(target.backend, target.node, tell)
    await health.tell()
    assert told == [], "nothing has changed since the start"
    target.node.run(lambda: drain(target.core))
    await health.tell()
    await health.look()
    assert told == [Serving(ready=False, live=True)]


async def test_a_look_that_breaks_is_logged_and_the_next_one_comes(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    told = asyncio.Event()
    broken = ["once"]

    async def tell(_: Serving) -> None:
        if broken:
            raise LookupError(broken.pop())
        told.set()

    health = DeviceHealth(target.backend, target.node, tell, probe_seconds=0.0)
    target.node.run(lambda: drain(target.core))
    with caplog.at_level(logging.ERROR):
        health.start()
        await told.wait()
        await health.close()
    assert [record.getMessage() for record in caplog.records] == ["device_look_broke"]


async def test_a_pair_of_devices_whose_copies_are_refused_is_told_once(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(ShmBackend):
        def refused_peers(self) -> dict[tuple[str, str], str]:
            return {("shm-0", "shm-1"): "1 of 2 bytes came wrong"}

    async def tell(serving: Serving) -> None:
        del serving

    backend = Refusing(2, 1 << 20)
    health = DeviceHealth(backend, target.node, tell)
    with caplog.at_level(logging.WARNING):
        await health.look()
        await health.look()
    assert [record.getMessage() for record in caplog.records] == ["device_pair_refused"]
    facts = replace(target.facts, health=health)
    (line,) = facts.attention(lambda _: True, sees_all=True)
    assert "from shm-0 to shm-1 are refused" in line
    assert "1 of 2 bytes came wrong" in line
