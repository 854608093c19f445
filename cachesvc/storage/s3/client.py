"""A bucket behind obstore, typed: calls that block outside of the GIL, and errors that are few.

Bytes come into memory of the library's own. What it is given to write it may read for as long as its request lives,
which may be longer than the call: so callers give it copies.
"""

from __future__ import annotations

import configparser
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.text import is_loopback, one_line
from cachesvc.storage.spec import StorageSpec, count_option, option, seconds_option, size_option, text_option

REGION = "us-east-1"
FIRST_PAUSE = timedelta(milliseconds=50)
LONGEST_PAUSE = timedelta(seconds=1)
"""Between tries of a request, with jitter."""
CONNECT_SECONDS = 2.0
MULTIPART_PARTS = 4
"""Parts of one object that are sent at a time."""
REASON_CHARACTERS = 300
LIST_OBJECTS = 1000
PANIC, BASE = "PanicException", "BaseError"
"""Names of the types that a panic and an error of the library raise; the first can be imported from nowhere."""
_NO_SUCH_RANGE, _NOT_IMPLEMENTED = "416", "501"
_NO_BUCKET = "NoSuchBucket"
_WORD = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_DENIED_CODES = ("401", "403")
_DENIED_WORDS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DENIED_TYPES = ("PermissionDeniedError", "UnauthenticatedError")
_CODE = re.compile(r"status code: ([0-9]{3})")
_ANSWER = re.compile(r"Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_LONG_HEX = re.compile(r"([0-9a-f]{8})[0-9a-f]{8,}")


class Trouble(Enum):
    """Kinds of failures: what an operator has to look at."""

    DENIED = "the store refuses the credentials"
    NO_BUCKET = "the store has no such bucket"
    OTHER = "the store does not answer, or answers with errors"


class RequestFailed(Exception):
    """A request that was not answered, or answered with an error. Its text is one line. ``trouble``: of what kind;
    ``code``: the store's own word for it, or its status; empty where there was no answer."""

    def __init__(self, reason: str, trouble: Trouble = Trouble.OTHER, code: str = "") -> None:
        super().__init__(reason)
        self.trouble = trouble
        self.code = code


class FoundObject(NamedTuple):
    """Part of an object: ``content``, and ``size_bytes`` of all of it. No content where the size is another one than
    was expected."""

    content: memoryview
    size_bytes: int


class ListedObject(NamedTuple):
    """An object of a listing; ``modified`` in seconds since 1970."""

    path: str
    size_bytes: int
    modified: int


def load() -> Any:
    """The library. Raises Unavailable with what is missing."""
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError as missing:
        raise Unavailable(
            f"storage s3 needs the package obstore, which cannot be loaded ({missing}); install cachesvc[s3]"
        ) from missing


@contextmanager
def _failing() -> Iterator[None]:
    """Fail a request by what the library raises. Its panics are no Exception, and would end the thread that asked."""
    try:
        yield
    except BaseException as error:
        names = {each.__name__ for each in type(error).__mro__}
        if PANIC in names:
            raise RequestFailed(f"obstore broke: {reason_of(error)}") from error
        if isinstance(error, OSError) or BASE in names:
            raise failed(error) from error
        raise


class S3Bucket:
    """Objects below the prefix. Raises InvalidRequest for settings that the library refuses, Unavailable."""

    def __init__(self, options: S3Options) -> None:
        self._library = load()
        self._options = options
        self._moving = self._store(options.retries)
        self._asking = self._store(0)
        self._creates = True

    def _store(self, retries: int) -> Any:
        options = self._options
        region = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION
        config: dict[str, object] = {
            "region": region_option("region", region),
            "virtual_hosted_style_request": options.addressing == "virtual",
            "unsigned_payload": not options.is_plain,
        }
        if options.endpoint:
            config["endpoint"] = options.endpoint
        client: dict[str, object] = {
            "timeout": timedelta(seconds=options.timeout),
            "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, options.timeout)),
            "allow_http": options.is_plain,
        }
        try:
            if options.ca:
                client["root_certificate"] = Path(options.ca).read_bytes()
            return self._library.store.S3Store(
                options.bucket,
                prefix=options.prefix or None,
                config=config,
                client_options=client,
                credential_provider=file_credentials(options.profile, os.environ, Path.home()),
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=options.timeout),
                    "backoff": {"init_backoff": FIRST_PAUSE, "max_backoff": LONGEST_PAUSE, "base": 2},
                },
            )
        except OSError as error:
            raise InvalidRequest(f"storage: ca={options.ca} cannot be read: {error}") from error
        except self._library.exceptions.BaseError as error:
            raise InvalidRequest(f"storage: s3 cannot be set up so: {reason_of(error)}") from error

    @_failing()
    def get(self, path: str, start: int, length: int, size_bytes: int) -> FoundObject | None:
        """Read ``length`` bytes of an object that is expected to have ``size_bytes``; None where there is no such
        object. Raises RequestFailed."""
        is_whole = length == size_bytes
        ranged = {} if is_whole else {"range": (start, start + length)}
        try:
            answer = self._library.get(self._moving, path, options=ranged)
            size = int(answer.meta["size"])
            return FoundObject(memoryview(answer.bytes() if size == size_bytes else b""), size)
        except FileNotFoundError as error:
            if _NO_BUCKET in str(error):
                raise
            return None
        except (OSError, self._library.exceptions.BaseError) as error:
            if not is_whole and _code_of(error) == _NO_SUCH_RANGE:
                return FoundObject(memoryview(b""), 0)  # it ends before this part of it
            raise

    @_failing()
    def put(self, path: str, content: memoryview | bytes) -> None:
        """Write an object; one that is there may stay. The library may read ``content`` after this has returned: it
        must not change any more. Raises RequestFailed: the object may be there nevertheless."""
        part = self._options.part
        is_large = len(content) >= 2 * part
        call: dict[str, object] = {"use_multipart": is_large}
        if is_large:
            call |= {"chunk_size": part, "max_concurrency": MULTIPART_PARTS}
        elif self._creates:
            call["mode"] = "create"
        errors = self._library.exceptions
        try:
            self._library.put(self._moving, path, content, **call)
        except errors.AlreadyExistsError:
            return
        except (OSError, errors.BaseError) as error:
            if "mode" in call and (_code_of(error) == _NOT_IMPLEMENTED or isinstance(error, errors.NotSupportedError)):
                self._creates = False  # a store without conditional writes
                self.put(path, content)
                return
            raise

    @_failing()
    def has(self, path: str) -> bool:
        """True where there is such an object. One try. Raises RequestFailed."""
        try:
            self._library.head(self._asking, path)
        except FileNotFoundError:
            return False
        return True

    @_failing()
    def size_of(self, path: str) -> int | None:
        """Bytes of an object; None where there is none. Raises RequestFailed."""
        try:
            return int(self._library.head(self._moving, path)["size"])
        except FileNotFoundError:
            return None

    @_failing()
    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects that may be gone. Raises RequestFailed."""
        with suppress(FileNotFoundError):
            self._library.delete(self._moving, list(paths))

    def list(self, folder: str) -> Iterator[list[ListedObject]]:
        """List objects below a folder, some at a time. Raises RequestFailed."""
        with _failing():
            for some in self._library.list(self._moving, prefix=folder, chunk_size=LIST_OBJECTS):
                yield [
                    ListedObject(each["path"], each["size"], int(each["last_modified"].timestamp())) for each in some
                ]


def reason_of(error: BaseException) -> str:
    """One line of an error, without the library's debugging text; names of objects are cut short. Of the store's answer
    its code and message alone: the rest may repeat the request's token."""
    first, _, body = str(error).partition("\n\nDebug source")[0].partition("<")
    if found := _ANSWER.search(body):
        first = f"{first}{found[1]}: {found[2]}"
    return _LONG_HEX.sub(r"\1..", " ".join(first.split()))[:REASON_CHARACTERS] or type(error).__name__


