"""Pace of reports: those of decoding requests are sent together, once in four iterations.

In most iterations of a decoding batch some requests fill a block and take the next one from the stock. A message costs
more than its content, and the daemon may get this content later: a stock page is the engine's anyway, and the block of
an answer is matched with the next turn. Matches, blocks of prompts, returned pages and a low stock are sent at once
(``PageBook.is_urgent``).
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
