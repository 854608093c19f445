"""The daemon's settings, each one row: flags, checks, what changes live and docs/settings.md come from these rows.

The configuration is frozen, checked when made, read once at the root. Flags win over the file.
"""

from __future__ import annotations

import math
import re
import sys
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cachesvc.model.answers import MAX_OPERATIONS
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import did_you_mean, parse_address, parse_amount, parse_size
from cachesvc.model.words import MOST_KEYS, WritePolicy

DEVICE_MEMORY = ("auto", "ipc", "vmm")
MOVERS = ("process", "inside")
MIN_SLICE_BYTES = 1 << 20
"""A link of 55 GB/s copies it in 19 us, about what it takes to choose a slice and submit it: below that it idles
between slices, and large pages are cut in pieces that cost a submission each."""
MIN_POOL_BYTES = 1 << 20
MAX_SOCKET_BYTES = 100
MAX_TOKEN_GRACE_SECONDS = 24 * 3600
LOOPBACK_HOST = "127.0.0.1"
ANY_HOSTS = frozenset(("0.0.0.0", "::", ""))  # noqa: S104 - what others may listen on
TWICE = re.compile("overwrite|Cannot (declare|define|mutate)|already")
"""Words of the parser for a key or a table that is given a second time."""
POOLS = ("device_pool", "host_pool")
GROUPS = {
    "log_level": "the log",
    "socket": "who may come, and where",
    "backend": "memory and its links",
    "write_policy": "what is kept, and for how long",
    "peers": "other nodes: what one has computed is a hit on another (docs/nodes.md)",
    "leases": "limits, beyond which calls are refused",
    "metrics_listen": "telemetry and checks",
}
"""Headings of --help and of docs/settings.md, by the first setting under each."""

UNBOUNDED = sys.float_info.max

T = TypeVar("T")


class Setting(NamedTuple):
    """``unit``: what stands for a value in --help; SIZE: bytes, which people write with a unit. ``least`` and ``most``
    bound a number, ``positive`` excludes 0 as well; ``why`` explains the bound in the refusal. ``live``: it changes
    while the daemon runs, when the file is read again; ``service/host/reload.py`` applies it."""

    unit: str
    help: str
    choices: tuple[str, ...] = ()
    positive: bool = False
    least: float = -UNBOUNDED
    most: float = UNBOUNDED
    why: str = ""
    live: bool = False


