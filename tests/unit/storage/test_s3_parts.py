"""Parts of the engine ``s3`` that need no store: options, credentials, names, known objects, questions, ranges."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.storage.known import MOST_KNOWN, Fact, KnownObjects
from cachesvc.storage.s3 import client
from cachesvc.storage.s3.client import file_credentials, s3_options
from cachesvc.storage.s3.engine import (
    WIDTH,
    Answer,
    Gather,
    Search,
    label_path,
    object_of,
    ranges,
    scatter,
    scope_of_label,
)
from cachesvc.storage.seam import NOTE_SECONDS, WHOLE, ObjectName, Outcome, Part, Scope, Troubles
from cachesvc.storage.spec import parse_storage
from tests.e2e.remote import ROOT

SCOPE = Scope(b"n" * 32, b"l" * 8)
PART = Part(0, 0, 1)


def name_of(number: int, part: Part = PART, scope: Scope = SCOPE) -> ObjectName:
    return ObjectName(scope, number.to_bytes(32, "big"), part)


def test_options_are_read_from_the_text() -> None:
    made = s3_options(
        parse_storage(
            "s3://a.bucket/deep/er/?endpoint=https://s3.example.com:9000&region=eu-west-1&part=16MiB&deadline=2s&readers=4",
            ("s3",),
        )
    )
    assert (made.bucket, made.prefix, made.endpoint) == ("a.bucket", "deep/er", "https://s3.example.com:9000")
    assert (made.region, made.part, made.timeout, made.readers, made.capacity) == ("eu-west-1", 16 << 20, 2.0, 4, 0)
    assert not made.is_plain
    assert s3_options(parse_storage("s3://bucket", ("s3",))).prefix == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3:bucket", "is not s3://BUCKET/PREFIX"),
        ("s3://B", "is not s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket", "credentials come from the environment"),
        ("s3://bucket/../up", "has a prefix with other than"),
        ("s3://bucket/a b", "has a prefix with other than"),
        ("s3://bucket?endpoint=s3.example.com", "is not a URL"),
        ("s3://bucket?endpoint=https://key:secret@s3.example.com", "without credentials in it"),
        ("s3://bucket?endpoint=http://10.0.0.1:9000", "unencrypted; use https, or allow it by insecure=1"),
        ("s3://bucket?part=1MiB", "part must be at least"),
        ("s3://bucket?readers=0", "readers and writers are 1 to"),
        ("s3://bucket?retries=1.5", "is not a whole number"),
        ("s3://bucket?addressing=dns", "is not one of path, virtual"),
        ("s3://bucket?secret=x", "unknown option 'secret' of s3"),
        ("s3://a..b", "is not s3://BUCKET/PREFIX"),
        ("s3://bucket?region=eu west", "is not a region's name"),
        ("s3://bucket?region=example.com/", "is not a region's name"),
        ("s3://bucket?endpoint=https://s3.example.com/a b", "is not a URL"),
        ("s3://bucket?endpoint=https://s3.example.com\n", "is not a URL"),
        ("s3://bucket?rescan=3651d", "is longer than 3650d"),
        ("s3://bucket?deadline=99999999999999", "is longer than 3650d"),
        ("s3://bucket?rescan=0s", "must be more than 0 seconds"),
    ],
)
def test_bad_options_are_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        s3_options(parse_storage(text, ("s3",)))
    assert said in str(refused.value)
    assert "key:" not in str(refused.value), "credentials are not repeated"


def test_of_the_stores_answer_its_code_and_message_are_told_and_no_token() -> None:
    answer = (
        "Server returned non-2xx status code: 403 Forbidden: <?xml version='1.0'?>\n<Error><Code>InvalidToken</Code>"
        "<Message>The token is\nmalformed.</Message><Token-0>secret</Token-0></Error>\n\nDebug source:\nsecret"
    )
    said = "Server returned non-2xx status code: 403 Forbidden: InvalidToken: The token is malformed."
    assert client.reason_of(OSError(answer)) == said
    assert client.reason_of(OSError("502 Bad Gateway: <html><b>secret</b></html>")) == "502 Bad Gateway:"


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:9000", "http://127.0.1.1:9000", "http://127.255.255.254", "http://[::1]:9000",
        "http://[::ffff:127.0.0.1]:9000", "http://localhost:9000", "http://LOCALHOST", "http://store:9000&insecure=1",
    ],
)  # fmt: skip
def test_plain_http_is_for_loopback_or_for_those_who_say_so(endpoint: str) -> None:
    assert s3_options(parse_storage(f"s3://bucket?endpoint={endpoint}", ("s3",))).is_plain


@pytest.mark.parametrize("host", ["127.0.0.1.example.com", "128.0.0.1", "[::2]", "localhost.example.com", "0.0.0.0"])
def test_plain_http_to_another_machine_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="unencrypted"):
        s3_options(parse_storage(f"s3://bucket?endpoint=http://{host}:9000", ("s3",)))


def test_the_library_is_loaded_where_it_is_used_and_missed_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = "import sys, cachesvc.storages; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(Unavailable, match=r"install cachesvc\[s3\]"):
        client.load()


def test_keys_of_the_shared_file_are_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    environment = {"AWS_SHARED_CREDENTIALS_FILE": str(path)}
    assert file_credentials("", environment, tmp_path) is None, "the library's own chain goes on"
    path.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n[other]\naws_access_key_id = c\n")
    provide = file_credentials("", environment, tmp_path)
    assert provide is not None
    first = provide()
    assert (first["access_key_id"], first["secret_access_key"], first["token"]) == ("a", "b", None)
    path.write_text("[default]\naws_access_key_id = x\naws_secret_access_key = y\naws_session_token = z\n")
    assert [provide()[each] for each in ("access_key_id", "secret_access_key", "token")] == ["x", "y", "z"]
    assert file_credentials("", {**environment, "AWS_ACCESS_KEY_ID": "env"}, tmp_path) is None
    with pytest.raises(InvalidRequest, match="has no profile 'other' with aws_access_key_id"):
        file_credentials("other", environment, tmp_path)


@pytest.mark.parametrize("part", [PART, Part(WHOLE, 0, 1), Part(3, 7, 8)])
def test_a_path_says_whose_object_it_is(part: Part) -> None:
    name = name_of(7, part)
    assert object_of(name.text) == name
    assert scope_of_label(label_path(SCOPE)) == SCOPE
    assert {object_of(each) for each in ("", name.text + "x", name.text[:-9], name.text.replace("cs2", "cs1"))} == {
        None
    }


# -- what is known --------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)


def test_leading_keys_with_all_parts_are_expected_and_others_asked_for() -> None:
    known, parts = KnownObjects(5.0, Clock()), (Part(0, 0, 2), Part(0, 1, 2))
    for number in (1, 2, 4):
        for part in parts:
            known.add(name_of(number, part), 100, 1)
    known.add(name_of(3, parts[0]), 100, 1)
    assert known.expects(SCOPE, keys(1, 2, 3, 4), parts) == 2
    assert known.expects(SCOPE, keys(3, 4), parts) is None, "another daemon may have written the rest"
    assert known.expects(SCOPE, b"", parts) == 0
    assert known.expects(Scope(b"o" * 32, b"l" * 8), keys(1), parts) is None


def test_what_was_absent_is_not_asked_for_again_for_a_while() -> None:
    clock = Clock()
    known = KnownObjects(5.0, clock)
    known.drop(name_of(1))
    known.describe(SCOPE, "m")
    known.drop(name_of(1))
    assert known.expects(SCOPE, keys(1), [PART]) == 0
    clock.now += 6
    assert known.expects(SCOPE, keys(1), [PART]) is None
    known.drop(name_of(1))
    known.add(name_of(1), 100, 1)
    assert known.expects(SCOPE, keys(1), [PART]) == 1, "it is written meanwhile"


def test_a_listing_forgets_what_it_has_not_seen_and_keeps_what_was_written_meanwhile() -> None:
    known = KnownObjects(5.0, Clock())
    known.add(name_of(1), 100, 1)
    known.add(name_of(2), 100, 1)
    number = known.begin_listing()
    known.add(name_of(3), 100, 1)  # written here while the bucket is listed
    known.add(name_of(1), 100, 1)  # listed
    known.end_listing(number)
    assert [name_of(at) in known for at in (1, 2, 3)] == [True, False, True]
    assert (len(known), known.size_bytes) == (2, 200)
    status = known.status(now=11)
    assert (status.objects, status.size_bytes, status.is_complete) == (2, 200, True)
    assert (status.scopes[SCOPE].newest_seconds, status.scopes[SCOPE].oldest_seconds) == (10.0, 10.0)


def test_facts_are_kept_whole_in_a_number() -> None:
    for fact in (Fact(0, 0, 0), Fact(1 << 44, 1 << 40, 7), Fact(5, 6, (1 << 32) - 1)):
        assert Fact.of(fact.packed) == fact
    assert Fact.of(Fact(5, -3, 1).packed) == Fact(5, 0, 1), "a time before 1970"
    assert MOST_KNOWN * 250 < 1 << 28


# -- questions ------------------------------------------------------------------------------------------------------


class Presence:
    """Names of which the first ``count`` are there; answers later, in any order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []
        self.waiting: list[tuple[int, Answer]] = []
        self.rounds = 0
        self.told: list[int | None] = []

    def ask(self, index: int, answer: Answer) -> None:
        self.asked.append(index)
        self.waiting.append((index, answer))

    def search(self, names: int) -> None:
        Search(names, self.ask, self.told.append).begin()
        while self.waiting:
            some, self.waiting = self.waiting, []
            self.rounds += 1
            for index, answer in reversed(some):
                answer(index < self.count)


