"""A digest of a checkpoint that is cheap to make and changes with its weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SAMPLES = 64
SAMPLE_BYTES = 64 << 10
"""Of each file so many pieces, evenly spread: training moves nearly every byte, and a read of all of them would take
as long as loading the weights again."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def checkpoint_digest(model: str, revision: str | None) -> str:
    """Of a folder or a file: hexadecimal, over sizes and samples of its weights. Of a name on a hub: its revision.

    Raises FileNotFoundError where there are no weights and no revision.
    """
    path = Path(model)
    if not path.exists():
        if revision is None:
            raise FileNotFoundError(f"{model} is no path, and vLLM knows no revision of it")
        return f"{model}@{revision}"
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in WEIGHTS)
    if not files:
        raise FileNotFoundError(f"there are no weights ({', '.join(WEIGHTS)}) in {path}")
    digest = hashlib.blake2b(digest_size=32, person=b"kv-checkpoint")
    for each in files:
        _sample(each, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: hashlib.blake2b) -> None:
    size = os.stat(path).st_size  # noqa: PTH116 - follows the links of a hub's cache, as open does
    digest.update(f"{path.name}:{size};".encode())
    with path.open("rb") as weights:
        for sample in range(SAMPLES):
            weights.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(weights.read(SAMPLE_BYTES))
            if size <= SAMPLE_BYTES:
                return
