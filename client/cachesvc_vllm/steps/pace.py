"""Pace of reports: what decoding leaves gathers over a few iterations, for a message costs more than what it says.

In most iterations of a decoding batch some requests fill a block and take the next one from the stock. The daemon may
hear of it later: a stock page is the engine's anyway, and the block of an answer is looked for with the next turn. What
others wait for goes at once (``PageBook.is_urgent``): matches, blocks of prompts, pages that come back.
"""

from __future__ import annotations

MOST_GATHERED = 4
"""Iterations whose reports go together: 40 ms at 10 ms each."""


class Pace:
    """Used from one thread."""

    def __init__(self) -> None:
        self._gathered = 0

    def is_due(self, *, is_urgent: bool) -> bool:
        """Return whether the iteration that was scheduled reports. ``is_urgent``: it has more to tell than usual."""
        self._gathered += 1
        if not is_urgent and self._gathered < MOST_GATHERED:
            return False
        self._gathered = 0
        return True
