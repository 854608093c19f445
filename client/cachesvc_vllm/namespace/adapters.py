"""LoRA adapters in the keys of their requests: a digest of their files. vLLM's own keys know an adapter's name and path
alone, behind which two engines may have two adapters."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cachesvc_client.plugins.namespace.checkpoint import WEIGHTS, files_digest

from cachesvc.model.keys import KEY_BYTES
from cachesvc_vllm.daemon.vllm_objects import LoraRequest

CONFIG = "adapter_config.json"

LOOK_S = 1.0
"""Between two looks at an adapter's files: on a network file system a look takes milliseconds."""

log = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Per file: name, bytes, when its content and when anything of it was changed, and its inode."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An adapter's files as they were when they were read."""

    folder: Path
    stamp: Stamp
    digest: bytes


@dataclass(slots=True)
class Adapter:
    """Adapter of this engine, as its first request named it. ``look``: whether its files are as they were, by the
    last look, which began at ``looked_s``. ``own``: a random salt of this engine, once the files that it computes with
    are unknown."""

    path: str
    reading: Future[Reading]
    look: Future[bool] | None = None
    looked_s: float = 0.0
    own: bytes = b""


class Adapters:
    """Adapters of one engine, by vLLM's numbers. ``locate``: where an adapter's files are, which may take long and
    raise anything. Used from vLLM's scheduler thread, which touches no file: another thread does."""

    def __init__(self, locate: Callable[[str], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._locate = locate
        self._clock = clock
        self._known: dict[int, Adapter] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-vllm-adapters")

    def salt(self, asked: LoraRequest | None) -> bytes | None:
        """Salt for the keys of a request with this ``LoRARequest``: 32 bytes, empty without one. None while the files
        are read, which the first call begins, or looked at, which one call in ``LOOK_S`` begins.

        An engine that has loaded an adapter goes on with what it loaded: once files have changed, or a request of the
        same number names others, what is computed is this engine's own.
        """
        if asked is None:
            return b""
        adapter = self._known.get(asked.lora_int_id)
        if adapter is None:
            reading = self._reader.submit(self._read, asked.lora_path)
            adapter = self._known[asked.lora_int_id] = Adapter(asked.lora_path, reading)
        if adapter.own:
            return adapter.own
        if asked.lora_path != adapter.path:
            return self._keep_apart(adapter, asked, f"it was loaded from {adapter.path}")
        if not adapter.reading.done():
            return None
        failed = adapter.reading.exception()
        if failed is not None:
            return self._keep_apart(adapter, asked, str(failed))
        found, now_s = adapter.reading.result(), self._clock()
        if adapter.look is None or (adapter.look.done() and now_s - adapter.looked_s >= LOOK_S):
            adapter.look, adapter.looked_s = self._reader.submit(_is_unchanged, found), now_s
        if not adapter.look.done():
            return None
        if not adapter.look.result():
            return self._keep_apart(adapter, asked, "its files have changed since they were read")
        return found.digest

    def _keep_apart(self, adapter: Adapter, asked: LoraRequest, why: str) -> bytes:
        adapter.own = secrets.token_bytes(KEY_BYTES)
        log.warning("adapter_not_shared name=%s path=%s why=%s", asked.lora_name, asked.lora_path, why)
        return adapter.own

    def close(self) -> None:
        """Have the thread end. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: str) -> Reading:
        """Read an adapter's folder, stamp and digest. Raises OSError, and what ``locate`` raises."""
        folder = Path(self._locate(path))
        stamp = _stamp(folder)
        return Reading(folder, stamp, bytes.fromhex(files_digest([folder / each[0] for each in stamp], folder)))


def _is_unchanged(reading: Reading) -> bool:
    try:
        return _stamp(reading.folder) == reading.stamp
    except OSError:
        return False


def _stamp(folder: Path) -> Stamp:
    """Stamp of an adapter's files. Raises OSError, also where there are none."""
    files = sorted(each for each in folder.iterdir() if each.name == CONFIG or each.suffix in WEIGHTS)
    if not any(each.suffix in WEIGHTS for each in files):
        raise FileNotFoundError(f"there are no weights ({', '.join(WEIGHTS)}) in {folder}")
    facts = [(each.name, each.stat()) for each in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in facts)
