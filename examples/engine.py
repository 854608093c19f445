"""An inference engine that keeps its keys and values in the node's cache: all that a client does, in one file.

One request's life, which `CachedEngine.answer` follows line by line:

    hash      the prompt's full blocks get keys, chained from the model's namespace on
    match     the longest prefix that anybody on this node has computed, pinned for this request
    allocate  pages for the rest; what lies in host memory starts to load into device pages
    compute   in place, in the daemon's own pages; before layer l wait until layer l has been loaded
    publish   blocks that are full and computed are sealed: from now on they are everybody's
    recycle   what no window reaches back to is given back
    release   the pins go; what was published stays, whatever becomes of this process

Takes requests on standard input and answers on standard output, one JSON line each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from cachesvc_client import (
    KEY_BYTES,
    AttachedPool,
    BlockHasher,
    CacheClient,
    CacheClientError,
    Layout,
    Lease,
    Plane,
    PlaneGroup,
    Sequence,
)

from examples.tiny_transformer.config import TinyConfig, list_groups, list_planes
from examples.tiny_transformer.digest import digest_model
from examples.tiny_transformer.generate import Drafts, generate
from examples.tiny_transformer.model import Planes, Tables, TinyTransformer, build_model, make_planes
from examples.tiny_transformer.tokens import Tokens
from examples.tiny_transformer.variants import VARIANTS

LOAD_SECONDS = 30.0  # for one layer; a healthy load takes milliseconds


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine at its start. An empty ``socket``: without a cache."""

    name: str
    variant: str
    socket: str = ""
    device_blocks: int = 0
    host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """Said once: how long it took to build the model, and then to have its cache back."""

    model_seconds: float
    attach_seconds: float = 0.0
    model_id: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """``device_tokens`` of the prompt were in place, ``host_tokens`` loaded. ``went_alone``: why without the cache.

    The model ``accepted`` some of the ``proposed`` tokens of a draft layer.
    """

    tokens: list[int]
    first_token_seconds: float
    device_tokens: int = 0
    host_tokens: int = 0
    went_alone: str = ""
    proposed: int = 0
    accepted: int = 0


class CachedEngine:
    """Answers one request at a time through a lease and the device pool that it has mapped."""

    def __init__(self, model: TinyTransformer, lease: Lease, pool: AttachedPool) -> None:
        self._model = model
        self._lease = lease
        self._pool = pool
        self._planes = planes_of(model, pool)

    def answer(self, prompt: Tokens, new_tokens: int) -> Answer:
        """Answer a prompt. No request fails because of the cache: the engine can compute by itself.

        A lost lease stays lost; an engine that is to run for long comes back with `cachesvc_client.Reattacher`.
        """
        began = time.perf_counter()
        try:
            return self._answer(prompt, new_tokens, began)
        except CacheClientError as error:
            return answer_alone(self._model, prompt, new_tokens, began, f"{type(error).__name__}: {error}")

    def _answer(self, prompt: Tokens, new_tokens: int, began: float) -> Answer:
        block_tokens = self._model.config.block_tokens
        hasher = BlockHasher(self._lease.registration.namespace, block_tokens)
        hasher.extend(prompt)
        with self._lease.match(reusable_keys(hasher, len(prompt))) as sequence:
            answer: list[int] = []
            drafts = Drafts()
            first_token_seconds = 0.0

            def tables_for(blocks: int, computed_tokens: int) -> Tables:
                if answer:
                    seal_blocks(sequence, hasher, computed_tokens)
                sequence.allocate(blocks)
                return name_tables(sequence, self._pool.layout)

            def wait_layer(layer: int) -> None:
                for ticket in sequence.tickets:
                    self._pool.wait_layer(ticket, layer, LOAD_SECONDS)

            hit_tokens = sequence.hit_blocks * block_tokens
            for token in generate(
                self._model, prompt, hit_tokens, new_tokens, tables_for, self._planes, wait_layer, drafts
            ):
                if not answer:
                    first_token_seconds = time.perf_counter() - began
                answer.append(token)
                hasher.extend([token])
            # No call computed what follows the last token, so its keys and values are missing.
            seal_blocks(sequence, hasher, len(prompt) + new_tokens - 1)
            self._lease.make_sure(LOAD_SECONDS)  # a process that was stopped may have read what others wrote since
            return Answer(
                answer,
                first_token_seconds,
                device_tokens=sequence.device_blocks * block_tokens,
                host_tokens=sequence.host_blocks * block_tokens,
                proposed=drafts.proposed,
                accepted=drafts.accepted,
            )


