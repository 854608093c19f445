"""An engine on a GPU: kernels fill its pages with bytes of their block's, and check them.

The same as ``tests.e2e.engine`` in all else. ``remote`` runs one in a process of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cachesvc_client import KEY_BYTES, NO_PAGE, Layout, TicketView, gqa
from cachesvc_client.sequence import Sequence as CacheSequence
from kvcache.v1 import admin_pb2

from cachesvc.model.layout import Plane, PlaneGroup
from gpu_ops.kernels.pages import Stamps, check_pages, count_wrong, stamp_pages, stamps
from tests.e2e.engine import BLOCK_TOKENS, Engine, Tabled
from tests.e2e.rig import Node, wait_until
from tests.gpu.frameworks import cupy

SMALL = gqa(layers=4, kv_heads=4, head_dim=64, block_tokens=BLOCK_TOKENS)
LARGE = gqa(layers=32, kv_heads=32, head_dim=128, block_tokens=BLOCK_TOKENS)
"""128 KiB a plane and 8 MiB a block: 150 of them are a load that lasts."""
MIXED = Layout(
    BLOCK_TOKENS,
    1,
    (PlaneGroup("full"), PlaneGroup("window", 40)),
    (
        *(Plane(name, layer, "full", (2, 16, 64), "float8_e4m3fn") for layer in (0, 2) for name in ("k", "v")),
        *(Plane(name, layer, "full", (2, 16), "float32") for layer in (0, 2) for name in ("k_scale", "v_scale")),
        *(Plane(name, layer, "window", (1, 16, 33), "bfloat16") for layer in (1, 3) for name in ("k", "v")),
    ),
)
"""Two groups, three widths, 8-bit planes with scales."""
LAYOUTS = {"small": SMALL, "large": LARGE, "mixed": MIXED}

CUDA = ("--backend", "cuda", "--device-pool", "2GiB", "--host-pool", "2GiB", "--calibration", "never")
BACKED_UP = (*CUDA, "--write-policy", "write_through")
SLOWLY = (*BACKED_UP, "--load-limit", "200MiB")
"""A rate at which 1.2 GiB take six seconds, for tests that act in the middle of a load."""


class PlaneChecks(NamedTuple):
    """A plane with the pages of a sequence in it."""

    layer: int
    name: str
    group: str
    plane: Any
    positions: list[int]
    marks: Stamps


def plane_seeds(keys: bytes, positions: Sequence[int], layer: int, name: str) -> npt.NDArray[np.uint64]:
    """One seed for each block in one plane, out of its key."""
    words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)[list(positions), 0].astype(np.uint64)
    salt = hashlib.blake2b(f"{layer} {name}".encode(), digest_size=8).digest()
    return words ^ np.uint64(int.from_bytes(salt, "little"))


class GpuEngine(Engine):
    """``stream`` is where it computes."""

    def start(self) -> GpuEngine:
        """Connect, register, open the lease, attach."""
        super().start()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        return self

    def __enter__(self) -> GpuEngine:
        return self.start()

    def planes(
        self, sequence: Tabled, keys: bytes, positions: Iterable[int], layers: Iterable[int] | None = None
    ) -> Iterator[PlaneChecks]:
        """Every plane (of ``layers``), with what belongs into the pages of the blocks; holes are passed over."""
        wanted = set(range(self.layout.layers) if layers is None else layers)
        every = list(positions)
        for group, table in zip(self.layout.groups, sequence.tables, strict=True):
            here = [position for position in every if table[position] != NO_PAGE]
            for (layer, name), plane in self.pool.group_planes(group.name).items() if here else ():
                if layer in wanted:
                    marks = stamps(table[here], plane_seeds(keys, here, layer, name))
                    yield PlaneChecks(layer, name, group.name, plane, here, marks)

    def fill(self, sequence: Tabled, keys: bytes, positions: Iterable[int]) -> None:
        """Compute blocks, and wait for it."""
        for each in self.planes(sequence, keys, positions):
            stamp_pages(each.plane, each.marks, self.stream.ptr)
        self.stream.synchronize()

    def bad(
        self, sequence: Tabled, keys: bytes, positions: Iterable[int], layers: Iterable[int] | None = None
    ) -> list[str]:
        """Planes of blocks that hold other bytes than they should."""
        return [
            f"block {each.positions[int(at)]} {each.name}.{each.layer}.{each.group}"
            for each in self.planes(sequence, keys, positions, layers)
            for at in np.flatnonzero(count_wrong(each.plane, each.marks, self.stream.ptr))
        ]

    def check_behind_waits(self, sequence: CacheSequence, keys: bytes, ticket: TicketView, stream: Any) -> list[Any]:
        """Queue for each layer a wait for it and checks of it on ``stream``; returns the counters of wrong words, and
        what must live until they are read. Nothing here waits, allocates or loads once ``prepare`` was called."""
        return self.queue_checks(self.prepare(sequence, keys), ticket, stream)

    def prepare(self, sequence: CacheSequence, keys: bytes) -> list[tuple[PlaneChecks, Any]]:
        """Arrays on the device, and kernels, for the checks of a hit; counters begin as nonsense."""
        every = list(self.planes(sequence, keys, range(sequence.hit_blocks)))
        assert every
        count_wrong(every[0].plane, every[0].marks, self.stream.ptr)
        prepared = [(each, cupy.full(len(each.marks), 0xDEADBEEF, np.uint32)) for each in every]
        cupy.cuda.get_current_stream().synchronize()
        return sorted(prepared, key=lambda one: one[0].layer)

    def queue_checks(self, prepared: list[tuple[PlaneChecks, Any]], ticket: TicketView, stream: Any) -> list[Any]:
        """The counters, which are right once ``stream`` has come so far."""
        waited = -1
        for each, wrong in prepared:
            if each.layer != waited:
                waited = each.layer
                self.pool.wait_layer_on(stream, ticket, waited)
            check_pages(each.plane, each.marks, wrong, stream.ptr)
        return [wrong for _, wrong in prepared]


def take_to_host(node: Node, engine: GpuEngine, tokens: Sequence[int]) -> None:
    """Have a prompt on the host alone, and other bytes in every page of the device. The daemon writes through."""
    blocks = len(tokens) // BLOCK_TOKENS
    before = node.pages("sealed", "host")
    engine.serve(tokens)
    wait_until(lambda: node.pages("sealed", "host") >= before + blocks, "the prompt is on the host")
    wait_until(lambda: node.pages("in_flight") == 0, "stores have ended")
    node.admin.Evict(admin_pb2.EvictRequest(model_id=engine.registration.model_id, tier="device"))
    scribble(engine)
    with engine.lease.match(engine.keys(tokens)) as sequence:
        assert (sequence.device_blocks, sequence.host_blocks) == (0, blocks)


def scribble(engine: GpuEngine) -> None:
    """Write other bytes into every free page of the device, so that what is right later has come there by a load."""
    pages = min(engine.registration.device_pages)
    rng = np.random.default_rng(pages)
    keys = rng.bytes(pages * KEY_BYTES)
    with engine.lease.match(b"") as sequence:
        sequence.allocate(pages)
        engine.fill(sequence, keys, range(pages))
