"""Hits of models with windows and states by group of conversations, beside plain attention and the offline optimum.

    python -m benchmarks.windows.conversations [--json OUT] [--layouts gpt-oss ...] [--modes write_back ...]

Groups of six conversations take turns, a group after another, over a real daemon on shared memory; a turn has ten new
blocks, and is in chunks, at whose ends a state is published. As vLLM's, the engine computes a part of the next block
before a request ends, and lets go of what that needs no more. Each byte of a hit is compared. The device has pages for
three conversations, the host for nine whole ones, in each layout; with a disk or a bucket below it the host has pages
for three. ``peers``: another node computes each prompt and lends it, and the hits are those of the node that decodes.

A figure is the share of a group's known blocks that are hit; ``relative``: to plain attention's in the same mode.
``optimum``: the share that any order could hit on device and host together, of plain blocks.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from cachesvc_client import KEY_BYTES, Expected, Layout, Plane, PlaneGroup
from cachesvc_lab.grid import optimal_hits
from cachesvc_lab.traces import TraceRequest, prompts_of
from kvcache.v1 import storage_pb2

from benchmarks.support.machine import fail
from benchmarks.support.recording import parser_of, save
from tests.contracts import s3_rig
from tests.e2e.engine import BLOCK_TOKENS, WAIT_SECONDS, Engine, prompt
from tests.e2e.rig import Node, running_node, wait_until

MEMBERS, TURNS, NEW = 6, 4, 10
CHUNK = 5
BLOCKS = TURNS * NEW
KNOWN = MEMBERS * NEW * sum(range(TURNS))
ON_DEVICE, ON_HOST = 3, 9
"""Conversations that the pools hold whole."""
BELOW = ("disk", "s3")
MODES = ("write_through", "write_back", *BELOW, "peers")
PLAIN = "plain"


class Shape(NamedTuple):
    """Groups beside that of full attention: ``states`` with a page a chunk, ``windows`` of ``window_blocks``."""

    states: int = 0
    windows: int = 0
    window_blocks: int = 0

    def layout(self) -> Layout:
        """One pool for all groups, whose pages have one size, as vLLM's have."""
        states = [PlaneGroup(f"state{n}", pool="kv", is_state=True) for n in range(self.states)]
        tokens = self.window_blocks * BLOCK_TOKENS
        windows = [PlaneGroup(f"window{n}", tokens, pool="kv") for n in range(self.windows)]
        groups = (PlaneGroup("full", pool="kv" if states or windows else ""), *states, *windows)
        planes = tuple(Plane("kv", layer, group.name, (1024,), "uint8") for layer, group in enumerate(groups))
        return Layout(BLOCK_TOKENS, 1, groups, planes)

    @property
    def conversation_pages(self) -> int:
        """Pages of a whole conversation: its blocks, the state of each chunk, and its last window."""
        return BLOCKS + self.states * BLOCKS // CHUNK + self.windows * self.window_blocks

    @property
    def running_pages(self) -> int:
        """Pages that a running chunk takes beside its conversation's."""
        return (1 + self.states + self.windows) * (CHUNK + self.window_blocks + 1)


SHAPES = {
    PLAIN: Shape(),
    "gpt-oss": Shape(windows=1, window_blocks=2),
    "gemma-3": Shape(windows=5, window_blocks=2),
    "qwen3-next": Shape(states=3),
    "granite-4": Shape(states=1),
}


class Rig(NamedTuple):
    """Engine whose hits count, its daemons, and what is done before it asks for a prompt."""

    engine: Engine
    nodes: list[Node]
    ahead: Callable[[list[int]], Expected | None]


@contextmanager
def running(shape: Shape, mode: str, folder: Path) -> Iterator[Rig]:
    """The rig of a mode, with the pools of a shape."""
    each = shape.conversation_pages
    device, host = ON_DEVICE * each + shape.running_pages, (ON_DEVICE if mode in BELOW else ON_HOST) * each
    layout = shape.layout()
    with ExitStack() as stack:

        def started(flags: list[str], device_pages: int, host_pages: int) -> tuple[Node, Engine]:
            node = stack.enter_context(running_node(flags))
            made = Engine(node.socket, layout=layout, device_pages=device_pages, host_pages=host_pages)
            return node, stack.enter_context(made)

        if mode == "peers":
            lends = ["--peer-listen", "127.0.0.1:0", "--write-policy", "write_through"]
            lender, prefill = started(lends, 2 * device, 2 * host)
            borrower, engine = started(["--peer-allow", "127.0.0.0/8"], device, host)

            def compute(tokens: list[int]) -> Expected:
                serve(prefill, tokens)
                settle([lender])
                return Expected(prefill.registration.peer_address, patience=WAIT_SECONDS, is_computed=True)

            yield Rig(engine, [lender, borrower], compute)
            return
        flags = ["--write-policy", "write_through" if mode in BELOW else mode]
        if mode == "disk":
            flags += ["--storage", f"file:{folder}/cache?capacity=1GiB&floor=0&write=through&wait=5s"]
        if mode == "s3":
            server = s3_rig.shared_server()
            options = s3_rig.options_of(server)
            server.wait(options)
            bucket = f"s3://{options.bucket}/{options.prefix}?endpoint={server.endpoint}"
            flags += ["--storage", f"{bucket}&write=through&wait=5s&absent=100ms"]
        node, engine = started(flags, device, host)
        yield Rig(engine, [node], lambda _: None)


