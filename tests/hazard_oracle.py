"""The eviction policy "hazard" told once more, plainly: all of a trace is known, nothing is ever forgotten, no seams.

It shares no line with ``cachesvc/policy/hazard``. A trace is a list of ``Prompt``; the running request's own blocks may
not go, as in a device pool.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

BINS = 30
EDGE = [2 ** (k / 2) - 1 for k in range(BINS)] + [1e9]
WIDTH = [min(EDGE[k + 1] - EDGE[k], 1e5) for k in range(BINS)]
GHOSTS = 8192


Row = tuple[object, ...]
"""A class: its table, its part, and what it shows."""


class Column(defaultdict[Row, list[float]]):
    """Seconds or counts by class and bin."""

    def __init__(self) -> None:
        super().__init__(lambda: [0.0] * BINS)


class Prompt(NamedTuple):
    """Arrival (seconds), the blocks' names from the root on, each standing for its whole prefix, tokens put out, and
    when it ended."""

    at: float
    blocks: tuple[int, ...]
    output_tokens: int
    ended: float


@dataclass(eq=False)
class Part:
    """Blocks ``[first, last)`` of a request, of which ``[top, bottom)`` are still its own and resident."""

    request: int
    path: tuple[int, ...]
    first: int
    last: int
    arrived: float
    ended: float
    row: Row
    row_after: Row
    top: int = 0
    bottom: int = 0
    is_forgotten: bool = False

    @property
    def weight(self) -> float:
        """Sum over the open landmarks."""
        return 0.5 * (self.top == self.first) + 0.5 if self.top < self.last else 0.0


def bin_of(age: float) -> int:
    """The bin of an age."""
    return min(int(2 * math.log2(1 + max(age, 0.0))), BINS - 1)


def below(borders: tuple[int, ...], value: float) -> int:
    """Number of borders that a value has reached."""
    return sum(value >= border for border in borders)


class Oracle:
    """One cache of ``capacity`` blocks. ``serve`` gives the hit of each prompt."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.capacity, self.block_tokens = capacity, block_tokens
        self.owner: dict[int, Part] = {}
        self.resident: set[int] = set()
        self.resident_children: defaultdict[int, int] = defaultdict(int)
        self.children: defaultdict[int, int] = defaultdict(int)
        self.last_use: dict[int, float] = {}
        self.ends: dict[int, tuple[float, int, float]] = {}
        self.hubs: dict[int, float] = {}
        self.parts: list[Part] = []
        self.live: list[Part] = []
        self.forgotten = 0
        self.requests = 0
        self.next_fit = 20
        self.events, self.within, self.censored = Column(), Column(), Column()
        self.density: dict[Row, list[float]] = {}
        self.before = [0.0] * BINS

    def serve(self, prompt: Prompt) -> int:
        """The prompt's hit; then all its blocks are resident, and leaves go until they fit."""
        path, now = prompt.blocks, prompt.at
        hit = next((at for at, block in enumerate(path) if block not in self.resident), len(path))
        shared, seen = self._features(path, now)
        self._touch(path, now)
        mine = self._open(prompt, shared, seen)
        for block, above in zip(path[hit:], (None, *path)[hit:], strict=False):
            self.resident.add(block)
            if above is not None:
                self.resident_children[above] += 1
        self._forget(now)
        if self.requests >= self.next_fit:
            self.next_fit = self.requests + min(400, max(20, self.requests // 10))
            self._fit(now)
        while len(self.resident) > self.capacity and self._evict(now):
            pass
        self.live += mine
        self.requests += 1
        return hit

    def _features(self, path: tuple[int, ...], now: float) -> tuple[int, tuple[int, int, int]]:
        known = next((at for at, block in enumerate(path) if block not in self.last_use), len(path))
        for at in range(max(known, 1), len(path)):
            self.children[path[at - 1]] += 1
        shared = next((at + 1 for at in range(len(path) - 1, -1, -1) if self.children[path[at]] >= 2), 0)
        found = None
        for block in path[max(0, known - 64) : known][::-1]:
            if self.children[block] >= 3:
                break
            found = self.ends.get(block)
            if found is not None:
                break
        gap, number, turns, smooth = 0, min(2, known), 1, 0.0
        if found is not None:
            smooth = math.log(1 + now - found[0])
            smooth = smooth if found[1] == 1 else (smooth + found[2]) / 2
            gap, number, turns = 1 + below((15, 60, 240), math.exp(smooth) - 1), 0, found[1] + 1
        elif known:
            hub = path[known - 1]
            use = math.log(1 + now - self.last_use[hub])
            self.hubs[hub] = use = (use + self.hubs[hub]) / 2 if hub in self.hubs else use
            gap = 5 + below((4, 15, 60, 240), math.exp(use) - 1)
        self.ends[path[-1]] = (now, turns, smooth)
        self.last_use.update(dict.fromkeys(path, now))
        return shared, (below((1024, 4096, 12288, 32768), (len(path) - known) * self.block_tokens), gap, number)

    def _touch(self, path: tuple[int, ...], now: float) -> None:
        at = 0
        while at < len(path) and path[at] in self.owner:
            part, first = self.owner[path[at]], at
            while at < len(path) and self.owner.get(path[at]) is part:
                at += 1
            weight = 0.5 * (first == part.first) + 0.5 * (at == part.last)
            if weight and not part.is_forgotten:
                for row, age in ((part.row, now - part.arrived), (part.row_after, max(0.0, now - part.ended))):
                    self.events[row][bin_of(age)] += weight
                    self.within[row][bin_of(age)] += weight * (age - EDGE[bin_of(age)])
            part.top = at
            if part in self.live and part.top >= part.bottom:
                self.live.remove(part)

    def _open(self, prompt: Prompt, shared: int, seen: tuple[int, int, int]) -> list[Part]:
        output = below((80, 200, 400, 800), prompt.output_tokens)
        out = []
        for first, last in ((0, shared), (shared, len(prompt.blocks))):
            if first < last:
                is_own = first == shared
                row, after = (0, is_own, seen[0], None, seen), (1, is_own, seen[0], output, seen)
                ended = prompt.ended
                part = Part(self.requests, prompt.blocks, first, last, prompt.at, ended, row, after, first, last)
                self.owner.update(dict.fromkeys(prompt.blocks[first:last], part))
                out.append(part)
        self.parts += out
        return out

    def _forget(self, now: float) -> None:
        while self.forgotten < len(self.parts) and self.parts[self.forgotten].request < self.requests - GHOSTS:
            part = self.parts[self.forgotten]
            for row, age in ((part.row, now - part.arrived), (part.row_after, now - part.ended)):
                self._expose(self.censored[row], age, part.weight)
            part.is_forgotten = True
            self.forgotten += 1

    @staticmethod
    def _expose(seconds: list[float], age: float, weight: float) -> None:
        for k in range(BINS):
            seconds[k] += weight * max(0.0, min(age, EDGE[k + 1]) - EDGE[k])

    def _fit(self, now: float) -> None:
        rows = dict.fromkeys([each for part in self.parts for each in (part.row, part.row_after)])
        exposed = {}
        for row in rows:
            later = 0.0
            exposed[row] = [a + b for a, b in zip(self.censored[row], self.within[row], strict=True)]
            for k in range(BINS - 1, -1, -1):
                exposed[row][k] += later * WIDTH[k]
                later += self.events[row][k]
        for part in self.parts[self.forgotten :]:
            if part.request < self.requests:
                self._expose(exposed[part.row], now - part.arrived, part.weight)
                self._expose(exposed[part.row_after], now - part.ended, part.weight)
        for table in (0, 1):
            self._fit_table([row for row in rows if row[0] == table], exposed)
        total, so_far = 1 + sum(sum(self.events[row]) for row in rows if row[0] == 0), 0.0
        for k in range(BINS):
            self.before[k] = so_far / total
            so_far += sum(self.events[row][k] for row in rows if row[0] == 0)
        for column in (self.events, self.within, self.censored):
            for row, values in column.items():
                column[row] = [0.95 * value for value in values]

    def _fit_table(self, rows: list[Row], exposed: dict[Row, list[float]]) -> None:
        groups: defaultdict[object, list[Row]] = defaultdict(list)
        for row in rows:
            groups[row[:4]].append(row)
        for group in groups.values():
            for row in group:
                hazards = []
                for k in range(BINS):
                    h = (sum(self.events[r][k] for r in rows) + 0.02) / (sum(exposed[r][k] for r in rows) + 60)
                    for members in (group, [row]):
                        prior = 8 / (h + 1 / WIDTH[k])
                        h = (sum(self.events[r][k] for r in members) + prior * h) / (
                            sum(exposed[r][k] for r in members) + prior
                        )
                    hazards.append(h)
                self.density[row] = [self._worth(hazards, k) for k in range(BINS)]

    @staticmethod
    def _worth(hazards: list[float], first: int) -> float:
        alive, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
        for k in range(first, BINS):
            stays = math.exp(-hazards[k] * WIDTH[k])
            hits += alive * (1 - stays)
            seconds += alive * (1 - stays) / hazards[k]
            alive *= stays
            best = max(best, hits / seconds)
        return best

    def _evict(self, now: float) -> bool:
        heads: dict[Row, Part] = {}
        for part in self.live:
            if not self.resident_children[part.path[part.bottom - 1]]:
                row = part.row_after if now >= part.ended else part.row
                heads[row] = min(heads.get(row, part), part, key=lambda each: each.request)
        if not heads:
            return False
        worth = {row: self._density(row, part, now) for row, part in heads.items()}
        oldest = min(heads, key=lambda row: (heads[row].request, -heads[row].first))
        least = min(heads, key=lambda row: (worth[row], heads[row].request))
        margin = 1 - 0.4 * self.before[bin_of(now - heads[oldest].arrived)]
        is_clear = worth[least] <= margin * worth[oldest] and not heads[oldest].is_forgotten
        part = heads[least if is_clear else oldest]
        while len(self.resident) > self.capacity and part.bottom > part.top:
            block = part.path[part.bottom - 1]
            if self.resident_children[block]:
                break
            self.resident.remove(block)
            part.bottom -= 1
            if part.bottom:
                self.resident_children[part.path[part.bottom - 1]] -= 1
        if part.bottom <= part.top:
            self.live.remove(part)
        return True

    def _density(self, row: Row, part: Part, now: float) -> float:
        age = now - (part.ended if row[0] else part.arrived)
        return self.density[row][bin_of(age)] if row in self.density else 0.0
