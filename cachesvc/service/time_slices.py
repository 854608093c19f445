"""Long work between calls: turns on the event loop that are short, and a thread for what needs no ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

TURN_SECONDS = 0.002
"""How long a walk goes on before calls get their turn."""

Result = TypeVar("Result")


class Turns:
    """One long call's share of the loop; ``longest_seconds`` is the longest that it kept others waiting at a time."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0

    def take(self, work: Callable[[], Result]) -> Result:
        """Do a piece in one go."""
        began = time.perf_counter()
        try:
            return work()
        finally:
            self.longest_seconds = max(self.longest_seconds, time.perf_counter() - began)

    async def aside(self, work: Callable[[], Result]) -> Result:
        """Do a piece that touches nothing of the ledger on a thread."""
        return await asyncio.to_thread(work)

    async def walk(self, steps: Iterator[Result]) -> list[Result]:
        """Take all steps, some at a time, with turns for others between them."""
        out: list[Result] = []
        is_more = self._some(steps, out)
        while is_more:
            await asyncio.sleep(TURN_SECONDS)  # as long again for others
            is_more = self._some(steps, out)
        return out

    def _some(self, steps: Iterator[Result], out: list[Result]) -> bool:
        def some() -> bool:
            until = time.perf_counter() + TURN_SECONDS
            for step in steps:
                out.append(step)
                if time.perf_counter() > until:
                    return True
            return False

        return self.take(some)
