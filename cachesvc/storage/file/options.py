"""Options of ``file``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text.printable import one_line
from cachesvc.storage.spec import StorageSpec, count_option, seconds_option, size_option

MIN_CAPACITY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileOptions:
    """``capacity``: bytes of all objects, of all daemons on the folder. ``floor``: bytes that are left free on the
    filesystem. ``ttl``: seconds without use after which objects go; 0: never. ``readers``, ``writers``: threads.
    ``rescan``: seconds between looks for what other daemons have done. ``direct``: 1 goes around the page cache where
    the filesystem lets us, 0 does not."""

    root: str
    capacity: int
    floor: int = 1 << 30
    ttl: float = 0.0
    readers: int = 4
    writers: int = 2
    rescan: float = 10.0
    direct: int = 1


def file_options(spec: StorageSpec) -> FileOptions:
    """Parse the options. Raises InvalidRequest."""
    readers: dict[str, Callable[[str, str], float]] = {
        "capacity": size_option,
        "floor": size_option,
        "ttl": seconds_option,
        "readers": count_option,
        "writers": count_option,
        "rescan": seconds_option,
        "direct": count_option,
    }
    spec.check_options(readers)
    if not spec.where.startswith("/") or "\0" in spec.where:
        raise InvalidRequest(
            f"storage: file:{one_line(spec.where)} is not an absolute path, such as file:/var/cache/cachesvc"
        )
    if "capacity" not in spec.options:
        raise InvalidRequest("storage: file needs capacity=SIZE, what all objects may take, such as capacity=200GiB")
    values = {name: readers[name](name, value) for name, value in spec.options.items()}
    whole = {name: int(value) for name, value in values.items() if name not in ("ttl", "rescan")}
    made = FileOptions(spec.where, **{**values, **whole})  # type: ignore[arg-type]
    if made.capacity < MIN_CAPACITY_BYTES:
        raise InvalidRequest(f"storage: capacity must be at least {MIN_CAPACITY_BYTES} (1 MiB), got {made.capacity}")
    if not 1 <= made.readers <= 64 or not 1 <= made.writers <= 64 or made.direct not in (0, 1):
        raise InvalidRequest("storage: readers and writers are 1 to 64 threads, and direct is 0 or 1")
    if made.rescan <= 0:
        raise InvalidRequest("storage: rescan must be more than 0 seconds")
    return made
