"""``cachesvc``: everything that an operator or a researcher does from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import grpc
from cachesvc_client.errors import CacheClientError, DaemonUnavailable, Unauthenticated, error_of, is_refusal

from cachesvc import __version__
from cachesvc.model.errors import CacheError
from cachesvc_ctl import calibrate, describe, events, inspect, layout, top, why
from cachesvc_ctl import dump as dumping
from cachesvc_ctl.daemon_process import DaemonFailed
from cachesvc_ctl.describe import UnknownSymbol
from cachesvc_ctl.extras import MissingExtraError
from cachesvc_ctl.index_file import IndexFileError
from cachesvc_ctl.lab import commands as replaying
from cachesvc_ctl.lab.replay import ReplayFailed
from cachesvc_ctl.lab.trace import TraceError
from cachesvc_ctl.target import no_answer

Command = Callable[[argparse.Namespace], int]
FAILURES = (TraceError, ReplayFailed, DaemonFailed, MissingExtraError, IndexFileError, UnknownSymbol)


def main() -> None:
    """Entry point of the console script. Exit codes: 0 well, 1 a check failed, 2 the call could not be carried out."""
    arguments = _parser().parse_args()
    command: Command = arguments.command
    try:
        code = command(arguments)
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
        _fail("stopped")


class _Columns(argparse.HelpFormatter):
    """One line a command."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)
        self._action_max_length = 14


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cachesvc",
        description="Looks into a cache daemon, and plans and replays without one.",
        epilog="cachesvc COMMAND --help says more. Exit codes: 0 well, 1 a check failed, 2 it was not carried out.",
        formatter_class=_Columns,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    top.add_command(commands)
    inspect.add_commands(commands)
    why.add_command(commands)
    events.add_command(commands)
    inspect.add_actions(commands)
    dumping.add_commands(commands)
    describe.add_command(commands)
    layout.add_command(commands)
    calibrate.add_command(commands)
    replaying.add_commands(commands)
    return parser


def _said(failure: BaseException | None, mapped: CacheClientError, arguments: argparse.Namespace) -> str:
    """The error for an operator; where nobody answers it is about the daemon, not about engines."""
    if isinstance(failure, grpc.RpcError) and isinstance(mapped, DaemonUnavailable) and not is_refusal(failure):
        return no_answer(failure, arguments)
    return f"{mapped}; see --token-file" if isinstance(mapped, Unauthenticated) else str(mapped)


def _fail(message: str) -> None:
    print(f"cachesvc: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
