"""Output for an operator's terminal: text, and nothing that the terminal would act on."""

from __future__ import annotations

from cachesvc_ctl.core.text import for_terminal, one_line, table
from hypothesis import given, settings
from hypothesis import strategies as st

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
