"""A digest of a checkpoint: of every byte that decides what is computed with it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cachesvc_client.plugins.namespace.file_digests import FileDigests, Progress

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DECIDING = (*WEIGHTS, ".json", ".py")
"""Suffixes that decide bytes beside weights: configurations of the model and of its quantisation, indexes, and code
that comes with it."""

HARMLESS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "chat_template.json"),
)
"""Decide which tokens there are, which keys have anyway, or how tokens are sampled."""

SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Per file: name, bytes, when its content and when anything of it was changed (ns), and its inode."""

BEGIN_S = 0.1
"""No process loads weights so soon, and the time at which one began is known no better than 0.01 s."""

MOST_LOOKS = 8
"""Models of one path that an engine loads: the target, and a drafter of the same checkpoint."""


def checkpoint_digest(
    model: str,
    revision: str | None,
    digests: FileDigests | None = None,
    *,
    download_dir: str | None = None,
    commit: str | None = None,
    has_hub: bool = True,
) -> str:
    """Return the digest of a folder or a file, hexadecimal: names and contents, whatever the folder is called.

    A link into a cache of the Hugging Face hub is known by its blob's name, which is the SHA-256 of its bytes; all
    other files are read once (``FileDigests``). A name on a hub is its snapshot in that cache, or a revision of 40
    hexadecimal digits: a branch moves. ``download_dir``: the cache, where it is not the default one. ``commit``: where
    the configuration came from, if known: weights that were loaded between two looks at one commit are of it.
    ``has_hub``: False where the engine takes names from another hub. Raises FileNotFoundError where there are no
    weights, and none of these.
    """
    path = Path(model)
    if not path.exists():
        found = _snapshot(model, revision, download_dir) if has_hub else None
        if found is None:
            if revision is not None and COMMIT.fullmatch(revision):
                return f"{model}@{revision}"
            raise FileNotFoundError(
                f"{model} is no path and not in the hub's cache, and its revision {revision} may move: name a commit "
                "of 40 hexadecimal digits (--revision)"
            )
        if commit is not None and found.name != commit:
            raise FileNotFoundError(
                f"{model} moved from commit {commit} to {found.name} while this engine started: name one (--revision)"
            )
        path = found
    files = [path] if path.is_file() else deciding_files(path)
    if not any(each.suffix in WEIGHTS for each in files):
        raise FileNotFoundError(f"there are no weights ({', '.join(WEIGHTS)}) in {path}")
    return files_digest(files, path.parent if path.is_file() else path, digests)


def checkpoint_stamp(model: str) -> Stamp:
    """Return the stamps of the files that ``checkpoint_digest`` reads of a folder or a file; none for a name on a hub,
    whose snapshots do not change, and where they cannot be listed."""
    path = Path(model)
    with suppress(OSError):
        files = [path] if path.is_file() else deciding_files(path)
        facts = [(str(each), each.stat()) for each in files]
        return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in facts)
    return ()


class LoadedCheckpoints:
    """Looks that this process took at checkpoints when it began to load them. A digest is taken later, and files that
    were replaced in between are not those that were loaded. ``process_began_s``: Unix time; a checkpoint that was
    loaded without a look is known where nothing of it has changed since. Used from one thread."""

    def __init__(self, process_began_s: float) -> None:
        self._changed_after_ns = int((process_began_s + BEGIN_S) * 1e9)
        self._looks: dict[str, list[Stamp]] = {}

    def look(self, model: str) -> None:
        """This process begins to load a folder or a file."""
        looks = self._looks.setdefault(model, [])
        looks.append(checkpoint_stamp(model))
        del looks[:-MOST_LOOKS]

    def replaced(self, model: str) -> str:
        """Return why the files of a checkpoint, which were just digested, may not be those that were loaded; empty
        where they are. Forgets the looks."""
        now, looks = checkpoint_stamp(model), self._looks.pop(model, [])
        if looks:
            return (
                f"files of {model} were replaced while they were loaded" if any(each != now for each in looks) else ""
            )
        changed = next((name for name, _, _, changed_ns, _ in now if changed_ns > self._changed_after_ns), "")
        return f"{changed} has changed since this process began" if changed else ""


def process_began_s() -> float:
    """Return the Unix time at which this process began, of a fork that of the fork. Raises OSError."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def deciding_files(folder: Path) -> list[Path]:
    """List the files of a folder, and of those below it, that decide what is computed. Raises OSError."""
    found = [
        each
        for each in folder.rglob("*")
        if each.suffix in DECIDING and each.name not in HARMLESS and not _is_hidden(each.relative_to(folder))
    ]
    return sorted(each for each in found if each.is_file())


def files_digest(files: Sequence[Path], folder: Path, digests: FileDigests | None = None) -> str:
    """Return the digest of files by their names below ``folder``, their sizes and their contents. Raises OSError."""
    known = {each: _blob_digest(each) for each in files}
    digests = FileDigests() if digests is None else digests
    progress = Progress(sum(each.stat().st_size for each in files if not known[each]))
    total = hashlib.blake2b(digest_size=32, person=b"kv-checkpoint-2")
    for each in files:
        name = str(each.relative_to(folder)) if len(files) > 1 else each.suffix
        content = known[each] or digests.digest(each, progress)
        total.update(repr((name, each.stat().st_size, content)).encode())
    return total.hexdigest()


def _blob_digest(path: Path) -> str:
    """The SHA-256 that a link into a hub's cache names; empty for any other file."""
    if not path.is_symlink():
        return ""
    blob = path.resolve()
    is_blob = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return f"sha256:{blob.name}" if is_blob and SHA256.fullmatch(blob.name) else ""


def _snapshot(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a hub's name in the local cache; None where it is not there."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
