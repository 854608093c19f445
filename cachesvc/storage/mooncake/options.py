"""Options of ``mooncake``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text.addresses import parse_address
from cachesvc.storage.spec import StorageSpec, number_option, seconds_option, size_option

PROTOCOLS = ("tcp", "rdma")
MOST_THREADS = 64
MOST_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """``master``: HOST:PORT. ``host``: by which other clients reach this one. ``segment``: bytes of memory that this
    daemon gives to the store; 0: none. ``buffer``: bytes of the client's own memory, which our calls do not use.
    ``protocol``: tcp or rdma; ``devices``: of rdma, by comma. ``readers``, ``writers``: threads. ``replicas``: copies
    of an object. ``discard``: seconds after which the master lets go of a put that never ended (its flag
    put_start_discard_timeout_sec): until then a put of the same name says 0, and nothing is stored."""

    master: str
    host: str = "127.0.0.1"
    segment: int = 0
    buffer: int = 16 << 20
    protocol: str = "tcp"
    devices: str = ""
    readers: int = 4
    writers: int = 2
    replicas: int = 1
    discard: float = 5.0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the master."""
        return parse_address("storage", self.master)


def mooncake_options(spec: StorageSpec) -> MooncakeOptions:
    """Parse the options. Raises InvalidRequest."""
    readers: dict[str, Callable[[str, str], object]] = {
        "host": _text,
        "segment": size_option,
        "buffer": size_option,
        "protocol": _text,
        "devices": _text,
        "readers": _count,
        "writers": _count,
        "replicas": _count,
        "discard": seconds_option,
    }
    spec.check_options(readers)
    parse_address("storage: the master of mooncake", spec.where, least_port=1)
    values = {name: readers[name](name, value) for name, value in spec.options.items()}
    made = MooncakeOptions(spec.where, **values)  # type: ignore[arg-type]
    if made.protocol not in PROTOCOLS:
        raise InvalidRequest(f"storage: protocol={made.protocol} is not one of {', '.join(PROTOCOLS)}")
    if not 1 <= made.readers <= MOST_THREADS or not 1 <= made.writers <= MOST_THREADS:
        raise InvalidRequest(f"storage: readers and writers are 1 to {MOST_THREADS} threads")
    if not 1 <= made.replicas <= MOST_REPLICAS:
        raise InvalidRequest(f"storage: replicas is 1 to {MOST_REPLICAS}")
    return made


def _text(_: str, text: str) -> str:
    return text


def _count(name: str, text: str) -> int:
    value = number_option(name, text)
    if value != int(value):
        raise InvalidRequest(f"storage: {name}={text} is not a whole number")
    return int(value)
