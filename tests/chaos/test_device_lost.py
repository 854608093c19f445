"""A GPU falls off the bus: told once and refused by name; others serve on, and only without them is all over."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cachesvc_client import opaque
from cachesvc_client.wire.life import LifeConnection
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, lease_pb2, lease_pb2_grpc

from cachesvc.config import Config
from cachesvc.daemon import Daemon
from cachesvc.hardware import Hardware
from cachesvc.memory.cuda import CudaBackend
from cachesvc.swap.movers import InProcessMovers
from cachesvc.wire.convert import layout_to_proto
from tests.contracts.host_gpu import HostGpu

POOL_BYTES = 1 << 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Gpu(HostGpu):
    """With what the daemon tells of a device."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.facts = SimpleNamespace(name="host GPU", pci=f"0000:0{number}:00.0", total_bytes=1 << 30)


class Site:
    """A daemon on two GPUs in this process, called over its real socket."""

    def __init__(self, channel: grpc.aio.Channel, gpus: tuple[Gpu, ...], socket: str) -> None:
        self.gpus = gpus
        self.socket = socket
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self.engine: Any = engine_pb2_grpc.EngineServiceStub(channel)
        self.leases: Any = lease_pb2_grpc.LeaseServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def register(self, model: str, gpu: Gpu) -> engine_pb2.RegisterResponse:
        answer: engine_pb2.RegisterResponse = await self.engine.Register(
            engine_pb2.RegisterRequest(
                model=model,
                layout=layout_to_proto(opaque(block_bytes=4096, block_tokens=16, layers=1)),
                devices=[gpu.uuid],
                device_pool=engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=[4])),
                host_pool=engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=[0])),
            )
        )
        return answer

    async def open(self, registered: engine_pb2.RegisterResponse, life: LifeConnection) -> str:
        request = lease_pb2.OpenRequest(
            model_id=registered.model_id, replica=registered.replica, engine="e", process_token=life.process_token
        )
        return str((await self.leases.Open(request)).lease_id)

    async def until(self, name: str, status: int) -> None:
        """Wait for what health checks of a name answer."""
        async for answer in self.health.Watch(health_pb2.HealthCheckRequest(service=name)):
            if answer.status == status:
                return

    async def check(self, name: str) -> int:
        return int((await self.health.Check(health_pb2.HealthCheckRequest(service=name))).status)

    async def status(self) -> admin_pb2.GetStatusResponse:
        answer: admin_pb2.GetStatusResponse = await self.admin.GetStatus(admin_pb2.GetStatusRequest())
        return answer


def on_two_gpus(folder: Path, story: Callable[[Site], Awaitable[None]]) -> tuple[Gpu, ...]:
    """Run a story on a loop of its own: a daemon takes the loop's signals."""
    gpus = (Gpu(0), Gpu(1))

    async def main() -> None:
        config = Config(socket=str(folder / "s"), host_pool=0, calibration="never", drain_seconds=0)
        hardware: Any = gpus
        backend = CudaBackend(gpus, POOL_BYTES, timeline_words=64)
        parts = Daemon(config, choose=lambda _: Hardware(InProcessMovers(backend), hardware))
        running = asyncio.create_task(parts.run())
        try:
            async with grpc.aio.insecure_channel(f"unix:{config.socket}") as channel:
                await channel.channel_ready()
                await story(Site(channel, gpus, config.socket))
        finally:
            parts.stopping.set()
            await running

    asyncio.run(main())
    return gpus


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await call
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("kv-error-code", "UNAVAILABLE") in tuple(told.value.trailing_metadata() or ())
    return str(told.value.details())


def test_one_gpu_of_two_falls_off_the_bus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(site: Site) -> None:
        good, bad = site.gpus
        life = LifeConnection(site.socket, 5.0, lambda: None)
        await asyncio.to_thread(life.start)
        kept = await site.open(await site.register("m", good), life)
        await site.register("m", bad)
        before = await site.status()
        assert (before.ready, before.live) == (True, True)
        assert [device.healthy for device in before.devices] == [True, True]
        bad.is_dead = True
        await site.until("", NOT_SERVING)
        assert await site.check("live") == SERVING, "an engine of the other GPU has a lease"
        status = await site.status()
        assert (status.ready, status.live) == (False, True)
        assert [(device.healthy, device.fault) for device in status.devices] == [
            (True, ""),
            (False, "free_bytes broke"),
        ]
        for model in ("m", "another"):
            said = await refused(site.register(model, bad))
            assert bad.uuid in said
            assert f"register on {good.uuid}" in said
            assert "restart" in said
        await site.register("another", good)
        await site.leases.Close(lease_pb2.CloseRequest(lease_id=kept, quiesced=True))
        await site.until("live", NOT_SERVING)
        await asyncio.to_thread(life.close)

    with caplog.at_level(logging.INFO):
        gpus = on_two_gpus(tmp_path, story)
    lost = [record for record in caplog.records if record.getMessage() == "device_lost"]
    assert len(lost) == 1
    assert json.loads(json.dumps(vars(lost[0])["fields"]))["devices_left"] == 1
    assert sum(record.getMessage().startswith("gpu_broken") for record in caplog.records) == 1
    assert all(gpu.is_whole() for gpu in gpus)


def test_with_no_gpu_left_there_is_nothing_to_keep_alive(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        life = LifeConnection(site.socket, 5.0, lambda: None)
        await asyncio.to_thread(life.start)
        await site.open(await site.register("m", site.gpus[0]), life)
        for gpu in site.gpus:
            gpu.is_dead = True
        await site.until("live", NOT_SERVING)
        assert await site.check("") == NOT_SERVING
        said = await refused(site.register("n", site.gpus[1]))
        assert "register on" not in said
        await asyncio.to_thread(life.close)

    on_two_gpus(tmp_path, story)


def test_a_layout_that_names_no_device_is_told_of_the_first_ones_fault(tmp_path: Path) -> None:
    async def story(site: Site) -> None:
        site.gpus[0].is_dead = True
        await site.until("", NOT_SERVING)
        request = engine_pb2.RegisterRequest(
            model="m", layout=layout_to_proto(opaque(block_bytes=4096, block_tokens=16, layers=1))
        )
        assert site.gpus[0].uuid in await refused(site.engine.Register(request))
        assert isinstance(request.layout, common_pb2.Layout)

    on_two_gpus(tmp_path, story)