def serve(engine: Engine, tokens: list[int], expected: Expected | None = None) -> int:
    """Hit of a prompt, in blocks; computes the rest in chunks, and a part of the block behind it."""
    keys = engine.keys(tokens)
    blocks = len(keys) // KEY_BYTES
    states = [group for group, each in enumerate(engine.layout.groups) if each.is_state]
    with engine.lease.match(keys, expected=expected) as sequence:
        hit = sequence.hit_blocks
        if hit:
            sequence.allocate(hit)
            sequence.wait_loaded(WAIT_SECONDS)
            if bad := engine.bad(sequence, keys, range(hit)):
                raise RuntimeError(f"wrong bytes: {bad}")
        for first in range(hit, blocks, CHUNK):
            last = min(first + CHUNK, blocks)
            sequence.allocate(last)
            engine.fill(sequence, keys, range(first, last))
            ends = {group: {last - 1: int(sequence.tables[group][last - 1])} for group in states}
            sequence.publish(last, states=ends)
            sequence.recycle(last * BLOCK_TOKENS, dead=dict.fromkeys(states, last))
    return hit


def settle(nodes: list[Node]) -> None:
    """Wait until nothing is copied or written any more: an engine computes for longer than that takes."""
    for node in nodes:
        wait_until(lambda node=node: is_idle(node), "all copies have ended")  # type: ignore[misc]


def is_idle(node: Node) -> bool:
    """True where nothing is copied to the host or written below it."""
    tiers = node.admin.GetStorage(storage_pb2.GetStorageRequest()).tiers
    return not node.counters()["tickets_running"] and not any(tier.items_under_way for tier in tiers)


def measure(shape: Shape, mode: str, groups: int) -> tuple[list[float], float]:
    """Share of the known blocks that each group hits; and the seconds that it took."""
    found: list[float] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conversations-") as folder, running(shape, mode, Path(folder)) as rig:
        for group in range(groups):
            hits = known = 0
            for turn, member in product(range(TURNS), range(MEMBERS)):
                tokens = prompt(MEMBERS * group + member, (turn + 1) * NEW)
                expected = rig.ahead(tokens)
                hits += serve(rig.engine, tokens, expected)
                settle(rig.nodes)
                known += NEW * (turn + (expected is not None))
            found.append(hits / known)
    return found, time.monotonic() - began


def optimum(groups: int) -> float:
    """Share of the known blocks that an order which knows the future hits, of plain blocks."""
    turns = product(range(groups), range(1, TURNS + 1), range(MEMBERS))
    heads = ((BLOCKS * (MEMBERS * group + member), turn * NEW) for group, turn, member in turns)
    requests = (TraceRequest(n, n, 1, 1, tuple(range(at, at + count))) for n, (at, count) in enumerate(heads))
    return sum(optimal_hits(prompts_of("", requests, 1), ON_DEVICE * BLOCKS, ON_HOST * BLOCKS)) / KNOWN / groups


def main() -> None:
    """Print each row and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--groups", type=int, default=6)
    said = parser.parse_args()
    if "s3" in said.modes and (why := s3_rig.why_not()):
        fail(why)
    best = optimum(said.groups)
    print(f"optimum on device and host together, plain blocks: {best:.3f}")
    rows: list[dict[str, Any]] = []
    for mode in said.modes:
        plain: list[float] = []
        for name in dict.fromkeys([PLAIN, *said.layouts]):
            found, seconds = measure(SHAPES[name], mode, said.groups)
            plain = plain or found
            relative = min(mine / theirs for mine, theirs in zip(found, plain, strict=True))
            shares = {str(group): round(share, 3) for group, share in enumerate(found)}
            rows.append({"mode": mode, "layout": name, **shares, "relative": round(relative, 3)})
            shown = " ".join(f"{share:.3f}" for share in found)
            print(f"{mode:>14} {name:>11} {shown}  {relative:.3f} {seconds:.1f} s", flush=True)
    save(said, {"benchmark": "conversations", "optimum": round(best, 3), "groups": said.groups, "rows": rows})


if __name__ == "__main__":
    main()
