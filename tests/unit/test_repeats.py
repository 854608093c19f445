"""Remembered answers: by count, and beyond the last few by bytes."""

from __future__ import annotations

import pytest
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import KeyReused
from cachesvc.service.calls import KEEP_BYTES, KEEP_LEAST, Repeats


class Calls:
    """Answers of a size, and how many had to be made."""

    def __init__(self, answer_bytes: int) -> None:
        self.repeats = Repeats(256)
        self.made = 0
        self._text = "x" * answer_bytes

    async def ask(self, request_id: int, contents: bytes = b"") -> cache_pb2.StepResponse:
        async def call() -> cache_pb2.StepResponse:
            self.made += 1
            return cache_pb2.StepResponse(
                request_id=request_id, error=cache_pb2.OperationError(code="INVALID", message=self._text)
            )

        answer = await self.repeats.answer(request_id, contents, call)
        assert isinstance(answer, cache_pb2.StepResponse)
        return answer


async def test_small_answers_are_kept_by_count() -> None:
    calls = Calls(10)
    for number in range(1, 301):
        await calls.ask(number)
    for number in range(45, 301):
        assert (await calls.ask(number)).request_id == number
    assert calls.made == 300
    await calls.ask(44)
    assert calls.made == 301


async def test_large_ones_are_kept_as_far_as_their_bytes_allow_and_the_last_few_always() -> None:
    calls = Calls(KEEP_BYTES // 64)
    for number in range(1, 201):
        await calls.ask(number)
    for number in range(200 - 62, 201):
        await calls.ask(number)
    assert calls.made == 200
    await calls.ask(100)
    assert calls.made == 201
    huge = Calls(KEEP_BYTES)
    for number in range(1, 101):
        await huge.ask(number)
    for number in range(101 - KEEP_LEAST + 1, 101):
        await huge.ask(number)
    assert huge.made == 100
    await huge.ask(60)
    assert huge.made == 101


async def test_an_id_with_other_contents_is_refused() -> None:
    calls = Calls(1)
    await calls.ask(7, b"a")
    with pytest.raises(KeyReused):
        await calls.ask(7, b"b")
