"""Options of ``s3``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text.addresses import is_loopback
from cachesvc.model.text.printable import one_line
from cachesvc.storage.spec import StorageSpec, count_option, seconds_option, size_option

MOST_THREADS = 128
MOST_RETRIES = 10
LEAST_PART_BYTES = 5 << 20
"""Smallest part of a multipart upload that S3 takes, but for the last."""
ADDRESSING = ("path", "virtual")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_URL = re.compile(r"[A-Za-z0-9:/._~%\[\]-]+")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*")


@dataclass(frozen=True, slots=True)
class S3Options:
    """``endpoint``: URL of the store; empty: the region's own. ``ca``: PEM file of roots that are trusted besides the
    system's. ``profile``: section of the shared credentials file. ``capacity``: known bytes above which nothing is
    written; 0: no limit. ``readers``, ``writers``: requests at a time. ``part``: bytes of one request; larger objects
    are read and written in parts. ``retries``: repeats of a failed request. ``rescan``: seconds between listings of the
    bucket. ``absent``: seconds for which a miss is remembered. ``timeout``: seconds of one request. ``insecure``: 1
    allows plain HTTP to another machine. ``addressing``: of buckets, by path or by virtual host."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    ca: str = ""
    profile: str = ""
    capacity: int = 0
    readers: int = 16
    writers: int = 8
    part: int = 8 << 20
    retries: int = 2
    rescan: float = 3600.0
    absent: float = 5.0
    timeout: float = 5.0
    insecure: int = 0
    addressing: str = "path"

    @property
    def is_plain(self) -> bool:
        """True where requests are not encrypted."""
        return urlsplit(self.endpoint).scheme == "http"


def s3_options(spec: StorageSpec) -> S3Options:
    """Parse the options. Raises InvalidRequest."""
    readers: dict[str, Callable[[str, str], object]] = {
        "endpoint": _text,
        "region": region_option,
        "ca": _text,
        "profile": _text,
        "addressing": _text,
        "capacity": size_option,
        "part": size_option,
        "readers": count_option,
        "writers": count_option,
        "retries": count_option,
        "insecure": count_option,
        "rescan": seconds_option,
        "absent": seconds_option,
    }
    spec.check_options(readers)
    bucket, prefix = _place(spec.where)
    values = {name: readers[name](name, value) for name, value in spec.options.items()}
    made = S3Options(bucket, prefix, timeout=spec.tier.deadline, **values)  # type: ignore[arg-type]
    _check_endpoint(made)
    if not 1 <= made.readers <= MOST_THREADS or not 1 <= made.writers <= MOST_THREADS:
        raise InvalidRequest(f"storage: readers and writers are 1 to {MOST_THREADS} requests at a time")
    if made.retries > MOST_RETRIES or made.insecure not in (0, 1):
        raise InvalidRequest(f"storage: retries is 0 to {MOST_RETRIES}, and insecure is 0 or 1")
    if made.part < LEAST_PART_BYTES:
        raise InvalidRequest(f"storage: part must be at least {LEAST_PART_BYTES} (5 MiB), got {made.part}")
    if made.rescan <= 0 or made.timeout <= 0:
        raise InvalidRequest("storage: rescan and deadline must be more than 0 seconds")
    if made.addressing not in ADDRESSING:
        raise InvalidRequest(f"storage: addressing={made.addressing} is not one of {', '.join(ADDRESSING)}")
    return made


def _place(where: str) -> tuple[str, str]:
    bucket, _, prefix = where.removeprefix("//").partition("/")
    prefix = prefix.rstrip("/")
    if not where.startswith("//") or _BUCKET.fullmatch(bucket) is None or ".." in bucket:
        raise InvalidRequest(
            f"storage: s3://{_shown(where)} is not s3://BUCKET/PREFIX with a BUCKET of 3 to 63 small letters, digits, "
            "dots and hyphens; credentials come from the environment, never from here"
        )
    if prefix and (_PREFIX.fullmatch(prefix) is None or {".", ".."} & set(prefix.split("/"))):
        raise InvalidRequest(f"storage: s3:{where} has a prefix with other than letters, digits and !_.*'()=-/")
    return bucket, prefix


def _check_endpoint(options: S3Options) -> None:
    if not options.endpoint:
        return
    host = _host(options.endpoint) if _URL.fullmatch(options.endpoint) else ""
    if not host:
        raise InvalidRequest(
            f"storage: endpoint={_shown(options.endpoint)} is not a URL such as https://s3.example.com:9000, "
            "without credentials in it"
        )
    if options.is_plain and not is_loopback(host) and not options.insecure:
        raise InvalidRequest(
            f"storage: endpoint={options.endpoint} sends blocks over the network unencrypted; use https, or allow it "
            "by insecure=1"
        )


def _shown(place: str) -> str:
    """A place as it may be repeated: without what may be credentials in it."""
    return one_line(place.removeprefix("//").rpartition("@")[2])


def _host(endpoint: str) -> str:
    """Host of a URL; empty where it is none, or has more in it than scheme, host, port and path."""
    try:
        parts = urlsplit(endpoint)
        has_more = parts.username or parts.password or parts.query or parts.fragment or parts.port == 0
    except ValueError:
        return ""
    return "" if has_more or parts.scheme not in ("http", "https") else parts.hostname or ""


def region_option(name: str, text: str) -> str:
    """A region's name: it becomes a part of host names. Raises InvalidRequest."""
    if _REGION.fullmatch(text) is None:
        raise InvalidRequest(f"storage: {name}={one_line(text)} is not a region's name such as eu-west-1")
    return text


def _text(_: str, text: str) -> str:
    return text
