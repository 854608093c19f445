"""Questions that take longer than a call may hold the ledger thread: generators that stop where others may go on.

A question yields ``None`` where it may be interrupted, or work that touches nothing of the ledger, whose result is sent
back to it. Its driver decides how: the daemon in time slices and with a thread for the work, tests at once.
What was read before a ``yield`` may have changed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

LINES_A_STEP = 32
"""Lines that are made in one step: some 0.3 ms of blocks with their copies."""

Row = TypeVar("Row")
Answer = TypeVar("Answer")
Work = Callable[[], Any]
Question = Generator[Work | None, Any, Answer]


def off_loop(work: Callable[[], Answer]) -> Question[Answer]:
    """The result of ``work``, which is not done on the ledger thread."""
    answer: Answer = yield work
    return answer


def in_steps(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Lines that a question, or the message of its answer, makes in one step."""
    for first in range(0, len(rows), LINES_A_STEP):
        yield rows[first : first + LINES_A_STEP]


def answer_at_once(question: Question[Answer]) -> Answer:
    """Drive a question to its end without a pause. For tests and tools that own the ledger."""
    result: Any = None
    while True:
        try:
            work = question.send(result)
        except StopIteration as ended:
            answer: Answer = ended.value
            return answer
        result = None if work is None else work()
