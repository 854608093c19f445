"""``cachesvc``: everything that an operator or a researcher does from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import grpc

from cachesvc.model.errors import CacheError
from cachesvc_client.ctl import calibrate, describe, dumping, events, inspect, layout, replaying, top, why
from cachesvc_client.ctl.daemon_process import DaemonFailed
from cachesvc_client.ctl.describe import UnknownSymbol
from cachesvc_client.ctl.extras import MissingExtraError
from cachesvc_client.ctl.index_file import IndexFileError
from cachesvc_client.ctl.replay import ReplayFailed
from cachesvc_client.ctl.trace import TraceError
from cachesvc_client.errors import CacheClientError, DaemonUnavailable, error_of

Command = Callable[[argparse.Namespace], int]
FAILURES = (TraceError, ReplayFailed, DaemonFailed, MissingExtraError, IndexFileError, UnknownSymbol)


def main() -> None:
    """Entry point of the console script. Exit codes: 0 well, 1 a check failed, 2 the call could not be carried out."""
    parser = argparse.ArgumentParser(prog="cachesvc", description="Looks into a cache daemon, and replays traces.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replaying.add_commands(commands)
    inspect.add_commands(commands)
    why.add_command(commands)
    events.add_command(commands)
    top.add_command(commands)
    describe.add_command(commands)
    dumping.add_commands(commands)
    calibrate.add_command(commands)
    layout.add_command(commands)
    arguments = parser.parse_args()
    command: Command = arguments.command
    try:
        sys.exit(command(arguments))
    except (*FAILURES, CacheError, CacheClientError, OSError) as error:
        _fail(str(error))
    except grpc.RpcError as error:
        mapped = error_of(error)
        hint = "; is the daemon running on that --socket?" if isinstance(mapped, DaemonUnavailable) else ""
        _fail(f"{mapped}{hint}")
    except KeyboardInterrupt:
        _fail("stopped")
    except BrokenPipeError:
        sys.exit(0)


def _fail(message: str) -> None:
    print(f"cachesvc: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
