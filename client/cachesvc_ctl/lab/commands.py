"""The commands ``replay`` and ``synth``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from cachesvc_ctl.daemon_process import DaemonProcess
from cachesvc_ctl.lab.picture import draw_picture
from cachesvc_ctl.lab.replay import ReplayFailed, ReplayPlan, ReplayRun
from cachesvc_ctl.lab.report import report_json, report_table
from cachesvc_ctl.lab.synthetic_trace import SyntheticTraceSpec, write_synthetic_trace
from cachesvc_ctl.lab.trace import TraceRequest, read_trace

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
EVICTIONS = ("deepest_first", "lfu", "lru")
CHUNK_BYTES = 1 << 30
SLAB_SLACK_BYTES = 1 << 20


def add_commands(commands: Any) -> None:
    """Add them to the parser."""
    replay = commands.add_parser("replay", help="replay a trace through a daemon and check every hit's bytes")
    add = replay.add_argument
    add("trace", metavar="TRACE", help=".jsonl or .jsonl.zst in the Mooncake format")
    add("--socket", metavar="PATH", help="use the daemon there instead of starting one")
    add("--backend", choices=("shm", "cuda"), default="shm", help="memory of the daemon that is started (default shm)")
    add("--engines", type=_positive, default=1, metavar="N", help="engine processes (default 1)")
    add(
        "--device-blocks",
        type=_blocks,
        default="100%",
        metavar="D",
        help="device pool, in blocks or %% of the distinct",
    )
    add("--host-blocks", type=_blocks, default="0", metavar="H", help="host pool, likewise (default 0)")
    add("--write-policy", choices=WRITE_POLICIES, default="write_back", help="default write_back")
    add("--eviction", choices=EVICTIONS, default="lru", help="default lru")
    add("--block-bytes", type=_positive, default=4096, metavar="B", help="bytes of a block, a multiple of 8 * layers")
    add("--block-tokens", type=_positive, default=512, metavar="T", help="tokens of a trace block (default 512)")
    add("--layers", type=_positive, default=1, metavar="L", help="planes that share a block's bytes (default 1)")
    add("--limit", type=_positive, metavar="R", help="replay only the first R requests")
    add("--kill-every", type=float, default=0, metavar="SECONDS", help="kill an engine that often, and start it again")
    add("--json", metavar="OUT", help="write the report there; the picture goes beside it")
    add("--picture", metavar="PNG", help="write the picture there")
    replay.set_defaults(command=_replay)
    synth = commands.add_parser("synth", help="write a synthetic trace: chats over shared system prompts")
    synth.add_argument("out", metavar="OUT", help="a .jsonl file")
    synth.add_argument("--requests", type=_positive, default=1000, metavar="N")
    synth.add_argument("--seed", type=int, default=0, metavar="S")
    synth.set_defaults(command=_synth)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _blocks(text: str) -> tuple[float, bool]:
    """``(number, is a percentage)``."""
    if not re.fullmatch(r"\d+(\.\d+)?%?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks, such as 5000, or a share, such as 10%")
    return float(text.removesuffix("%")), text.endswith("%")


def _resolve(wish: tuple[float, bool], distinct: int) -> int:
    number, is_percent = wish
    return max(1, int(distinct * number / 100)) if is_percent and number else int(number)


def _replay(arguments: argparse.Namespace) -> int:
    requests = list(read_trace(Path(arguments.trace), block_tokens=arguments.block_tokens, limit=arguments.limit))
    plan = _plan(arguments, requests)
    if arguments.socket:
        report = ReplayRun(plan, arguments.socket, requests).run()
    else:
        with DaemonProcess(_daemon_flags(plan, arguments.backend)) as daemon:
            report = ReplayRun(plan, daemon.socket, requests).run()
    print(report_table(report))
    picture = arguments.picture
    if arguments.json:
        Path(arguments.json).write_text(report_json(report) + "\n", encoding="utf-8")
        picture = picture or str(Path(arguments.json).with_suffix(".png"))
    if picture:
        draw_picture(report, Path(picture))
        print(f"picture: {picture}", file=sys.stderr)
    return 0 if report.is_sound else 1


def _plan(arguments: argparse.Namespace, requests: list[TraceRequest]) -> ReplayPlan:
    distinct = len({block for request in requests for block in request.block_ids})
    if arguments.block_bytes % (8 * arguments.layers):
        raise ReplayFailed(
            f"--block-bytes {arguments.block_bytes} must be a multiple of 8 times --layers {arguments.layers}"
        )
    device_blocks = _resolve(arguments.device_blocks, distinct)
    if device_blocks < 1:
        raise ReplayFailed("--device-blocks must be at least 1")
    print(
        f"{arguments.trace}: {len(requests):,} requests, "
        f"{distinct:,} distinct blocks of {arguments.block_tokens} tokens",
        file=sys.stderr,
    )
    return ReplayPlan(
        trace=arguments.trace,
        engines=arguments.engines,
        device_blocks=device_blocks,
        host_blocks=_resolve(arguments.host_blocks, distinct),
        write_policy=arguments.write_policy,
        eviction=arguments.eviction,
        block_bytes=arguments.block_bytes,
        block_tokens=arguments.block_tokens,
        layers=arguments.layers,
        kill_every_seconds=arguments.kill_every,
    )


def _daemon_flags(plan: ReplayPlan, backend: str) -> list[str]:
    device = plan.device_blocks * plan.block_bytes + plan.layers * SLAB_SLACK_BYTES
    host = plan.host_blocks * plan.block_bytes
    host += -(-host // CHUNK_BYTES) * (plan.block_bytes + SLAB_SLACK_BYTES)
    flags = {
        "--backend": backend,
        "--device-pool": str(device),
        "--host-pool": str(host),
        "--write-policy": plan.write_policy,
        "--eviction": plan.eviction,
    }
    return [part for pair in flags.items() for part in pair]


def _synth(arguments: argparse.Namespace) -> int:
    spec = SyntheticTraceSpec(requests=arguments.requests, seed=arguments.seed)
    written = write_synthetic_trace(Path(arguments.out), spec)
    print(f"{arguments.out}: {arguments.requests} requests, {written} bytes")
    return 0
