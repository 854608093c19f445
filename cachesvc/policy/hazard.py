"""Policy "hazard": chooses victims by how soon blocks of their class and age were used again.

A request is the last to touch the blocks of its path, in two parts: down to the deepest block that has several known
children, and the rest. Each part is a segment, of a class by what the request showed at its arrival, and of another one
by what it showed at its end. When a landmark of a segment is touched again, or forgotten, its classes learn
(``hazard_rates.py``). Of all queues of candidates, one a class, the head goes whose blocks will bring the fewest hits a
second, unless the oldest of all is worth hardly more, or is older than anything that is remembered.

Time comes in as an argument. What is kept is bounded: by the last ``REMEMBERED`` requests, and by what is resident.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from cachesvc.model.answers import LINEAR_TOKENS, Ended, Parts, Path, Worth
from cachesvc.policy.hazard_rates import BINS, LANDMARKS_A_STEP, TABLES, Floats, Ints, Lessons, Open, Rates, bin_of

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
        self.decides, self.weighs_cost = decides, weighs_cost

    @property
    def remembered(self) -> Sequence[Parts]:
        """Requests whose landmarks are followed, oldest first."""
        return self._remembered

    @property
    def running(self) -> list[Parts]:
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
        segments, shared = self.segments, parts.shared_blocks
        if new_from == blocks:
            return
        if new_from < shared:
            segments.grew(parts.shared, new_from, min(blocks, shared))
        if blocks > shared:
            segments.grew(parts.own, max(new_from, shared), blocks)

    def taken(self, parts: Parts, owners: Ints, bottom: int) -> None:
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
        return self._lessons.take()

    def let_go(self, segment: int, blocks: int, now: float, *, is_host: bool) -> None:
        if segment != NO_SEGMENT:
            self.uses.let_go(now - self.segments.arrived[segment], blocks, is_host=is_host)

    def is_worth_saving(self, segment: int, share: float) -> bool:
        return segment == NO_SEGMENT or self.uses.is_worth(self.queue_of(segment), share)

    # -- what to choose ----------------------------------------------------------------------------------------

    def queue_of(self, segment: int) -> int:
        return self.segments.queue_after[segment] or self.segments.queue[segment]

    def since(self, segment: int) -> float:
        """Time from which the age of the segment counts (seconds): the end of its request, or its arrival."""
        segments = self.segments
        return segments.ended[segment] if segments.queue_after[segment] else segments.arrived[segment]

    def pick(self, heads: Heads, now: float) -> int:
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


NEW_TOKENS = (1024, 4096, 12288, 32768)
LINE_GAPS = (15, 60, 240)
HUB_GAPS = (4, 15, 60, 240)
OUTPUT_TOKENS = (80, 200, 400, 800)
NO_GAP = 0
FIRST_HUB_GAP = len(LINE_GAPS) + 2
KNOWN_MOST = 2


class Features(NamedTuple):
    """``new_tokens``: class of the tokens that were computed. ``gap``: of the smoothed seconds between a line's turns,
    or between uses of a known beginning, or ``NO_GAP``. ``known``: of the known blocks of a new line."""

    new_tokens: int
    gap: int
    known: int


def features(new_tokens: int, line_gap: float | None, hub_gap: float | None, known_blocks: int) -> Features:
    """``line_gap`` (seconds): of the line that the request goes on with; None: it begins one, at ``hub_gap``."""
    fresh = bisect_right(NEW_TOKENS, new_tokens)
    if line_gap is not None:
        return Features(fresh, 1 + bisect_right(LINE_GAPS, line_gap), 0)
    gap = NO_GAP if hub_gap is None else FIRST_HUB_GAP + bisect_right(HUB_GAPS, hub_gap)
    return Features(fresh, gap, min(known_blocks, KNOWN_MOST))


def output_class(tokens: int) -> int:
    return bisect_right(OUTPUT_TOKENS, tokens)


class Classes:
    """Numbers of classes, as they are first seen; ``add_row(table, group)`` gives the next one, of that group."""

    def __init__(self, add_row: Callable[[int, tuple[int, ...]], int]) -> None:
        self._add_row = add_row
        self._rows: dict[tuple[int, bool, Features, int | None], int] = {}
        self._names: list[tuple[Features, int | None, bool]] = []

    def row(self, table: int, seen: Features, output: int | None, *, is_shared: bool) -> int:
        """The number of a class, which is that of its queue. ``output``: class of the output, once it is known."""
        name = (table, is_shared, seen, output)
        row = self._rows.get(name)
        if row is None:
            group = (int(is_shared), seen.new_tokens, -1 if output is None else output)
            row = self._rows[name] = self._add_row(table, group)
            self._names.append((seen, output, is_shared))
        return row

    def in_words(self, row: int) -> str:
        seen, output, is_shared = self._names[row]
        return in_words(seen, output, is_shared=is_shared)


def in_words(seen: Features, output: int | None, *, is_shared: bool) -> str:
    """Meaning of a class, as an operator reads it."""
    parts = ["beginning that others share" if is_shared else "end of its own"]
    parts.append(_between("computed tokens", NEW_TOKENS, seen.new_tokens))
    if seen.gap == NO_GAP:
        parts.append("first of its kind")
    elif seen.gap < FIRST_HUB_GAP:
        parts.append(f"a line with {_between('seconds between turns', LINE_GAPS, seen.gap - 1)}")
    else:
        gap = _between("seconds between uses of its beginning", HUB_GAPS, seen.gap - FIRST_HUB_GAP)
        parts.append(f"a new line with {gap}")
    if output is not None:
        parts.append(_between("output tokens", OUTPUT_TOKENS, output))
    return ", ".join(parts)


def _between(what: str, borders: tuple[int, ...], number: int) -> str:
    if number == len(borders):
        return f"{what} from {borders[-1]} up"
    return f"{what} below {borders[number]}"


class Landmarks:
    """``segment_of``: by key, whose landmark it was last. Not to be written."""

    def __init__(self) -> None:
        self.segment_of: dict[bytes, int] = {}
        self._keys: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.segment_of)

    def remember(self, segment: int, key: bytes) -> None:
        """Remember a landmark of the segment that has left the cache."""
        self.segment_of[key] = segment
        self._keys.setdefault(segment, []).append(key)

    def forget(self, segment: int) -> None:
        for key in self._keys.pop(segment, ()):
            if self.segment_of.get(key) == segment:
                del self.segment_of[key]


# Lines of requests that go on with one another, as conversations do, and where prompts part: by block keys, bounded.
#
# ``ends``: of each request the last full block, as the end of a line that the next request may go on with.
# ``children``: how many known children a block has, kept where that is not 1. ``hubs``: how often the known beginning
# of new lines is used, as the smoothed logarithm of the seconds between uses.

Value = TypeVar("Value")
LOOK_BACK_BLOCKS = 64
PARTING = 3
"""Number of known children from which on lines part at a block: no line goes on across it."""


class Line(NamedTuple):
    """State as of its last request: arrival (seconds), requests, smoothed logarithm of the seconds between them."""

    arrived: float
    turns: int
    gap: float


class Found(NamedTuple):
    """The line that a request is part of, and the smoothed seconds of its own gap, or of its beginning's."""

    line: Line
    line_gap: float | None
    hub_gap: float | None


