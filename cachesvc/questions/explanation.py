"""Explanation of a block: its copies, their holders, and its last events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from kvcache.v1 import admin_pb2, event_pb2, inspect_pb2

from cachesvc.ledger.change_log import STORAGE, Cause, Event, Kind, place_name
from cachesvc.ledger.ledger import Model
from cachesvc.ledger.sequences import Hold
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.errors import EventsForgotten, InvalidRequest, NotFound, NotOwned, SubscriberTooSlow
from cachesvc.model.words import KEY_BYTES, READY, Tier
from cachesvc.questions.query import block_line, keys_beginning
from cachesvc.questions.view import Question, View

HOLDERS_LISTED = 64
CLIMBED_MAX = 8192
"""Blocks that are walked up for one explanation, some 0.4 ms."""
PREFETCH = -1
"""Number that stands in place of a sequence's."""
PREFIX_BYTES_MIN = 2
EVENTS_MAX = 256
EVENTS_DEFAULT = 16
EXPLAINED_MAX = 16
EVENTS_A_STEP = 2048
"""Events that are compared before others may run: some 0.3 ms."""

REASONS = {
    Cause.PUBLISHED: "an engine published it",
    Cause.LOADED: "a load brought it",
    Cause.BACKED_UP: "a backup brought it",
    Cause.FETCHED: "it came from storage, and was verified",
    Cause.COPY_FAILED: "the transfer that was to bring it failed",
    Cause.EVICTED: "it was evicted for others that needed the room",
    Cause.DRAINED: "it was evicted for others that needed the room, after it had been saved on the host",
    Cause.WINDOW_EVICTED: "no window looked back to it and others needed the room",
    Cause.OPERATOR: "an operator evicted it",
    Cause.LOST: "the memory of its device was lost",
    Cause.STORED: "it was written to storage, or came from there",
    Cause.UNSTORED: "storage let go of it, or did not have it",
}

EXPECTATIONS = {
    "arrived": "all of the prompt has come",
    "silent": "it made no progress for as long as the caller was patient",
    "absent": "it has computed the prompt and lacks this part",
    "given_up": "the request that computed it there has ended",
    "restarted": "it has started again since",
    "unreachable": "it does not answer",
    "refused": "this node may not ask it: it is none of --peers and in no network of --peer-allow",
    "full": "the host here has no room",
    "incomplete": "what it lent did not come whole",
    "abandoned": "no request waits for it any more",
    "crowded": "not asked: the request's process expects as many prompts as it may have at a time",
}
"""Ends of expectations of other nodes, in words."""


def explain(view: View, model_id: int, prefix: bytes, events: int = 0) -> Question[list[admin_pb2.ExplainResponse]]:
    """Explain up to ``EXPLAINED_MAX`` blocks whose keys begin with ``prefix``, of one model or (0) of all, in parts of
    one answer. ``events``: of each block, 0: ``EVENTS_DEFAULT``, at most ``EVENTS_MAX``. Raises InvalidRequest,
    NotFound (the model)."""
    if not PREFIX_BYTES_MIN <= len(prefix) <= KEY_BYTES:
        raise InvalidRequest(f"a key has {KEY_BYTES} bytes; name at least the first {PREFIX_BYTES_MIN} bytes of it")
    models = [view.model(model_id)] if model_id else view.models()
    limit = min(events or EVENTS_DEFAULT, EVENTS_MAX)
    stories: list[admin_pb2.BlockStory] = []
    truncated = False
    forgotten = 0.0
    for model in models:
        found = yield from _events_of(model, prefix)
        for key in (yield from keys_beginning(model, prefix.hex(), EXPLAINED_MAX)):
            found.setdefault(key, [])
        if len(prefix) < KEY_BYTES:
            for key in (yield from _stored_beginning(model, prefix)):
                found.setdefault(key, [])
        if not found and len(prefix) == KEY_BYTES and len(models) == 1:
            found = {prefix: []}
        journal = model.blocks.journal
        if journal.first > 1:
            age = view.now() - journal.seconds_of(journal.first)
            forgotten = min(forgotten, age) if forgotten else age
        room = EXPLAINED_MAX - len(stories)
        truncated = truncated or len(found) > room
        stories += [explain_block(view, model, key, found[key][-limit:]) for key in list(found)[:room]]
    head = admin_pb2.ExplainResponse(truncated=truncated, forgotten_before_seconds=forgotten)
    return [head, *(admin_pb2.ExplainResponse(stories=[story]) for story in stories)]


