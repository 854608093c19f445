"""A process that has imported what others need, and forks them: an import of vLLM or SGLang takes ten seconds, that of
the daemon half of one, a thousand times.

    python -m tests.forker SOCKET PRELOAD

``PRELOAD``: a module that imports it. Each connection to the socket asks for a process that runs a module, as
``python -m`` would: three files for its standard streams, and a line of JSON. Answered by two lines, its process id and
its exit code. Run by any Python, which need not have pytest. Ends with its standard input.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any


def run(asked: dict[str, Any], streams: list[int]) -> int:
    """Run a module with these standard streams; its exit code."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[1:] = asked["arguments"]
    sys.stdin, sys.stdout = open(0, encoding="utf-8", closefd=False), open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - they are its standard streams
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:  # noqa: BLE001 - the root of the process
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def supervise(connection: socket.socket) -> None:
    """Fork the process that a connection asks for, and tell its id and its exit code. Returns in that process alone,
    by its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rw", encoding="utf-8") as lines:
        asked = json.loads(lines.readline())
        if pid := os.fork():
            for stream in streams:
                os.close(stream)
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # what SGLang tells its parent by
            print(pid, file=lines, flush=True)
            ended = os.pidfd_open(pid)
            with suppress(OSError):  # nothing is left of it, or of who asked
                if ended not in select.select([ended, connection.fileno()], [], [])[0]:
                    os.killpg(pid, signal.SIGKILL)  # who asked has gone, and would leave an engine behind
                _, status = os.waitpid(pid, 0)
                print(os.waitstatus_to_exitcode(status), file=lines, flush=True)
            os._exit(0)
    connection.close()
    sys.exit(run(asked, streams))


def main(path: str, preload: str) -> None:
    """Fork a process for each connection, until its standard input ends."""
    import_module(preload)
    gc.freeze()
    gc.unfreeze = lambda: None  # vLLM does at its end, and a collection of all that was imported takes seconds
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listens", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            listener.close()
            supervise(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