class Bounded(Generic[Value]):
    """Dict of the last ``most`` keys that were written."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[bytes, Value] = OrderedDict()
        self.get = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def put(self, key: bytes, value: Value) -> None:
        """Write a key; the one that was written longest ago is forgotten where there are too many."""
        known = self._known
        known[key] = value
        known.move_to_end(key)
        if len(known) > self._most:
            known.popitem(last=False)


class Lines:
    """``most``: keys of each kind that are kept. ``children_of``: as ``children``, with what it is where nothing is
    known."""

    def __init__(self, most: int) -> None:
        self._ends: Bounded[Line] = Bounded(most)
        self._children: Bounded[int] = Bounded(most)
        self._hubs: Bounded[float] = Bounded(most)
        self.children_of = self._children.get

    def __len__(self) -> int:
        return len(self._ends) + len(self._children) + len(self._hubs)

    def children(self, key: bytes) -> int:
        """Known children of a block; 1 where nothing is known of it."""
        return self._children.get(key, 1)

    def part(self, key: bytes) -> int:
        """A block has a child that was not known; returns how many it has now."""
        now = self.children(key) + 1
        self._children.put(key, now)
        return now

    def find(self, key: Callable[[int], bytes], known: int, since: float, now: float) -> Found:
        """The line of a request of which ``known`` blocks are known, the last one used ``since`` (seconds)."""
        for at in range(known - 1, max(0, known - LOOK_BACK_BLOCKS) - 1, -1):
            each = key(at)
            if self.children(each) >= PARTING:
                break
            line = self._ends.get(each)
            if line is not None:
                gap = log(1 + max(0.0, now - line.arrived))
                if line.turns > 1:
                    gap = (line.gap + gap) / 2
                return Found(Line(now, line.turns + 1, gap), exp(gap) - 1, None)
        if not known:
            return Found(Line(now, 1, 0.0), None, None)
        hub, gap = key(known - 1), log(1 + max(0.0, now - since))
        before = self._hubs.get(hub)
        if before is not None:
            gap = (before + gap) / 2
        self._hubs.put(hub, gap)
        return Found(Line(now, 1, 0.0), None, exp(gap) - 1)

    def end(self, key: bytes, line: Line, *, is_new: bool) -> None:
        """A request of a line ends at the block of ``key``; ``is_new``: nothing is known below it."""
        self._ends.put(key, line)
        if is_new:
            self._children.put(key, 0)

    def go_on(self, key: bytes) -> None:
        """Undo the end of a request at ``key``: it continues below that key."""
        if self._children.get(key) == 0:
            self._children.put(key, 1)


# Segments: blocks that each request was the last to touch, in two parts, kept in columns by slot.
#
# A part is the run of blocks ``[top, bottom)`` of a path that is resident. It only shrinks: from the top as later
# requests take blocks over, from the bottom as they leave the cache. Its landmarks are its first and its last block;
# they count until they are touched again. Slot 0 belongs to no request.

NO_SEGMENT = 0
FIRST_OPEN, LAST_OPEN, IS_RUNNING, IS_REMEMBERED, IS_SHARED = 1, 2, 4, 8, 16
LANDMARKS = FIRST_OPEN | LAST_OPEN
WEIGHTS = (0.0, 0.5, 0.5, 1.0)
"""Weights of the landmarks that are open: together a segment counts once."""
WEIGHT_COLUMN = np.array(WEIGHTS)
LEAST_SLOTS = 256
SLOTS_AT_ONCE = 16384


class Segments:
    """Columns by slot. ``arrived`` and ``ended``: of its request (seconds); ``request``: its number. ``queue``: of its
    class while it runs, and ``queue_after`` once it has ended, where it is known (0: not). ``first`` and ``last``: its
    blocks as it began, last exclusive. ``weight``: what its landmarks that were touched before its end count there."""

    def __init__(self) -> None:
        self.arrived, self.ended, self.early = array("d"), array("d"), array("f")
        self.request = array("q")
        self.queue, self.queue_after = array("H"), array("H")
        self.first, self.top, self.bottom, self.last = array("i"), array("i"), array("i"), array("i")
        self.flags = bytearray()
        self._free: list[int] = []
        self._grow()
        self._free.pop()  # slot 0
        self.request[NO_SEGMENT] = -1

    def _grow(self) -> None:
        slots = len(self.flags)
        more = max(slots, LEAST_SLOTS)
        for column in (self.arrived, self.ended, self.early, self.request, self.queue, self.queue_after):
            column.frombytes(bytes(column.itemsize * more))
        for blocks in (self.first, self.top, self.bottom, self.last):
            blocks.frombytes(bytes(blocks.itemsize * more))
        self.flags.extend(bytes(more))
        self._free.extend(range(slots + more - 1, slots - 1, -1))

    def __len__(self) -> int:
        return len(self.flags) - 1 - len(self._free)

    def begin(self, request: int, now: float, queue: int, first: int, last: int, resident: int, flags: int) -> int:
        """A part of a request that has arrived: blocks ``[first, last)`` of its path, of which ``resident`` blocks are
        there. Returns its slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.arrived[slot], self.ended[slot], self.early[slot] = now, 0.0, 0.0
        self.request[slot] = request
        self.queue[slot], self.queue_after[slot] = queue, 0
        self.first[slot] = self.top[slot] = first
        self.last[slot] = last
        self.bottom[slot] = min(max(resident, first), last)
        self.flags[slot] = (LANDMARKS if last > first else 0) | IS_RUNNING | IS_REMEMBERED | flags
        return slot

    def grew(self, slot: int, first: int, bottom: int) -> None:
        """Blocks ``[first, bottom)`` of the path are new, and of that segment; younger requests have none of them."""
        self.top[slot] = min(self.top[slot], first)
        self.bottom[slot] = bottom
        if bottom > self.last[slot]:
            if self.last[slot] == self.first[slot]:
                self.flags[slot] |= LANDMARKS
            self.last[slot] = bottom

    def release(self, slot: int) -> bool:
        """Make the slot free if nothing needs it any more; True when it is."""
        if self.flags[slot] & (IS_RUNNING | IS_REMEMBERED) or self.top[slot] < self.bottom[slot] or slot == NO_SEGMENT:
            return False
        self._free.append(slot)
        return True

    def sweep(self, owners: Ints, bottom: int, taker: Parts) -> None:
        """``taker`` has taken over blocks of a path, the deepest before ``bottom``, of which ``owners`` were the
        segments, deepest first. Where that is not known yet it is not learned from, and nothing is done one by one."""
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        slots, ends = owners[starts], (bottom - starts).astype(np.int32)
        tops, flags = np.frombuffer(self.top, np.int32), np.frombuffer(self.flags, np.uint8)
        is_new = (ends > tops[slots]) & (slots != NO_SEGMENT) & (slots != taker.shared) & (slots != taker.own)
        if not is_new.any():
            return
        slots, ends = slots[is_new], ends[is_new]
        flags[slots] &= np.uint8(0xFF & ~LANDMARKS)
        tops[slots] = ends
        needed = flags[slots] & (IS_RUNNING | IS_REMEMBERED) != 0
        self._free.extend(slots[~needed & (ends >= np.frombuffer(self.bottom, np.int32)[slots])].tolist())

    def open_landmarks(self, now: float, most: int) -> Iterator[Open]:
        """Open landmarks of the remembered segments, in parts of ``most`` of them at most: in the first table by
        arrival, in the second by end."""
        for first in range(0, len(self.flags), SLOTS_AT_ONCE):
            flags = np.frombuffer(self.flags, np.uint8)[first : first + SLOTS_AT_ONCE] & LANDMARKS
            at: Ints = np.flatnonzero(flags).astype(np.int64) + first
            yield from (self._open(at[part : part + most], now) for part in range(0, max(1, len(at)), most))

    def _open(self, at: Ints, now: float) -> Open:
        weights = WEIGHT_COLUMN[np.frombuffer(self.flags, np.uint8)[at] & LANDMARKS]
        arrived, ended = np.frombuffer(self.arrived)[at], np.frombuffer(self.ended)[at]
        queue = np.frombuffer(self.queue, np.uint16)[at].astype(np.int64)
        after = np.frombuffer(self.queue_after, np.uint16)[at].astype(np.int64)
        has_ended = after > 0
        rows: Ints = np.concatenate([queue, after[has_ended]])
        ages: Floats = np.concatenate([now - arrived, now - ended[has_ended]])
        return Open(rows, ages, np.concatenate([weights, weights[has_ended]]))