@pytest.mark.parametrize("names", [1, 2, WIDTH, WIDTH + 1, 100, 1024])
def test_the_step_is_found_wherever_it_is_by_few_questions(names: int) -> None:
    for count in {0, 1, names // 3, names // 2, names - 1, names}:
        presence = Presence(count)
        presence.search(names)
        assert presence.told == [min(count, names)]
        assert presence.rounds <= 4
        assert len(presence.asked) <= 1 + 3 * WIDTH
        assert max(Counter(presence.asked).values()) == 1


def test_a_prompt_that_is_not_there_costs_one_question() -> None:
    presence = Presence(0)
    presence.search(1024)
    assert presence.asked == [0]
    none = Presence(0)
    none.search(0)
    assert (none.asked, none.told) == ([], [0])


def test_a_question_that_fails_is_no_answer() -> None:
    told: list[int | None] = []
    Search(64, lambda index, answer: answer(None if index == 11 else True), told.append).begin()
    assert told == [None]


# -- ranges ---------------------------------------------------------------------------------------------------------


def test_ranges_cover_an_object_once_and_content_comes_to_its_pieces() -> None:
    content = bytes(at % 251 for at in range(1000))
    for part in (64, 100, 333, 499, 500, 501, 2000):
        spans = ranges(len(content), part)
        assert all(length <= 2 * part for _, length in spans)
        pieces = [memoryview(bytearray(size)) for size in (1, 0, 499, 37, 463)]
        for start, length in reversed(spans):
            scatter(pieces, start, memoryview(content)[start : start + length])
        assert b"".join(pieces) == content


def test_an_object_ends_with_its_last_part_by_the_first_that_failed() -> None:
    ended: list[Outcome] = []
    gather = Gather(3, ended.append)
    gather.add(Outcome.OK)
    gather.add(Outcome.FAILED)
    assert ended == []
    gather.add(Outcome.MISS)
    assert ended == [Outcome.FAILED]


def test_a_thousand_errors_are_a_line_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    troubles = Troubles(clock)
    for _ in range(1000):
        troubles.note("read", OSError("broken"))
    troubles.note("write", OSError("full"))
    clock.now += NOTE_SECONDS
    troubles.note("read", OSError("other"))
    lines = [(record.message, record.__dict__["fields"]["objects"]) for record in caplog.records]
    assert lines == [("storage_read_failed", 1), ("storage_write_failed", 1), ("storage_read_failed", 1000)]
    assert (troubles.count, troubles.last) == (1002, "other")