def planes_of(model: TinyTransformer, pool: AttachedPool) -> Planes:
    """The daemon's pages as the model's arrays: one array for each plane of each group, over the same bytes."""
    return {
        (plane.group, plane.layer, plane.name): model.arrays.plane_of(pool, plane.layer, plane.name, plane.group)
        for plane in pool.layout.own_planes
    }


def reusable_keys(hasher: BlockHasher, prompt_tokens: int) -> bytes:
    """Keys of the blocks that a hit may have.

    At least one token is left to compute, because the first one of the answer comes out of its logits. (Not by
    ``max_blocks``: for a prompt of one block that would be 0, which is no limit.)
    """
    return bytes(hasher.keys[: (prompt_tokens - 1) // hasher.block_tokens * KEY_BYTES])


def seal_blocks(sequence: Sequence, hasher: BlockHasher, computed_tokens: int) -> None:
    """Publish the full blocks of what was computed, then give back what the sequence needs no more.

    Where another engine was faster, the sequence goes on with that engine's pages, and its own are given back too. So
    call it between two steps, while nothing computes, and take the tables anew.
    """
    full_blocks = computed_tokens // hasher.block_tokens
    if full_blocks > sequence.sealed_blocks:
        sequence.publish(full_blocks, bytes(hasher.keys))
    sequence.recycle(computed_tokens)


def name_tables(sequence: Sequence, layout: Layout) -> Tables:
    """The page of each block, by the name of the group."""
    return {group.name: table for group, table in zip(layout.groups, sequence.tables, strict=True)}


def answer_alone(model: TinyTransformer, prompt: Tokens, new_tokens: int, began: float, why: str) -> Answer:
    """Answer a prompt that came at ``began`` without the cache, in private pages that end with the answer."""
    config = model.config
    blocks = -(-(len(prompt) + new_tokens) // config.block_tokens)
    planes, drafts = make_planes(model, blocks), Drafts()
    tables = {group.name: np.arange(blocks, dtype=np.int32) for group in config.groups}
    stream = generate(model, prompt, 0, new_tokens, lambda *_: tables, planes, lambda _: None, drafts)
    first = next(stream)
    first_token_seconds = time.perf_counter() - began
    tokens = [first, *stream]
    return Answer(tokens, first_token_seconds, went_alone=why, proposed=drafts.proposed, accepted=drafts.accepted)


def layout_of(config: TinyConfig, ranks: int = 1) -> Layout:
    """Layout that a model registers: the planes and groups of a block on each rank."""
    return Layout(
        block_tokens=config.block_tokens,
        ranks=ranks,
        groups=tuple(PlaneGroup(*group) for group in list_groups(config)),
        planes=tuple(Plane(*plane) for plane in list_planes(config.shard(ranks))),
    )


def serve(ready: Ready, answer: Callable[[Tokens, int], Answer]) -> None:
    """Say that the engine is ready, then answer every request until standard input ends."""
    _say(asdict(ready))
    for line in sys.stdin:
        request = json.loads(line)
        _say(asdict(answer(np.array(request["prompt"], dtype=np.int32), request["new_tokens"])))


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


USAGE = """usage: python -m examples.engine SETTINGS, with settings as JSON, such as
  {"name": "a", "variant": "tiny-gqa", "socket": "/tmp/kv.sock", "device_blocks": 320, "host_blocks": 320}
and then a request a line on standard input: {"prompt": [1, 2, 3], "new_tokens": 4}"""


def main() -> None:
    """Build the model, connect and serve."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        sys.exit(USAGE)
    settings = EngineSettings(**json.loads(sys.argv[1]))
    began = time.perf_counter()
    model = build_model(VARIANTS[settings.variant])
    # Engines share what they compute only where the name is the same, so it stands for the very bits.
    name = f"{settings.variant}@{digest_model(model)}"
    model_seconds = time.perf_counter() - began
    if not settings.socket:
        why = "started without a cache"
        serve(Ready(model_seconds), lambda prompt, count: answer_alone(model, prompt, count, time.perf_counter(), why))
        return
    layout = layout_of(model.config)
    began = time.perf_counter()
    with CacheClient(settings.socket, engine=settings.name) as client:
        registration = client.register(
            name,
            layout,
            device_pages=[settings.device_blocks] * len(layout.groups),
            host_pages=[settings.host_blocks] * len(layout.groups),
        )
        with client.open_lease(registration) as lease, lease.attach() as pool:
            attach_seconds = time.perf_counter() - began
            ready = Ready(model_seconds, attach_seconds, registration.model_id)
            serve(ready, CachedEngine(model, lease, pool).answer)


if __name__ == "__main__":
    main()