def explain_block(view: View, model: Model, key: bytes, events: list[Event]) -> admin_pb2.BlockStory:
    """All that is known of one key; ``events`` are what its model's journal knows of it, oldest first."""
    index = model.blocks.index
    row = index.rows.get(key, NO_ROW)
    newest_first = events[::-1]
    story = admin_pb2.BlockStory(
        model_id=model.id, model=model.shown, key=key, events=[_line(view, model, event) for event in newest_first]
    )
    if row == NO_ROW or not index.has_copy(row):
        story.verdict = _why_not(model, newest_first, view.now())
    else:
        holders, story.holders_truncated = holders_of(view, model, row)
        story.block.MergeFrom(block_line(model, row) or admin_pb2.BlockStatus())
        story.holders.extend(holders)
        story.tickets.extend(
            ticket.id
            for ticket in view.running()
            if ticket.model == model.id and (row in ticket.rows or any(drain.row == row for drain in ticket.drains))
        )
        story.accesses_since = view.last_access - index.stamp[row]
        story.verdict = _pinned_words(view, model, row) or _why_here(model, row, story)
        story.verdict += _shorter_hits(model, row) + _worth(model, row)
    story.verdict += _storage_words(view, model, key) + _expected_words(model, key)
    return story


def holders_of(view: View, model: Model, row: int) -> tuple[list[inspect_pb2.BlockHolder], bool]:
    """Sequences and prefetches that keep ``row`` where it is, by themselves or through a block below it; and whether
    there are more.

    A key stands for its whole prefix, so a sequence goes through a block when it has the same key at that depth. A
    prefetch keeps no keys: the way up from its deepest block is walked, ``CLIMBED_MAX`` blocks in all.
    """
    index = model.blocks.index
    depth, key = index.depth[row], index.keys[row]
    found: list[inspect_pb2.BlockHolder] = []
    left = CLIMBED_MAX
    for lease in view.leases():
        if lease.model != model.id:
            continue
        holder = partial(_holder, view.lease_id(lease), lease.engine)
        for sequence in lease.sequences.values():
            if sequence.known_keys > depth and sequence.key(depth) == key:
                found += [holder(sequence.id, place, below) for place, _, below in _ends(model, sequence, depth)]
            if len(found) > HOLDERS_LISTED:
                return found[:HOLDERS_LISTED], True
        for prefetch in lease.prefetches:
            for place, anchor, below in _ends(model, prefetch, depth):
                left -= below
                if left < 0 or len(found) >= HOLDERS_LISTED:
                    return found[:HOLDERS_LISTED], True
                above = anchor
                for _ in range(below):
                    above = index.parent[above]
                if above == row:
                    found.append(holder(PREFETCH, place, below))
    return found, False


def _holder(lease_id: str, engine: str, sequence: int, place: int, blocks_below: int) -> inspect_pb2.BlockHolder:
    """A sequence, or a prefetch (``PREFETCH``), that keeps a block on a place, and how much deeper it reaches."""
    return inspect_pb2.BlockHolder(
        lease_id=lease_id,
        engine=engine,
        sequence_id=sequence,
        tier=(Tier.DEVICE if place else Tier.HOST).value,
        replica=max(0, place - 1),
        blocks_below=blocks_below,
    )


def _ends(model: Model, hold: Hold, depth: int) -> Iterator[tuple[int, int, int]]:
    """Place, row, and blocks below ``depth`` of each end that a hold has pinned at that depth or deeper."""
    for place, anchor in ((hold.place.number, hold.anchor), (model.blocks.host.number, hold.host_anchor)):
        if anchor != NO_ROW and (below := model.blocks.index.depth[anchor] - depth) >= 0:
            yield place, anchor, below


def _events_of(model: Model, prefix: bytes) -> Question[dict[bytes, list[Event]]]:
    """Events in the journal of the keys that begin with ``prefix``, oldest first."""
    journal = model.blocks.journal
    found: dict[bytes, list[Event]] = {}
    for start in range(journal.first, journal.last + 1, EVENTS_A_STEP):
        for event in journal.about(prefix, range(start, start + EVENTS_A_STEP)):
            found.setdefault(event.key, []).append(event)
        yield None
    return found


