"""An engine as a process of the demo's: started, asked over pipes, killed or ended."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any

from examples.engine import Answer, EngineSettings, Ready
from examples.tiny_transformer.digest import ONE_BLAS_THREAD
from examples.tiny_transformer.tokens import Tokens

LINE_SECONDS = 120.0  # for an engine to get ready, or for one answer: a hundred times what it takes
END_SECONDS = 30.0


class EngineFailed(Exception):
    """An engine process ended, or said nothing in time. What it wrote to standard error stands above."""


class EngineProcess:
    """``with EngineProcess(settings) as engine: engine.ask(prompt, new_tokens)``."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Ready | None = None
        self._began = 0.0
        self.seconds_to_first_token = 0.0

    @property
    def ready(self) -> Ready:
        """The engine's message that it is ready."""
        assert self._ready is not None
        return self._ready

    def start(self) -> None:
        """Start and wait until it is ready. Raises EngineFailed."""
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.engine", json.dumps(asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ONE_BLAS_THREAD},  # equal bits in all engines
        )
        try:
            self._ready = Ready(**self._read())
        except EngineFailed:
            self.kill()
            raise

    def ask(self, prompt: Tokens, new_tokens: int) -> Answer:
        """The engine's answer to a prompt. Raises EngineFailed."""
        process = self._running()
        assert process.stdin is not None
        asked = time.perf_counter()
        request = json.dumps({"prompt": prompt.tolist(), "new_tokens": new_tokens})
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineFailed(f"{self._settings.name} is gone") from error
        answer = Answer(**self._read())
        if not self.seconds_to_first_token:
            self.seconds_to_first_token = asked - self._began + answer.first_token_seconds
        return answer

    def kill(self) -> None:
        """Send SIGKILL: the engine ends without notice."""
        process = self._running()
        process.kill()
        self._reap(process)

    def close(self) -> None:
        """End of input: the engine closes its lease and ends. Raises EngineFailed unless it ends well. Idempotent."""
        if self._process is None:
            return
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise EngineFailed(f"{self._settings.name} did not end within {END_SECONDS:g} s") from error
        self._reap(process)
        if code:
            raise EngineFailed(f"{self._settings.name} ended with exit code {code}")

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._process is not None:
            self.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineFailed(f"{self._settings.name} does not run")
        return self._process

    def _read(self) -> dict[str, Any]:
        """The next line. There is never more than one on its way, so none can hide in the reader's buffer."""
        pipe = self._running().stdout
        assert pipe is not None
        readable, _, _ = select.select([pipe], [], [], LINE_SECONDS)
        line = pipe.readline() if readable else b""
        if not line:
            silence = "has ended" if readable else f"said nothing for {LINE_SECONDS:g} s"
            raise EngineFailed(f"{self._settings.name} ({self._settings.variant}) {silence}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
