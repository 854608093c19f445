"""The daemon's configuration: frozen, checked when made, read once at the root. Flags win over the file."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import WritePolicy

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}
_UNITS |= {"t": 1 << 40, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BACKENDS = ("auto", "shm", "cuda")
DEVICE_MEMORY = ("ipc", "vmm")
CALIBRATION = ("start", "never")
CHECKSUMS = ("off", "sample", "all")
LOG_LEVELS = ("debug", "info", "warning", "error")


def parse_size(text: str | int) -> int:
    """Bytes of ``8GiB``, ``512MiB``, ``1e9`` is not one. Raises InvalidRequest."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidRequest(f"{text!r} is no size; write a number with B, KiB, MiB, GiB or TiB, e.g. 8GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, with its unit in its name. Raises InvalidRequest for a value that cannot be.

    ``socket``: path of the gRPC unix socket (the life socket lies beside it). ``listen``: loopback TCP, or empty.
    ``device_pool``, ``host_pool``: bytes. ``shm_devices``: simulated devices of the shm backend. ``device_memory``: how
    engines map a GPU's pools, by legacy IPC handle or by VMM descriptor. ``calibration``: when each GPU's link is
    measured. ``load_limit``, ``store_limit``: bytes per second and device, 0 for none. ``slice_bytes``: what is copied
    before the next choice between jobs. ``lease_seconds``: silence after which a lease is lost. ``wait_seconds``:
    longest that a call waits for transfers. ``drain_seconds``: how long SIGTERM waits for engines to finish.
    ``allow_uids``: empty: its own and root. ``checksums``: of which sealed pages they are taken, for Verify;
    ``checksum_limit``: bytes per second that are read for them. ``web_listen``: HOST:PORT of the read-only page on
    loopback, or empty.
    """

    socket: str = "/run/cachesvc/cachesvc.sock"
    listen: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    backend: str = "auto"
    device_pool: int = 1 << 30
    host_pool: int = 1 << 30
    host_chunk: int = 1 << 30
    host_threads: int = 2
    shm_devices: int = 1
    load_limit: int = 0
    store_limit: int = 0
    slice_bytes: int = 32 << 20
    device_memory: str = "ipc"
    calibration: str = "start"
    write_policy: str = WritePolicy.WRITE_BACK.value
    write_through_threshold: int = 2
    eviction: str = "lru"
    lease_seconds: float = 10.0
    wait_seconds: float = 30.0
    drain_seconds: float = 5.0
    blocks_per_sequence: int = 65536
    sequences_per_lease: int = 4096
    stock_pages_per_lease: int = 4096
    leases: int = 1024
    operations_per_step: int = 4096
    calls_in_flight: int = 1024
    allow_uids: tuple[int, ...] = ()
    checksums: str = "off"
    checksum_limit: int = 256 << 20
    web_listen: str = ""
    log_level: str = "info"

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("write_policy", self.write_policy, tuple(policy.value for policy in WritePolicy))
        _one_of("device_memory", self.device_memory, DEVICE_MEMORY)
        _one_of("calibration", self.calibration, CALIBRATION)
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("checksums", self.checksums, CHECKSUMS)
        if not self.socket or len(self.socket.encode()) > 100:
            raise InvalidRequest(f"socket must be a path of at most 100 bytes (a unix socket's limit): {self.socket!r}")
        for name in ("device_pool", "host_chunk", "host_threads", "shm_devices", "write_through_threshold", "leases"):
            _positive(name, getattr(self, name))
        for name in ("lease_seconds", "wait_seconds", "blocks_per_sequence", "sequences_per_lease"):
            _positive(name, getattr(self, name))
        for name in ("operations_per_step", "calls_in_flight"):
            _positive(name, getattr(self, name))
        _positive("slice_bytes", self.slice_bytes)
        _positive("checksum_limit", self.checksum_limit)
        if min(self.load_limit, self.store_limit) < 0:
            raise InvalidRequest("load_limit and store_limit may not be negative; 0 is no limit")
        if self.host_pool < 0 or not 0 <= self.drain_seconds < math.inf:
            raise InvalidRequest("host_pool and drain_seconds may not be negative, and must be finite")
        _check_listen(self)
        _check_web(self.web_listen)

    def shown(self) -> dict[str, str]:
        """The effective configuration as text, for the log and for operators; nothing in it is a secret."""
        return {name: str(value) for name, value in asdict(self).items()}


def load_config(path: str | None, flags: dict[str, Any]) -> Config:
    """The file's settings under the flags'. Raises InvalidRequest that names an unknown key or a bad value."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequest(f"cannot read the configuration {path}: {error}") from error
    known = {field.name: field for field in fields(Config)}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name not in known:
            raise InvalidRequest(f"unknown key {name!r} in {path}; known are {', '.join(sorted(known))}")
    values |= {name: value for name, value in flags.items() if value is not None}
    return Config(**{name: _coerce(name, value) for name, value in values.items()})


SIZES = ("device_pool", "host_pool", "host_chunk", "load_limit", "store_limit", "slice_bytes", "checksum_limit")


def _coerce(name: str, value: Any) -> Any:
    default = getattr(Config(), name)
    if isinstance(value, bool):
        raise InvalidRequest(f"{name}: {value!r} is not a {type(default).__name__}")
    try:
        if name in SIZES:
            return parse_size(value)
        if name == "allow_uids":
            return tuple(int(uid) for uid in value)
        if isinstance(default, float):
            return float(value)
        if isinstance(default, int):
            return int(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: {value!r} is not a {type(default).__name__}") from error
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: {value!r} is not a text")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequest(f"{name}: {value!r} is not one of {', '.join(allowed)}")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name} must be positive and finite, got {value}")


def _check_listen(config: Config) -> None:
    if not config.listen:
        return
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"listen: {config.listen!r} is not HOST:PORT")
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise InvalidRequest("tls_certificate and tls_key go together")
    if not config.tls_key and host not in ("127.0.0.1", "localhost", "[::1]"):
        raise InvalidRequest(
            f"listen: {host} is not loopback; without TLS (tls_certificate, tls_key) only 127.0.0.1, localhost or [::1]"
        )


def _check_web(web_listen: str) -> None:
    host, _, port = web_listen.rpartition(":")
    if web_listen and (host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit() or int(port) > 65535):
        raise InvalidRequest(
            f"web_listen: {web_listen!r} is not 127.0.0.1:PORT, localhost:PORT or [::1]:PORT; the page has no login, "
            "so it is served on loopback alone"
        )
