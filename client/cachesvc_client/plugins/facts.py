"""The facts behind the name under which engines share, in a form that all processes agree on, and the name."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Protocol

DISPLAY_BYTES = 128

Fields = Mapping[str, frozenset[str]]
NO_FIELDS: Fields = MappingProxyType({})

HUB_NOTES = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
"""Notes in a model's ``config.json`` about its origin."""

LENGTH_FREE_ROPES = frozenset({"", "default", "linear", "llama3", "yarn", "deepseek_yarn", "mrope", "proportional"})
"""Kinds of position embeddings that do not look at the longest request; LongRoPE, for one, does."""


LENGTH_READERS = ("llama4",)
"""Beginnings of the names of model types that scale attention by the longest request and the generation config."""


def named(engine: str, facts: Mapping[str, str]) -> str:
    """Return the identity of what a kind of engine computes."""
    text = json.dumps(dict(facts), sort_keys=True).encode()
    person = f"kv-{engine}-name"[:16].encode()
    return f"{engine}-{hashlib.blake2b(text, digest_size=16, person=person).hexdigest()}"


def display_name(model: str) -> str:
    """Return what operators see beside the identity: the last part of the model's path or name, as far as the daemon
    takes it: printable, at most ``DISPLAY_BYTES``."""
    text = "".join(each if each.isprintable() else "?" for each in PurePath(model).name)
    return text.encode(errors="replace")[:DISPLAY_BYTES].decode(errors="ignore")


def length_fact(text_config: object, longest_tokens: int, generation: Callable[[], object]) -> str:
    """Return what a model's attention takes from the length of its longest request, an empty text where it takes
    nothing. ``generation``: gives the defaults of sampling that the checkpoint has."""
    config = canonical(text_config)
    if str(config.get("model_type") if isinstance(config, dict) else "").startswith(LENGTH_READERS):
        return f"{longest_tokens}.{digest_of(canonical(generation()))}"
    kinds = {str(kind) for kind in _rope_kinds(config)}
    return "" if kinds <= LENGTH_FREE_ROPES else str(longest_tokens)


def canonical(value: object, harmless: Fields = NO_FIELDS, inside: tuple[int, ...] = ()) -> object:
    """Turn a value into what JSON has, equal in all processes for equal values. ``harmless``: fields by the name of
    their class that are left out. ``inside``: the values around it, which it may lead back to."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Enum):
        return [_type_name(type(value)), value.name]
    if isinstance(value, type) or id(value) in inside:
        return _type_name(value if isinstance(value, type) else type(value))
    if isinstance(value, Path):
        return str(value)
    inside = (*inside, id(value))
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):  # a configuration of a model
        return canonical(without_notes(to_dict()), harmless, inside)
    if isinstance(value, Mapping):
        return {str(key): canonical(each, harmless, inside) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((canonical(each, harmless, inside) for each in value), key=repr)
    if isinstance(value, list | tuple):
        return [canonical(each, harmless, inside) for each in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch":  # dtypes and devices
        return str(value)
    left_out = harmless.get(type(value).__name__, frozenset())
    parts = {name: each for name, each in fields_of(value).items() if name not in left_out}
    return [_type_name(type(value)), {name: canonical(parts[name], harmless, inside) for name in sorted(parts)}]


def without_notes(config: Mapping[str, object]) -> dict[str, object]:
    """Leave out where a model's configuration came from, at each level."""
    return {
        key: without_notes(each) if isinstance(each, Mapping) else each
        for key, each in config.items()
        if key not in HUB_NOTES
    }


def digest_of(value: object) -> str:
    """Return 16 hexadecimal digits of what ``canonical`` made."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kv-vllm-fact").hexdigest()


def fields_of(value: object) -> dict[str, object]:
    """Fields of a value, or what else it has; nothing of what is no data."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name, None) for each in fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _rope_kinds(config: object, *, is_rope: bool = False) -> Iterable[object]:
    """All kinds of position embeddings that a model's configuration names, at any depth."""
    for key, each in config.items() if isinstance(config, Mapping) else ():
        if is_rope and key in ("rope_type", "type"):
            yield each
        elif isinstance(each, Mapping):
            yield from _rope_kinds(each, is_rope=is_rope or key in ("rope_parameters", "rope_scaling"))


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


# Digests of whole files, kept on disk so that a second start of an engine reads nothing again.
#
# An entry belongs to (device, inode, size, mtime, ctime, algorithm): the change time catches a file whose modification
# time was set back. Entries are trusted only where no other user may write them.

PIECE_BYTES = 256 << 20
"""Bytes hashed between two looks at the clock; BLAKE3 uses all cores for each piece."""

