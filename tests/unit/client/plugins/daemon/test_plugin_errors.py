"""Refusals of a daemon as the vLLM connector reports them."""

from __future__ import annotations

from cachesvc_client.plugins.keeper import REPEAT_S, News


def test_a_refusal_that_goes_on_is_a_warning_every_minute() -> None:
    now = [100.0]
    news = News(lambda: now[0])
    assert [news.is_new("token") for _ in range(3)] == [True, False, False]
    assert news.is_new("quota"), "another kind"
    now[0] += REPEAT_S - 0.1
    assert not news.is_new("quota")
    now[0] += 0.1
    assert [news.is_new("quota") for _ in range(2)] == [True, False]


def test_what_works_again_and_is_then_refused_is_a_warning_at_once() -> None:
    news = News(lambda: 0.0)
    assert news.is_new("token")
    news.end()
    assert news.is_new("token")
