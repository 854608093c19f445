"""Salts of adapters are what the workers have loaded, for as long as that is known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cachesvc_vllm.adapters import AdapterReport, Adapters, content_digest

from cachesvc.model.words import KEY_BYTES

D1, D2, D3 = b"1" * KEY_BYTES, b"2" * KEY_BYTES, b"3" * KEY_BYTES


@dataclass
class LoRARequest:
    """Stand-in for vLLM's own."""

    lora_int_id: int = 1
    lora_path: str = "folder"
    lora_name: str = "a"


class Scheduler:
    """Steps of an engine. ``running``: the adapters in use."""

    def __init__(self, ranks: int = 1, most_together: int = 4, most_loaded: int = 4) -> None:
        self.running: set[int] = set()
        self.adapters = Adapters(lambda: self.running, ranks, most_together, most_loaded)

    def step(self, *ranks: dict[int, bytes], epoch: int | None = None) -> list[int]:
        """Schedule a step, whose output has the report of these ranks, or none. Return the adapters it asks for."""
        asked, at = self.adapters.begin_step(), self.adapters.epoch if epoch is None else epoch
        if ranks:
            self.adapters.learn(AdapterReport(at, dict(enumerate(ranks))))
        self.adapters.end_step()
        return [each.lora_int_id for each in asked]

    def salt(self, number: int = 1) -> bytes | None:
        """Salt of a request with an adapter."""
        return self.adapters.salt(LoRARequest(number))


def test_a_request_without_an_adapter_has_no_salt() -> None:
    assert Scheduler().adapters.salt(None) == b""


def test_a_request_waits_for_the_step_that_asks_what_is_loaded() -> None:
    engine = Scheduler()
    assert [engine.salt(), engine.salt()] == [None, None]
    assert engine.step({1: D1}) == [1]
    assert [engine.salt(), engine.salt()] == [D1, D1]
    assert engine.step() == []


def test_two_engines_agree_and_so_does_one_that_loads_the_same_again_under_another_number() -> None:
    one, other = Scheduler(), Scheduler()
    one.step({1: D1})
    other.step({7: D1, 1: D2})
    assert one.salt(1) == other.salt(7) == D1 != other.salt(1)
    one.step({1: D2})
    assert one.salt(1) == D2
    one.step({1: D1})
    assert one.salt(1) == D1


def test_what_no_worker_can_say_is_this_engine_s_own_until_one_says() -> None:
    one, other = Scheduler(), Scheduler()
    for each in (one, other):
        assert each.salt() is None
        each.step({})
    own = one.salt()
    assert own is not None
    assert own == one.salt() != other.salt()
    one.step({1: D1})
    assert one.salt() == D1


def test_an_answer_to_an_older_question_is_none() -> None:
    """A step was under way when the adapter was loaded anew, or the cache was reset."""
    engine = Scheduler()
    engine.step({1: D1})
    before = engine.adapters.epoch
    engine.adapters.forget()
    assert engine.salt() is None
    engine.step({1: D1}, epoch=before)
    assert engine.salt() != D1
    engine.adapters.forget()
    assert engine.salt() is None
    engine.step({1: D2})
    assert engine.salt() == D2


def test_a_reset_ends_an_engine_s_own_salts_too() -> None:
    engine = Scheduler()
    engine.salt()
    engine.step({})
    own = engine.salt()
    engine.adapters.forget()
    engine.salt()
    engine.step({})
    assert engine.salt() not in (own, None)


def test_ranks_that_have_loaded_different_adapters_are_as_no_other_engine() -> None:
    same, different, turned, missing = (Scheduler(ranks=2) for _ in range(4))
    same.step({1: D1}, {1: D1})
    different.step({1: D1}, {1: D2})
    turned.step({1: D2}, {1: D1})
    assert same.salt() == D1
    assert len({D1, D2, different.salt(), turned.salt()}) == 4
    assert missing.salt() is None
    missing.step({1: D1})
    assert missing.salt() not in (D1, None)


def test_a_rank_without_news_has_what_it_had() -> None:
    """A rank loads its own of an adapter's experts: where only another rank's have changed, that one reports alone."""
    engine, other = Scheduler(ranks=2), Scheduler(ranks=2)
    engine.step({1: D1}, {1: D1})
    assert engine.adapters.learn(AdapterReport(0, {1: {1: D2}})) == {1: engine.salt()}
    other.step({1: D1}, {1: D2})
    assert engine.salt() == other.salt() != D1


def test_a_late_answer_tells_what_its_own_step_was_computed_with() -> None:
    engine = Scheduler()
    engine.step({1: D1})
    engine.adapters.forget()
    assert engine.adapters.learn(AdapterReport(0, {0: {1: D2}})) == {1: D2}
    assert engine.salt() is None


def test_no_more_are_asked_for_than_are_computed_together() -> None:
    """Each may have a worker drop another one."""
    engine = Scheduler(most_together=2, most_loaded=2)
    engine.running = {1}
    assert [engine.salt(2), engine.salt(3)] == [None, None]
    assert engine.step({1: D1, 2: D2}) == [2]
    assert engine.salt(2) == D2


def test_one_that_may_be_dropped_for_another_counts_as_unknown() -> None:
    engine = Scheduler(most_together=2, most_loaded=2)
    engine.step({1: D1, 2: D2})
    assert engine.salt(3) is None
    assert engine.salt(1) is None
    engine.running = {1}
    assert engine.salt(1) == D1


def test_nothing_is_kept_of_adapters_that_are_not_loaded() -> None:
    engine = Scheduler(most_together=1, most_loaded=2)
    for number in range(1, 1000):
        engine.salt(number)
        engine.step({number: D1} if number % 2 else {})
    kept = [value for value in vars(engine.adapters).values() if isinstance(value, dict)]
    assert sum(map(len, kept)) <= 4


@pytest.mark.parametrize(
    "other", [{"a": [1, 3]}, {"a": [1], "b": [2]}, {"a": [[1, 2]]}, {"a": ["1", 2]}, {"b": [1, 2]}, {"a": {0: 1, 1: 2}}]
)
def test_a_digest_is_of_all_of_a_value(other: object) -> None:
    value = {"a": [1, 2]}
    assert content_digest(value, b"p") == content_digest({"a": [1, 2]}, b"p") != content_digest(other, b"p")
    assert content_digest(value, b"p") != content_digest(value, b"q")
