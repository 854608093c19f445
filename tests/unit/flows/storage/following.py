"""A decoder's daemon that follows a prefill of another node, which the test plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cachesvc.flows import expected as flow
from cachesvc.flows.core import Promise
from cachesvc.flows.leases import process_arrived
from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match
from cachesvc.flows.recycle import release
from cachesvc.ledger.ledger import Model
from cachesvc.model.answers import Expected, Matched, Wait
from cachesvc.model.numbers import Party
from cachesvc.model.words import KEY_BYTES
from tests.unit.rigs.ledger_rig import TOKEN, chain
from tests.unit.rigs.storage_flows_rig import StorageRig, storing

PEER = "10.0.0.1:7100"
PROMPT = "abcdefgh"
PROMPT_KEYS = chain(*PROMPT)


class RecordingLenders:
    """Keeps questions, which the test answers. ``refuses``: why a peer is not asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.told: list[Callable[[Promise], None]] = []
        self.refuses = ""
        self.here: set[str] = set()
        self.dropped: list[bytes] = []

    def drop(self, model: Model, keys: Sequence[bytes]) -> None:
        self.dropped += keys

    def is_here(self, peer: str) -> bool:
        return peer in self.here

    def ask(
        self, model: Model, party: Party, keys: bytes, peer: str, seconds: float, told: Callable[[Promise], None]
    ) -> str:
        if not self.refuses:
            self.asked.append((len(keys) // KEY_BYTES, seconds))
            self.told.append(told)
        return self.refuses


class Following:
    """A decoder's daemon whose peer is the test."""

    def __init__(self, host: int = 16, replicas: int = 1) -> None:
        self.at: StorageRig = storing(host=host, replicas=replicas)
        self.at.storage.knows = False
        self.rig, self.storage = self.at.rig, self.at.storage
        self.lenders = RecordingLenders()
        self.rig.core.lenders = self.lenders
        self.number = 0
        self.lease = self.at.lease

    def be_other_process(self, number: int = 0) -> None:
        """The Matches that follow are another process's."""
        name = f"other{number}"
        process_arrived(self.rig.core, TOKEN + name.encode(), 2 + number, 1)
        self.lease = self.rig.lease(name)

    def look(
        self,
        *,
        is_computed: bool = False,
        patience: float = 5.0,
        peer: str = PEER,
        blocks: int = 0,
        keys: bytes = PROMPT_KEYS,
        is_over: bool = False,
    ) -> tuple[int, int]:
        """Blocks that are here, and that are coming, by a Match that does not wait."""
        expected = Expected(peer, blocks, patience, is_computed, waits=False, is_over=is_over)
        answer = self.ask(expected, keys)()
        while isinstance(answer, Wait) and not answer.tickets:
            answer = self.ask(expected, keys)()
        if isinstance(answer, Wait):  # of the usual fetch, once nothing is expected any more
            return -1, 0
        self.rig.run(release, self.lease, self.number)
        return answer.device_blocks + answer.host_blocks, answer.coming_blocks

    def ask(self, expected: Expected, keys: bytes = PROMPT_KEYS) -> Callable[[], Matched | Wait]:
        """One Match call, to be run again and again."""
        self.number += 1
        self.rig.core.ledger.moment.seconds = self.rig.now
        sharing = Sharing(expected=expected)
        return partial(self.rig.once, partial(match, sharing=sharing), self.lease, self.number, keys, 0)

    def promise(self, lent: int = 0, computing: int = 0, epoch: int = 1, problem: str = "") -> None:
        """The peer answers the last question."""
        self.rig.core.ledger.moment.seconds = self.rig.now
        self.lenders.told[-1](Promise(lent, computing, epoch, problem))
        self.at.settle()

    def give_up(self) -> None:
        """The peer answers the last question: its request has ended without these blocks."""
        self.lenders.told[-1](Promise(epoch=1, is_given_up=True))
        self.at.settle()

    def pass_time(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.core.ledger.moment.seconds = self.rig.now
        flow.tick_expected(self.rig.core)
        self.at.settle()

    def ended(self, how: str) -> int:
        return self.rig.core.counters.get(f"expectations_ended_{how}", 0)
