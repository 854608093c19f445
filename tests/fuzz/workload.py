"""Requests that make sense: engines that match, grow, publish, swap, recycle and release, so that fuzzing gets deep."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from cachesvc_client import Layout, Plane, PlaneGroup, gqa_windowed, opaque
from cachesvc_client.core.keys import block_keys
from google.protobuf.message import Message
from kvcache.v1 import cache_pb2, common_pb2, engine_pb2, lease_pb2

from cachesvc.wire.convert import layout_to_proto
from tests.fuzz.pools import PROMPT_BLOCKS, PROMPTS, Held, Lease, Pools

BLOCK_TOKENS = 4
LAYOUTS: tuple[Layout, ...] = (
    opaque(block_bytes=64, block_tokens=BLOCK_TOKENS, layers=2),
    gqa_windowed(
        window_layers=[False, True],
        kv_heads=1,
        head_dim=8,
        block_tokens=BLOCK_TOKENS,
        window_tokens=2 * BLOCK_TOKENS + 1,
    ),
)
POOLED = Layout(
    BLOCK_TOKENS,
    1,
    (
        PlaneGroup("full", pool="kv"),
        PlaneGroup("window", 2 * BLOCK_TOKENS + 1, pool="kv"),
        PlaneGroup("state", pool="kv", is_state=True),
    ),
    (
        Plane("k", 0, "full", (1, BLOCK_TOKENS, 8), "float16"),
        Plane("k", 1, "window", (1, BLOCK_TOKENS, 8), "float16"),
        Plane("ssm", 2, "state", (5, 7), "float32"),
    ),
)
"""Three groups of one pool, one of them of states."""
STATE = 2
LAYOUTS = (*LAYOUTS, POOLED)
DEVICE_PAGES = 48
HOST_PAGES = 64
Request = tuple[str, Message]


def registers() -> list[engine_pb2.RegisterRequest]:
    """Three models and, of the first, a second replica and a second tenant."""
    wishes = [("model@1", 0, b"", "shm-0"), ("model@1", 0, b"", "shm-1"), ("model@2", 1, b"", "shm-0")]
    wishes += [("model@1", 0, b"other tenant", "shm-1"), ("model@3", 2, b"", "shm-1")]
    out = []
    for name, layout, salt, device in wishes:
        groups = len(LAYOUTS[layout].groups)
        out.append(
            engine_pb2.RegisterRequest(
                model=name,
                layout=layout_to_proto(LAYOUTS[layout]),
                tenant_salt=salt,
                devices=[device],
                device_pool=engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=[DEVICE_PAGES] * groups)),
                host_pool=engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=[HOST_PAGES] * groups)),
                reserved_pages=layout,
            )
        )
    return out


def prompts(namespace: bytes) -> list[bytes]:
    """Keys of a few prompts that branch off one another."""
    rng = random.Random(1)
    base = [rng.randrange(1000) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS)]
    out = []
    for index in range(PROMPTS):
        cut = (index % 4) * 6 * BLOCK_TOKENS
        tail = random.Random(index)
        tokens = base[:cut] + [tail.randrange(1000) for _ in range(len(base) - cut)]
        out.append(block_keys(namespace, tokens, BLOCK_TOKENS))
    return out


class Workload:
    """Draws the next sensible request, and learns from what comes back."""

    def __init__(self, rng: random.Random, pools: Pools) -> None:
        self.rng = rng
        self.pools = pools
        self._moves: dict[str, Callable[[Lease], Message | None]] = {
            "Match": self._match,
            "Allocate": self._allocate,
            "Publish": self._publish,
            "Swap": self._swap,
            "Recycle": self._recycle,
            "Release": self._release,
            "Prefetch": self._prefetch,
            "Step": self._step,
            "WaitTickets": self._wait,
        }

    def draw(self) -> Request | None:
        """An RPC's name and its request; None where there is no lease."""
        if not self.pools.leases:
            return None
        lease = self.rng.choice(self.pools.leases)
        names = (
            "Match",
            "Allocate",
            "Allocate",
            "Publish",
            "Publish",
            "Step",
            "Step",
            "Swap",
            "Recycle",
            "Release",
            "Prefetch",
        )
        name = self.rng.choice((*names, "WaitTickets"))
        request = self._moves[name](lease)
        return None if request is None else (name, request)

    def learn(self, request: Any, answers: list[Any]) -> None:
        """Keep the ids that an answer tells, so that later messages can name them."""
        for answer in answers:
            for ticket in getattr(answer, "tickets", ()):
                self.pools.tickets.append(ticket.id)
            lease = next((one for one in self.pools.leases if one.id == getattr(request, "lease_id", None)), None)
            if lease is None:
                continue
            if isinstance(answer, cache_pb2.StepResponse):
                for group in answer.stock:
                    pages = struct.unpack(f"<{len(group.pages) // 4}i", group.pages)
                    generations = struct.unpack(f"<{len(group.generations) // 4}I", group.generations)
                    lease.stock[group.group] += zip(pages, generations, strict=True)
                for operation, result in zip(request.operations, answer.results, strict=False):
                    name = operation.WhichOneof("operation")
                    if name is not None and result.WhichOneof("result") == name:
                        self._learn_one(lease, getattr(operation, name), getattr(result, name))
            else:
                self._learn_one(lease, request, answer)

    def _learn_one(self, lease: Lease, request: Any, answer: Any) -> None:
        held = lease.sequences.get(getattr(request, "sequence_id", -1))
        if isinstance(answer, cache_pb2.MatchResponse):
            hit = answer.device_blocks + answer.host_blocks
            lease.sequences[request.sequence_id] = Held(answer.device_blocks, answer.device_blocks, hit, request.keys)
        elif isinstance(answer, cache_pb2.ReleaseResponse):
            lease.sequences.pop(request.sequence_id, None)
        elif held is None:
            return
        elif isinstance(answer, cache_pb2.AllocateResponse):
            held.blocks = max(held.blocks, request.blocks)
            held.sealed = max(held.sealed, held.hit)
            for cells in answer.tables if lease.groups == len(POOLED.groups) else ():
                if cells.group == STATE:
                    pages = struct.unpack(f"<{len(cells.pages) // 4}i", cells.pages)
                    held.states |= {at: page for at, page in enumerate(pages, cells.first_block) if page >= 0}
        elif isinstance(answer, cache_pb2.PublishResponse):
            held.sealed = answer.sealed_blocks

    def _pick(self, lease: Lease) -> tuple[int, Held] | None:
        return self.rng.choice(list(lease.sequences.items())) if lease.sequences else None

    def _match(self, lease: Lease) -> Message:
        if len(lease.sequences) > 10:
            return self._release(lease) or lease_pb2.CloseRequest()
        lease.next_sequence += 1
        keys = self.rng.choice(lease.keys)
        return cache_pb2.MatchRequest(
            lease_id=lease.id,
            request_id=self._request(lease),
            sequence_id=lease.next_sequence,
            keys=keys[: 32 * self.rng.randrange(1, PROMPT_BLOCKS + 1)],
            max_blocks=self.rng.choice((0, 0, 0, 4)),
        )

    def _allocate(self, lease: Lease) -> Message | None:
        picked = self._pick(lease)
        if picked is None:
            return None
        number, held = picked
        blocks = min(max(held.blocks, held.hit) + self.rng.randrange(5), 30)
        request = cache_pb2.AllocateRequest(
            lease_id=lease.id, request_id=self._request(lease), sequence_id=number, blocks=blocks
        )
        if lease.groups == len(POOLED.groups) and self.rng.random() < 0.5:
            first = max(held.blocks, held.hit)
            wanted = [position for position in range(first, blocks) if self.rng.random() < 0.5]
            request.positions.add(group=STATE, positions=struct.pack(f"<{len(wanted)}I", *wanted))
        return request

    def _publish(self, lease: Lease) -> Message | None:
        picked = self._pick(lease)
        if picked is None:
            return None
        number, held = picked
        last = min(held.blocks, len(held.keys) // 32)
        count = self.rng.randrange(1, max(2, last - held.sealed + 1))
        request = cache_pb2.PublishRequest(
            lease_id=lease.id,
            request_id=self._request(lease),
            sequence_id=number,
            first_block=held.sealed,
            blocks=count,
        )
        for position in self.rng.sample(sorted(held.states), self.rng.randint(0, len(held.states))):
            request.states.add(group=STATE, first_block=position, pages=struct.pack("<i", held.states[position]))
        return request

    def _swap(self, lease: Lease) -> Message | None:
        picked = self._pick(lease)
        if picked is None:
            return None
        return cache_pb2.SwapRequest(
            lease_id=lease.id,
            request_id=self._request(lease),
            sequence_id=picked[0],
            direction=self.rng.choice((cache_pb2.SWAP_DIRECTION_OUT, cache_pb2.SWAP_DIRECTION_IN)),
        )

    def _recycle(self, lease: Lease) -> Message | None:
        picked = self._pick(lease)
        if picked is None:
            return None
        number, held = picked
        dead = lease.groups == len(POOLED.groups) and self.rng.random() < 0.3
        return cache_pb2.RecycleRequest(
            lease_id=lease.id,
            request_id=self._request(lease),
            sequence_id=number,
            computed_tokens=self.rng.randrange(held.blocks * BLOCK_TOKENS + 1),
            pages=self._from_stock(lease) if self.rng.random() < 0.2 else (),
            dead_blocks=[self.rng.randrange(held.blocks + 1) for _ in range(2)] if dead else (),
        )

    def _release(self, lease: Lease) -> Message | None:
        picked = self._pick(lease)
        if picked is None:
            return None
        return cache_pb2.ReleaseRequest(lease_id=lease.id, request_id=self._request(lease), sequence_id=picked[0])

    def _prefetch(self, lease: Lease) -> Message:
        keys = self.rng.choice(lease.keys)
        return cache_pb2.PrefetchRequest(lease_id=lease.id, request_id=self._request(lease), keys=keys)

    def _wait(self, lease: Lease) -> Message:
        return cache_pb2.WaitTicketsRequest(
            lease_id=lease.id, tickets=[self.rng.choice(self.pools.tickets)], wait_ms=self.rng.choice((0, 2))
        )

    def _step(self, lease: Lease) -> Message:
        step = cache_pb2.StepRequest(lease_id=lease.id, request_id=lease.request())
        for _ in range(self.rng.randrange(1, 6)):
            name = self.rng.choice(("match", "allocate", "publish", "recycle", "release", "prefetch", "extend", "swap"))
            operation = step.operations.add()
            if name == "extend":
                picked = self._pick(lease)
                operation.extend.sequence_id = picked[0] if picked else 1
                operation.extend.pages.extend(self._from_stock(lease))
                continue
            made = self._moves[name.capitalize()](lease)
            if made is not None and isinstance(made, type(getattr(operation, name))):
                getattr(operation, name).CopyFrom(made)
        if self.rng.random() < 0.4:
            self._put_columns(lease, step)
        if self.rng.random() < 0.5:
            step.stock_pages.extend(self.rng.randrange(4) for _ in range(lease.groups))
        return step

    def _put_columns(self, lease: Lease, step: cache_pb2.StepRequest) -> None:
        """Growth, publishes, recycles and releases of a few sequences."""
        columns = step.columns
        numbers = [picked for _ in range(self.rng.randrange(1, 4)) if (picked := self._pick(lease)) is not None]
        ids = struct.pack(f"<{len(numbers)}Q", *(number for number, _ in numbers))
        if self.rng.random() < 0.7:
            columns.grow_sequences = ids
            pages = [self._from_stock(lease) for _ in numbers]
            for group in range(lease.groups):
                mine = [each[group] for each in pages]
                columns.grow.add(
                    group=group,
                    pages=b"".join(each.pages for each in mine),
                    generations=b"".join(each.generations for each in mine),
                )
        if self.rng.random() < 0.7:
            columns.publish_sequences = ids
            columns.publish_first = struct.pack(f"<{len(numbers)}I", *(held.sealed for _, held in numbers))
        if self.rng.random() < 0.3:
            columns.recycle_sequences = ids
            tokens = [self.rng.randrange(held.blocks * BLOCK_TOKENS + 1) for _, held in numbers]
            columns.recycle_tokens = struct.pack(f"<{len(numbers)}Q", *tokens)
        if self.rng.random() < 0.2:
            columns.release_sequences = ids

    def _from_stock(self, lease: Lease) -> list[common_pb2.GroupPages]:
        """One page of every group's stock."""
        out = []
        for group in range(lease.groups):
            is_pooled = lease.groups == len(POOLED.groups)
            stock = lease.stock[0 if is_pooled else group]
            page, generation = stock.pop() if stock else (0, 1)
            if is_pooled and group and self.rng.random() < 0.4:
                page, generation = -1, 0
            out.append(
                common_pb2.GroupPages(
                    group=group, pages=struct.pack("<i", page), generations=struct.pack("<I", generation)
                )
            )
        return out

    def _request(self, lease: Lease) -> int:
        """Mostly a new id, at times none, at times one that was used."""
        return self.rng.choice((0, 0, lease.request(), lease.next_request))
