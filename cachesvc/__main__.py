"""``cachesvcd``: read the configuration, run the daemon, exit 0 when it was asked to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import resource
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachesvc import __version__
from cachesvc.config import DEFAULTS, GROUPS, SETTINGS, Config, explain, load_config
from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.model.text import Parser
from cachesvc.mover.life import Listing
from cachesvc.telemetry.events import start_logging

if TYPE_CHECKING:
    from cachesvc.daemon import Daemon

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
        from cachesvc.daemon import Daemon
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
        _run(Daemon(config, reread, partial(choose_hardware, listing=listing)))
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
    defaults = DEFAULTS.shown()
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


def _run(daemon: Daemon) -> None:
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
    factory: Any = None
    with contextlib.suppress(ImportError):
        from uvloop import Loop as factory  # noqa: N813 - a class that makes loops
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(daemon.run())


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="cachesvcd",
        description="Owns the KV cache of all inference engines on this node.",
        epilog="Sizes are bytes, or have a unit: 512MiB, 8GiB, 8Gi, 8g; 8GB is 8 * 10^9. Flags win over the file of "
        "--config, which has the same names with _ for -; there lists are lists: allow_uids = [1001, 1002]. What is "
        "marked [live] changes while the daemon runs: edit the file, then cachesvc reload, or SIGHUP.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings, by the names of these flags")
    parser.add_argument("--check-config", action="store_true", help="say whether flags and file are valid, and end")
    parser.add_argument(
        "--check-machine",
        nargs="?",
        const="text",
        choices=("text", "json"),
        help="say what a daemon of these settings lacks on this machine and what to do, and end: 0, or 1 if something",
    )
    _add_settings(parser)
    return parser


FLAGS = {"allow_uids": "--allow-uid", "allow_gids": "--allow-gid"}
"""Flags of settings that are not named like them: each gives one value of many."""


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, with its purpose, its default and whether it changes live."""
    group: Any = parser
    for name, row in SETTINGS.items():
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        kind = type(getattr(DEFAULTS, name))
        many = {"action": "append"} if kind is tuple else {}
        number = int if name in FLAGS else kind
        is_number = number in (int, float) and row.unit != "SIZE"
        said = argparse.SUPPRESS if name == "fault_copies" else explain(name) + " [live]" * row.live
        group.add_argument(
            FLAGS.get(name, "--" + name.replace("_", "-")),
            dest=name,
            type=number if is_number else str,
            metavar=row.unit or None,
            choices=row.choices or None,
            help=said,
            **many,
        )


if __name__ == "__main__":
    main()