def failed(error: BaseException) -> RequestFailed:
    """The failure that an error of the library is."""
    text, status = str(error), _code_of(error)
    found = _WORD.search(text)
    word = found[1] if found else ""
    trouble = Trouble.OTHER
    if word == _NO_BUCKET or _NO_BUCKET in text:
        trouble = Trouble.NO_BUCKET
    elif status in _DENIED_CODES or word in _DENIED_WORDS or type(error).__name__ in _DENIED_TYPES:
        trouble = Trouble.DENIED
    return RequestFailed(reason_of(error), trouble, " ".join(filter(None, (status, word))))


def _code_of(error: BaseException) -> str:
    """Status code of the store's answer; empty where there was none."""
    found = _CODE.search(str(error))
    return "" if found is None else found[1]


# Credentials from the shared file of AWS tools, which the library does not read.
#
# The library itself knows the environment's keys, web identity, containers' and instances' metadata. The file stands
# before the last two, as in other tools, and is read anew so that rotated keys are used.

FRESH_SECONDS = 60
"""Time for which credentials of the file are used before it is read again, seconds."""

Provider = Callable[[], dict[str, object]]
"""Gives ``access_key_id``, ``secret_access_key``, ``token`` and ``expires_at``."""


def file_credentials(profile: str, environment: Mapping[str, str], home: Path) -> Provider | None:
    """The shared file's provider; None where the library's own chain applies. Raises InvalidRequest for a profile that
    was named and is not there."""
    named = profile or environment.get("AWS_PROFILE", "")
    if not profile and ("AWS_ACCESS_KEY_ID" in environment or "AWS_WEB_IDENTITY_TOKEN_FILE" in environment):
        return None
    path = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials")
    section = named or "default"
    if _read(path, section) is None:
        if not named:
            return None
        raise InvalidRequest(
            f"storage: {path} has no profile {section!r} with aws_access_key_id; add it, or name another"
        )

    def provide() -> dict[str, object]:
        found = _read(path, section)
        if found is None:
            raise OSError(f"{path} has no profile {section!r} any more")
        return {**found, "expires_at": datetime.now(UTC) + timedelta(seconds=FRESH_SECONDS)}

    return provide


