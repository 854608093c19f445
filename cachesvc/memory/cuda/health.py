"""Health of a GPU for this process. After a fault on the device every call of CUDA fails, in this process and for good:
the log says so once, and nothing is tried again. One that hangs is not even called to give something back: the call
would not return.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cachesvc.model.errors import Unavailable

log = logging.getLogger(__name__)


class GpuHealth:
    """Health of one GPU. Thread-safe."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._reason = ""
        self.hangs = False
        self._lock = threading.Lock()

    def broke(self, error: Exception) -> None:
        """The GPU does not work any more; the first ``error`` is the reason."""
        with self._lock:
            is_news = not self._reason
            self._reason = self._reason or str(error) or type(error).__name__
        if is_news:
            log.error("gpu_broken device=%s reason=%s", self._uuid, self._reason)

    def hung(self, why: str) -> None:
        """Note that the GPU does not answer any more."""
        self.hangs = True
        self.broke(RuntimeError(why))

    @property
    def reason(self) -> str:
        """Reason why the GPU no longer works; empty while it does."""
        return self._reason

    def check(self) -> None:
        """Raise Unavailable once the GPU has broken."""
        if self._reason:
            raise Unavailable(
                f"GPU {self._uuid} no longer works for this daemon ({self._reason}); recompute, and restart the daemon"
            )

    def attempt(self, call: Callable[[], object]) -> None:
        """Ask something or give it back; where the GPU cannot any more, what comes after is done all the same."""
        if self.hangs:
            return
        try:
            call()
        except RuntimeError as error:
            self.broke(error)