# Classes of blocks that are worth a copy on the host: a share of them is used again after the device has dropped them
# and before the host would.
#
# Lives of blocks end by a use, or by being too old for the host. How old what leaves a device, or the host, is at that
# time is followed as it changes.

PRIOR_BLOCKS = 200
"""Blocks of the mean with which each class begins."""
FOLLOWS = 0.001
DECAY = 0.95
DECAY_EVERY = 400
"""Number of requests between two decays."""


class HostUses:
    """Counts of blocks by class. ``device_seconds``, ``host_seconds``: how old what leaves them is."""

    def __init__(self) -> None:
        self.device_seconds, self.host_seconds = 30.0, 300.0
        self._outlasted: defaultdict[int, float] = defaultdict(float)
        self._used: defaultdict[int, float] = defaultdict(float)
        self._all_outlasted, self._all_used = 2.0, 1.0
        self._requests = 0

    def request(self) -> None:
        """A request has come: what was long ago counts for less."""
        self._requests += 1
        if self._requests % DECAY_EVERY == 0:
            for column in (self._outlasted, self._used):
                for row in column:
                    column[row] *= DECAY
            self._all_outlasted *= DECAY
            self._all_used *= DECAY

    def used(self, rows: tuple[int, int], age: float, blocks: int) -> None:
        """Count ``blocks`` blocks of classes ``rows`` (0: none) that were used again at ``age`` seconds."""
        if age > self.device_seconds:
            self._end(rows, blocks, blocks if age <= self.host_seconds else 0)

    def unused(self, rows: tuple[int, int], blocks: int) -> None:
        """Count ``blocks`` blocks that have become too old for the host."""
        self._end(rows, blocks, 0)

    def _end(self, rows: tuple[int, int], blocks: int, used: int) -> None:
        for row in rows:
            if row:
                self._outlasted[row] += blocks
                self._used[row] += used
        self._all_outlasted += blocks
        self._all_used += used

    def let_go(self, age: float, blocks: int, *, is_host: bool) -> None:
        """Blocks have left the host, or a device, ``age`` seconds after their last use."""
        follows = FOLLOWS if blocks == 1 else 1 - (1 - FOLLOWS) ** blocks
        if is_host:
            self.host_seconds += follows * (age - self.host_seconds)
        else:
            self.device_seconds += follows * (age - self.device_seconds)

    def is_worth(self, row: int, share: float) -> bool:
        """True where blocks of the class are used from the host at least ``share`` times as often as the mean."""
        mean = self._all_used / self._all_outlasted
        used = (self._used[row] + PRIOR_BLOCKS * mean) / (self._outlasted[row] + PRIOR_BLOCKS)
        return used >= share * mean


