"""The daemon's configuration: frozen, checked when made, read once at the root. Flags win over the file."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cachesvc.model.answers import MAX_OPERATIONS
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.keys import MOST_KEYS
from cachesvc.model.text import did_you_mean, parse_address, parse_amount, parse_size
from cachesvc.model.words import WritePolicy

BACKENDS = ("auto", "shm", "cuda")
DEVICE_MEMORY = ("auto", "ipc", "vmm")
CALIBRATION = ("start", "never")
MOVERS = ("process", "inside")
MIN_SLICE_BYTES = 1 << 20
"""A link of 55 GB/s copies it in 19 us, about what it takes to choose a slice and submit it: below that it idles
between slices, and large pages are cut in pieces that cost a submission each."""
MAX_SOCKET_BYTES = 100
MAX_TOKEN_GRACE_SECONDS = 24 * 3600
LOOPBACK_HOST = "127.0.0.1"
ANY_HOSTS = frozenset(("0.0.0.0", "::", ""))  # noqa: S104 - what others may listen on
TWICE = re.compile("overwrite|Cannot (declare|define|mutate)|already")
"""Words of the parser for a key or a table that is given a second time."""
CHECKSUMS = ("off", "sample", "all")
LIVE = frozenset(
    {
        *("blocks_per_sequence", "sequences_per_lease", "stock_pages_per_lease", "leases", "operations_per_step"),
        *("calls_in_flight", "load_limit", "store_limit", "write_policy", "write_through_threshold", "wait_seconds"),
        *("eviction", "write_back_share", "pin_share"),
        *("waiting_calls", "waiting_calls_per_process", "lanes_per_process", "drain_seconds", "log_level"),
    }
)
"""Settings that change while the daemon runs, when the file is read again; ``service/host/reload.py`` applies them."""
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, with its unit in its name. Raises InvalidRequest for a value that cannot be.

    ``socket``: path of the gRPC unix socket (the life socket lies beside it). ``socket_group``: group that may connect
    beside the daemon's own uid, by name or number, or empty. ``listen``: loopback TCP, or empty. ``health_listen``:
    where probes are answered, anywhere, or empty. ``device_pool``, ``host_pool``: bytes. ``shm_devices``: simulated
    devices of the shm backend. ``device_memory``: how engines map a GPU's pools, by legacy IPC handle or by VMM
    descriptor. ``movers``: what copies, a process for each device or threads of the daemon. ``mover``: sockets of such
    processes that run already, one for each device in order. ``calibration``: when each GPU's link is measured.
    ``load_limit``, ``store_limit``: bytes per second and device, 0 for none. ``ahead_pages``: device pages of each pool
    that are kept free, of blocks that the host has. ``pin_share``: of each pool of a model, what operators may pin.
    ``slice_bytes``: what is copied before the next choice between
    jobs. ``lease_seconds``: silence after which a lease is lost. ``wait_seconds``: longest that a call waits for
    transfers. ``drain_seconds``: how long SIGTERM waits for engines to finish. ``calls_in_flight``: calls at a time
    that work, of which a process gets its share. ``waiting_calls``: that wait for transfers instead (25 KiB each, and
    no time); ``waiting_calls_per_process``: of one engine: others have room. ``lanes_per_process``: lanes that one life
    connection may have; 0: none, all clients call by gRPC. ``metrics_listen``: HOST:PORT of the scrape endpoint, or
    empty. ``otlp_endpoint``: URL of a collector that gets metrics and traces, or empty. ``event_history``: changes of
    blocks that each model remembers; a subscriber that falls behind it is cut off. ``allow_uids``, ``allow_gids``:
    users that may connect to the life socket and so attach; both empty: its own user and root. ``tokens``: file of
    callers and their rights; empty: all processes that may open the socket. ``tls_client_ca``: clients on TCP need a
    certificate that it signed; ``tokens`` say what they may. ``checksums``: of which sealed pages they are taken, for
    Verify; ``checksum_limit``: bytes per second that are read for them. ``web_listen``: HOST:PORT of the read-only page
    on loopback, or empty. ``storage``: what outlives the daemon, by tier, as KIND:WHERE?options, the
    fastest first. ``peers``: daemons of
    other nodes that are asked, HOST:PORT by comma. ``peer_allow``: networks by comma whose daemons are asked where a
    request names them. ``peer_listen``: HOST:PORT where other nodes are answered, or empty; ``peer_advertise``:
    HOST:PORT that engines tell them, where that is another;
    ``peer_data_port``: where their bytes come from, 0: any. ``peer_tokens``: file of what nodes show each other;
    ``peer_tls_*``: their certificates. ``peer_lease_seconds``: how long a silent node keeps what it borrowed.
    ``fault_copies``: share of copies that are made to fail, for tests; a flag that no file may set, for the shm backend
    alone.
    """

    socket: str = "/run/cachesvc/cachesvc.sock"
    socket_group: str = ""
    listen: str = ""
    health_listen: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tokens: str = ""
    token_grace_seconds: float = 300.0
    backend: str = "auto"
    device_pool: int = 1 << 30
    host_pool: int = 1 << 30
    host_chunk: int = 1 << 30
    host_threads: int = 8
    shm_devices: int = 1
    load_limit: int = 0
    store_limit: int = 0
    slice_bytes: int = 32 << 20
    device_memory: str = "auto"
    movers: str = "process"
    mover: tuple[str, ...] = ()
    calibration: str = "start"
    write_policy: str = WritePolicy.WRITE_BACK.value
    write_through_threshold: int = 2
    write_back_share: float = 0.0
    ahead_pages: int = 256
    pin_share: float = 0.25
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
    waiting_calls: int = 4096
    waiting_calls_per_process: int = 256
    lanes_per_process: int = 8
    event_subscribers: int = 64
    event_history: int = 65536
    allow_uids: tuple[int, ...] = ()
    allow_gids: tuple[int, ...] = ()
    checksums: str = "off"
    checksum_limit: int = 256 << 20
    web_listen: str = ""
    storage: tuple[str, ...] = ()
    peers: str = ""
    peer_allow: str = ""
    peer_listen: str = ""
    peer_advertise: str = ""
    peer_data_port: int = 0
    peer_tokens: str = ""
    peer_tls_certificate: str = ""
    peer_tls_key: str = ""
    peer_tls_ca: str = ""
    peer_lease_seconds: float = 30.0
    log_level: str = "info"
    metrics_listen: str = ""
    otlp_endpoint: str = ""
    fault_copies: float = 0.0

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("write_policy", self.write_policy, tuple(policy.value for policy in WritePolicy))
        _one_of("device_memory", self.device_memory, DEVICE_MEMORY)
        _one_of("calibration", self.calibration, CALIBRATION)
        _one_of("movers", self.movers, MOVERS)
        if self.mover and self.movers == "inside":
            raise InvalidRequest("mover names sockets of movers that run already: it cannot be with movers = inside")
        if len(set(self.mover)) < len(self.mover):
            raise InvalidRequest(f"mover names a socket twice, and each is for one device: {', '.join(self.mover)}")
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("checksums", self.checksums, CHECKSUMS)
        _require_path(self.socket)
        for name in ("device_pool", "host_chunk", "host_threads", "shm_devices", "write_through_threshold", "leases"):
            _positive(name, getattr(self, name))
        for name in (
            "lease_seconds",
            "wait_seconds",
            "peer_lease_seconds",
            "blocks_per_sequence",
            "sequences_per_lease",
        ):
            _positive(name, getattr(self, name))
        for name in ("operations_per_step", "calls_in_flight", "waiting_calls", "waiting_calls_per_process"):
            _positive(name, getattr(self, name))
        if self.operations_per_step > MAX_OPERATIONS:
            raise InvalidRequest(
                f"operations_per_step must be at most {MAX_OPERATIONS}, got {self.operations_per_step}"
            )
        if self.blocks_per_sequence > MOST_KEYS:
            raise InvalidRequest(
                f"blocks_per_sequence must be at most {MOST_KEYS}, got {self.blocks_per_sequence}: a request carries "
                "no more keys; larger blocks (tokens a block) make room for longer prompts"
            )
        if self.slice_bytes < MIN_SLICE_BYTES:
            raise InvalidRequest(
                f"slice_bytes must be at least {MIN_SLICE_BYTES} (1 MiB), got {self.slice_bytes}: smaller slices cost "
                "more to choose and submit than to copy"
            )
        for name in ("event_subscribers", "event_history", "checksum_limit"):
            _positive(name, getattr(self, name))
        if min(self.load_limit, self.store_limit) < 0:
            raise InvalidRequest("load_limit and store_limit may not be negative; 0 is no limit")
        _require_shares(self)
        if self.ahead_pages < 0:
            raise InvalidRequest("ahead_pages may not be negative; 0 makes no room ahead")
        if self.lanes_per_process < 0:
            raise InvalidRequest("lanes_per_process may not be negative; 0 gives no lanes")
        _require_pools(self)
        if self.host_pool < 0 or not 0 <= self.drain_seconds < math.inf:
            raise InvalidRequest("host_pool and drain_seconds may not be negative, and must be finite")
        _require_grace(self.token_grace_seconds)
        if not 0 <= self.fault_copies <= 1 or (self.fault_copies and self.backend != "shm"):
            raise InvalidRequest("fault_copies is a share from 0 to 1, and for --backend shm alone")
        _check_listen(self)
        _check_ports(self)
        _check_telemetry(self)
        _check_web(self.web_listen)
        if self.web_listen and self.tokens:
            raise InvalidRequest(
                "web_listen has no login and shows every tenant's models to any user of the node: not with tokens; "
                "use cachesvc top"
            )

    def attaching_uids(self, own: int) -> frozenset[int]:
        """Users who may attach: the named ones, or else ``own`` and root."""
        return frozenset(self.allow_uids or (() if self.allow_gids else (0, own)))

    def shown(self) -> dict[str, str]:
        """The effective configuration as text, for the log and for operators; nothing in it is a secret."""
        return {name: str(value) for name, value in asdict(self).items()}