def setting(default: T, *about: Any, **bounds: Any) -> T:
    """Make a row of ``Config``: a default, and the parts of a ``Setting``."""
    return field(default=default, metadata={"row": Setting(*about, **bounds)})


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting, with its unit in its name. Raises InvalidRequest for a value that cannot be."""

    log_level: str = setting(
        "info", "", "least severe lines on standard error", choices=("debug", "info", "warning", "error"), live=True
    )

    socket: str = setting(
        "/run/cachesvc/cachesvc.sock", "PATH", "gRPC unix socket to serve on; the life socket lies beside it"
    )
    socket_group: str = setting("", "GROUP", "group that may connect beside the daemon's own user: name or number")
    allow_uids: tuple[int, ...] = setting(
        (), "UID", "user who may connect to the life socket and so attach; may be repeated (default: its own and root)"
    )
    allow_gids: tuple[int, ...] = setting((), "GID", "group that may attach; may be repeated")
    tokens: str = setting(
        "",
        "FILE",
        "TOML or JSON: tokens with scopes, tenants and quotas (SIGHUP reads it anew; default: all processes that may "
        "open the socket)",
    )
    token_grace_seconds: float = setting(
        300.0,
        "S",
        "how long an engine's token that left the file serves the leases its engine has; 0: not",
        least=0,
        most=MAX_TOKEN_GRACE_SECONDS,
    )
    listen: str = setting("", "HOST:PORT", "also serve on TCP: loopback only, unless TLS is configured")
    tls_certificate: str = setting("", "FILE", "PEM certificate chain for --listen")
    tls_key: str = setting("", "FILE", "PEM private key for --listen")
    tls_client_ca: str = setting(
        "", "FILE", "PEM roots: clients of --listen need a certificate signed by one; --tokens says what they may"
    )
    health_listen: str = setting("", "HOST:PORT", "answer gRPC health checks, and nothing else, on any address")

    backend: str = setting("auto", "", "memory: auto takes shm where there is no GPU", choices=("auto", "shm", "cuda"))
    device_pool: int = setting(1 << 30, "SIZE", "bytes of each device that the daemon owns", positive=True)
    host_pool: int = setting(1 << 30, "SIZE", "bytes of the host tier; 0: none", least=0)
    host_chunk: int = setting(1 << 30, "SIZE", "the host pool comes in pieces of this size", positive=True)
    host_threads: int = setting(8, "N", "threads that populate the host pool", positive=True)
    shm_devices: int = setting(1, "N", "simulated devices of the shm backend", positive=True)
    device_memory: str = setting(
        "auto",
        "",
        "how engines map GPU pools: vmm (descriptors) or ipc (handles); auto: as it can",
        choices=DEVICE_MEMORY,
    )
    movers: str = setting("process", "", "copy by a process for each device, or by threads inside", choices=MOVERS)
    mover: tuple[str, ...] = setting(
        (),
        "PATH",
        "socket of a cachesvc-mover that runs already; once for each device, in order (default: started by the daemon)",
    )
    calibration: str = setting(
        "start", "", "measure each GPU's link at the start, or never", choices=("start", "never")
    )
    load_limit: int = setting(0, "SIZE", "bytes per second from host to each device; 0: no limit", least=0, live=True)
    store_limit: int = setting(0, "SIZE", "bytes per second from each device to host; 0: no limit", least=0, live=True)
    slice_bytes: int = setting(
        32 << 20,
        "SIZE",
        "bytes copied before a more urgent copy may go first",
        least=MIN_SLICE_BYTES,
        why="smaller slices cost more to choose and submit than to copy",
    )

    write_policy: str = setting(
        WritePolicy.WRITE_BACK.value,
        "",
        "when blocks are copied to the host",
        choices=tuple(policy.value for policy in WritePolicy),
        live=True,
    )
    write_through_threshold: int = setting(2, "N", "reuses before a selective backup", positive=True, live=True)
    write_back_share: float = setting(0.0, "X", "write back classes used X times the mean; 0: all", least=0, live=True)
    pin_share: float = setting(
        0.25, "X", "of each pool of a model, what operators may pin; 0: no pins", least=0, most=1, live=True
    )
    ahead_pages: int = setting(
        256, "N", "device pages of each pool kept free, of blocks that the host has; 1/64 of a pool at most", least=0
    )
    storage: tuple[str, ...] = setting(
        (),
        "SPEC",
        "below the host, and outlives the daemon: file:FOLDER?capacity=SIZE, mooncake:HOST:PORT or s3://BUCKET; again "
        "for tiers below it",
    )
    eviction: str = setting(
        "lru", "", "eviction policy", choices=("deepest_first", "hazard", "hazard_cost", "lfu", "lru"), live=True
    )
    lease_seconds: float = setting(10.0, "S", "silence after which a lease is lost", positive=True)
    wait_seconds: float = setting(30.0, "S", "longest that a call waits for transfers", positive=True, live=True)
    drain_seconds: float = setting(5.0, "S", "how long SIGTERM waits for engines to finish", least=0, live=True)

    peers: str = setting("", "HOST:PORT,...", "daemons to ask for blocks that this node lacks (default: none)")
    peer_allow: str = setting(
        "", "NETWORK,...", "networks of daemons that are asked where a request names them (default: none)"
    )
    peer_advertise: str = setting("", "HOST:PORT", "where other nodes reach --peer-listen (default: the same)")
    peer_listen: str = setting("", "HOST:PORT", "lend host pages to other nodes (default: not)")
    peer_data_port: int = setting(0, "N", "port that sends pages to other nodes; 0: any")
    peer_tokens: str = setting("", "FILE", "tokens that nodes show each other, one a line")
    peer_tls_certificate: str = setting("", "FILE", "certificate of this node, for both directions")
    peer_tls_key: str = setting("", "FILE", "private key of that certificate")
    peer_tls_ca: str = setting("", "FILE", "PEM roots that sign the certificates of nodes")
    peer_lease_seconds: float = setting(
        30.0, "S", "how long a silent node keeps the pages that it borrowed", positive=True
    )

    leases: int = setting(1024, "N", "leases at a time, besides a process's first", positive=True, live=True)
    sequences_per_lease: int = setting(4096, "N", "open sequences of one lease", positive=True, live=True)
    blocks_per_sequence: int = setting(
        65536,
        "N",
        "blocks of one sequence, the most too",
        least=1,
        most=MOST_KEYS,
        why="a request carries no more keys; larger blocks (tokens a block) make room for longer prompts",
        live=True,
    )
    stock_pages_per_lease: int = setting(4096, "N", "pages granted ahead of use", live=True)
    operations_per_step: int = setting(4096, "N", "operations of one Step", least=1, most=MAX_OPERATIONS, live=True)
    calls_in_flight: int = setting(
        1024, "N", "calls at work, of all callers together; a process gets its share", positive=True, live=True
    )
    waiting_calls: int = setting(
        4096, "N", "calls that wait for transfers, of all callers; each takes 25 KiB", positive=True, live=True
    )
    waiting_calls_per_process: int = setting(
        256, "N", "calls that wait for transfers, of one engine", positive=True, live=True
    )
    lanes_per_process: int = setting(
        8, "N", "lanes of one life connection; 0: none, all calls go by gRPC", least=0, live=True
    )
    event_subscribers: int = setting(64, "N", "open subscriptions to changes of blocks", positive=True)

    metrics_listen: str = setting(
        "",
        "HOST:PORT",
        "serve /metrics for Prometheus, to all who reach it; with --tokens, to tokens of scope metrics (default: not)",
    )
    otlp_endpoint: str = setting("", "URL", "push metrics and traces to an OTLP collector (default: not)")
    web_listen: str = setting("", "HOST:PORT", "serve a read-only page on loopback; not with --tokens (default: none)")
    event_history: int = setting(
        65536, "N", "changes of blocks kept for each model; a subscriber behind them is cut off", positive=True
    )
    checksums: str = setting(
        "off", "", "checksums of sealed pages, for `cachesvc verify --checksums`", choices=("off", "sample", "all")
    )
    checksum_limit: int = setting(256 << 20, "SIZE", "bytes per second read for checksums", positive=True)
    fault_copies: float = setting(
        0.0, "SHARE", "copies that are made to fail, for tests: a flag alone, for the shm backend", least=0, most=1
    )

    def __post_init__(self) -> None:
        for name, row in SETTINGS.items():
            _check(name, row, getattr(self, name))
        if self.mover and self.movers == "inside":
            raise InvalidRequest("mover names sockets of movers that run already: it cannot be with movers = inside")
        if len(set(self.mover)) < len(self.mover):
            raise InvalidRequest(f"mover names a socket twice, and each is for one device: {', '.join(self.mover)}")
        if self.fault_copies and self.backend != "shm":
            raise InvalidRequest("fault_copies is for --backend shm alone")
        _require_path(self.socket)
        _require_pools(self)
        _check_listen(self)
        _check_ports(self)
        _check_telemetry(self)

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
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in values:
        if name not in SETTINGS:
            hint = did_you_mean(name, SETTINGS, "cachesvcd --help lists them")
            raise InvalidRequest(f"unknown key {name!r} in {path}; {hint}")
        if name == "fault_copies":
            raise InvalidRequest("fault_copies makes copies fail, for tests: a flag (--fault-copies), never in a file")
    values |= {name: value for name, value in flags.items() if value is not None}
    return Config(**{name: _coerce(name, value) for name, value in values.items()})


SETTINGS: dict[str, Setting] = {each.name: each.metadata["row"] for each in fields(Config)}
LIVE = frozenset(name for name, row in SETTINGS.items() if row.live)
SIZES = tuple(name for name, row in SETTINGS.items() if row.unit == "SIZE")


def explain(name: str) -> str:
    """Purpose of a setting, and its default where it has one that the purpose does not name."""
    row, default = SETTINGS[name], getattr(DEFAULTS, name)
    if default in ("", ()):
        return row.help
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    if row.unit == "SIZE" and default:
        shown = f"{default >> 30}GiB" if default >= 1 << 30 else f"{default >> 20}MiB"
    return f"{row.help} (default {shown})"


def _check(name: str, row: Setting, value: Any) -> None:
    if row.choices and value not in row.choices:
        raise InvalidRequest(f"{name}: {value!r} is not one of {', '.join(row.choices)}")
    if not isinstance(value, int | float):
        return
    if row.positive and not 0 < value < math.inf:
        raise InvalidRequest(f"{name} must be positive and finite, got {value}")
    if not row.least <= value <= row.most:
        bounds = f"from {row.least} to {row.most}" if row.most < UNBOUNDED else f"at least {row.least} and finite"
        raise InvalidRequest(f"{name} must be {bounds}, got {value}{row.why and ': '}{row.why}")


def _coerce(name: str, value: Any) -> Any:
    row, default = SETTINGS[name], getattr(DEFAULTS, name)
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
    if row.unit == "SIZE" and not isinstance(value, bool):
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


def _pool_size(text: object) -> int:
    """Bytes of a pool. Raises InvalidRequest for what is no size, or one with its unit that is too small."""
    size = parse_size(text)
    if 0 < size < MIN_POOL_BYTES and not str(text).strip().isdecimal():
        raise InvalidRequest(f"{text} is too small: a pool has at least {MIN_POOL_BYTES} bytes (1 MiB)")
    return size


def _require_pools(config: Config) -> None:
    """Raises InvalidRequest for a pool that holds no block of any model: a unit was left out."""
    for name in POOLS:
        size = getattr(config, name)
        if 0 < size < MIN_POOL_BYTES:
            raise InvalidRequest(
                f"{name}: {size} is {size} bytes, and a pool has at least {MIN_POOL_BYTES} (1 MiB); did you "
                f"mean {size}GiB?"
            )
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
    if config.otlp_endpoint and not re.fullmatch(r"https?://[^@/\s]+/?", config.otlp_endpoint):
        raise InvalidRequest(
            f"otlp_endpoint: {config.otlp_endpoint!r} is not http://HOST:PORT or https://HOST:PORT; "
            "credentials go into OTEL_EXPORTER_OTLP_HEADERS"
        )
    if config.web_listen and not parse_address("web_listen", config.web_listen).is_loopback:
        raise InvalidRequest(
            f"web_listen: {config.web_listen!r} is not 127.0.0.1:PORT, localhost:PORT or [::1]:PORT; the page has no "
            "login, so it is served on loopback alone"
        )
    if config.web_listen and config.tokens:
        raise InvalidRequest(
            "web_listen has no login and shows every tenant's models to any user of the node: not with tokens; "
            "use cachesvc top"
        )


DEFAULTS = Config()
