"""Storage presence hints: sent to subscribers that asked for them, remembered, and part of an explanation."""

from __future__ import annotations

from cachesvc.flows import pinning
from cachesvc.flows.core import tidy
from cachesvc.flows.leases import close_lease
from cachesvc.flows.pending_writes import want
from cachesvc.flows.presence import FORGOTTEN_A_TURN, forget, forget_all
from cachesvc.flows.registration import evict_model
from cachesvc.ledger.change_log import Cause, Kind
from cachesvc.model.words import KEY_BYTES, WritePolicy
from cachesvc.questions.explanation import Feed, explain
from cachesvc.questions.view import EVERYTHING, View, answer_at_once
from tests.unit.rigs.ledger_rig import one_group, rig_of, serve
from tests.unit.rigs.storage_flows_rig import GONE, LENT, WHOLE, StorageRig, keys_of, packed, storing, waits

THROUGH = WritePolicy.WRITE_THROUGH


def written(prompt: str) -> StorageRig:
    """A prompt that was served, and written to storage."""
    at = storing(policy=THROUGH)
    serve(at.rig, at.lease, 1, prompt)
    at.rig.settle()
    at.settle()
    for key in packed(prompt):
        at.tell_kept(key, WHOLE)
    return at


def feed_of(at: StorageRig, *, storage: bool = True) -> Feed:
    feed = Feed(at.rig.model, snapshot=False, storage=storage)
    assert feed.next() is not None
    return feed


def told(feed: Feed, tier: str = "storage") -> list[tuple[bool, str, list[bytes]]]:
    """Events of storage: presence, reason, blocks."""
    changes = feed.next()
    out: list[tuple[bool, str, list[bytes]]] = []
    for run in [] if changes is None else changes.runs:
        if run.tier == tier:
            keys = [run.keys[at : at + KEY_BYTES] for at in range(0, len(run.keys), KEY_BYTES)]
            if out and out[-1][:2] == (run.present, run.reason):
                out[-1][2].extend(keys)
            else:
                out.append((run.present, run.reason, keys))
    return out


def why(at: StorageRig, prefix: bytes) -> list[str]:
    view = View(at.rig.core, EVERYTHING, lambda: at.rig.now)
    return [story.verdict for part in answer_at_once(explain(view, 1, prefix)) for story in part.stories]


def test_a_block_that_was_written_is_told_to_who_asked_for_it() -> None:
    at = storing(policy=THROUGH)
    feed, other = feed_of(at), feed_of(at, storage=False)
    serve(at.rig, at.lease, 1, "ab")
    at.rig.settle()
    at.settle()
    assert told(feed) == [], "it is on its way"
    at.tell_kept(packed("ab")[0], WHOLE)
    at.tell_kept(packed("ab")[1], GONE)
    assert told(feed) == [(True, "stored", packed("ab")[:1])]
    assert told(other) == []
    assert other.behind == 0, "its numbers go on all the same"
    [event] = at.rig.model.blocks.journal.read(at.rig.model.blocks.journal.last, 1)
    assert (event.kind, event.cause, event.group) == (Kind.TIER_CHANGED, Cause.STORED, 0)


def test_what_came_from_storage_is_there_and_what_was_lent_need_not_be() -> None:
    at = storing("abc")
    at.storage.keeps_all = False
    feed = feed_of(at)
    waits(at.ask("abc", 1)())
    at.tell([0, 1], WHOLE)
    at.tell([2], LENT)
    assert told(feed) == [(True, "stored", packed("abc")[:2])]


def test_what_goes_from_storage_is_told_once_and_may_be_written_again() -> None:
    at = written("abc")
    feed = feed_of(at)
    forget(at.rig.core, 1, [*packed("xy"), *packed("abc")[1:], packed("abc")[2]])
    at.settle()
    assert told(feed) == [(False, "unstored", packed("abc")[1:])]
    at.storage.keeps.clear()
    model = at.rig.model
    want(at.rig.core, model, [model.blocks.index.rows[packed("abc")[2]]])
    at.settle()
    assert keys_of(at.storage.keeps) == packed("abc")[1:]


def test_what_is_asked_for_and_is_not_there_is_told_too() -> None:
    at = written("ab")
    at.storage.there = set(packed("ab"))
    close_lease(at.rig.core, at.lease, quiesced=True)
    for tier in ("device", "host"):
        pinning.evict(at.rig.core, 1, tier, 0)
    assert not at.rig.host_keys()
    again = StorageRig(at.rig, at.storage, at.rig.lease("b", 0))
    feed = feed_of(at)
    waits(again.ask("ab", 1)())
    again.tell([0], WHOLE)
    again.tell([1], GONE)
    assert told(feed) == [(False, "unstored", packed("ab")[1:])], "the other one was known to be there"


def test_many_go_a_turn_at_a_time() -> None:
    at = storing(policy=THROUGH)
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(2 * FORGOTTEN_A_TURN)]
    for key in keys:
        at.rig.model.stored.wrote(key, 0.0)
    forget(at.rig.core, 1, keys)
    assert len(at.rig.model.stored.written) == FORGOTTEN_A_TURN
    at.settle()
    assert not at.rig.model.stored.written
    forget(at.rig.core, 99, keys)


def test_all_that_storage_had_of_a_model_goes_a_turn_at_a_time_beside_what_is_written_and_lost() -> None:
    at = storing(policy=THROUGH)
    stored = at.rig.model.stored
    keys = [number.to_bytes(KEY_BYTES, "big") for number in range(2 * FORGOTTEN_A_TURN)]
    for key in keys:
        stored.wrote(key, 0.0)
    forget_all(at.rig.core, at.rig.model)
    assert list(stored.written) == keys[FORGOTTEN_A_TURN:]
    stored.wrote(b"meanwhile", 0.0)
    for key in keys[-8:]:
        del stored.written[key]
    at.settle()
    assert not stored.written


def test_what_a_model_that_is_gone_has_known_goes_a_turn_at_a_time() -> None:
    rig = rig_of(one_group(), device=(16,))
    a = rig.lease("a")
    serve(rig, a, 1, "abcdef")
    close_lease(rig.core, a, quiesced=True)
    model = rig.model
    rig.core.turns = rig.core.turns._replace(forgotten=4)
    model.remembered.update({b"%d" % number: 1 for number in range(6)})
    model.stored.written.update({b"%d" % number: 0.0 for number in range(6)})
    evict_model(rig.core, rig.vault, model)
    left = []
    while rig.core.chores:
        tidy(rig.core.chores)
        left.append(len(model.remembered) + len(model.stored.written))
    assert left[:4] == [8, 4, 0, 0]
    assert not model.blocks.index.keys


def test_why_knows_a_block_that_lies_in_storage_alone() -> None:
    at = written("ab")
    [said] = why(at, packed("ab")[1])
    assert said.endswith("; storage has it: written, or seen there, 0.0 s ago")
    close_lease(at.rig.core, at.lease, quiesced=True)
    for tier in ("device", "host"):
        pinning.evict(at.rig.core, 1, tier, 0)
    at.rig.now += 12.5
    [said] = why(at, packed("ab")[1])
    assert said.startswith("it is not here: 12.5 s ago an operator evicted it")
    assert said.endswith("; storage has it: written, or seen there, 12.5 s ago")
    assert len(why(at, packed("ab")[1][:3])) == 1


def test_why_asks_what_was_there_before_the_daemon() -> None:
    at = storing("abc")
    [said] = why(at, packed("abc")[2])
    assert said.endswith("; storage has it, from before")
    [said] = why(at, bytes(KEY_BYTES))
    assert "storage" not in said
