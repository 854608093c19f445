"""Reports of a lone request are put off until its first token has come, and not for longer."""

from __future__ import annotations

import pytest
from cachesvc_vllm.plain import MOST_STEPS, FirstToken


def test_nothing_is_reported_before_the_first_output_of_a_lone_request() -> None:
    first = FirstToken()
    assert first.may_report()
    first.admit(is_alone=True)
    assert [first.may_report() for _ in range(MOST_STEPS)] == [False] * MOST_STEPS
    assert first.take_output()
    assert first.may_report()
    assert not first.take_output()


def test_reports_are_put_off_for_a_few_iterations_where_no_output_comes() -> None:
    first = FirstToken()
    first.admit(is_alone=True)
    assert [first.may_report() for _ in range(MOST_STEPS + 2)] == [False] * MOST_STEPS + [True, True]


@pytest.mark.parametrize("admitted", [(False,), (True, False)])
def test_nothing_is_put_off_beside_other_requests(admitted: tuple[bool, ...]) -> None:
    first = FirstToken()
    for is_alone in admitted:
        first.admit(is_alone=is_alone)
    assert first.may_report()
    assert not first.take_output()
