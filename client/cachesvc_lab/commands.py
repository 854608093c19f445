"""The commands ``replay``, ``simulate`` and ``synth``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cachesvc_ctl.core.command import Command, at_least_one, count, flag, part_file

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import parse_size
from cachesvc_lab.grid import (
    HYBRID_MODELS,
    OPTIMUM,
    HybridModel,
    HybridRejected,
    PoolSize,
    Row,
    SimulationFailed,
    Unit,
    check_names,
    draw_rows,
    grid,
    hybrid_grid,
    hybrid_model,
    hybrid_table,
    pool_size,
    pool_sizes,
    rows_json,
    rows_table,
    run_grid,
)
from cachesvc_lab.replay import EngineSettings, ReplayFailed, ReplayPlan, ReplayRun, running_nodes
from cachesvc_lab.replay_report import draw_picture, report_json, report_table
from cachesvc_lab.traces import Prompts, SyntheticTraceSpec, TraceRequest, prompts_of, read_trace, write_synthetic_trace

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
EVICTIONS = ("deepest_first", "hazard", "hazard_cost", "lfu", "lru")
CHUNK_BYTES = 1 << 30
SLAB_SLACK_BYTES = 1 << 20


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _block_bytes(text: str) -> int:
    """Parse the bytes of a block, for argparse."""
    try:
        size = parse_size(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not size:
        raise argparse.ArgumentTypeError("a block has at least one byte")
    return size


def _hybrid_model(text: str) -> HybridModel:
    try:
        return hybrid_model(text)
    except HybridRejected as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tell(done: int, runs: int) -> None:
    if sys.stderr.isatty():
        print(f"{done} of {runs} runs", end="\n" if done == runs else "\r", file=sys.stderr, flush=True)


class Replay(Command):
    """A daemon of its own, unless one is named, and engines that check every byte."""

    name = "replay"
    about = "replay a trace through a daemon and check every hit's bytes"
    flags = (
        flag("trace", metavar="TRACE", help=".jsonl or .jsonl.zst in the Mooncake format"),
        flag("--socket", metavar="PATH", help="use the daemon there instead of starting one"),
        flag("--backend", choices=("shm", "cuda"), default="shm", help="memory of the started daemon (default shm)"),
        flag("--engines", type=at_least_one, default=1, metavar="N", help="engine processes (default 1)"),
        flag(
            "--device-blocks", type=pool_size, default="100%", metavar="D", help="device pool, in blocks or %% of all"
        ),
        flag("--host-blocks", type=pool_size, default="0", metavar="H", help="host pool, likewise (default 0)"),
        flag("--write-policy", choices=WRITE_POLICIES, default="write_back", help="default write_back"),
        flag("--eviction", choices=EVICTIONS, default="lru", help="default lru"),
        flag("--block-bytes", type=at_least_one, default=4096, metavar="B", help="of a block, 8 * layers * n"),
        flag("--block-tokens", type=at_least_one, default=512, metavar="T", help="of a trace's block (default 512)"),
        flag("--layers", type=at_least_one, default=1, metavar="L", help="planes that share a block (default 1)"),
        flag("--limit", type=at_least_one, metavar="R", help="replay only the first R requests"),
        flag("--clock", choices=("daemon", "trace"), default="daemon", help="whose time eviction learns from"),
        flag("--kill-every", type=float, default=0, metavar="SECONDS", help="kill an engine and start it again"),
        flag("--storage", metavar="SPEC", default="", help="of the started daemon: file:FOLDER?capacity=SIZE"),
        flag("--restart-every", type=float, default=0, metavar="SECONDS", help="kill the daemon and start another one"),
        flag("--nodes", type=int, choices=(1, 2), default=1, help="daemons that lend to each other (default 1)"),
        flag("--json", metavar="OUT", help="write the report there; the picture goes beside it"),
        flag("--picture", metavar="PNG", help="write the picture there"),
    )

    def run(self) -> int:
        """1 where the report is not sound. Raises TraceError, ReplayFailed, DaemonFailed."""
        said = self.arguments
        requests = list(read_trace(Path(said.trace), block_tokens=said.block_tokens, limit=said.limit))
        plan = _plan(said, requests)
        if said.socket and (said.storage or said.restart_every):
            raise ReplayFailed("--storage and --restart-every are for a daemon that it starts, not with --socket")
        if said.nodes > 1 and (said.socket or said.restart_every or not plan.settings.host_blocks):
            raise ReplayFailed("--nodes 2 starts its daemons, kills none, and needs --host-blocks to lend")
        if said.socket:
            report = ReplayRun(plan, said.socket, requests).run()
        else:
            flags = _daemon_flags(plan, said.backend)
            with running_nodes(flags, said.nodes, has_storage=bool(plan.storage)) as (daemon, *others):
                report = ReplayRun(plan, daemon.socket, requests, daemon, [each.socket for each in others]).run()
        print(report_table(report))
        picture = said.picture
        if said.json:
            with part_file(Path(said.json)) as part:
                part.write_text(report_json(report) + "\n", encoding="utf-8")
            picture = picture or str(Path(said.json).with_suffix(".png"))
        if picture:
            with part_file(Path(picture)) as part:
                draw_picture(report, part)
            print(f"picture: {picture}", file=sys.stderr)
        return 0 if report.is_sound else 1


class Simulate(Command):
    name = "simulate"
    about = "hit ratios of policies and pool sizes on a trace"
    epilog = (
        "Sizes are blocks, shares of the trace's distinct blocks, or (with --block-bytes) bytes. Example: cachesvc "
        "simulate t.jsonl --block-bytes 64MiB --device-blocks 40GiB --host-blocks 0,64GiB,128GiB"
    )
    flags = (
        flag("traces", nargs="+", metavar="TRACE", help=".jsonl or .jsonl.zst in the Mooncake format"),
        flag(
            "--policies",
            type=_names,
            metavar="P,P",
            help="default lru,hazard,opt (opt: the best there can be; not with --layout)",
        ),
        flag("--device-blocks", type=pool_sizes, default="1%,2%,5%,10%,20%,50%", metavar="D,D", help="device pools"),
        flag("--host-blocks", type=pool_sizes, default="0", metavar="H,H", help="host pools (default 0)"),
        flag("--disk-blocks", type=pool_sizes, default="0", metavar="S,S", help="disks below them (default 0)"),
        flag("--restart-every", type=count, default=0, metavar="R", help="stop and start the daemon every R requests"),
        flag("--write-policies", type=_names, default="write_back", metavar="W,W", help="default write_back"),
        flag("--block-bytes", type=_block_bytes, default=0, metavar="B", help="of a block, for sizes in bytes"),
        flag("--block-tokens", type=at_least_one, default=512, metavar="T", help="of a trace's block (default 512)"),
        flag(
            "--layout",
            type=_hybrid_model,
            metavar="NAME|FILE",
            help=f"a hybrid model, {' or '.join(HYBRID_MODELS)} or a .json file: states and windows share the pools",
        ),
        flag("--limit", type=at_least_one, metavar="R", help="simulate only the first R requests"),
        flag("--processes", type=at_least_one, metavar="N", help="runs at a time (default: a processor each)"),
        flag("--json", type=Path, metavar="OUT", help="write the rows there; the picture goes beside it"),
        flag("--picture", type=Path, metavar="PNG", help="write the picture there"),
    )

    def run(self) -> int:
        """Raises TraceError, SimulationFailed, MissingExtraError, OSError."""
        said = self.arguments
        policies = said.policies or (("lru", "hazard") if said.layout else ("lru", "hazard", OPTIMUM))
        check_names(policies, said.write_policies)
        rows = [row for trace in said.traces for row in self._rows(trace, policies)]
        if said.layout:
            has_host = any(row.cell.host_blocks for row in rows)
            print((rows_table if has_host else hybrid_table)(rows, block_bytes=said.block_bytes, name=said.layout.name))
        else:
            print(rows_table(rows, said.block_bytes))
        if said.json:
            with part_file(said.json) as part:
                part.write_text(rows_json(rows, said.block_bytes), encoding="utf-8")
        picture = said.picture or (said.json and said.json.with_suffix(".png"))
        if picture:
            with part_file(picture) as part:
                draw_rows(rows, said.block_bytes, part)
            print(f"picture: {picture}", file=sys.stderr)
        return 0

    def _rows(self, trace: str, policies: Sequence[str]) -> list[Row]:
        said = self.arguments
        requests = read_trace(trace, block_tokens=said.block_tokens, limit=said.limit)
        prompts = prompts_of(Path(trace).name, requests, said.block_tokens)
        sizes = (said.device_blocks, said.host_blocks, said.disk_blocks)
        device, host, disk = (self._blocks(each, prompts) for each in sizes)
        if min(device) < 1:
            raise SimulationFailed("--device-blocks must be at least 1")
        if said.layout and (disk != [0] or said.restart_every or OPTIMUM in policies):
            raise SimulationFailed(
                "--layout is simulated without disk and restarts, and there is no opt of it: leave these out"
            )
        if said.layout:
            try:
                cells = hybrid_grid(policies, device, said.layout.copies(said.block_tokens), host, said.write_policies)
            except HybridRejected as error:
                raise SimulationFailed(str(error)) from error
        else:
            cells = grid(policies, said.write_policies, device, host, disk, said.restart_every)
        began = time.monotonic()
        rows = run_grid(prompts, cells, said.processes or len(os.sched_getaffinity(0)), _tell)
        simulated = sum(row.requests for row in rows if row.cell.policy != OPTIMUM)
        pace = simulated / max(time.monotonic() - began, 1e-9) * 60
        print(f"{trace}: {len(cells)} rows, {pace:,.0f} requests a minute", file=sys.stderr)
        return rows

    def _blocks(self, sizes: tuple[PoolSize, ...], prompts: Prompts) -> list[int]:
        block_bytes = self.arguments.block_bytes
        if not block_bytes and any(size.unit is Unit.BYTES for size in sizes):
            raise SimulationFailed("a pool is given in bytes: say with --block-bytes how many a block has")
        return list(dict.fromkeys(size.blocks(prompts.distinct_blocks, block_bytes) for size in sizes))


class Synth(Command):
    name = "synth"
    about = "write a synthetic trace: chats over shared system prompts"
    epilog = "The same numbers give the same bytes. Example: cachesvc synth t.jsonl && cachesvc replay t.jsonl"
    flags = (
        flag("out", type=Path, metavar="OUT", help="a file whose name ends in .jsonl; what was there is replaced"),
        flag("--requests", type=at_least_one, default=1000, metavar="N", help="prompts in it (default 1000)"),
        flag("--seed", type=count, default=0, metavar="S", help="another number, another trace (default 0)"),
    )

    def run(self) -> int:
        """Leaves no file unless it is whole. Raises TraceError, OSError."""
        spec = SyntheticTraceSpec(requests=self.arguments.requests, seed=self.arguments.seed)
        written = write_synthetic_trace(self.arguments.out, spec)
        print(f"{self.arguments.out}: {self.arguments.requests:,} requests, {written:,} bytes")
        return 0


def _plan(arguments: argparse.Namespace, requests: list[TraceRequest]) -> ReplayPlan:
    distinct = len({block for request in requests for block in request.block_ids})
    if arguments.block_bytes % (8 * arguments.layers):
        raise ReplayFailed(
            f"--block-bytes {arguments.block_bytes} must be a multiple of 8 times --layers {arguments.layers}"
        )
    device_blocks = arguments.device_blocks.blocks(distinct, arguments.block_bytes)
    if device_blocks < 1:
        raise ReplayFailed("--device-blocks must be at least 1")
    print(
        f"{arguments.trace}: {len(requests):,} requests, "
        f"{distinct:,} distinct blocks of {arguments.block_tokens} tokens",
        file=sys.stderr,
    )
    settings = EngineSettings(
        socket="",
        name="",
        model=f"replay {Path(arguments.trace).name} {time.time_ns()}",
        block_bytes=arguments.block_bytes,
        block_tokens=arguments.block_tokens,
        layers=arguments.layers,
        device_blocks=device_blocks,
        host_blocks=arguments.host_blocks.blocks(distinct, arguments.block_bytes),
        tells_time=arguments.clock == "trace",
    )
    return ReplayPlan(
        trace=arguments.trace,
        engines=arguments.engines,
        settings=settings,
        write_policy=arguments.write_policy,
        eviction=arguments.eviction,
        kill_every_seconds=arguments.kill_every,
        storage=arguments.storage,
        restart_every_seconds=arguments.restart_every,
    )


def _daemon_flags(plan: ReplayPlan, backend: str) -> list[str]:
    settings = plan.settings
    device = settings.device_blocks * settings.block_bytes + settings.layers * SLAB_SLACK_BYTES
    host = settings.host_blocks * settings.block_bytes
    host += -(-host // CHUNK_BYTES) * (settings.block_bytes + SLAB_SLACK_BYTES)
    flags = ["--backend", backend, "--device-pool", str(device), "--host-pool", str(host)]
    flags += ["--write-policy", plan.write_policy, "--eviction", plan.eviction]
    return [*flags, "--storage", plan.storage] if plan.storage else flags