QUIET_S = 5.0
"""Hashing that takes longer tells how far it is, each time as much later."""

SETTLED_S = 2.0
"""File systems stamp changes in ticks of up to this long: of a file that changed later than that ago, the next change
may bear the same stamp, so its digest is not kept."""

MOST_ENTRIES = 4096
"""A checkpoint of a large model has some 200 files."""

DIGEST = re.compile(r"[a-z0-9]+:[0-9a-f]{64}")

log = logging.getLogger(__name__)


class Hasher(Protocol):
    """Protocol of a ``hashlib`` digest."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes, 64 hexadecimal digits."""


def new_hasher() -> tuple[str, Hasher]:
    """Return the fastest algorithm that there is: BLAKE3 on all cores, which the engine brings, else BLAKE2b."""
    try:
        from blake3 import blake3
    except ImportError:
        return "blake2b", hashlib.blake2b(digest_size=32)
    return "blake3", blake3(max_threads=blake3.AUTO)


class Progress:
    """Tells in the log how far hashing is, where it takes long. ``total_bytes``: of all files."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = total_bytes
        self._clock = clock
        self._began_s = self._told_s = clock()
        self._done_bytes = 0

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._told_s >= QUIET_S:
            self._told_s = now_s
            speed = self._done_bytes / max(now_s - self._began_s, 1e-6)
            log.info(
                "weights_hashing done_gib=%.1f total_gib=%.1f gib_per_s=%.2f",
                self._done_bytes / 2**30,
                self._total_bytes / 2**30,
                speed / 2**30,
            )


def cache_folder() -> Path | None:
    """Return where entries are kept: ``$XDG_CACHE_HOME/cachesvc/digests``, else below ``~/.cache``; None for a user
    without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "cachesvc" / "digests"
    except RuntimeError:
        return None


class FileDigests:
    """``folder``: for entries; where it cannot be used, every file is hashed each time. Safe between processes: of
    several that want one file's digest at once, one hashes it."""

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._folder = _usable(cache_folder() if folder is None else folder)
        self._clock = clock

    def digest(self, path: Path, progress: Progress | None = None) -> str:
        """Return ``ALGORITHM:HEX`` of all bytes of a file. Raises OSError."""
        algorithm, hasher = new_hasher()
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if self._folder is None:
                return _hash(file.fileno(), status.st_size, algorithm, hasher, progress)
            entry = self._folder / _entry_name(status, algorithm)
            with _locked(entry.with_suffix(".lock")):
                known = _read_entry(entry)
                if known is not None:
                    return known
                found = _hash(file.fileno(), status.st_size, algorithm, hasher, progress)
                is_settled = self._clock() - status.st_ctime >= SETTLED_S
                if is_settled and _entry_name(os.fstat(file.fileno()), algorithm) == entry.name:
                    _write_entry(entry, found)
        self._prune()
        return found

    def _prune(self) -> None:
        assert self._folder is not None
        with suppress(OSError):
            entries = sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime)
            for each in entries[: max(0, len(entries) - 2 * MOST_ENTRIES)]:
                each.unlink(missing_ok=True)


def _usable(folder: Path | None) -> Path | None:
    """The folder, made if need be; None where it cannot be made or others may write to it."""
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        log.info("digests_not_kept folder=%s why=%s", folder, error)
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("digests_not_kept folder=%s why=other users may write to it", folder)
        return None
    return folder if os.access(folder, os.W_OK) else None


def _entry_name(status: os.stat_result, algorithm: str) -> str:
    facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, algorithm)
    return hashlib.blake2b(repr(facts).encode(), digest_size=20, person=b"kv-file-digest").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; where there can be none, as on some network file systems, do without."""
    with ExitStack() as held:
        with suppress(OSError):
            lock = held.enter_context(path.open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_entry(entry: Path) -> str | None:
    try:
        status = entry.stat()
        text = entry.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return text if DIGEST.fullmatch(text) else None


def _write_entry(entry: Path, digest: str) -> None:
    try:
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False, encoding="ascii") as file:
            file.write(digest)
        Path(file.name).replace(entry)
    except OSError as error:
        log.info("digest_not_kept folder=%s why=%s", entry.parent, error)


def _hash(descriptor: int, size_bytes: int, algorithm: str, hasher: Hasher, progress: Progress | None) -> str:
    if size_bytes:
        with mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            for first in range(0, size_bytes, PIECE_BYTES):
                with view[first : first + PIECE_BYTES] as piece:
                    hasher.update(piece)
                    if progress is not None:
                        progress.add(len(piece))
    return f"{algorithm}:{hasher.hexdigest()}"