def _stored_beginning(model: Model, prefix: bytes) -> Question[list[bytes]]:
    """Keys that storage is known to have and that begin with ``prefix``; the search ends once it has enough."""
    found: list[bytes] = []
    known = list(model.stored.written)
    for start in range(0, len(known), EVENTS_A_STEP):
        found += [key for key in known[start : start + EVENTS_A_STEP] if key.startswith(prefix)]
        if len(found) > EXPLAINED_MAX:
            break
        yield None
    return found


def _line(view: View, model: Model, event: Event) -> inspect_pb2.BlockEvent:
    return inspect_pb2.BlockEvent(
        sequence_number=event.number,
        age_seconds=view.now() - event.seconds,
        kind=event.kind.name.lower(),
        present=event.present,
        place=place_name(event.place),
        group=model.layout.groups[event.group].name,
        reason=event.cause.name.lower(),
    )


def _pinned_words(view: View, model: Model, row: int) -> str:
    """Words on the operator's pin that keeps a block longest; empty where there is none."""
    keeping = [pin for pin in model.pins.by_key.values() if model.blocks.index.is_above(row, pin.row)]
    if not keeping:
        return ""
    last = max(keeping, key=lambda pin: pin.until)
    left, places = last.until - view.now(), ", ".join(last.places)
    return f"it stays: an operator has pinned the prefix to {last.key.hex()[:16]} for {left:.0f} s more, on {places}"


def _why_here(model: Model, row: int, story: admin_pb2.BlockStory) -> str:
    index = model.blocks.index
    if story.holders:
        own = sum(not holder.blocks_below for holder in story.holders)
        through = len(story.holders) - own
        return f"it stays: {own} pins on it, {through} on blocks below it; only a release or a lost lease ends them"
    if story.tickets:
        return f"it stays while ticket {story.tickets[0]} moves it"
    if index.children[row]:
        return f"it stays before its {index.children[row]} children go: blocks leave leaf first"
    return "nothing keeps it: it goes when others need the room and its turn has come"


def _shorter_hits(model: Model, row: int) -> str:
    """Words on places that have the block, and where no hit ends at it because a windowed group lacks what it needs."""
    blocks, out = model.blocks, ""
    if not model.layout.window_groups:
        return out
    keys = b"".join(map(blocks.index.key_of, blocks.index.path(row)))
    for place in blocks.index.places:
        if place is blocks.host or not place.is_hittable(row):
            continue
        _, _, less, _, lost = blocks.find(keys, place)
        if lost:
            groups = ", ".join(model.layout.groups[group].name for group, _ in lost)
            tokens = (blocks.index.depth[row] + 1 - less) * model.layout.block_tokens
            out += f"; on {place.name} a hit ends {tokens} tokens above its end, for want of what group {groups} needs"
    return out


def _worth(model: Model, row: int) -> str:
    """Worth of the block to a policy that learns, as an addition to the reason why it is here."""
    blocks = model.blocks
    if blocks.chooser is None:
        return ""
    worth = blocks.chooser.worth(blocks.index.segments[row], blocks.clock.seconds)
    if worth is None:
        return "; its last use came before eviction learned: it goes by how long ago that was"
    hits = f"{worth.density * 3600:.2f} hits an hour" if worth.density else "nothing yet"
    return f"; its class ({worth.words}) is worth {hits} at its age, {worth.age:.0f} s: what is worth least goes first"


def _storage_words(view: View, model: Model, key: bytes) -> str:
    """Words on storage's copy of the block, as an addition to the reason why it is here or not."""
    seconds = model.stored.written.get(key)
    if seconds is not None:
        return f"; storage has it: written, or seen there, {view.now() - seconds:.1f} s ago"
    return "; storage has it, from before" if view.is_stored(model, key) else ""


def _expected_words(model: Model, key: bytes) -> str:
    """Words on what other nodes were to send of it lately."""
    words = ""
    for known in model.stored.expectations.values():
        if known.path.find(key) % KEY_BYTES == 0:
            what = EXPECTATIONS.get(known.end, known.end) if known.end else "it is on its way"
            words += f"; expected from the node {known.peer}: {what}"
    return words


