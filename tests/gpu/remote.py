"""A GPU engine in a process of its own, told what to do as ``tests.e2e.remote`` is."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.e2e.engine import WAIT_SECONDS
from tests.e2e.remote import RemoteEngine, RemoteLoop, serve_lines
from tests.forked_command import command_forker
from tests.forked_process import PipedProcess
from tests.gpu.engine import LAYOUTS, GpuEngine


class RemoteGpuEngine(RemoteEngine):
    """The test's end. Settings are those of ``GpuEngine``, but ``layout`` is a name of ``LAYOUTS``, ``salt`` a text."""

    def __init__(self, socket: str, **settings: Any) -> None:
        arguments = (json.dumps({"socket": socket, **settings}),)
        self.process = PipedProcess(command_forker().socket, "tests.gpu.remote", arguments, os.environ)


class GpuLoop(RemoteLoop):
    """The process's end."""

    def __init__(self, engine: GpuEngine) -> None:
        super().__init__(engine)
        self._gpu_engine = engine

    def begin_load(self, name: str, blocks: int) -> list[int]:
        """Grow a sequence over its hit on the host; once the first layer is there, and with a stream that waits for the
        last one: the tickets."""
        sequence, _ = self._sequences[name]
        sequence.allocate(blocks)
        pool = self._gpu_engine.pool
        for ticket in sequence.tickets:
            pool.wait_layer(ticket, 0, WAIT_SECONDS)
            pool.wait_ticket_on(self._gpu_engine.stream, ticket)
        return [ticket.id for ticket in sequence.tickets]


def main() -> None:
    settings = json.loads(sys.argv[1])
    layout, salt = LAYOUTS[settings.pop("layout", "small")], settings.pop("salt", "").encode()
    engine = GpuEngine(settings.pop("socket"), layout=layout, salt=salt, **settings)
    serve_lines(GpuLoop(engine))
    engine.close()


if __name__ == "__main__":
    main()
