"""``cachesvcd``: read the configuration, run the daemon, exit 0 when it was asked to stop."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachesvc import __version__
from cachesvc.config import (
    BACKENDS,
    CALIBRATION,
    CHECKSUMS,
    DEVICE_MEMORY,
    LIVE,
    LOG_LEVELS,
    MOVERS,
    Config,
    load_config,
)
from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.model.text import Parser
from cachesvc.model.words import WritePolicy
from cachesvc.mover.life import Listing
from cachesvc.policy.eviction import EVICTION_POLICIES
from cachesvc.telemetry.events import start_logging

if TYPE_CHECKING:
    from cachesvc.daemon import DaemonParts

SWITCH_SECONDS = 0.0002
"""Interval after which a copy thread yields the interpreter to the event loop, seconds. Python's 5 ms would be the p99
of every call."""

LEAST_FILES = 128
"""Least number of descriptors: a daemon without engines opens half of it, and gRPC ends the process where it cannot
open one more."""

HEAP = {-8: 2, -3: 1 << 20, -1: 4 << 20}
"""The C library's M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD (mallopt(3)). Left alone it gives every thread a
heap and puts ever larger messages into it, between what lives for long, so that their memory never comes back. Columns
of NumPy of 65,536 pages stay below the threshold: to map each anew takes as long as the work on it, or longer."""

Add = Callable[..., None]
log = logging.getLogger("cachesvc")


def main() -> None:
    """Entry point of the console script. Exit codes: 0 stopped, 2 bad configuration or start."""
    # Before gRPC is imported: its core writes lines of its own to standard error, where each line is to be JSON.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    path, flags, is_check = read_flags(sys.argv[1:])
    form = flags.pop("check_machine")
    try:
        config = load_config(path, flags)
        if form:
            sys.exit(check_machine(config, form))
        has_no_gpus = is_check or config.backend == "shm" or config.movers == "inside"
        listing = None if has_no_gpus else Listing()  # while all else is imported
        from cachesvc.daemon import build
        from cachesvc.hardware import choose_hardware

        if is_check:
            _print(check(config))
            return
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("grpc"):
            raise
        print(f"cachesvcd needs the Python module {error.name}: pip install 'cachesvc[server]'", file=sys.stderr)
        sys.exit(2)
    except CacheError as error:
        print(f"cachesvcd: {error}", file=sys.stderr)
        sys.exit(2)
    start_logging(config.log_level)
    reread = partial(load_config, path, flags) if path else None
    try:
        _run(build(config, reread, partial(choose_hardware, listing=listing)))
    except CacheError as refused:
        if sys.stderr.isatty():
            print(f"cachesvcd: {refused}", file=sys.stderr)
        else:
            log.error("start_refused reason=%s", refused)
        sys.exit(2)


def _print(text: str) -> None:
    """Print to a reader that may have seen enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_flags(words: list[str]) -> tuple[str | None, dict[str, Any], bool]:
    """The file, the settings that flags give (None: not given), and whether they are to be checked alone.

    Exits with 0 after help, with 2 after a line that says what is wrong.
    """
    flags = vars(_parser().parse_args(words))
    return flags.pop("config"), flags, flags.pop("check_config")


def check(config: Config) -> str:
    """Settings of the configuration beside its defaults, once the files that it names have been read.

    Raises a CacheError for an impossible setting. Only a start checks memory, GPUs, sockets and ports.
    """
    from cachesvc.nodes import check_peers
    from cachesvc.service.access.tokens import read_keys
    from cachesvc.service.host.socket_files import group_number
    from cachesvc.service.host.tls import Certificates
    from cachesvc.storages import check_storage

    check_storage(config.storage)
    check_peers(config)
    if config.socket_group:
        group_number(config.socket_group)
    if config.tokens:
        read_keys(Path(config.tokens))
    if config.tls_key:
        Certificates(config.tls_certificate, config.tls_key, config.tls_client_ca).credentials()
    defaults = Config().shown()
    lines = [f"{name} = {value}" for name, value in config.shown().items() if value != defaults[name]]
    return "\n".join(["the configuration is valid; it differs from the defaults by", *(lines or ["nothing"])])


def check_machine(config: Config, form: str) -> int:
    """Print what a daemon of this configuration lacks on this machine; the exit code: 0 nothing, 1 something."""
    from cachesvc.machine import is_ready, look

    findings = look(config)
    if form == "json":
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        print("\n".join(finding.line() for finding in findings))
    return 0 if is_ready(findings) else 1


