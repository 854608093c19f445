"""Reports put off until the first token of a lone request has come: its client waits for nothing else.

Under asynchronous scheduling the next iteration is scheduled before the output of the last one is taken:

    step 0   admits the request          no report
    step 1                               no report
    output of step 0: the first token    no report; it goes to the client
    step 2                               reports what has gathered
"""

from __future__ import annotations

MOST_STEPS = 2
"""Iterations whose reports may be put off: other engines wait for what they free."""


class FirstToken:
    """Used from one thread."""

    def __init__(self) -> None:
        self._is_awaited = False
        self._steps = 0

    def admit(self, *, is_alone: bool) -> None:
        """Note that a request was admitted; ``is_alone``: no other one is unfinished."""
        self._is_awaited = is_alone
        self._steps = MOST_STEPS

    def may_report(self) -> bool:
        """Return whether the iteration that was scheduled reports."""
        if self._is_awaited:
            self._steps -= 1
        return not self._is_awaited or self._steps < 0

    def take_output(self) -> bool:
        """Note that an output has come; return whether it is the first behind an admission, which nothing holds up."""
        is_first, self._is_awaited = self._is_awaited, False
        return is_first
