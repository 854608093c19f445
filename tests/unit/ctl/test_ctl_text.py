"""Output for an operator's terminal: text, and nothing that the terminal would act on."""

from __future__ import annotations

from argparse import Namespace

import grpc
import pytest
from cachesvc_ctl.core.command import Table, for_terminal, no_answer, one_line, table
from cachesvc_ctl.status import describe_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcache.v1 import admin_pb2
from kvcache.v1.status_pb2 import LoopStatus

EVIL = "m\x1b]0;owned\x07\x1b[2J\x1b[1;1Hok\r\n\u202efake\x9b"


def test_a_name_stays_readable_and_acts_on_nothing() -> None:
    assert one_line(EVIL) == "m\\x1b]0;owned\\x07\\x1b[2J\\x1b[1;1Hok\\r\\n\\u202efake\\x9b"
    assert one_line("模型/混合🦙@main") == "模型/混合🦙@main"


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), st.integers()), min_size=1))
def test_a_table_has_a_line_a_row_whatever_the_names_are(rows: list[tuple[str, int]]) -> None:
    lines = table(("name", "count"), rows).split("\n")
    assert len(lines) == len(rows) + 1
    assert all(line.isprintable() for line in lines)


@settings(deadline=None)
@given(st.text())
def test_several_lines_keep_their_newlines_alone(text: str) -> None:
    shown = for_terminal(text)
    assert shown.count("\n") == text.count("\n")
    assert all(line.isprintable() for line in shown.split("\n"))


def test_status_says_how_long_rounds_of_the_event_loop_were() -> None:
    loop = LoopStatus(longest_round_ms=3.25, long_rounds=1200, longest_flow="CacheService/Match", longest_flow_ms=2.5)
    assert describe_loop(loop) == "event loop: longest round 3.2 ms, 1,200 above 2 ms; CacheService/Match 2.5 ms"
    assert describe_loop(LoopStatus()) == "event loop: longest round 0.0 ms, 0 above 2 ms"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "unix:/tmp/a: connect failed: addr: unix:/tmp/a error: No such file or directory",
            "(nothing listens there: no",
        ),
        ("connect failed: Connection refused", "its daemon has ended); is the daemon running on that --socket? start"),
        (
            "timed out before receiving SETTINGS frame",
            "does not answer); the daemon is stopped or stuck: see the end of",
        ),
        ("Permission denied", "(Permission denied); that socket is closed to this user"),
    ],
)
def test_no_answer_says_what_the_socket_does_and_what_to_do(said: str, words: str) -> None:
    failure = grpc.RpcError(said)
    assert words in no_answer(failure, Namespace(socket="/tmp/a"))


def test_columns_name_fields_formats_and_what_is_made_of_a_row() -> None:
    rows = [
        admin_pb2.PoolStatus(model_id=1, place="host", capacity=4096, page_bytes=2048),
        admin_pb2.PoolStatus(model_id=12, group="window", capacity=7, pool="shared"),
    ]
    shown = Table(
        "id=model_id | place? | group={group:.3}? | in all={capacity:,} pages | =pool | page_bytes | double",
        double=lambda row: 2 * row.capacity,
    ).text(rows)
    assert shown.split("\n") == [
        "id  place  group  in all               page_bytes  double",
        " 1  host   -      4,096 pages          2.00 KiB     8,192",
        "12  -      win    7 pages      shared  0 B             14",
    ]
    lease = admin_pb2.LeaseStatus(process_ids=[3, 4])
    assert Table("processes=process_ids").text([lease]) == "processes\n3 4"
