"""``cachesvc``: everything that an operator or a researcher does from the command line."""

from __future__ import annotations

import argparse
import os
import sys

import grpc
from cachesvc_client.core.errors import CacheClientError, DaemonUnavailable, Unauthenticated, error_of, is_refusal
from cachesvc_lab.commands import Replay, Simulate, Synth
from cachesvc_lab.grid import SimulationFailed
from cachesvc_lab.index_file import IndexFileError
from cachesvc_lab.replay import ReplayFailed
from cachesvc_lab.traces import TraceError

from cachesvc import __version__
from cachesvc.model.errors import CacheError
from cachesvc.model.text import Parser, did_you_mean
from cachesvc_ctl.actions import Drain, Evict, Pin, Reload, Unpin, Verify, Wait, Weights
from cachesvc_ctl.blocks import Blocks, Leases, Sequences, Tenants, Tickets, Tree, Why
from cachesvc_ctl.check import Calibrate, Check
from cachesvc_ctl.core.command import Command, MissingExtraError, for_terminal, no_answer
from cachesvc_ctl.core.daemon_process import DaemonFailed
from cachesvc_ctl.describe import Describe, UnknownSymbol
from cachesvc_ctl.dump import Dump, Load
from cachesvc_ctl.events import Events
from cachesvc_ctl.layout import LayoutOfModel
from cachesvc_ctl.status import Models, Status, Storage, UnknownModel
from cachesvc_ctl.top import Top

FAILURES = (
    *(TraceError, ReplayFailed, SimulationFailed, DaemonFailed),
    *(MissingExtraError, IndexFileError, UnknownSymbol, UnknownModel),
)
INTERRUPTED = 130
"""Exit code that shells use for a command that Ctrl-C ended."""

COMMANDS: tuple[type[Command], ...] = (
    *(Check, Status, Top, Wait),
    *(Models, Leases, Tenants, Sequences, Blocks, Tree, Tickets, Why, Events, Storage, Verify),
    *(Pin, Unpin, Evict, Weights, Drain, Reload),
    *(Dump, Load, Describe),
    *(LayoutOfModel, Calibrate, Replay, Simulate, Synth),
)
"""Commands in the order of the list."""


def main() -> None:
    """Entry point. Exit codes: 0 well, 1 a check found something, 2 the call could not be carried out; commands with
    more of them say so."""
    arguments = parse(sys.argv[1:])
    command: type[Command] = arguments.command
    try:
        code = command(arguments).run()
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # its reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except grpc.RpcError as error:
        _fail(_said(error, error_of(error), arguments))
    except CacheClientError as error:
        _fail(_said(error.__cause__, error, arguments))
    except (*FAILURES, CacheError, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def parse(words: list[str]) -> argparse.Namespace:
    """Parsed command line. Exits with 0 after help, with 2 after a line that says what is wrong."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    parser = _parser()
    if not words:
        parser.print_help()
        parser.exit()
    if not words[0].startswith("-") and words[0] not in {command.name for command in COMMANDS}:
        hint = did_you_mean(words[0], [command.name for command in COMMANDS], "")
        parser.error(f"there is no command {words[0]!r}{hint and ', '}{hint}")
    return parser.parse_args(words)


class _Columns(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)
        self._action_max_length = 14


def _parser() -> Parser:
    parser = Parser(
        prog="cachesvc",
        description="Looks into a cache daemon, and plans and replays without one.",
        epilog="cachesvc COMMAND --help says more. Exit codes: 0 well, 1 a check found something, 2 it was not carried "
        "out. CACHESVC_SOCKET or CACHESVC_ADDRESS names the daemon, CACHESVC_TOKEN_FILE the token.",
        formatter_class=_Columns,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


def _said(failure: BaseException | None, mapped: CacheClientError, arguments: argparse.Namespace) -> str:
    """The error for an operator; without an answer it is about the daemon, not about engines."""
    if isinstance(failure, grpc.RpcError) and isinstance(mapped, DaemonUnavailable) and not is_refusal(failure):
        return no_answer(failure, arguments)
    return f"{mapped}; see --token-file" if isinstance(mapped, Unauthenticated) else str(mapped)


def _fail(message: str) -> None:
    print(for_terminal(f"cachesvc: {message}"), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
