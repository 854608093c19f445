"""State and counters of a batching engine's requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cachesvc_client import BlockHasher
from cachesvc_client import Sequence as CacheSequence

from examples.tiny_transformer.config import F32
from examples.tiny_transformer.generate import Drafts, pick_tokens
from examples.tiny_transformer.model import Work
from examples.tiny_transformer.tokens import Tokens


class Phase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    MATCHED = "matched"  # pins its hit, has no pages of its own yet
    RUNNING = "running"
    SWAPPED = "swapped"
    ENDED = "ended"


LEGAL_MOVES = {
    (Phase.WAITING, Phase.MATCHED),
    (Phase.MATCHED, Phase.WAITING),
    (Phase.MATCHED, Phase.RUNNING),
    (Phase.RUNNING, Phase.SWAPPED),
    (Phase.SWAPPED, Phase.RUNNING),
    (Phase.SWAPPED, Phase.WAITING),  # the host had no room for it
    (Phase.RUNNING, Phase.ENDED),
}


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """``stock_blocks`` are kept at hand for growth; an iteration computes at most ``token_budget`` tokens.

    Without ``recycles`` the pages behind a window stay until their request ends.
    """

    requests: int = 8
    token_budget: int = 64
    chunk_tokens: int = 32
    stock_blocks: int = 2
    recycles: bool = True


@dataclass(slots=True)
class BatchCounters:
    """Event counters of a batch."""

    steps: int = 0
    sent_ahead: int = 0  # of them, answered while the iteration computed
    mixed_iterations: int = 0  # with prefills and decodes in one call
    swapped_out: int = 0
    swapped_in: int = 0
    recomputed: int = 0  # preempted without a swap, because the host was full
    grown_blocks: int = 0  # from stock
    published_blocks: int = 0
    recycled_cells: int = 0  # of window groups
    hit_tokens: int = 0


@dataclass(eq=False)
class Request:
    """A prompt on its way. ``computed``: how many of ``tokens`` have their rows in the pages, verified."""

    age: int
    prompt: Tokens
    new_tokens: int
    hasher: BlockHasher
    tokens: list[int] = field(init=False)
    computed: int = 0
    phase: Phase = Phase.WAITING
    sequence: CacheSequence | None = None
    drafts: Drafts = field(default_factory=Drafts)

    def __post_init__(self) -> None:
        self.tokens = self.prompt.tolist()
        self.hasher.extend(self.prompt)

    def move(self, target: Phase) -> None:
        """Go on to another phase."""
        assert (self.phase, target) in LEGAL_MOVES, f"{self.phase} to {target}"
        self.phase = target

    def restart(self) -> None:
        """Its pages are gone: wait to be matched again, with all tokens that are known."""
        self.move(Phase.WAITING)
        self.sequence = None
        self.computed = 0

    @property
    def answer(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def tokens_left(self) -> int:
        """Number of tokens still to generate."""
        return self.new_tokens - len(self.answer)

    @property
    def tokens_ahead(self) -> int:
        """Known tokens whose rows are not in the pages: 1 in decoding, more in a prefill."""
        return len(self.tokens) - self.computed

    @property
    def chunk_ahead(self) -> int:
        """Largest share of ``tokens_ahead`` for one call. Tokens that were decoded before end in a call of one token,
        as then, so that the same drafts are made of them."""
        return self.tokens_ahead - 1 if self.answer and self.tokens_ahead > 1 else self.tokens_ahead

    @property
    def open_sequence(self) -> CacheSequence:
        """The request's sequence in the cache."""
        assert self.sequence is not None
        return self.sequence

    @property
    def is_active(self) -> bool:
        """True while it has pages on the device, or pins them."""
        return self.phase in (Phase.MATCHED, Phase.RUNNING)

    def take(self, work: Work, logits: F32, count: int) -> None:
        """A work of ``count`` tokens, and perhaps a draft, was computed: count what is verified, keep what follows."""
        self.computed += count
        if self.tokens_ahead:
            return
        picked = pick_tokens(work, logits, self.drafts)
        self.computed += len(picked) - 1
        self.tokens += picked
        self.hasher.extend(picked)
