"""A real S3-compatible store that freezes, dies, lies and forgets: nothing wrong comes out, nothing hangs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.storage.s3.client import S3Bucket, S3Options
from cachesvc.storage.s3.engine import S3Storage
from cachesvc.storage.seam import Outcome, Part
from tests.contracts.s3_rig import Proxy, S3Turning, Server, as_it_is, dead, options_of, require, shared_server
from tests.contracts.storage_rig import FAR, OTHER, PAGE_BYTES, SCOPE, Bench, content_of, name_of
from tests.e2e.access.test_access import Authority

OK, MISS, WRONG, BUSY, FAILED, LATE = (
    Outcome.OK,
    Outcome.MISS,
    Outcome.WRONG,
    Outcome.BUSY,
    Outcome.FAILED,
    Outcome.LATE,
)
LARGE = (24 << 20,)
PART = Part(0, 0, 1)


@contextmanager
def opened(options: S3Options) -> Iterator[Bench]:
    made = Bench(S3Turning(options)).start()
    try:
        yield made
    finally:
        made.turning.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy(shared_server().port)
    yield made
    made.close()


@pytest.fixture
def bench(proxy: Proxy) -> Iterator[Bench]:
    """An engine that reaches the store through the proxy."""
    with opened(options_of(proxy, timeout=1.0, retries=2, absent=60.0)) as made:
        yield made


def engine_of(bench: Bench) -> S3Storage:
    assert isinstance(bench.turning, S3Turning)
    return bench.turning.engine


# -- large objects, several daemons ---------------------------------------------------------------------------------


@pytest.fixture
def patient() -> Iterator[Bench]:
    """An engine whose requests have time for many bytes."""
    with opened(options_of(shared_server(), timeout=60.0)) as made:
        yield made


def test_a_large_object_is_written_and_read_in_parts(patient: Bench) -> None:
    name, bench = name_of("large"), patient
    assert bench.keep([name], LARGE) == [OK]
    assert bench.fetch([name], LARGE) == [OK]
    bench.turning.damage(name, lambda content: content[: 20 << 20])
    assert bench.fetch([name], LARGE) == [WRONG], "parts behind its end do not exist"
    assert bench.fetch([name], LARGE) == [MISS]
    assert bench.keep([name], LARGE) == [OK]
    bench.turning.damage(name, lambda content: content[: 13 << 20] + b"?" + content[(13 << 20) + 1 :])
    assert bench.fetch([name], LARGE) == [WRONG]


def test_what_one_daemon_writes_is_a_hit_of_another_that_runs_already() -> None:
    options = options_of(shared_server(), absent=0.0)
    with opened(options) as one, opened(options) as other:
        names = [name_of(f"{at}") for at in range(40)]
        assert other.exists(names) == [False] * 40
        one.keep(names[:25])
        assert other.exists(names) == [True] * 25 + [False] * 15
        assert other.fetch(names[:25]) == [OK] * 25
        keys = b"".join(name.key for name in names)
        assert other.store.backend.expects(SCOPE, keys, [PART]) == 25, "and what was read is known"
        one.turning.backend.remove(names[:5])
        one.turning.crank()
        with opened(options) as late:
            pause = threading.Event()
            while late.fetch(names[:5]) != [MISS] * 5:  # they are removed beside this
                pause.wait(0.01)
            engine_of(one).close()
            assert late.fetch(names[:6]) == [MISS] * 5 + [OK]
        assert other.fetch(names[:6])[-1] is OK


def test_a_daemon_that_starts_lists_what_is_there_and_of_which_model() -> None:
    options = options_of(shared_server())
    with opened(options) as one:
        one.turning.backend.describe(SCOPE, "a model")
        one.keep([name_of("a"), name_of("b"), name_of("a", scope=OTHER)])
        one.turning.crank()
    with opened(options) as late:
        engine = engine_of(late)
        pause = threading.Event()
        while not engine.status().is_complete or not engine.status().scopes[SCOPE].label:
            pause.wait(0.01)
        status = engine.status()
        assert (status.objects, status.scopes[SCOPE].objects, status.scopes[OTHER].objects) == (3, 2, 1)
        assert status.scopes[SCOPE].label == "a model"
        assert late.store.backend.expects(SCOPE, name_of("a").key + name_of("b").key, [PART]) == 2


def test_two_daemons_that_write_one_object_both_have_it() -> None:
    options = options_of(shared_server())
    with opened(options) as one, opened(options) as other:
        name = name_of("a")
        puts = [bench.put([name]) for bench in (one, other)]
        assert [asked.told() for asked in puts] == [[OK], [OK]]
        assert one.fetch([name]) == other.fetch([name]) == [OK]


def test_above_its_capacity_nothing_is_written_and_all_is_read() -> None:
    with opened(options_of(shared_server(), capacity=3 * PAGE_BYTES)) as bench:
        names = [name_of(key) for key in "abc"]
        assert bench.keep(names[:2]) == [OK, OK]
        assert bench.keep(names[2:]) == [BUSY]
        assert bench.fetch(names) == [OK, OK, MISS]
        assert bench.turning.backend.totals().capacity_bytes == 3 * PAGE_BYTES


# -- it lies --------------------------------------------------------------------------------------------------------


def test_what_the_bucket_has_expired_is_a_miss_and_is_written_again(bench: Bench) -> None:
    """Known by this daemon, and gone: a hint is no hit."""
    name = name_of("a")
    bench.keep([name])
    assert isinstance(bench.turning, S3Turning)
    bench.turning.raw.delete([name.text])
    assert bench.store.backend.expects(SCOPE, name.key, [PART]) == 1
    assert bench.fetch([name]) == [MISS]
    assert bench.store.backend.expects(SCOPE, name.key, [PART]) == 0
    assert bench.keep([name]) == [OK]
    assert bench.fetch([name]) == [OK]


def test_an_answer_that_is_cut_is_never_taken_for_whole(bench: Bench, proxy: Proxy) -> None:
    names = [name_of(key) for key in "abcdefgh"]
    sizes = (300_000,)
    bench.keep(names, sizes)
    left = [150_000]

    def cut(client: socket.socket, chunk: bytes) -> bool:
        client.sendall(chunk[: left[0]])
        left[0] -= min(left[0], len(chunk))
        return left[0] > 0

    proxy.harm = cut
    asked = bench.get(names, sizes=sizes)
    outcomes = asked.told()
    assert FAILED in outcomes
    assert set(outcomes) <= {OK, FAILED}
    for at, outcome in enumerate(outcomes):
        expected = content_of(names[at], sizes[0]) if outcome is OK else bytes(sizes[0])
        assert asked.content(at) == expected, "what did not come whole was not copied"
    proxy.harm = as_it_is
    assert bench.fetch(names, sizes) == [OK] * 8


def test_bits_that_flip_on_the_way_are_wrong_and_counted(bench: Bench, proxy: Proxy) -> None:
    name = name_of("a")
    bench.keep([name])

    def flip(client: socket.socket, chunk: bytes) -> bool:
        at = len(chunk) - 100
        client.sendall(chunk[:at] + bytes([chunk[at] ^ 4]) + chunk[at + 1 :] if len(chunk) > PAGE_BYTES // 2 else chunk)
        return True

    proxy.harm = flip
    assert bench.fetch([name]) == [WRONG]
    proxy.harm = as_it_is
    assert bench.fetch([name]) == [MISS], "it was removed"


def test_errors_are_tried_again_and_then_told(bench: Bench, proxy: Proxy) -> None:
    names = [name_of("a"), name_of("b")]
    bench.keep(names)
    answers = [2]

    def refuse(client: socket.socket, chunk: bytes) -> bool:
        if answers[0] <= 0:
            return as_it_is(client, chunk)
        answers[0] -= 1
        client.sendall(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        return False

    proxy.harm = refuse
    assert bench.fetch(names[:1]) == [OK], "the third try came through"
    answers[0] = 1000
    assert bench.fetch(names[:1]) == [FAILED]
    assert bench.keep([name_of("c")]) == [FAILED]
    assert engine_of(bench).status().errors >= 2
    assert "503" in engine_of(bench).status().last_error


def test_a_question_that_fails_is_not_taken_for_absence(bench: Bench, proxy: Proxy) -> None:
    proxy.harm = dead
    told: list[Sequence[bool] | None] = []
    ended = threading.Event()

    def found(there: Sequence[bool] | None) -> None:
        told.append(there)
        ended.set()

    bench.store.backend.exists([name_of("a")], FAR, found)
    ended.wait()
    assert told == [None]
    proxy.harm = as_it_is
    bench.keep([name_of("a")])
    assert bench.exists([name_of("a")]) == [True]


def test_what_was_absent_a_moment_ago_costs_no_request(bench: Bench, proxy: Proxy) -> None:
    names = [name_of(f"absent {at}") for at in range(300)]
    bench.turning.backend.describe(SCOPE, "m")
    assert bench.exists(names) == [False] * 300
    bench.turning.crank()
    assert bench.store.backend.expects(SCOPE, names[0].key, [PART]) == 0


# -- it freezes, and dies -------------------------------------------------------------------------------------------


def test_a_stalled_read_ends_by_its_timeout_and_writes_no_byte_later(bench: Bench, proxy: Proxy) -> None:
    name = name_of("a")
    bench.keep([name])
    proxy.flowing.clear()
    asked = bench.get([name], deadline=time.monotonic() + 0.2)
    bench.now = FAR
    assert bench.store.expire() == 1
    assert asked.told() == [LATE]
    bench.turning.crank()
    assert asked.back == [0], "its requests have timed out"
    proxy.flowing.set()
    assert bench.fetch([name]) == [OK]
    assert asked.content(0) == bytes(PAGE_BYTES), "what came too late was not copied"


def test_a_put_that_was_given_up_reads_the_page_no_more(bench: Bench, proxy: Proxy) -> None:
    """Its page holds another block by the time that the store goes on: the object is right, or absent."""
    name, size = name_of("a"), (4 << 20,)
    proxy.flowing.clear()
    asked = bench.put([name], sizes=size)
    assert asked.told() == [FAILED]
    asked.pages[0][0][:] = b"x" * size[0]
    proxy.flowing.set()
    outcomes = bench.fetch([name], size)
    assert outcomes[0] in (OK, MISS), "and not WRONG"


def test_a_store_that_is_killed_fails_at_once_and_is_used_again(tmp_path: Path) -> None:
    require()
    server = Server(tmp_path / "store")
    options = S3Options("tests", endpoint=server.endpoint, timeout=2.0, retries=1)
    try:
        server.wait(options)
        with opened(options) as bench:
            names = [name_of(key) for key in "ab"]
            bench.keep(names)
            server.freeze()
            assert set(bench.get(names).told()) == {FAILED}
            server.thaw()
            assert bench.fetch(names) == [OK, OK]
            server.kill()
            assert bench.fetch(names) == [FAILED, FAILED]
            assert bench.keep([name_of("c")]) == [FAILED]
            engine_of(bench).close()
    finally:
        server.kill()


def test_a_store_that_is_not_there_costs_no_start() -> None:
    require()
    with opened(S3Options("tests", endpoint="http://127.0.0.1:1", timeout=1.0, retries=0)) as bench:
        assert bench.fetch([name_of("a")]) == [FAILED]
        with pytest.raises(Unavailable, match="try again"):
            bench.turning.backend.purge(None)
        with pytest.raises(Unavailable, match="cannot be listed"):
            bench.store.check_all()


def test_the_end_does_not_wait_for_a_stalled_store(bench: Bench, proxy: Proxy) -> None:
    bench.keep([name_of("a")])
    proxy.flowing.clear()
    bench.get([name_of("a")])
    bench.turning.close()
    proxy.flowing.set()


# -- whom it trusts -------------------------------------------------------------------------------------------------


def test_a_store_is_known_by_its_certificate(tmp_path: Path) -> None:
    require()
    made = Authority(tmp_path)
    certificate, key = made.sign("store", 3, "DNS:localhost,IP:127.0.0.1")
    server = Server(tmp_path / "store", f"-s3.cert.file={certificate}", f"-s3.key.file={key}")
    options = S3Options("tests", endpoint=server.endpoint, ca=str(tmp_path / "root.pem"), timeout=5.0)
    try:
        server.wait(options)
        with opened(options) as bench:
            assert bench.keep([name_of("a")]) == [OK]
            assert bench.fetch([name_of("a")]) == [OK]
        with opened(replace(options, ca="", retries=0)) as bench:
            assert bench.fetch([name_of("a")]) == [FAILED], "a root that is not trusted"
        with pytest.raises(InvalidRequest, match="cannot be read"):
            S3Bucket(replace(options, ca="/nowhere"))
    finally:
        server.kill()


def test_wrong_keys_are_told_in_the_stores_words(monkeypatch: pytest.MonkeyPatch) -> None:
    server = shared_server()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with opened(replace(options_of(server), retries=0)) as bench:
        assert bench.fetch([name_of("a")]) == [FAILED]
        assert "403" in engine_of(bench).status().last_error


def test_a_panic_of_the_library_fails_a_request_and_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that no header can hold make obstore panic."""
    keys = tmp_path / "credentials"
    keys.write_text("[odd]\naws_access_key_id = a\x01\naws_secret_access_key = b\n", encoding="utf-8")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    with opened(replace(options_of(shared_server()), profile="odd", retries=0, readers=1, writers=1)) as bench:
        for _ in range(3):
            assert bench.fetch([name_of("a")]) == [FAILED]
            assert bench.keep([name_of("a")]) == [FAILED]
        assert "obstore broke" in engine_of(bench).status().last_error


def test_a_region_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1 ")
    with pytest.raises(InvalidRequest, match="is not a region's name"):
        S3Bucket(S3Options("bucket"))
