"""An engine in a process of its own: told what to do by one JSON line on standard input, answering by one each.

Run as a module it is the process; ``RemoteEngine`` is the end that a test holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cachesvc_client import CacheClient, CacheClientError, Registration
from cachesvc_client.sequence import Sequence

from tests.e2e.engine import LAYOUTS, WAIT_SECONDS, Engine
from tests.forked_command import command_forker
from tests.forked_process import PipedProcess

ROOT = Path(__file__).parents[2]


class RemoteRefused(Exception):
    """Error of a call of the remote engine: ``kind`` is the name of its type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class RemoteEngine(AbstractContextManager["RemoteEngine"]):
    """The test's end. Settings are those of ``Engine``; ``layout`` is a name of ``LAYOUTS``.

    With ``worker`` (what another engine's ``start`` has answered) it is a worker rank under that engine's lease.
    """

    def __init__(self, socket: str, **settings: Any) -> None:
        arguments = (json.dumps({"socket": socket, **settings}),)
        self.process = PipedProcess(command_forker().socket, "tests.e2e.remote", arguments, os.environ)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have something done; its answer. Raises RemoteRefused."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Have something done; ``answer`` says what came of it."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. Raises RemoteRefused, EOFError when the process is gone."""
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise EOFError(f"the engine ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteRefused(answer["error"], answer["message"])
        return answer["value"]

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process; a SIGKILL is waited for."""
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                self.process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        else:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                self.process.wait()
        self.process.stdout.close()


class RemoteLoop:
    """The process's end: one method for each thing that can be asked for. Sequences go by names of the test's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences: dict[str, tuple[Sequence, bytes]] = {}

    def start(self) -> dict[str, object]:
        """Connect and attach."""
        self._engine.start()
        registration = self._engine.registration
        lease = self._engine.lease
        return {
            "lease": lease.id,
            "joined": lease.joined,
            "model": registration.model_id,
            "existed": registration.existed,
        }

    def serve(self, tokens: list[int]) -> dict[str, object]:
        """A whole prompt."""
        return self._engine.serve(tokens)._asdict()

    def match(self, name: str, tokens: list[int]) -> dict[str, int]:
        """Open a sequence."""
        keys = self._engine.keys(tokens)
        sequence = self._engine.lease.match(keys)
        self._sequences[name] = (sequence, keys)
        return {
            "id": sequence.id,
            "device": sequence.device_blocks,
            "host": sequence.host_blocks,
            "computing": sequence.computing_blocks,
        }

    def allocate(self, name: str, blocks: int) -> list[list[int]]:
        """Grow it; its tables."""
        sequence, _ = self._sequences[name]
        sequence.allocate(blocks)
        sequence.wait_loaded(WAIT_SECONDS)
        return [table.tolist() for table in sequence.tables]

    def fill(self, name: str, first: int, last: int) -> None:
        """Compute blocks."""
        sequence, keys = self._sequences[name]
        self._engine.fill(sequence, keys, range(first, last))

    def fill_forever(self, name: str, first: int, last: int) -> None:
        """Answer after the first pass over the blocks, and go on writing until the process is killed."""
        self.fill(name, first, last)
        say({"value": None})
        while True:
            self.fill(name, first, last)

    def publish(self, name: str, blocks: int) -> dict[str, object]:
        """Seal blocks."""
        sequence, _ = self._sequences[name]
        published = sequence.publish(blocks)
        return {
            "sealed": published.sealed_blocks,
            "duplicates": list(published.duplicate_positions),
            "tables": [table.tolist() for table in sequence.tables],
        }

    def release(self, name: str) -> int:
        """End a sequence."""
        sequence, _ = self._sequences.pop(name)
        return sequence.release()

    def close(self, quiesced: bool) -> None:
        """End the lease; the process goes on."""
        self._engine.lease.close(quiesced=quiesced)


class WorkerLoop:
    """A worker rank's process: it maps the pool under its scheduler's lease, and nothing else."""

    def __init__(self, client: CacheClient, registration: Registration, lease: str) -> None:
        self._client = client
        self._registration = registration
        self._lease = lease

    def start(self) -> int:
        """Attach; how many planes there are."""
        pool = self._client.connect().attach(self._registration, self._lease)
        return len(pool.planes)


def serve_lines(loop: RemoteLoop | WorkerLoop) -> None:
    """Do what each line says, until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(loop, request.pop("do"))(**request)}
        except (CacheClientError, EOFError) as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        say(answer)


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    layout = LAYOUTS[settings.pop("layout", "plain")]
    worker = settings.pop("worker", None)
    if worker is None:
        engine = Engine(settings.pop("socket"), layout=layout, **settings)
        serve_lines(RemoteLoop(engine))
        engine.close()
        return
    client = CacheClient(settings["socket"], engine="worker")
    registration = Registration(worker["model"], 0, b"", (), (), (), 0, layout)
    serve_lines(WorkerLoop(client, registration, worker["lease"]))
    client.close()


if __name__ == "__main__":
    main()