def _run(parts: DaemonParts) -> None:
    """Run on uvloop where it is installed: its round trips are shorter."""
    sys.setswitchinterval(SWITCH_SECONDS)
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):  # other C libraries have none
        for option, value in HEAP.items():
            c_library.mallopt(option, value)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_FILES:
        raise Unavailable(f"this process may open {most} files; raise the limit (ulimit -n) to {LEAST_FILES} or more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an engine takes three: two connections and a pidfd
    try:
        from uvloop import Loop
    except ImportError:
        asyncio.run(_serve(parts))
        return
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(_serve(parts))


async def _serve(parts: DaemonParts) -> None:
    from cachesvc.daemon import run

    await run(parts)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="cachesvcd",
        description="Owns the KV cache of all inference engines on this node.",
        epilog="Sizes are bytes, or have a unit: 512MiB, 8GiB, 8Gi, 8g; 8GB is 8 * 10^9. Flags win over the file of "
        "--config, which has the same names with _ for -; there lists are lists: allow_uids = [1001, 1002]. What is "
        "marked [live] changes while the daemon runs: edit the file, then cachesvc reload, or SIGHUP.",
    )
    add = _adding(parser)
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--config", metavar="FILE", help="TOML file with settings, by the names of these flags")
    add("--check-config", action="store_true", help="say whether flags and file are valid, and end")
    add(
        "--check-machine",
        nargs="?",
        const="text",
        choices=("text", "json"),
        help="say what a daemon of these settings lacks on this machine and what to do, and end: 0, or 1 if something",
    )
    add("--log-level", choices=LOG_LEVELS, help="least severe lines on standard error (default info)")
    add("--fault-copies", type=float, metavar="SHARE", help=argparse.SUPPRESS)  # docs/staying-up.md
    _add_ways_in(parser)
    _add_memory(parser)
    _add_policy(parser)
    _add_nodes(parser)
    _add_limits(parser)
    _add_looks(parser)
    return parser


def _adding(to: argparse.ArgumentParser | argparse._ArgumentGroup) -> Add:
    """``add_argument`` that marks the settings which change live."""

    def add(*names: str, **settings: Any) -> None:
        action = to.add_argument(*names, **settings)
        if action.dest in LIVE:
            action.help = f"{action.help} [live]"

    return add


