"""What a LoRA adapter adds to the keys of its requests: a digest of its files. vLLM's own keys know its name and path
alone, behind which two engines may have two adapters."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachesvc.model.keys import KEY_BYTES
from cachesvc_vllm.checkpoint import WEIGHTS

CONFIG = "adapter_config.json"

log = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int, int], ...]
"""Of each file: name, bytes, when it was changed, and its inode."""


@dataclass(slots=True)
class Adapter:
    """One that this engine has, as its first request named it. ``own``: a salt that nobody else knows, once it cannot
    be told which files are computed with."""

    path: str
    digest: Future[tuple[Path, Stamp, bytes]]
    own: bytes = b""


class Adapters:
    """Those of one engine, by vLLM's number of them. ``locate``: where an adapter's files are, which may take long.
    Used from vLLM's scheduler thread; files are read in another one."""

    def __init__(self, locate: Callable[[str], str]) -> None:
        self._locate = locate
        self._known: dict[int, Adapter] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-vllm-adapters")

    def salt(self, asked: Any) -> bytes | None:
        """What the keys of a request with this ``LoRARequest`` are mixed with: 32 bytes, nothing without one. None
        while the files are read, which the first call begins.

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
        if not adapter.digest.done():
            return None
        try:
            folder, stamp, digest = adapter.digest.result()
            if _stamp(folder) == stamp and asked.lora_path == adapter.path:
                return digest
            why = f"it was loaded from {adapter.path}, whose files have changed or are not meant"
        except OSError as error:
            why = str(error)
        adapter.own = secrets.token_bytes(KEY_BYTES)
        log.warning("adapter_not_shared name=%s path=%s why=%s", asked.lora_name, asked.lora_path, why)
        return adapter.own

    def close(self) -> None:
        """Have the thread end. Idempotent."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, path: str) -> tuple[Path, Stamp, bytes]:
        """Raises OSError."""
        folder = Path(self._locate(path))
        stamp = _stamp(folder)
        digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kv-vllm-adapter")
        for name, size, _, _ in stamp:
            digest.update(f"{name}:{size};".encode())
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        return folder, stamp, digest.digest()


def _stamp(folder: Path) -> Stamp:
    """Of an adapter's files. Raises OSError, also where there are none."""
    files = sorted(each for each in folder.iterdir() if each.name == CONFIG or each.suffix in WEIGHTS)
    if not any(each.suffix in WEIGHTS for each in files):
        raise FileNotFoundError(f"there are no weights ({', '.join(WEIGHTS)}) in {folder}")
    facts = [(each.name, each.stat()) for each in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts)