def _read(path: Path, section: str) -> dict[str, object] | None:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, configparser.Error, UnicodeDecodeError):
        return None
    if not parser.has_option(section, "aws_access_key_id") or not parser.has_option(section, "aws_secret_access_key"):
        return None
    return {
        "access_key_id": parser.get(section, "aws_access_key_id"),
        "secret_access_key": parser.get(section, "aws_secret_access_key"),
        "token": parser.get(section, "aws_session_token", fallback=None),
    }


MOST_THREADS = 128
MOST_RETRIES = 10
LEAST_PART_BYTES = 5 << 20
"""Smallest part of a multipart upload that S3 takes, but for the last."""
ADDRESSING = ("path", "virtual")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_URL = re.compile(r"[A-Za-z0-9:/._~%\[\]-]+")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*")


def region_option(name: str, text: str) -> str:
    """A region's name: it becomes a part of host names. Raises InvalidRequest."""
    if _REGION.fullmatch(text) is None:
        raise InvalidRequest(f"storage: {name}={one_line(text)} is not a region's name such as eu-west-1")
    return text


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
    endpoint: str = option(text_option, "")
    region: str = option(region_option, "")
    ca: str = option(text_option, "")
    profile: str = option(text_option, "")
    capacity: int = option(size_option, 0)
    readers: int = option(count_option, 16)
    writers: int = option(count_option, 8)
    part: int = option(size_option, 8 << 20)
    retries: int = option(count_option, 2)
    rescan: float = option(seconds_option, 3600.0)
    absent: float = option(seconds_option, 5.0)
    timeout: float = 5.0
    insecure: int = option(count_option, 0)
    addressing: str = option(text_option, "path")

    @property
    def is_plain(self) -> bool:
        return urlsplit(self.endpoint).scheme == "http"


def s3_options(spec: StorageSpec) -> S3Options:
    """Parse the options. Raises InvalidRequest."""
    bucket, prefix = _place(spec.where)
    made = spec.read_options(S3Options, bucket=bucket, prefix=prefix, timeout=spec.tier.deadline)
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