def _why_not(model: Model, newest_first: list[Event], now: float) -> str:
    journal = model.blocks.journal
    for event in newest_first:
        if not event.present and event.place != STORAGE:
            return f"it is not here: {now - event.seconds:.1f} s ago {REASONS[event.cause]}"
    if journal.first > 1:
        return f"it is not here, and none of the last {journal.keep} changes of its model was about it"
    return "it is not here and never was, since the daemon started or its model was registered"


# Follow one model's blocks: a snapshot that is exact although the ledger goes on changing, then every change.
#
# The snapshot goes through the rows piece by piece. Before each piece it sends the changes since the last one, though
# only those of rows that were passed already: rows ahead are read later, in their state at that time. So at every
# answer the follower has exactly the truth of that moment for the rows passed, and at the last piece for all of them.

ROWS_AT_ONCE = 1024
CHANGES_AT_ONCE = 1024
"""Most changes of one answer: a millisecond or two of the ledger thread."""


def find_model(view: View, model_id: int, namespace: bytes) -> Model:
    """The model that a follower names. Raises NotOwned where it does not prove that it may, NotFound, InvalidRequest.

    To know the namespace is to know the model, its layout and the tenant's salt, so only a caller that may see all
    models anyway can do without. Models outside of the view are not there, whatever else is wrong.
    """
    if not namespace:
        if not view.sight.is_of_all:
            raise NotOwned("name the namespace that Register answered; a model's number alone opens nothing")
        return view.model(model_id)
    if len(namespace) != KEY_BYTES:
        raise InvalidRequest(f"a namespace has {KEY_BYTES} bytes, got {len(namespace)}")
    for model in view.models():
        if model.namespace == namespace:
            if model_id not in (0, model.id):
                raise InvalidRequest(f"the namespace is not that of model {model_id}; name the one that belongs to it")
            return model
    raise NotFound("namespace", namespace.hex(), "register the model first")


