"""Policy "hazard": chooses victims by how soon blocks of their class and age were used again.

A request is the last to touch the blocks of its path, in two parts: down to the deepest block that has several known
children, and the rest. Each part is a segment, of a class by what the request showed at its arrival, and of another one
by what it showed at its end. When a landmark of a segment is touched again, or forgotten, its classes learn
(``rates.py``). Of all queues of candidates, one a class, the head goes whose blocks will bring the fewest hits a
second, unless the oldest of all is worth hardly more, or is older than anything that is remembered.

Time comes in as an argument. What is kept is bounded: by the last ``REMEMBERED`` requests, and by what is resident.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cachesvc.model.requests import Ended, Parts, Worth
from cachesvc.policy.hazard.ages import bin_of
from cachesvc.policy.hazard.asked import Heads, Path
from cachesvc.policy.hazard.classes import Classes, Features, features, output_class
from cachesvc.policy.hazard.landmarks import Landmarks
from cachesvc.policy.hazard.lessons import Lessons
from cachesvc.policy.hazard.lines import Line, Lines
from cachesvc.policy.hazard.rates import LANDMARKS_A_STEP, TABLES, Ints, Rates
from cachesvc.policy.hazard.segments import (
    FIRST_OPEN,
    IS_REMEMBERED,
    IS_RUNNING,
    IS_SHARED,
    LANDMARKS,
    LAST_OPEN,
    NO_SEGMENT,
    WEIGHTS,
    Segments,
)
from cachesvc.policy.hazard.uses import HostUses
from cachesvc.policy.hazard.worth import MARGIN, NO_RANK, choose_stored, worth_of

REMEMBERED = 8192
"""Number of requests whose landmarks are followed."""
ENDS_AT_ONCE = 64
GHOSTS_LOOKED = 1024
"""Blocks of a prompt that have left the cache and are looked up, the deepest of them."""
SEGMENTS_LOOKED = 32
"""Number of segments, from the deepest on, that learn that a prompt is the next to use their blocks."""
SHARED_LOOKED = 512
"""Blocks of one segment among which the deepest with several children is looked for."""
WHILE_RUNNING, AFTER_END = 0, 1


class _Running(NamedTuple):
    parts: Parts
    seen: Features
    line: Line
    prompt_end: bytes


class _End(NamedTuple):
    blocks: int
    key: bytes
    ended: Ended


class History:
    """History of one model. ``on_moved``: called for a segment whose class has changed. ``weighs_cost``: a hit is worth
    more the later in a prompt it is. ``remembered_seconds``: age of the oldest request whose landmarks are followed."""

    def __init__(self, block_tokens: int, *, weighs_cost: bool = False) -> None:
        self.segments = Segments()
        self.rates = Rates()
        self.classes = Classes(self.rates.add_row)
        self.on_moved: Callable[[int], None] = lambda _: None
        self.decides = True
        self.weighs_cost = weighs_cost
        self.requests = 0
        self.uses = HostUses()
        self.remembered_seconds = float("inf")
        self._block_tokens = block_tokens
        self._lines = Lines(REMEMBERED)
        self._remembered: deque[Parts] = deque()
        self._unsettled: deque[Parts] = deque()
        self._landmarks = Landmarks()
        self._running: dict[int, _Running] = {}
        self._ending: list[tuple[float, int]] = []
        self._ends: dict[int, _End] = {}
        self._lessons = Lessons()
        self.classes.row(WHILE_RUNNING, Features(0, 0, 0), None, is_shared=False)  # queue 0: blocks without a segment

    def govern(self, *, decides: bool, weighs_cost: bool) -> None:
        """Set how it chooses: by what it has learned, or (not ``decides``) the oldest; it goes on learning."""
        self.decides, self.weighs_cost = decides, weighs_cost

    @property
    def remembered(self) -> Sequence[Parts]:
        """Requests whose landmarks are followed, oldest first."""
        return self._remembered

    @property
    def running(self) -> list[Parts]:
        """Requests that have not ended."""
        return [each.parts for each in self._running.values()]

    @property
    def kept_keys(self) -> int:
        """Keys that are kept of lines, beginnings and landmarks that have left the cache."""
        return len(self._lines) + len(self._landmarks)

    # -- what happens ------------------------------------------------------------------------------------------

    def arrived(self, path: Path, now: float, waited: float) -> Parts:
        """A request has come, ``waited`` seconds ago; the resident blocks of its path are its own from now on, and the
        caller says so in its column. Learns from what it touches."""
        self.advance(now)
        now -= waited
        number = self.requests
        self.requests += 1
        blocks, known, key = path.blocks, path.known, path.key
        if 0 < known < blocks:
            self._lines.part(key(known - 1))
        since, shared = self._touch(path, now)
        found = self._lines.find(key, known, since, now)
        if blocks:
            self._lines.end(key(blocks - 1), found.line, is_new=known < blocks)
        seen = features((blocks - known) * self._block_tokens, found.line_gap, found.hub_gap, known)
        begin, resident = self.segments.begin, path.resident
        top = NO_SEGMENT
        if shared:
            queue = self.classes.row(WHILE_RUNNING, seen, None, is_shared=True)
            top = begin(number, now, queue, 0, shared, resident, IS_SHARED)
        queue = self.classes.row(WHILE_RUNNING, seen, None, is_shared=False)
        end = begin(number, now, queue, shared, blocks, resident, 0)
        parts = Parts(number, top, end, shared)
        self._running[number] = _Running(parts, seen, found.line, key(blocks - 1) if blocks else b"")
        self._remembered.append(parts)
        self._settle(parts, now)
        if len(self._remembered) > REMEMBERED:
            self._forget(self._remembered.popleft(), now)
            self.remembered_seconds = now - self.segments.arrived[self._remembered[0].own]
        return parts

    def grew(self, parts: Parts, new_from: int, blocks: int) -> None:
        """The request has computed its first ``blocks`` blocks; those ``new_from`` on have just come to the index."""
        segments, shared = self.segments, parts.shared_blocks
        if new_from == blocks:
            return
        if new_from < shared:
            segments.grew(parts.shared, new_from, min(blocks, shared))
        if blocks > shared:
            segments.grew(parts.own, max(new_from, shared), blocks)

    def taken(self, parts: Parts, owners: Ints, bottom: int) -> None:
        """The request has taken over blocks of its path, the deepest before ``bottom``, of which ``owners`` were the
        segments, deepest first."""
        self.segments.sweep(owners, bottom, parts)

    def takes(self, segment: int, other: int, position: int) -> bool:
        """A running request has computed a block that is in the ``other`` segment: it is in its own ``segment`` from
        now on; False where it stays, because the other request is the younger one."""
        segments = self.segments
        is_younger = segments.request[segment] > segments.request[other]
        loser = other if is_younger else segment
        segments.top[loser] = max(segments.top[loser], position + 1)
        segments.release(loser)
        if is_younger:
            if segments.top[segment] >= segments.bottom[segment]:  # it has nothing, and begins anew here
                segments.top[segment] = segments.bottom[segment] = position
            segments.grew(segment, segments.top[segment], max(segments.bottom[segment], position + 1))
        return is_younger

    def left(self, segment: int, bottom: int, keys: Sequence[bytes]) -> None:
        """The deepest blocks of the segment, which ends before ``bottom``, have left the cache; deepest first."""
        segments = self.segments
        top = segments.bottom[segment] = bottom - len(keys)
        flags = segments.flags[segment]
        if flags & IS_REMEMBERED:
            if flags & LAST_OPEN and bottom == segments.last[segment]:
                self._landmarks.remember(segment, keys[0])
            if flags & FIRST_OPEN and top == segments.first[segment]:
                self._landmarks.remember(segment, keys[-1])
        elif top <= segments.top[segment]:
            segments.release(segment)

    def ended(self, parts: Parts, blocks: int, key: bytes, ended: Ended, now: float) -> None:
        """The request holds nothing any more: ``blocks`` blocks of its path were sealed, the last under ``key``. An end
        that lies ahead is waited for, as long as few are; none lies before the request came."""
        at = now if ended.at is None else max(ended.at, self.segments.arrived[parts.own])
        self._ends[parts.number] = _End(blocks, key, ended)
        if at > now and len(self._ending) < REMEMBERED:
            heapq.heappush(self._ending, (at, parts.number))
        else:
            self._end(parts.number, min(at, now))

    def advance(self, now: float) -> None:
        """Advance to ``now``: do what is due, but for ends beyond ``ENDS_AT_ONCE``, which wait for the next call."""
        for _ in range(ENDS_AT_ONCE):
            if not self._ending or self._ending[0][0] > now:
                break
            at, number = heapq.heappop(self._ending)
            self._end(number, at)
        if self._lessons.is_due(self.requests):
            waiting = self.segments.open_landmarks(now, LANDMARKS_A_STEP // TABLES)
            self._lessons.begin(self.requests, self.rates.refit(waiting))

    def lesson(self) -> Callable[[], bool] | None:
        """Callable to be called until it returns True, while no call is served; None: nothing is new."""
        return self._lessons.take()

    def let_go(self, segment: int, blocks: int, now: float, *, is_host: bool) -> None:
        """Blocks of the segment leave the host, or a device."""
        if segment != NO_SEGMENT:
            self.uses.let_go(now - self.segments.arrived[segment], blocks, is_host=is_host)

    def is_worth_saving(self, segment: int, share: float) -> bool:
        """True where blocks like those of the segment are used from the host ``share`` times as often as the mean."""
        return segment == NO_SEGMENT or self.uses.is_worth(self.queue_of(segment), share)

    # -- what to choose ----------------------------------------------------------------------------------------

    def queue_of(self, segment: int) -> int:
        """The queue in which candidates of the segment wait."""
        return self.segments.queue_after[segment] or self.segments.queue[segment]

    def since(self, segment: int) -> float:
        """Time from which the age of the segment counts (seconds): the end of its request, or its arrival."""
        segments = self.segments
        return segments.ended[segment] if segments.queue_after[segment] else segments.arrived[segment]

    def pick(self, heads: Heads, now: float) -> int:
        """The queue whose head goes next; -1 where there is none."""
        ranks = heads.ranks[: self.rates.rows]
        oldest = int(ranks.argmin())
        if ranks[oldest] == NO_RANK:
            return -1
        if not self.decides or ranks[oldest] < 0:
            return oldest
        worth = worth_of(heads, self.rates, now, self._block_tokens if self.weighs_cost else 0)
        least = int(worth.argmin())
        segment = heads.segments[oldest]
        segments = self.segments
        if segments.request[segment] < self.requests - REMEMBERED:
            return oldest
        margin = 1 - MARGIN * self.rates.reused_before[bin_of(now - segments.arrived[segment])]
        return least if worth[least] <= margin * worth[oldest] and worth[least] < worth[oldest] else oldest

    def choose(self, queues: Sequence[int], ages: Sequence[float]) -> int:
        """Index of the queue whose oldest block goes next from storage, where blocks have no segments. ``ages``: of the
        oldest block of each, seconds. Any thread: it only reads."""
        known_seconds = self.remembered_seconds if self.decides else 0.0
        return choose_stored(self.rates, queues, ages, known_seconds)

    def worth(self, segment: int, now: float) -> Worth | None:
        """Known worth of blocks of the segment; None for slot 0."""
        if segment == NO_SEGMENT:
            return None
        queue, age = self.queue_of(segment), max(0.0, now - self.since(segment))
        return Worth(self.classes.in_words(queue), age, float(self.rates.density[queue, bin_of(age)]))

    # -- learning ----------------------------------------------------------------------------------------------

    def _touch(self, path: Path, now: float) -> tuple[float, int]:
        """Everything known on the path is touched. Returns when its deepest known block was used last, and how many
        blocks there are down to the deepest that has several known children."""
        segments, lines, key = self.segments, self._lines, path.key
        known, resident = path.known, path.resident
        landmark_of = self._landmarks.segment_of.get
        since, shared = -1.0, 0
        if 0 < known < path.blocks and lines.children(key(known - 1)) > 1:
            shared = known
        children_of = lines.children_of
        for at in range(known - 1, max(resident, known - GHOSTS_LOOKED) - 1, -1):
            each = key(at)
            slot = landmark_of(each, NO_SEGMENT)
            if slot:
                self._touched(slot, now, is_first=segments.first[slot] == at, is_last=segments.last[slot] == at + 1)
                since = max(since, segments.arrived[slot])
                if segments.last[slot] == at + 1:
                    self._used(slot, now, at + 1 - max(segments.top[slot], segments.bottom[slot]))
            if not shared and children_of(each, 1) > 1:
                shared = at + 1
        at, looks = resident, 0
        while at > 0:
            looks += 1
            if looks > SEGMENTS_LOOKED:
                break
            slot = path.segment(at - 1)
            top = segments.top[slot]
            if slot == NO_SEGMENT or at <= top:
                at -= 1
                continue
            since = max(since, segments.arrived[slot])
            shared = shared or self._shared_above(path, slot, top, at)
            self._touched(slot, now, is_first=top == segments.first[slot], is_last=at == segments.last[slot])
            self._used(slot, now, at - top)
            segments.top[slot] = at
            segments.release(slot)
            at = top
        return (since if since >= 0 else now), shared

    def _shared_above(self, path: Path, slot: int, top: int, at: int) -> int:
        """Number of blocks down to the deepest one with several known followers, in a segment's run ``[top, at)`` on a
        path; 0 where it has none."""
        segments, children, key = self.segments, self._lines.children, path.key
        if at == path.resident < path.known:  # what follows has left the cache: it may be the segment's own
            if children(key(at - 1)) > 1:
                return at
        elif at < path.blocks and at < segments.last[slot]:
            return at
        if segments.flags[slot] & IS_SHARED:
            if at == segments.last[slot]:
                return at
            last = max(top, at - SHARED_LOOKED)
            return next((each + 1 for each in range(at - 1, last - 1, -1) if children(key(each)) > 1), 0)
        return 0

    def _touched(self, slot: int, now: float, *, is_first: bool, is_last: bool) -> None:
        segments = self.segments
        flags = segments.flags[slot]
        open_now = flags & ((FIRST_OPEN if is_first else 0) | (LAST_OPEN if is_last else 0))
        if not open_now:
            return
        segments.flags[slot] = flags & ~open_now
        if not flags & IS_REMEMBERED:
            return
        weight = WEIGHTS[open_now]
        self.rates.touched(segments.queue[slot], now - segments.arrived[slot], weight)
        if segments.queue_after[slot]:
            self.rates.touched(segments.queue_after[slot], now - segments.ended[slot], weight)
        elif flags & IS_RUNNING:
            segments.early[slot] += weight

    def _used(self, slot: int, now: float, blocks: int) -> None:
        segments = self.segments
        rows = (segments.queue[slot], segments.queue_after[slot])
        self.uses.used(rows, now - segments.arrived[slot], blocks)

    def _settle(self, newest: Parts, now: float) -> None:
        """Settle unused segments: blocks not used again until the host would have dropped them are not worth a copy."""
        segments, unsettled = self.segments, self._unsettled
        self.uses.request()
        unsettled.append(newest)
        while now - segments.arrived[unsettled[0].own] > self.uses.host_seconds or len(unsettled) > REMEMBERED:
            parts = unsettled.popleft()
            for slot in (parts.shared, parts.own):
                if slot != NO_SEGMENT and segments.last[slot] > segments.top[slot]:
                    rows = (segments.queue[slot], segments.queue_after[slot])
                    self.uses.unused(rows, segments.last[slot] - segments.top[slot])

    def _forget(self, parts: Parts, now: float) -> None:
        """Stop following a request."""
        segments = self.segments
        for slot in (parts.shared, parts.own):
            if slot == NO_SEGMENT:
                continue
            flags = segments.flags[slot]
            weight = WEIGHTS[flags & LANDMARKS]
            if weight:
                self.rates.forgotten(segments.queue[slot], now - segments.arrived[slot], weight)
                if segments.queue_after[slot]:
                    self.rates.forgotten(segments.queue_after[slot], now - segments.ended[slot], weight)
            segments.flags[slot] = flags & ~(LANDMARKS | IS_REMEMBERED)
            self._landmarks.forget(slot)
            segments.release(slot)

    def _end(self, number: int, at: float) -> None:
        blocks, key, ended = self._ends.pop(number)
        parts, seen, line, prompt_end = self._running.pop(number)
        segments = self.segments
        if blocks and key != prompt_end:
            self._lines.go_on(prompt_end)
            self._lines.end(key, line, is_new=True)
        for slot, is_shared in ((parts.shared, True), (parts.own, False)):
            if slot == NO_SEGMENT:
                continue
            segments.flags[slot] &= ~IS_RUNNING
            if blocks < segments.last[slot]:  # what was not computed after all
                segments.last[slot] = max(blocks, segments.first[slot])
                if blocks <= segments.first[slot]:
                    segments.flags[slot] &= ~LANDMARKS
            if ended.output_tokens is not None:
                after = self.classes.row(AFTER_END, seen, output_class(ended.output_tokens), is_shared=is_shared)
                segments.queue_after[slot], segments.ended[slot] = after, at
                if segments.early[slot]:
                    self.rates.touched(after, 0.0, segments.early[slot])
                self.on_moved(slot)
            segments.release(slot)
