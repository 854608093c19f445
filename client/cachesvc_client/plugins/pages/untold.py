"""Reports to the daemon that must wait: computed blocks, cells that are not read any more, and ended requests.

A drafter's kernels may run on when a step's output has come, for sampled tokens are copied out before that. They
write KV behind what the step has computed. With a drafter the daemon gets the report of an output's blocks after the
next output, whose kernels ran behind them, or after that of a step that computes nothing, for which workers wait.

    end_step   blocks of this output, requests that it ended     -> late
    end_step   of the next                                       -> ready, sent by the next flush
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cachesvc_client.plugins.pages.request_pages import RequestPages


@dataclass(slots=True)
class Sealing:
    """``blocks``: how many leading blocks are computed; ``keys``: of these. ``states``: by group and position, the
    pages of states that are among them."""

    blocks: int
    keys: Sequence[bytes]
    states: dict[int, dict[int, int]] = field(default_factory=dict)

    def add(self, newer: Sealing) -> None:
        """Take what is known since."""
        self.blocks, self.keys = newer.blocks, newer.keys
        for group, states in newer.states.items():
            self.states.setdefault(group, {}).update(states)


@dataclass(slots=True)
class Written:
    """Blocks that a step under way writes of a request: once its output has come, the first ``blocks`` are computed.
    ``is_over``: then, True where the engine has let go of the request meanwhile, and says nothing of it any more."""

    request: RequestPages
    blocks: int
    keys: Sequence[bytes]
    is_over: Callable[[], bool]


@dataclass(slots=True)
class Reports:
    """Reports to make. ``dead``: by group, the first block that a request may still read. ``has_prompts``: blocks of
    prompts are among those that are computed."""

    sealing: dict[RequestPages, Sealing] = field(default_factory=dict)
    dead: dict[RequestPages, dict[int, int]] = field(default_factory=dict)
    ended: list[RequestPages] = field(default_factory=list)
    has_prompts: bool = False

    def __bool__(self) -> bool:
        """True where there is a report to make."""
        return bool(self.sealing or self.dead or self.ended)

    @property
    def is_urgent(self) -> bool:
        """True where it tells of more than decoding: others can use pages that come back, and prompts."""
        return self.has_prompts or bool(self.ended or self.dead)

    def add(self, other: Reports) -> None:
        """Take all that ``other`` has, which is newer."""
        if not other:
            return
        for request, sealing in other.sealing.items():
            self.seal(request, sealing)
        self.has_prompts |= other.has_prompts
        for request, dead in other.dead.items():
            self.dead.setdefault(request, {}).update(dead)
        self.ended += other.ended
        other.clear()

    def seal(self, request: RequestPages, sealing: Sealing) -> None:
        """Add what is computed."""
        if (older := self.sealing.get(request)) is None:
            self.sealing[request] = sealing
        else:
            older.add(sealing)

    def clear(self) -> None:
        """Forget it all."""
        self.sealing.clear()
        self.dead.clear()
        self.ended.clear()
        self.has_prompts = False


class Untold:
    """Used from the engine's scheduler thread. ``is_late``: there is a drafter."""

    def __init__(self) -> None:
        self.is_late = False
        self.ready, self._late, self._fresh = Reports(), Reports(), Reports()

    def __bool__(self) -> bool:
        """True where a report may be sent."""
        return bool(self.ready)

    @property
    def has_late_pages(self) -> bool:
        """True where requests that have ended will give pages back without anything else."""
        return bool(self._late.ended or self._fresh.ended)

    def seal(self, request: RequestPages, sealing: Sealing, *, is_prompt: bool = False) -> None:
        """Note what is computed."""
        newest = self._newest
        newest.seal(request, sealing)
        newest.has_prompts |= is_prompt

    def recycle(self, request: RequestPages, dead: Mapping[int, int]) -> None:
        """Note that the request reads no block before these, by group."""
        self._newest.dead.setdefault(request, {}).update(dead)

    def end(self, request: RequestPages) -> None:
        """Note that the engine has freed all pages of the request."""
        self._newest.ended.append(request)

    @property
    def _newest(self) -> Reports:
        return self._fresh if self.is_late else self.ready

    def begin_step(self) -> None:
        """Note that what is fresh was said without an output: kernels of the last output were the last to write it."""
        if self.is_late:
            self._late.add(self._fresh)

    def begin_output(self) -> None:
        """An output has come: all kernels before its step's have ended."""
        if self.is_late:
            self.ready.add(self._late)

    def end_output(self, *, computes: bool) -> None:
        """Note the end of an output. Without ``computes`` workers have waited for all kernels."""
        if self.is_late:
            (self._late if computes else self.ready).add(self._fresh)

    def settle(self) -> None:
        """Let all be used by this engine itself, whose kernels run one after another."""
        self.begin_output()
        self.end_output(computes=False)

    def forget_blocks(self, request: RequestPages | None = None) -> None:
        """Seal none of what is computed, or none of one request's."""
        for part in (self.ready, self._late, self._fresh):
            if request is not None:
                part.sealing.pop(request, None)
                continue
            part.sealing.clear()
            part.has_prompts = False

    def clear(self) -> None:
        """Forget it all."""
        for part in (self.ready, self._late, self._fresh):
            part.clear()
