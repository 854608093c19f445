"""``s3`` over a store that refuses, loses its bucket, and is well again: its reasons, and its recovery."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cachesvc.model.errors import Unavailable
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.s3.client import S3Options, load
from cachesvc.storage.s3.engine import S3Storage
from cachesvc.storage.seam import Outcome
from tests.contracts.storage_rig import name_of

try:
    load()
except Unavailable as missing:
    pytest.skip(str(missing), allow_module_level=True)

WELL = (200, "")
DENIED = (403, "InvalidAccessKeyId")
EXPIRED = (400, "ExpiredToken")
NO_BUCKET = (404, "NoSuchBucket")


class FakeStore(ThreadingHTTPServer):
    """A part of S3, as much as the engine asks for. ``answer``: what everything is answered, unless it is WELL."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = WELL
        self.flips = 0
        self.objects: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def options(self) -> S3Options:
        return S3Options(
            "blocks", endpoint=f"http://127.0.0.1:{self.server_port}", retries=0, timeout=5.0, rescan=0.05, absent=0.0
        )


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: FakeStore
    protocol_version = "HTTP/1.1"

    def do(self) -> None:
        """Answer a request."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        status, word = self.server.answer
        path = self.path.partition("?")[0]
        content, ranged = b"", ""
        if (status, word) != WELL:
            content = f"<Error><Code>{word}</Code><Message>said so</Message></Error>".encode()
        elif self.command == "PUT":
            self.server.objects[path] = body
        elif self.command == "POST":
            content = b"<DeleteResult></DeleteResult>"
            for name in list(self.server.objects):
                if name.removeprefix("/blocks/").encode() in body:
                    del self.server.objects[name]
        elif "list-type" in self.path:
            content = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        elif path not in self.server.objects:
            status, content = 404, b"<Error><Code>NoSuchKey</Code><Message>said so</Message></Error>"
        else:
            content = self.server.objects[path]
            whole = len(content)
            if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or ""):
                content = content[int(span[1]) : int(span[2]) + 1]
                status, ranged = 206, f"bytes {span[1]}-{int(span[1]) + len(content) - 1}/{whole}"
            if self.command == "GET" and self.server.flips:
                self.server.flips -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        if ranged:
            self.send_header("content-range", ranged)
        self.send_header("etag", '"e"')
        self.send_header("last-modified", "Sun, 01 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do  # noqa: N815 - the library's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


def fake_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    """Such a store, and keys for it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    made = FakeStore()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    yield from fake_store(monkeypatch)


@contextmanager
def running(options: S3Options) -> Iterator[tuple[S3Storage, ObjectStore]]:
    engine = S3Storage(options)
    objects = ObjectStore(engine, time.monotonic)
    objects.start()
    try:
        yield engine, objects
    finally:
        engine.close()


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not holds():
        pause.wait(0.01)


def ask(objects: ObjectStore, verb: str, key: str, page: bytearray) -> Outcome:
    """Put or get one object, to its end."""
    ended: list[Outcome] = []
    done = threading.Event()

    def each(_: int, outcome: Outcome) -> None:
        ended.append(outcome)
        done.set()

    until = time.monotonic() + 60
    objects.prepare(Verb(verb), [name_of(key)], [(memoryview(page),)], until, each, lambda _: None)()
    done.wait()
    return ended[0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (DENIED, "bucket blocks: the store refuses the credentials (403 InvalidAccessKeyId)"),
        (EXPIRED, "bucket blocks: the store refuses the credentials (400 ExpiredToken)"),
        (NO_BUCKET, "bucket blocks: the store has no such bucket (404 NoSuchBucket)"),
    ],
)
def test_what_a_store_refuses_is_told_without_any_call_and_passes_by_itself(
    answer: tuple[int, str], said: str, store: FakeStore
) -> None:
    store.answer = answer
    with running(store.options) as (engine, objects):
        until(lambda: not engine.totals().is_usable)
        assert engine.totals().problem == engine.status().problem == said
        assert not engine.totals().has_answered
        assert ask(objects, "put", "a", bytearray(4096)) is Outcome.FAILED
        store.answer = WELL
        until(lambda: engine.totals().is_usable)
        assert not engine.totals().problem
        assert engine.totals().has_answered
        assert ask(objects, "put", "a", bytearray(4096)) is Outcome.OK


def test_an_object_of_a_deleted_bucket_has_failed_and_is_not_taken_for_absent(store: FakeStore) -> None:
    with running(replace(store.options, rescan=3600.0)) as (engine, objects):
        until(lambda: engine.status().is_complete)
        assert ask(objects, "put", "a", bytearray(4096)) is Outcome.OK
        store.answer = NO_BUCKET
        assert ask(objects, "get", "a", bytearray(4096)) is Outcome.FAILED
        assert "no such bucket" in engine.totals().problem
        assert engine.totals().is_usable, "what one call says is the breaker's to judge"
        store.answer = WELL
        store.objects.clear()
        assert ask(objects, "put", "b", bytearray(4096)) is Outcome.OK
        assert not engine.totals().problem
        assert ask(objects, "get", "a", bytearray(4096)) is Outcome.MISS


@pytest.mark.parametrize(("flips", "stays"), [(1, True), (2, False)])
def test_an_answer_that_was_changed_is_read_once_more_before_its_object_goes(
    flips: int, stays: bool, store: FakeStore
) -> None:
    with running(replace(store.options, rescan=3600.0)) as (engine, objects):
        until(lambda: engine.status().is_complete)
        assert ask(objects, "put", "a", bytearray(4096)) is Outcome.OK
        store.flips = flips
        assert ask(objects, "get", "a", bytearray(4096)) is Outcome.WRONG
        if stays:
            until(lambda: ask(objects, "get", "a", bytearray(4096)) is Outcome.OK)
        else:
            until(lambda: not store.objects)
        assert not store.flips, "it was read twice"
        assert any(name_of("a").text in path for path in store.objects) is stays


@pytest.mark.parametrize("more", [0, 100])
def test_an_object_of_a_newer_format_is_missing_and_stays(more: int, store: FakeStore) -> None:
    with running(replace(store.options, rescan=3600.0)) as (engine, objects):
        until(lambda: engine.status().is_complete)
        assert ask(objects, "put", "a", bytearray(4096)) is Outcome.OK
        path = next(path for path in store.objects if name_of("a").text in path)
        newer = store.objects[path][:7] + b"\x03" + store.objects[path][8:] + bytes(more)
        store.objects[path] = newer
        assert ask(objects, "get", "a", bytearray(4096)) is Outcome.MISS
        assert store.objects[path] == newer
