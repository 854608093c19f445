"""Links between the ranks of an SGLang engine, and their start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_sglang.links import FollowerLinks, LeaderLink, NewPages, RankLost, RanksDiverged, Record
from cachesvc_sglang.plain import RankGroup

RANKS = 3


def linked() -> tuple[FollowerLinks, list[LeaderLink]]:
    """Links of the first of three ranks, and of the others."""
    ends = [Pipe() for _ in range(1, RANKS)]
    return FollowerLinks([mine for mine, _ in ends]), [LeaderLink(its, rank) for rank, (_, its) in enumerate(ends, 1)]


def on_all(act: Callable[[RankGroup], Any]) -> list[Any]:
    """Results of an act of three ranks, or what it raised."""
    barrier, values, results = threading.Barrier(RANKS), [None] * RANKS, [None] * RANKS

    def be(rank: int) -> None:
        def gather(mine: Any) -> list[Any]:
            values[rank] = mine
            barrier.wait(10)
            found = list(values)
            barrier.wait(10)
            return found

        try:
            results[rank] = act(RankGroup(rank, RANKS, gather))
        except (OSError, ValueError) as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(RANKS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return results


def test_followers_read_what_the_first_rank_has_decided() -> None:
    first, others = linked()
    records = [
        Record(("take", 2, 70), True, (64, 32), (0, 0), {"r1": NewPages(3, [7, 9], [2, 4])}),
        Record(("room",), None, (32, 0), (0, 0), {}),
    ]
    for record in records:
        first.tell(record)
    for other in others:
        assert [other.hear(record.call) for record in records] == records


def test_a_rank_that_makes_another_call_says_which() -> None:
    first, (one, other) = linked()
    first.tell(Record(("prompt", "r2", 64, True), True, (0,), (0,), {}))
    with pytest.raises(RanksDiverged, match=r"rank 2 .* called prompt\('r2', 96, True\) where rank 0 called prompt\("):
        other.hear(("prompt", "r2", 96, True))
    assert one.hear(("prompt", "r2", 64, True)).answer is True


def test_a_load_has_come_once_it_has_on_each_rank() -> None:
    first, (one, other) = linked()
    for number in (1, 2, 3):
        first.expect(number)
    one.end_load(1, has_come=True)
    one.end_load(2, has_come=True)
    assert first.has_come(1, 0.0) is None
    other.end_load(2, has_come=False)
    other.end_load(1, has_come=True)
    assert first.has_come(2, 10.0) is False
    assert first.has_come(1, 10.0) is True
    first.forget(3)
    one.end_load(3, has_come=True)  # of a request that has ended meanwhile
    one.answer("sound", value=True)
    other.answer("sound", value=False)
    assert first.gather("sound") == [True, False]


def test_an_answer_about_something_else_is_refused() -> None:
    first, (one, _) = linked()
    one.answer("sound", value=True)
    with pytest.raises(RanksDiverged, match="rank 1 answered about sound, and rank 0 asked about lease"):
        first.gather("lease")


def test_a_rank_that_ends_ends_the_others() -> None:
    first, (one, other) = linked()
    other.close()
    with pytest.raises(RankLost, match="rank 2 of this engine has ended"):
        first.tell(Record(("room",), None, (0,), (0,), {}))
    first.close()
    assert one.hear(("room",)).answer is None  # sent before
    with pytest.raises(RankLost, match="rank 0 of this engine has ended"):
        one.hear(("room",))


def test_ranks_start_together_and_are_linked_in_their_order() -> None:
    def start(group: RankGroup) -> Any:
        assert group.all(lambda: group.rank) == [0, 1, 2]
        first, leader = group.connect()
        if leader is not None:
            leader.answer("rank", group.rank)
            return leader.hear(("room",)).answer
        assert first is not None
        first.tell(Record(("room",), "told", (0,), (0,), {}))
        return first.gather("rank")

    assert on_all(start) == [[1, 2], "told", "told"]


def test_none_starts_where_one_cannot() -> None:
    def start(group: RankGroup) -> Any:
        def act() -> None:
            if group.rank == 1:
                raise OSError("no such GPU")

        return group.all(act)

    zero, one, two = on_all(start)
    assert isinstance(one, OSError)
    for other in (zero, two):
        assert isinstance(other, ConnectorRefused)
        assert str(other) == "rank 1 of this engine did not start: OSError: no such GPU"


def test_an_engine_of_one_rank_has_no_links() -> None:
    alone = RankGroup(0, 1, lambda mine: [mine])
    assert alone.all(lambda: "mine") == ["mine"]
    assert alone.connect() == (None, None)