class Feed:
    """One follower's cursor. Nothing is kept for it but that: the journal is the queue."""

    def __init__(
        self,
        model: Model,
        *,
        snapshot: bool,
        after: int | None = None,
        storage: bool = False,
        rows_at_once: int = ROWS_AT_ONCE,
        changes_at_once: int = CHANGES_AT_ONCE,
    ) -> None:
        """Begin with a snapshot, behind change ``after``, or now. ``storage``: tell of what changes there too. Raises
        EventsForgotten, InvalidRequest."""
        journal = model.blocks.journal
        if after is not None and after > journal.last:
            raise InvalidRequest(f"change {after} has not happened yet, the last one is {journal.last}")
        if after is not None and after + 1 < journal.first:
            raise EventsForgotten(after + 1, journal.first)
        self.model = model
        self._journal = journal
        self._storage = storage
        self._rows_at_once = rows_at_once
        self._changes_at_once = changes_at_once
        self._next = journal.last + 1 if after is None else after + 1
        self._row = 0 if snapshot else NO_ROW
        self._part = event_pb2.SNAPSHOT_PART_FIRST if snapshot else event_pb2.SNAPSHOT_PART_UNSPECIFIED
        self._has_begun = snapshot

    @property
    def behind(self) -> int:
        """Changes that the follower has not been given."""
        return self._journal.last + 1 - self._next

    @property
    def is_in_snapshot(self) -> bool:
        """True until the last piece of a snapshot was given."""
        return self._row != NO_ROW

    @property
    def is_overrun(self) -> bool:
        """True once the next change that it needs is no longer known."""
        return self._next < self._journal.first

    def next(self) -> event_pb2.SubscribeResponse | None:
        """The next answer, without the epoch; None while there is nothing to report. Raises SubscriberTooSlow."""
        if self.is_overrun:
            raise SubscriberTooSlow(self.behind, self._journal.keep)
        if self._row != NO_ROW:
            return self._piece()
        if not self._has_begun:  # so that a follower knows where it stands before anything happens
            self._has_begun = True
            return self._answer(self._next, [])
        if not self.behind:
            return None
        first = self._next
        return self._answer(first, runs_of(self._take()))

    def _answer(
        self,
        first: int,
        runs: list[event_pb2.BlockRun],
        part: event_pb2.SnapshotPart.ValueType = event_pb2.SNAPSHOT_PART_UNSPECIFIED,
    ) -> event_pb2.SubscribeResponse:
        return event_pb2.SubscribeResponse(
            model_id=self.model.id,
            first_sequence_number=first,
            sequence_number=self._next - 1,
            snapshot_part=part,
            runs=runs,
        )

    def _take(self) -> list[Event]:
        events = self._journal.read(self._next, self._changes_at_once)
        self._next += len(events)
        return events if self._storage else [event for event in events if event.place != STORAGE]

    def _piece(self) -> event_pb2.SubscribeResponse:
        passed = self._row
        runs = runs_of(event for event in self._take() if event.row < passed)
        part, self._part = self._part, event_pb2.SNAPSHOT_PART_MORE
        if not self.behind:
            rows = len(self.model.blocks.index.keys)
            if passed < rows:
                self._row = min(rows, passed + self._rows_at_once)
                runs += self._read(passed, self._row)
            elif part != event_pb2.SNAPSHOT_PART_FIRST:
                self._row = NO_ROW
                part = event_pb2.SNAPSHOT_PART_LAST
        return self._answer(0, runs, part)

    def _read(self, start: int, stop: int) -> list[event_pb2.BlockRun]:
        """Runs of blocks in rows ``start`` to ``stop`` now, as far as the journal has reported them."""
        index = self.model.blocks.index
        runs: list[event_pb2.BlockRun] = []
        for place in index.told:
            for group, states in enumerate(place.states):
                found: list[tuple[bytes, bytearray]] = []  # the parent of a run's first key, and its keys
                above = -2  # no row's parent
                for row in range(start, stop):
                    if states[row] < READY:
                        continue
                    key, parent = index.keys[row] or b"", index.parent[row]
                    if parent != above or parent == NO_ROW:
                        root = b"" if parent == NO_ROW else index.keys[parent] or b""
                        found.append((root, bytearray()))
                    found[-1][1].extend(key)
                    above = row
                runs += [_run(Kind.STORED, None, True, place.number, group, parent, keys) for parent, keys in found]
        return runs + self._read_stored(start, stop) if self._storage else runs

    def _read_stored(self, start: int, stop: int) -> list[event_pb2.BlockRun]:
        """Blocks of rows ``start`` to ``stop`` that are known to be in storage. What lies there alone has no row."""
        index, written = self.model.blocks.index, self.model.stored.written
        runs: list[event_pb2.BlockRun] = []
        for row in range(start, stop):
            key = index.keys[row]
            if key is not None and key in written:
                above = index.parent[row]
                parent = b"" if above == NO_ROW else index.keys[above] or b""
                runs += [
                    _run(Kind.TIER_CHANGED, None, True, STORAGE, group, parent, key)
                    for group in self.model.layout.full_groups
                ]
        return runs


def runs_of(events: Iterable[Event]) -> list[event_pb2.BlockRun]:
    """Events as runs. Only changes of different groups may change places with one another."""
    # Keys grow in bytearrays, not in messages, which would copy them with each.
    out: list[tuple[Event, bytearray]] = []
    open_runs: dict[int, tuple[bytearray, bytes]] = {}
    alike: tuple[Kind, Cause, bool, int] | None = None
    for event in events:
        now = (event.kind, event.cause, event.present, event.place)
        if now != alike:
            alike = now
            open_runs.clear()
        keys, last = open_runs.get(event.group, (None, b""))
        if keys is None or (event.present and event.parent != last):
            keys = bytearray()
            out.append((event, keys))
        keys.extend(event.key)
        open_runs[event.group] = (keys, event.key)
    return [_run(e.kind, e.cause, e.present, e.place, e.group, e.parent, keys) for e, keys in out]


def _run(
    kind: Kind, cause: Cause | None, present: bool, place: int, group: int, parent: bytes, keys: bytes | bytearray
) -> event_pb2.BlockRun:
    tier = Tier.STORAGE if place == STORAGE else Tier.DEVICE if place else Tier.HOST
    return event_pb2.BlockRun(
        kind=event_pb2.EventKind.ValueType(kind),
        present=present,
        keys=bytes(keys),
        parent_key=parent,
        group=group,
        tier=tier.value,
        replica=place - 1 if tier is Tier.DEVICE else 0,
        reason="" if cause is None else cause.name.lower(),
    )
