"""The longest hold of the event loop, by flow: ``python -m benchmarks.ledger.turns --json OUT``.

A daemon's own parts in one process (dispatcher, node, ledger, swap engine, shared memory) without sockets around them.
Calls are messages, as large as they come: prompts of 128k tokens, evictions of 43,000 pages, swaps, loads, leases that
end with all that they hold; with ``--blocks`` blocks resident. Every callback of the loop is timed, and of each flow
the longest one counts: so long everybody else waits. ``ms`` is of the loop thread's processor time, which neighbours
of a shared machine disturb less (``wall_ms``: by the clock). Rounds do the same in the same order: of each callback the
best of them counts, and the worst of all stands beside it (``worst_ms``).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvcache.v1 import admin_pb2, cache_pb2

from benchmarks.ledger.moves import PROMPT_BLOCKS
from benchmarks.ledger.turns_daemon import LAYOUT, TOKEN, WINDOWED, Daemon, running
from benchmarks.support.recording import parser_of, save
from cachesvc.__main__ import SWITCH_SECONDS
from cachesvc.flows.leases import lose_silent, process_gone
from cachesvc.flows.registration import PoolRequest, RegisterRequest, evict_model
from cachesvc.model.layout import Layout
from cachesvc.questions.audit import verify
from cachesvc.questions.dump import dump
from cachesvc.questions.status import status
from cachesvc.service.loop.line import LoopWatch, TimeSlices
from cachesvc.telemetry.scrape_server import Reading

LONG = 43_000
SEQUENCES = 16
HOST_SHARE = 10


# -- flows ---------------------------------------------------------------------------------------------------------


async def prompts(daemon: Daemon) -> None:
    """A prompt of 128k tokens from beginning to end, on a full pool and then in its own pages."""
    keys = daemon.prompt()
    sequence = await daemon.measured("match 2,048 new", daemon.match(keys))
    await daemon.measured("allocate 2,048, evicting", daemon.allocate(sequence, PROMPT_BLOCKS))
    await daemon.measured("publish 2,048", daemon.publish(sequence, 0, PROMPT_BLOCKS))
    await daemon.measured("release 2,048 shared", daemon.release(sequence))
    hit = await daemon.measured("match 2,048 resident", daemon.match(keys))
    await daemon.release(hit)
    own = await daemon.match()
    await daemon.allocate(own, PROMPT_BLOCKS)
    await daemon.measured("release 2,048 own", daemon.release(own))
    own = await daemon.match(daemon.prompt())
    await daemon.measured("allocate 2,048 free", daemon.allocate(own, PROMPT_BLOCKS))
    await daemon.release(own)
    await daemon.fill()


async def many_pages(daemon: Daemon) -> None:
    """One sequence with room for millions of tokens."""
    blocks = min(LONG, daemon.blocks // 2)
    sequence = await daemon.match()
    await daemon.measured("allocate 43,000, evicting", daemon.allocate(sequence, blocks))
    await daemon.measured("release 43,000 own", daemon.release(sequence))
    await daemon.fill()


async def swaps(daemon: Daemon) -> None:
    """A sequence of 128k tokens goes out and comes back: own pages, then shared ones too."""
    own = await daemon.match()
    await daemon.allocate(own, PROMPT_BLOCKS)
    await daemon.measured("swap out 2,048 own", daemon.swap(own, cache_pb2.SWAP_DIRECTION_OUT))
    await daemon.measured("swap in 2,048 own", daemon.swap(own, cache_pb2.SWAP_DIRECTION_IN))
    await daemon.release(own)
    shared = await daemon.match(daemon.prompt())
    await daemon.allocate(shared, PROMPT_BLOCKS)
    await daemon.publish(shared, 0, PROMPT_BLOCKS)
    await daemon.measured("swap out 2,048 shared", daemon.swap(shared, cache_pb2.SWAP_DIRECTION_OUT))
    daemon.leave_device()
    await daemon.measured("swap in 2,048 shared", daemon.swap(shared, cache_pb2.SWAP_DIRECTION_IN))
    await daemon.release(shared)
    await daemon.fill()


async def loads(daemon: Daemon) -> None:
    """A prompt of 128k tokens that lies on the host."""
    keys = daemon.prompt()
    await daemon.save(keys)
    sequence = await daemon.measured("match 2,048 on the host", daemon.match(keys))
    await daemon.measured("allocate 2,048, loading", daemon.allocate(sequence, PROMPT_BLOCKS))
    await daemon.release(sequence)
    await daemon.fill()


async def leases(daemon: Daemon) -> None:
    """Engines that hold much and go: closed, dead, silent."""
    for flow, end in (("close a lease", _close), ("process gone", _die), ("lease silent", _silence)):
        token = flow.encode()
        main = daemon.lease
        await daemon.open(token)
        for number in range(SEQUENCES):
            keys = daemon.prompt()
            sequence = await daemon.match(keys)
            await daemon.allocate(sequence, PROMPT_BLOCKS)
            if number % 2:
                await daemon.publish(sequence, 0, PROMPT_BLOCKS)
        await daemon.measured(flow, end(daemon, token))
        process_gone(daemon.core, token)
        daemon.lease = main
    await daemon.fill()


async def _close(daemon: Daemon, _: bytes) -> None:
    await daemon.close()


async def _die(daemon: Daemon, token: bytes) -> None:
    await _call(lambda: daemon.node.run(process_gone, daemon.core, token))


async def _silence(daemon: Daemon, _: bytes) -> None:
    now = daemon.node.now() + 1e6
    main = next(lease for lease in daemon.core.ledger.leases.values() if lease.opened_by[0] == TOKEN)
    main.last_heard = now
    await _call(lambda: daemon.node.run(lose_silent, daemon.core, 30.0, now))


async def _call(work: Callable[[], object]) -> None:
    done = asyncio.get_running_loop().create_future()

    def run() -> None:
        work()
        done.set_result(None)

    asyncio.get_running_loop().call_soon(run)
    await done


async def stock(daemon: Daemon) -> None:
    """A stock as large as it may be, on a full pool, for an engine that has grown as much."""
    sequence = await daemon.match()
    await daemon.allocate(sequence, PROMPT_BLOCKS)
    request = cache_pb2.StepRequest(lease_id=daemon.lease, request_id=next(daemon.numbers), stock_pages=[4096])
    await daemon.measured("refill a stock of 4,096", daemon.ask(daemon.cache.step, request))
    request = cache_pb2.StepRequest(lease_id=daemon.lease, request_id=next(daemon.numbers), stock_pages=[0])
    await daemon.ask(daemon.cache.step, request)
    await daemon.release(sequence)
    await daemon.close()
    await daemon.open()
    await daemon.fill()


async def prefetches(daemon: Daemon) -> None:
    """A prompt of 128k tokens that lies on the host is fetched ahead of its use."""
    keys = daemon.prompt()
    await daemon.save(keys)
    request = cache_pb2.PrefetchRequest(lease_id=daemon.lease, request_id=next(daemon.numbers), keys=keys)
    await daemon.measured("prefetch 2,048", daemon.ask(daemon.cache.prefetch, request))
    await daemon.fill()


async def windows(daemon: Daemon) -> None:
    """A prompt of 128k tokens whose second group keeps a window alone: computed, found again, swapped, fetched."""
    keys = daemon.prompt()
    sequence = await daemon.measured("windows: match 2,048 new", daemon.match(keys))
    await daemon.measured("windows: allocate 2,048, evicting", daemon.allocate(sequence, PROMPT_BLOCKS))
    await daemon.measured("windows: publish 2,048", daemon.publish(sequence, 0, PROMPT_BLOCKS))
    request = cache_pb2.RecycleRequest(
        lease_id=daemon.lease, sequence_id=sequence, computed_tokens=PROMPT_BLOCKS * daemon.layout.block_tokens
    )
    await daemon.measured("windows: recycle 2,032", daemon.ask(daemon.cache.recycle, request))
    await daemon.measured("windows: release 2,048 shared", daemon.release(sequence))
    hit = await daemon.measured("windows: match 2,048 resident", daemon.match(keys))
    await daemon.measured("windows: swap out 2,048 shared", daemon.swap(hit, cache_pb2.SWAP_DIRECTION_OUT))
    daemon.leave_device()
    await daemon.measured("windows: swap in 2,048 shared", daemon.swap(hit, cache_pb2.SWAP_DIRECTION_IN))
    await daemon.release(hit)
    daemon.leave_device()
    hit = await daemon.match(keys)
    await daemon.measured("windows: allocate 2,048, loading", daemon.allocate(hit, PROMPT_BLOCKS))
    await daemon.release(hit)
    own = await daemon.match()
    await daemon.allocate(own, PROMPT_BLOCKS)
    request = cache_pb2.RecycleRequest(
        lease_id=daemon.lease, sequence_id=own, computed_tokens=PROMPT_BLOCKS * daemon.layout.block_tokens
    )
    await daemon.measured("windows: recycle 2,032 own", daemon.ask(daemon.cache.recycle, request))
    await daemon.measured("windows: release 2,048 own", daemon.release(own))
    await daemon.fill()


async def questions(daemon: Daemon) -> None:
    """Ask the questions of operators and their dashboards."""
    view = daemon.node.view()
    slices = TimeSlices(LoopWatch())
    await daemon.measured("status", slices.answer(status(view, 30.0)))
    await daemon.measured("metrics", _call(lambda: daemon.parts.metrics(Reading())))
    await daemon.measured("verify", slices.answer(verify(view, daemon.model)))
    await daemon.measured("dump of the index", slices.answer(dump(view, daemon.model)))
    request = admin_pb2.EvictRequest(model_id=daemon.model, tier="device", blocks=4096)
    await daemon.measured("evict 4,096, operator", daemon.parts.administration.evict(view, request))
    await daemon.fill()


async def models(daemon: Daemon) -> None:
    """Another replica's pools come, and another model as large comes and goes."""
    layout, pages = LAYOUT, PoolRequest((daemon.blocks,))
    request = RegisterRequest("another", layout, device_pool=pages, host_pool=PoolRequest((0,)))
    made = await daemon.measured("register a model", daemon.parts.registrar.register(request, "bench"))
    await daemon.measured("forget a model", _call(lambda: evict_model(daemon.core, daemon.node.vault, made.model)))
    daemon.node.vault.close_retired()


