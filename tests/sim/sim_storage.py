"""A storage engine in memory that acts only on command, and lies when its seed says so.

No thread and no clock of its own. It must pass the contract suite of the real engines (tests/contracts/test_storage.py)
without injected faults.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cachesvc.model.words import KEY_BYTES
from cachesvc.storage.objects import is_newer
from cachesvc.storage.seam import (
    Caps,
    Check,
    Checked,
    Chooser,
    Each,
    Found,
    Gone,
    Item,
    Kept,
    ObjectName,
    Outcome,
    Part,
    Scope,
    Step,
    StoreStatus,
    Totals,
    Use,
    key_at,
    no_step,
)

FAULTS = ("lose", "tear", "swap", "flip", "short", "vanish", "fail", "invent", "twice")
"""lose: a put is OK, and nothing is kept. tear: of a put some bytes are kept, and it never ends well. swap: a get
brings another object whole. flip: a bit is another one. short: the payload's end is not written. vanish: what was there
is gone. fail: an error. invent: exists says yes. twice: an item is answered twice."""


@dataclass
class Pending:
    """Something that has been asked and not done. ``run`` moves the bytes and answers."""

    way: str
    name: ObjectName
    run: Callable[[], None]
    deadline: float
    busy: Callable[[], None]


@dataclass
class SimStorage:
    """``odds``: how likely each fault is. ``waiting``: what ``step`` has to do. ``frozen``: it does nothing."""

    seed: int = 0
    odds: Mapping[str, float] = field(default_factory=dict)
    caps: Caps = field(default_factory=lambda: Caps(is_shared=True, survives="node"))
    knows: bool = True
    kind: str = "sim"

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.objects: dict[ObjectName, bytes] = {}
        self.labels: dict[Scope, str] = {}
        self.uses: list[tuple[Scope, Use]] = []
        self.waiting: list[Pending] = []
        self.faults: Counter[str] = Counter()
        self.chunks: list[memoryview] = []
        self.gone: Gone | None = None
        self.frozen = False
        self.away = ""
        self.losses = 0
        self.is_open = False

    def start(self) -> None:
        self.is_open = True

    def register(self, chunk: memoryview) -> None:
        self.chunks.append(chunk)

    def describe(self, scope: Scope, label: str) -> None:
        self.labels[scope] = label

    def watch(self, gone: Gone) -> None:
        self.gone = gone

    def used(self, scope: Scope, uses: Sequence[Use], chooser: Chooser | None) -> None:
        self.uses += [(scope, use) for use in uses]

    def expects(self, scope: Scope, keys: bytes, parts: Sequence[Part]) -> int | None:
        if not self.knows:
            return None
        count = len(keys) // KEY_BYTES
        for at in range(count):
            if any(ObjectName(scope, key_at(keys, at), part) not in self.objects for part in parts):
                return at if not self._draws("invent") else count
        return count

    def exists(self, names: Sequence[ObjectName], deadline: float, found: Found) -> None:
        asked = list(names)

        def run() -> None:
            found([name in self.objects or self._draws("invent") for name in asked])

        self._later("exists", asked[0], run, deadline, lambda: found([False] * len(asked)))

    def get(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        for index, item in enumerate(items):
            self._later(
                "get",
                item.name,
                lambda index=index, item=item: self._read(index, item, each),  # type: ignore[misc]
                deadline,
                lambda index=index: each(index, Outcome.BUSY),  # type: ignore[misc]
            )

    def put(self, items: Sequence[Item], deadline: float, each: Each) -> None:
        for index, item in enumerate(items):
            self._later(
                "put",
                item.name,
                lambda index=index, item=item: self._write(index, item, each),  # type: ignore[misc]
                deadline,
                lambda index=index: each(index, Outcome.BUSY),  # type: ignore[misc]
            )

    def remove(self, names: Sequence[ObjectName]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def doubt(self, names: Sequence[ObjectName], check: Check) -> None:
        self.remove([name for name in names if not is_newer(self.objects.get(name, b""))])

    def purge(self, scope: Scope | None, step: Step = no_step) -> int:
        gone = [name for name in self.objects if scope is None or name.scope == scope]
        self.remove(gone)
        return len(gone)

    def status(self) -> StoreStatus:
        out = StoreStatus(len(self.objects), sum(map(len, self.objects.values())))
        for name, content in self.objects.items():
            kept = out.scopes.setdefault(name.scope, Kept(self.labels.get(name.scope, "")))
            kept.objects += 1
            kept.size_bytes += len(content)
        return out

    def totals(self) -> Totals:
        size_bytes = sum(map(len, self.objects.values()))
        return Totals(len(self.objects), size_bytes, 0, 0, self.away, not self.away, self.losses)

    def check_all(self, check: Check, step: Step = no_step) -> Checked:
        found = Checked(len(self.objects), sum(map(len, self.objects.values())))
        for name, content in list(self.objects.items()):
            verdict = check(name, memoryview(content))
            if verdict is not Outcome.OK:
                found.wrong += verdict is Outcome.WRONG
                found.missing += verdict is Outcome.MISS
                self.doubt([name], check)
        return found

    def close(self) -> None:
        """Answer BUSY for what has not begun, unless it hangs."""
        self.is_open = False
        if not self.frozen:
            waiting, self.waiting = self.waiting, []
            for each in waiting:
                each.busy()

    # -- for the simulator -------------------------------------------------------------------------------------

    def step(self, now: float = 0.0) -> bool:
        """Do one thing that waits, any of them; False where there is none, or all hang."""
        if self.frozen or not self.waiting:
            return False
        each = self.waiting.pop(self._rng.randrange(len(self.waiting)))
        if each.deadline <= now:
            each.busy()
        else:
            each.run()
        return True

    def crank(self, now: float = 0.0) -> None:
        """Do all that waits."""
        while self.step(now):
            pass

    def lose(self, why: str) -> None:
        """Be away, with all that it had."""
        self.objects.clear()
        self.away = why
        self.losses += 1

    def evict(self, names: Sequence[ObjectName]) -> None:
        """Let go of objects, and say so."""
        self.remove(names)
        if self.gone is not None:
            self.gone(names)

    def land_late(self) -> None:
        """Move the bytes of calls begun long ago, deadlines or not: a stopped process goes on."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.run()

    def _later(
        self, way: str, name: ObjectName, run: Callable[[], None], deadline: float, busy: Callable[[], None]
    ) -> None:
        if self.is_open:
            self.waiting.append(Pending(way, name, run, deadline, busy))
        else:
            busy()

    def _draws(self, fault: str) -> bool:
        odds = self.odds.get(fault, 0.0)
        if not odds or self._rng.random() >= odds:
            return False
        self.faults[fault] += 1
        return True

    def _answer(self, each: Each, index: int, outcome: Outcome) -> None:
        each(index, outcome)
        if self._draws("twice"):
            each(index, Outcome.OK)

    def _read(self, index: int, item: Item, each: Each) -> None:
        content = self.objects.get(item.name)
        if self.away or self._draws("fail"):
            self._answer(each, index, Outcome.FAILED)
            return
        if content is not None and self._draws("vanish"):
            self.evict([item.name])
            content = None
        if self._draws("swap") and self.objects:
            content = self.objects[self._rng.choice(list(self.objects))]
        if content is None:
            self._answer(each, index, Outcome.MISS)
            return
        if self._draws("flip"):
            at = self._rng.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ 1 << self._rng.randrange(8)]) + content[at + 1 :]
        if self._draws("short"):
            content = content[: self._rng.randrange(len(content))]
        at = 0
        for piece in (item.head, *item.pages):
            part = content[at : at + len(piece)]
            piece[: len(part)] = part
            at += len(piece)
        self._answer(each, index, Outcome.OK)

    def _write(self, index: int, item: Item, each: Each) -> None:
        content = b"".join((item.head, *item.pages))
        if self.away or self._draws("fail"):
            self._answer(each, index, Outcome.FAILED)
            return
        if self._draws("tear"):
            cut = self._rng.randrange(len(content))
            before = self.objects.get(item.name, bytes(len(content)))
            self.objects[item.name] = content[:cut] + before[cut:]
            self._answer(each, index, Outcome.FAILED)
            return
        if not self._draws("lose"):
            self.objects.setdefault(item.name, content)
        self._answer(each, index, Outcome.OK)