def load_config(path: str | None, flags: dict[str, Any]) -> Config:
    """The file's settings under the flags'. Raises InvalidRequest that names an unknown key or a bad value."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            remedy = 'texts and sizes stand in quotes, as in device_pool = "4GiB"'
            if TWICE.search(str(error)):
                remedy = "a key or a table is given twice: keep one of them"
            raise InvalidRequest(f"cannot read the configuration {path}: {error}; {remedy}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read the configuration {path}: {error}") from error
    known = {field.name: field for field in fields(Config)}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known, "cachesvcd --help lists them")
            raise InvalidRequest(f"unknown key {name!r} in {path}; {hint}")
        if name == "fault_copies":
            raise InvalidRequest("fault_copies makes copies fail, for tests: a flag (--fault-copies), never in a file")
    values |= {name: value for name, value in flags.items() if value is not None}
    return Config(**{name: _coerce(name, value) for name, value in values.items()})


MIN_POOL_BYTES = 1 << 20
POOLS = ("device_pool", "host_pool")
SIZES = ("device_pool", "host_pool", "host_chunk", "load_limit", "store_limit", "slice_bytes", "checksum_limit")


def _coerce(name: str, value: Any) -> Any:
    default = getattr(Config(), name)
    if name == "storage":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"storage: {value!r} is not KIND:WHERE?options, or a list of them")
        return tuple(filter(None, texts))
    if name == "mover":
        if not isinstance(value, list) or not all(isinstance(path, str) and path for path in value):
            raise InvalidRequest(f"mover: {value!r} is not a list of paths of sockets")
        return tuple(value)
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
            raise InvalidRequest(f"{name}: {value!r} is not a list of numbers, such as [1001, 1002]")
        return tuple(value)
    if name in SIZES and not isinstance(value, bool):
        try:
            return _pool_size(value) if name in POOLS else parse_amount(value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}") from error
    if isinstance(default, int):
        if type(value) is not int:
            raise InvalidRequest(f"{name}: {value!r} is not a whole number")
        return value
    if isinstance(default, float):
        if type(value) not in (int, float):
            raise InvalidRequest(f"{name}: {value!r} is not a number")
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidRequest(f"{name}: a whole number of that size is no time") from error
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: {value!r} is not a text")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidRequest(f"{name}: {value!r} is not one of {', '.join(allowed)}")


def _pool_size(text: object) -> int:
    """Bytes of a pool. Raises InvalidRequest for what is no size, or one with its unit that is too small."""
    size = parse_size(text)
    if 0 < size < MIN_POOL_BYTES and not str(text).strip().isdecimal():
        raise InvalidRequest(f"{text} is too small: a pool has at least {MIN_POOL_BYTES} bytes (1 MiB)")
    return size


def _require_pool(name: str, size_bytes: int) -> None:
    """Raises InvalidRequest for a pool that holds no block of any model: a unit was left out."""
    if 0 < size_bytes < MIN_POOL_BYTES:
        raise InvalidRequest(
            f"{name}: {size_bytes} is {size_bytes} bytes, and a pool has at least {MIN_POOL_BYTES} (1 MiB); did you "
            f"mean {size_bytes}GiB?"
        )


def _require_pools(config: Config) -> None:
    for name in POOLS:
        _require_pool(name, getattr(config, name))
    if config.storage and not config.host_pool:
        raise InvalidRequest(
            "storage: blocks go to storage from the host's pages, and host_pool is 0: nothing would be kept; give it a "
            "host_pool, such as 8GiB"
        )


def _require_path(socket: str) -> None:
    size = len(socket.encode())
    if not 0 < size <= MAX_SOCKET_BYTES:
        raise InvalidRequest(
            f"socket is a path of 1 to {MAX_SOCKET_BYTES} bytes (a unix socket's limit), not {size}: {socket!r}; "
            "choose a shorter one, or a symbolic link to its folder"
        )


def _require_shares(config: Config) -> None:
    if not 0 <= config.write_back_share < math.inf:
        raise InvalidRequest(f"write_back_share may not be negative, and must be finite: {config.write_back_share}")
    if not 0 <= config.pin_share <= 1:
        raise InvalidRequest(f"pin_share is a share of a pool, from 0 (no pins) to 1: {config.pin_share}")


def _require_grace(seconds: float) -> None:
    if not 0 <= seconds <= MAX_TOKEN_GRACE_SECONDS:
        raise InvalidRequest(f"token_grace_seconds is a time from 0 to {MAX_TOKEN_GRACE_SECONDS}, got {seconds}")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name} must be positive and finite, got {value}")


def _check_ports(config: Config) -> None:
    """Two listeners of one port: the second one could not start."""
    taken: list[tuple[str, str, int]] = []
    for name in ("listen", "health_listen", "metrics_listen", "web_listen", "peer_listen"):
        if text := getattr(config, name):
            address = parse_address(name, text)
            taken.append((name, LOOPBACK_HOST if address.host == "localhost" else address.host, address.port))
            if name == "peer_listen":
                taken.append(("peer_data_port", taken[-1][1], config.peer_data_port))
    for at, (name, host, port) in enumerate(taken):
        for other, its_host, its_port in taken[:at]:
            if port and port == its_port and (host == its_host or {host, its_host} & ANY_HOSTS):
                raise InvalidRequest(f"{other} and {name} are both port {port}; give each a port of its own")


def _check_listen(config: Config) -> None:
    if config.health_listen:
        parse_address("health_listen", config.health_listen)
    if not config.listen:
        if config.tls_certificate or config.tls_key or config.tls_client_ca:
            raise InvalidRequest("tls_certificate, tls_key and tls_client_ca are for listen, which is not set")
        return
    listen = parse_address("listen", config.listen)
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise InvalidRequest("tls_certificate and tls_key go together")
    if config.tls_client_ca and not config.tls_key:
        raise InvalidRequest("tls_client_ca needs tls_certificate and tls_key")
    if config.tls_key and not config.tokens:
        raise InvalidRequest(
            "TLS says who calls, not who may: name tokens too. A [[certificate]] of that file lets in who shows one "
            "that tls_client_ca has signed, read-only unless its scopes say otherwise"
        )
    if not config.tls_key and not listen.is_loopback:
        raise InvalidRequest(
            f"listen: {listen.host} is not loopback; without TLS (tls_certificate, tls_key) only 127.0.0.1, localhost "
            "or [::1]"
        )


def _check_telemetry(config: Config) -> None:
    if config.metrics_listen:
        parse_address("metrics_listen", config.metrics_listen)
    if config.otlp_endpoint and not re.fullmatch(r"https?://[^@/\s]+/?", config.otlp_endpoint):
        raise InvalidRequest(
            f"otlp_endpoint: {config.otlp_endpoint!r} is not http://HOST:PORT or https://HOST:PORT; "
            "credentials go into OTEL_EXPORTER_OTLP_HEADERS"
        )


def _check_web(web_listen: str) -> None:
    if web_listen and not parse_address("web_listen", web_listen).is_loopback:
        raise InvalidRequest(
            f"web_listen: {web_listen!r} is not 127.0.0.1:PORT, localhost:PORT or [::1]:PORT; the page has no login, "
            "so it is served on loopback alone"
        )