def _add_ways_in(parser: argparse.ArgumentParser) -> None:
    add = _adding(parser.add_argument_group("who may come, and where"))
    add("--socket", metavar="PATH", help="unix socket to serve on (default /run/cachesvc/cachesvc.sock)")
    add("--socket-group", metavar="GROUP", help="group that may connect beside the daemon's own user: name or number")
    users = "user who may attach; may be repeated (default: its own and root)"
    add("--allow-uid", type=int, action="append", dest="allow_uids", metavar="UID", help=users)
    groups = "group that may attach; may be repeated"
    add("--allow-gid", type=int, action="append", dest="allow_gids", metavar="GID", help=groups)
    add("--tokens", metavar="FILE", help="TOML or JSON: tokens with scopes, tenants and quotas (SIGHUP reads it anew)")
    add(
        "--token-grace-seconds",
        type=float,
        metavar="S",
        help="how long an engine's token that left the file serves the leases its engine has (default 300; 0: not)",
    )
    add("--listen", metavar="HOST:PORT", help="also serve on TCP: loopback only, unless TLS is configured")
    add("--tls-certificate", metavar="FILE", help="PEM certificate chain for --listen")
    add("--tls-key", metavar="FILE", help="PEM private key for --listen")
    add("--tls-client-ca", metavar="FILE", help="PEM roots: clients of --listen need a certificate signed by one")
    add("--health-listen", metavar="HOST:PORT", help="answer gRPC health checks, and nothing else, on any address")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = _adding(parser.add_argument_group("memory and its links"))
    add("--backend", choices=BACKENDS, help="memory: auto (default) takes shm where there is no GPU")
    add("--device-pool", metavar="SIZE", help="bytes of each device that the daemon owns (default 1GiB)")
    add("--host-pool", metavar="SIZE", help="bytes of the host tier (default 1GiB; 0: none)")
    add("--host-chunk", metavar="SIZE", help="the host pool comes in pieces of this size (default 1GiB)")
    add("--host-threads", type=int, metavar="N", help="threads that populate the host pool (default 8)")
    add("--shm-devices", type=int, metavar="N", help="devices of the shm backend (default 1)")
    add("--device-memory", choices=DEVICE_MEMORY, help="GPU pools: vmm (descriptors) or ipc (handles); auto: as it can")
    add("--movers", choices=MOVERS, help="copy by a process for each device (default), or by threads inside")
    paths = (
        "socket of a cachesvc-mover that runs already; once for each device, in order (default: started by the daemon)"
    )
    add("--mover", action="append", metavar="PATH", help=paths)
    add("--calibration", choices=CALIBRATION, help="measure each GPU's link at the start (default), or never")
    add("--load-limit", metavar="SIZE", help="bytes per second from host to each device (default 0: no limit)")
    add("--store-limit", metavar="SIZE", help="bytes per second from each device to host (default 0: no limit)")
    add("--slice-bytes", metavar="SIZE", help="bytes copied before a more urgent copy may go first (default 32MiB)")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    add = _adding(parser.add_argument_group("what is kept, and for how long"))
    policies = [policy.value for policy in WritePolicy]
    add("--write-policy", choices=policies, help="when blocks are copied to the host (default write_back)")
    add("--write-through-threshold", type=int, metavar="N", help="reuses before a selective backup (default 2)")
    add("--write-back-share", type=float, metavar="X", help="write back classes used X times the mean (default 0: all)")
    add("--pin-share", type=float, metavar="X", help="of each pool, what operators may pin (default 0.25)")
    add("--ahead-pages", type=int, metavar="N", help="pages kept free, 1/64 of a pool at most (default 256)")
    below = "below the host: file:FOLDER?capacity=SIZE, mooncake:HOST:PORT or s3://BUCKET; again for tiers below it"
    add("--storage", metavar="SPEC", action="append", help=below)
    add("--eviction", choices=sorted(EVICTION_POLICIES), help="eviction policy (default lru)")
    add("--lease-seconds", type=float, metavar="S", help="silence after which a lease is lost (default 10)")
    add("--wait-seconds", type=float, metavar="S", help="longest that a call waits for transfers (default 30)")
    add("--drain-seconds", type=float, metavar="S", help="how long SIGTERM waits for engines (default 5)")


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    add = _adding(parser.add_argument_group("other nodes: what one has computed is a hit on another (docs/nodes.md)"))
    add("--peers", metavar="HOST:PORT,...", help="daemons to ask for blocks that this node lacks (default: none)")
    add("--peer-allow", metavar="NETWORK,...", help="networks of daemons that a request may name (default: none)")
    add("--peer-advertise", metavar="HOST:PORT", help="where other nodes reach --peer-listen (default: the same)")
    add("--peer-listen", metavar="HOST:PORT", help="lend host pages to other nodes (default: not)")
    add("--peer-data-port", type=int, metavar="N", help="port that sends pages to other nodes; 0: any (default 0)")
    add("--peer-tokens", metavar="FILE", help="tokens that nodes show each other, one a line")
    add("--peer-tls-certificate", metavar="FILE", help="certificate of this node, for both directions")
    add("--peer-tls-key", metavar="FILE", help="private key of that certificate")
    add("--peer-tls-ca", metavar="FILE", help="PEM roots that sign the certificates of nodes")
    add("--peer-lease-seconds", type=float, metavar="S", help="how long a silent node keeps pages (default 30)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = _adding(parser.add_argument_group("limits, beyond which calls are refused"))
    add("--leases", type=int, metavar="N", help="leases at a time, besides a process's first (default 1024)")
    add("--sequences-per-lease", type=int, metavar="N", help="open sequences of one lease (default 4096)")
    add("--blocks-per-sequence", type=int, metavar="N", help="blocks of one sequence, the most too (default 65536)")
    add("--stock-pages-per-lease", type=int, metavar="N", help="pages granted ahead of use (default 4096)")
    add("--operations-per-step", type=int, metavar="N", help="operations of one Step (default 4096)")
    add("--calls-in-flight", type=int, metavar="N", help="calls at work, of all callers together (default 1024)")
    add("--waiting-calls", type=int, metavar="N", help="calls that wait for transfers, of all callers (default 4096)")
    each = "calls that wait for transfers, of one engine (default 256)"
    add("--waiting-calls-per-process", type=int, metavar="N", help=each)
    each = "lanes of one life connection; 0: none, all calls go by gRPC (default 8)"
    add("--lanes-per-process", type=int, metavar="N", help=each)
    add("--event-subscribers", type=int, metavar="N", help="open subscriptions to changes of blocks (default 64)")


def _add_looks(parser: argparse.ArgumentParser) -> None:
    add = _adding(parser.add_argument_group("telemetry and checks"))
    metrics = (
        "serve /metrics for Prometheus, to all who reach it; with --tokens, to tokens of scope metrics (default: not)"
    )
    add("--metrics-listen", metavar="HOST:PORT", help=metrics)
    add("--otlp-endpoint", metavar="URL", help="push metrics and traces to an OTLP collector (default: not)")
    add(
        "--web-listen",
        metavar="HOST:PORT",
        help="serve a read-only page on loopback; not with --tokens (default: none)",
    )
    add("--event-history", type=int, metavar="N", help="changes of blocks kept for each model (default 65536)")
    add(
        "--checksums",
        choices=CHECKSUMS,
        help="checksums of sealed pages, for `cachesvc verify --checksums` (default off)",
    )
    add("--checksum-limit", metavar="SIZE", help="bytes per second read for checksums (default 256MiB)")


if __name__ == "__main__":
    main()