MARGIN = 0.4
"""Margin by which a head must be worth less than the oldest before it goes first: this share, where all uses are
younger."""
NO_RANK = (1 << 63) - 1
"""Rank of a queue without candidates."""


def worth_of(heads: Heads, rates: Rates, now: float, weighed_tokens: int) -> Floats:
    """Hits a second that each head is expected to bring; infinite where there is none. ``weighed_tokens``: tokens of a
    block, where a hit counts for more the later in a prompt it is; 0: all count the same."""
    queues = min(len(heads.ranks), rates.rows)
    bins = np.log2(np.maximum(now + 1.0 - heads.since[:queues], 1.0))
    bins += bins
    at = np.minimum(bins, BINS - 1).astype(np.int64)
    at += _ROW_STARTS[:queues] if queues <= len(_ROW_STARTS) else np.arange(queues) * BINS
    worth: Floats = rates.density.ravel()[at]
    if weighed_tokens:
        worth *= 1 + heads.depths[:queues] * (weighed_tokens / LINEAR_TOKENS)
    worth[heads.ranks[:queues] == NO_RANK] = np.inf
    return worth


_ROW_STARTS: Ints = np.arange(1024, dtype=np.int64) * BINS


def choose_stored(rates: Rates, queues: Sequence[int], ages: Sequence[float], known_seconds: float) -> int:
    """Index of the queue whose oldest block goes next from storage, by the ``ages`` of these, seconds. The oldest of
    all goes where it is older than what is known of uses, or where no other is worth much less. It only reads: any
    thread."""
    oldest = max(range(len(ages)), key=ages.__getitem__)
    if ages[oldest] > known_seconds:
        return oldest
    margin = 1 - MARGIN * float(rates.reused_before[bin_of(ages[oldest])])
    worth = [float(rates.density[queue, bin_of(age)]) for queue, age in zip(queues, ages, strict=True)]
    least = min(range(len(worth)), key=worth.__getitem__)
    return least if worth[least] <= margin * worth[oldest] and worth[least] < worth[oldest] else oldest


class Heads(Protocol):
    """The first candidate of each queue of a place: ``ranks`` (``NO_RANK``: there is none), ``since`` when its age
    counts (seconds), its ``segments``, and its position in the prompt (``depths``)."""

    ranks: Ints
    since: Floats
    segments: list[int]
    depths: Ints