class Setting(NamedTuple):
    """A daemon, and the flows that are measured on it. ``host_share``: its blocks for each host block, 0 for none."""

    flows: tuple[Callable[[Daemon], Awaitable[None]], ...]
    label: str = ""
    host_share: int = 0
    layout: Layout = LAYOUT
    eviction: str = "lru"


SETTINGS = (
    Setting((prompts, many_pages, stock, leases, questions, models)),
    Setting((prompts, many_pages, stock, swaps, loads, prefetches), "; saved", HOST_SHARE),
    Setting((windows,), "", HOST_SHARE, WINDOWED),
    Setting((prompts, stock), "; hazard", 0, LAYOUT, "hazard"),
)
FLOWS = tuple(dict.fromkeys(flow.__name__ for setting in SETTINGS for flow in setting.flows))


# -- running -------------------------------------------------------------------------------------------------------


async def measure(blocks: int, rounds: int, names: list[str]) -> dict[str, dict[str, float]]:
    """Figures by flow, in milliseconds."""
    sys.setswitchinterval(SWITCH_SECONDS)
    found: dict[str, list[list[tuple[float, float]]]] = {}
    totals: dict[str, float] = {}
    for setting in SETTINGS:
        chosen = [each for each in setting.flows if each.__name__ in names]
        if not chosen:
            continue
        host = blocks // setting.host_share if setting.host_share else 0
        async with running(blocks, "write_back", host, setting.layout, setting.eviction) as daemon:
            for _ in range(rounds):
                daemon.holds.times = {}
                for flow in chosen:
                    await flow(daemon)
                for name, times in daemon.holds.times.items():
                    found.setdefault(name + setting.label, []).append(times)
            totals |= {name + setting.label: seconds for name, seconds in daemon.totals.items()}
    return {
        name: {
            "ms": longest([[cpu for cpu, _ in times] for times in rounds_of]) * 1e3,
            "worst_ms": max(cpu for times in rounds_of for cpu, _ in times) * 1e3,
            "wall_ms": longest([[wall for _, wall in times] for times in rounds_of]) * 1e3,
            "whole_ms": totals.get(name, 0.0) * 1e3,
        }
        for name, rounds_of in found.items()
    }


def longest(rounds: list[list[float]]) -> float:
    """The longest turn: of each the best of the rounds, which all do the same in the same order. Where they did not,
    the shortest of their longest."""
    if len({len(times) for times in rounds}) == 1:
        best: list[float] = [min(turn) for turn in zip(*rounds, strict=True)]
        return max(best)
    return min(map(max, rounds))


def main() -> None:
    """Print the table and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks that are resident")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flows", nargs="+", choices=FLOWS, default=FLOWS)
    arguments = parser.parse_args()
    flows = asyncio.run(measure(arguments.blocks, arguments.rounds, arguments.flows))
    print(f"{'longest hold of the loop':40}{'ms':>9}{'worst':>9}{'wall':>9}{'whole call':>12}")
    for name, row in flows.items():
        print(f"{name:40}" + "".join(f"{row[key]:9.2f}" for key in ("ms", "worst_ms", "wall_ms", "whole_ms")))
    result: dict[str, object] = {
        "blocks": arguments.blocks,
        "loop_longest_ms": max(row["ms"] for row in flows.values()),
        "flows": flows,
    }
    save(arguments, result)


if __name__ == "__main__":
    main()
