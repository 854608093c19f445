"""The commands ``replay`` and ``synth``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from cachesvc_ctl.command import Command, at_least_one, count, flag
from cachesvc_ctl.daemon_process import DaemonProcess
from cachesvc_ctl.lab.picture import draw_picture
from cachesvc_ctl.lab.replay import ReplayFailed, ReplayPlan, ReplayRun
from cachesvc_ctl.lab.report import report_json, report_table
from cachesvc_ctl.lab.synthetic_trace import SyntheticTraceSpec, write_synthetic_trace
from cachesvc_ctl.lab.trace import TraceRequest, read_trace
from cachesvc_ctl.part_file import part_file

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
EVICTIONS = ("deepest_first", "lfu", "lru")
CHUNK_BYTES = 1 << 30
SLAB_SLACK_BYTES = 1 << 20


def _blocks(text: str) -> tuple[float, bool]:
    """``(number, is a percentage)``."""
    if not re.fullmatch(r"\d+(\.\d+)?%?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks, such as 5000, or a share, such as 10%")
    return float(text.removesuffix("%")), text.endswith("%")


class Replay(Command):
    """A daemon of its own, unless one is named, and engines that check every byte."""

    name = "replay"
    about = "replay a trace through a daemon and check every hit's bytes"
    flags = (
        flag("trace", metavar="TRACE", help=".jsonl or .jsonl.zst in the Mooncake format"),
        flag("--socket", metavar="PATH", help="use the daemon there instead of starting one"),
        flag("--backend", choices=("shm", "cuda"), default="shm", help="memory of the started daemon (default shm)"),
        flag("--engines", type=at_least_one, default=1, metavar="N", help="engine processes (default 1)"),
        flag("--device-blocks", type=_blocks, default="100%", metavar="D", help="device pool, in blocks or %% of all"),
        flag("--host-blocks", type=_blocks, default="0", metavar="H", help="host pool, likewise (default 0)"),
        flag("--write-policy", choices=WRITE_POLICIES, default="write_back", help="default write_back"),
        flag("--eviction", choices=EVICTIONS, default="lru", help="default lru"),
        flag("--block-bytes", type=at_least_one, default=4096, metavar="B", help="of a block, 8 * layers * n"),
        flag("--block-tokens", type=at_least_one, default=512, metavar="T", help="of a trace's block (default 512)"),
        flag("--layers", type=at_least_one, default=1, metavar="L", help="planes that share a block (default 1)"),
        flag("--limit", type=at_least_one, metavar="R", help="replay only the first R requests"),
        flag("--kill-every", type=float, default=0, metavar="SECONDS", help="kill an engine and start it again"),
        flag("--json", metavar="OUT", help="write the report there; the picture goes beside it"),
        flag("--picture", metavar="PNG", help="write the picture there"),
    )

    def run(self) -> int:
        """1 where the report is not sound. Raises TraceError, ReplayFailed, DaemonFailed."""
        said = self.arguments
        requests = list(read_trace(Path(said.trace), block_tokens=said.block_tokens, limit=said.limit))
        plan = _plan(said, requests)
        if said.socket:
            report = ReplayRun(plan, said.socket, requests).run()
        else:
            with DaemonProcess(_daemon_flags(plan, said.backend)) as daemon:
                report = ReplayRun(plan, daemon.socket, requests).run()
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


class Synth(Command):
    """No daemon is needed."""

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


def _resolve(wish: tuple[float, bool], distinct: int) -> int:
    number, is_percent = wish
    return max(1, int(distinct * number / 100)) if is_percent and number else int(number)


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
