"""Conservation in parts sees what the audit sees: every kind of damage is found, and is named."""

from __future__ import annotations

from functools import partial

import pytest

from cachesvc.flows.allocate import allocate, swap_out
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.registration import evict_model
from cachesvc.ledger.block_ledger import Hit
from cachesvc.ledger.pins import WindowPins
from cachesvc.ledger.sequences import Prefetch
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model import words
from cachesvc.model.errors import InvalidRequest, NotFound
from cachesvc.model.words import KEY_BYTES, NO_PAGE
from cachesvc.questions import dump
from cachesvc.questions.audit import verify_at_once
from cachesvc.questions.dump import columns_of
from cachesvc.questions.query import Ranking, Tree, block_line, one_key, tree_line
from cachesvc.questions.view import EVERYTHING, Question, View, answer_at_once
from tests.conservation import audit
from tests.unit.rigs.ledger_rig import Rig, chain, prefill, rig_of, serve, windowed


def busy() -> Rig:
    """Two chains that share a block, one of them held by an open sequence; some blocks are on the host too."""
    rig = rig_of(windowed(), device=(16, 16), host=(8, 8))
    lease = rig.lease()
    serve(rig, lease, 1, ["a", "b", "c"])
    serve(rig, lease, 2, ["a", "d"])
    prefill(rig, lease, 3, ["a", "b", "c", "e"])
    return rig


def row(rig: Rig, *names: object) -> int:
    return rig.model.blocks.index.rows[chain(*names)[-KEY_BYTES:]]


DAMAGE = (
    ("index.children[a] += 1", "3 children counted, 2 there"),
    ("index.depth[ad] = 7", "depth 7"),
    ("for states in place.states: states[ad] = ABSENT", "copy"),
    ("place.pages[0][ad] = place.pages[0][ab]", "held by row"),
    ("pool.take(1, PageState.PRIVATE)", "PRIVATE, but held by no holder"),
    ("pool.states[pool.free_runs()[0][0]] = PageState.SEALED", "free runs hold it 1 times"),
    ("place.pins[ad] += 1", "1 pins counted, 0 holders"),
    ("place.window_pins[1][ad] += 1", "window pins counted"),
    ("index.flights[ad] += 1", "1 transfers counted, 0 holders"),
    ("assert place.leaves.remove(ad)", "may go, but is not filed"),
    ("place.leaves.filed[a] = 1", "filed, but may not go"),
    ("index.stamp[ad] += 1", "which is not its own"),
    # A holder there is, so that only the copy is missing.
    ("other.hold(hit, 99)", "pinned, but its copy is ABSENT"),
    (
        "other.windows = windows; windows.hold(1, 1, ad)",
        "a window holds it, but its copy is ABSENT",
    ),
    ("grow(5); sequence.tables[0][4] = NO_PAGE", "group 0: no page for block 4"),
    ("grow(5); sequence.tables[0][4] = place.pages[0][ad]", "its table is not the pages of its blocks"),
    ("place.states[1][ad] = FILLING", "no ticket moves it"),
    ("sequence.loads.append(77)", "waits for ticket 77"),
    ("sequence.swap_ticket = 77", "no ticket 77 swaps it"),
    # The host loses a block of a sequence that is swapped out.
    ("swap(); rig.settle(); rig.host.states[0][ab] = FILLING", "is to come from the host, but it is not there"),
    ("index.spare_rows.append(a)", "rows are spare"),
    ("index.head[ab] = ad", "but its parent is not"),
    ("index.continued[a] = 0", "1 children go on with its chain"),
    ("index.flying.add(ad)", "rows are known in flight"),
    ("index.keys[ad], index.keys[ab] = index.keys[ab], index.keys[ad]", "key and row do not agree"),
    ("sequence.tables[0][0] = 15", "its table is not the pages of its blocks"),
    ("rig.model.computing[b'x' * KEY_BYTES] = 1", "keys being computed do not add up"),
    ("place.states[0][ad] = FILLING", "but held by"),
    ("place.children[a] -= 1", "1 children counted, 2 there"),
    ("place.counts.states[READY] += 1", "blocks are READY"),
    ("place.counts.pinned -= 1", "blocks are pinned"),
    ("place.protected.blocks += 1", "pins protect 4 blocks, 5 are counted"),
    ("pool.reserved += 1", "1 pages are counted reserved, 0 are"),
    # Two blocks of a table that is kept in pieces change their pages.
    ("pages = place.pages[0]; pages[ab], pages[abc] = pages[abc], pages[ab]", "is not its blocks' pages"),
    ("swap()\nfor at in range(len(rig.host.filling)): rig.host.filling[at] = 0", "but None is known"),
)
"""Statements that break a busy ledger, and words of the problem that they make."""


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_damage_is_found_by_the_parts_as_by_the_audit(damage: str, said: str) -> None:
    rig = busy()
    (lease,) = rig.core.ledger.leases.values()
    names = {
        "rig": rig,
        "index": rig.model.blocks.index,
        "place": rig.place(),
        "pool": rig.place().pools[0],
        "sequence": lease.sequences[3],
        "other": Prefetch(rig.model.blocks, rig.place(), lease.prefetches),
        "hit": Hit(0, NO_ROW, 2, row(rig, "a", "d")),
        "windows": WindowPins(rig.model.blocks, rig.host),
        "grow": partial(rig.run, allocate, lease.id, 3),
        "swap": partial(rig.run, swap_out, lease.id, 3),
        **{name: row(rig, *name) for name in ("a", "ab", "abc", "ad")},
    }
    assert verify_at_once(rig.core) == []
    exec(damage, vars(words) | names)
    assert audit(rig.core.ledger).problems, "the reference sees it"
    problems = verify_at_once(rig.core)
    assert any(said in problem for problem in problems), problems


def test_keys_that_are_copied_before_the_moment_are_those_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dropped and given to other blocks while keys are copied some at a time."""
    monkeypatch.setattr(dump, "KEYS_A_STEP", 4)
    rig = busy()
    view, lease = View(rig.core, EVERYTHING, lambda: 0.0), rig.lease("b")
    turns = iter(range(1000))

    def meanwhile() -> Question[dump.Columns]:
        question, told = columns_of(view, rig.model), None
        while True:
            try:
                told = yield question.send(told)
            except StopIteration as ended:
                taken: dump.Columns = ended.value
                return taken
            turn = next(turns)
            serve(rig, lease, 10 + turn, [turn, turn, turn])

    taken, known = answer_at_once(meanwhile()), dict(rig.model.blocks.index.rows)
    assert next(turns) > 3
    taken.put_in_order()
    rows = taken.rows(0, taken.blocks)
    assert {rows.keys[at : at + KEY_BYTES] for at in range(0, len(rows.keys), KEY_BYTES)} == set(known)


def test_a_model_that_goes_while_its_index_is_copied_is_not_found() -> None:
    rig = busy()
    question = columns_of(View(rig.core, EVERYTHING, lambda: 0.0), rig.model)
    work = next(question)
    assert work is not None
    room = work()
    question.send(room)
    evict_model(rig.core, rig.vault, rig.model)
    with pytest.raises(NotFound):
        next(question)


def test_a_capture_is_of_its_moment_whatever_comes_after() -> None:
    rig = busy()
    index = rig.model.blocks.index
    taken = answer_at_once(columns_of(View(rig.core, EVERYTHING, lambda: 0.0), rig.model))
    tree = Tree(rig.model, b"")
    known = dict(index.rows)
    lease = rig.lease("b")
    for turn in range(12):
        serve(rig, lease, 10 + turn, [turn, turn])
    taken.put_in_order()
    rows = taken.rows(0, taken.blocks)
    keys = [rows.keys[at : at + KEY_BYTES] for at in range(0, len(rows.keys), KEY_BYTES)]
    assert set(keys) == set(known)
    for number, parent in enumerate(rows.parents):
        assert parent < number
        assert rows.positions[number] == (rows.positions[parent] + 1 if parent >= 0 else 0)
    assert {node.row for node in tree.nodes(8, 100)[0]} == set(known.values())


def test_a_tree_counts_what_is_below_and_puts_the_biggest_first() -> None:
    rig = busy()
    rows, truncated = Tree(rig.model, b"").nodes(8, 100)
    lines = [line for each in rows if (line := tree_line(rig.model, each)) is not None]
    assert not truncated
    assert [(line.depth, line.descendants) for line in lines] == [(0, 4), (1, 2), (2, 1), (3, 0), (1, 0)]
    cut, is_cut = Tree(rig.model, b"").nodes(2, 100)
    assert (len(cut), is_cut) == (3, True)
    below, _ = Tree(rig.model, chain("a", "b")[-KEY_BYTES:]).nodes(8, 100)
    assert len(below) == 3
    with pytest.raises(NotFound, match="it is not resident"):
        Tree(rig.model, b"n" * KEY_BYTES)


def test_rankings_are_those_of_a_plain_sort() -> None:
    rig = busy()
    lease = rig.lease("b")
    for turn in range(6):
        serve(rig, lease, 10 + turn, ["a", "d"] if turn % 2 else ["z", turn])
    index = rig.model.blocks.index
    every = list(index.rows.values())
    recent = sorted(every, key=lambda r: (-index.stamp[r], -index.depth[r]))
    hot = sorted((r for r in every if index.hits[r]), key=lambda r: (-index.hits[r], -index.stamp[r], -index.depth[r]))
    for count in (1, 3, 100):
        assert Ranking(rig.model, by_hits=False).first(count) == recent[:count]
        assert Ranking(rig.model, by_hits=True).first(count) == hot[:count]
    line = block_line(rig.model, hot[0])
    assert line is not None
    assert line.hits == index.hits[hot[0]]


def test_keys_are_found_by_digits_or_the_search_says_why_not() -> None:
    rig = busy()
    key = chain("a", "b")[-KEY_BYTES:]

    def search(digits: str) -> bytes:
        return answer_at_once(one_key(rig.model, digits))

    for digits in (key.hex(), key.hex()[:9], f" {key.hex()[:8].upper()} "):
        assert search(digits) == key
    rig.model.blocks.index.keys.append(key[:4] + bytes(KEY_BYTES - 4))
    with pytest.raises(InvalidRequest, match="names several blocks"):
        search(key.hex()[:8])
    for bad in ("", "abc", "xyz1", "0" * 65):
        with pytest.raises(InvalidRequest, match="hexadecimal digits"):
            search(bad)
    for absent in ("ff" * KEY_BYTES, "0123456"):
        with pytest.raises(NotFound):
            search(absent)


def test_pages_that_are_absent_name_none() -> None:
    rig = busy()
    at = row(rig, "a", "d")
    rig.host.pages[0][at] = 3
    assert any("absent, yet it names a page" in problem for problem in verify_at_once(rig.core))
    rig.host.pages[0][at] = NO_PAGE
    assert verify_at_once(rig.core) == []


def test_a_leaf_behind_which_no_prompt_can_go_on_heads_a_queue_and_adds_up() -> None:
    rig = rig_of(windowed(pool="kv"), device=(16, 16), eviction="hazard")
    lease = rig.lease()
    rig.run(match, lease, 1, chain("a", "b"), 0)
    rig.run(partial(allocate, positions={1: []}), lease, 1, 2)  # without a window
    rig.run(publish, lease, 1, 0, chain("a", "b"), 0)
    rig.run(release, lease, 1)
    assert rig.place().is_spent(row(rig, "a", "b"))
    assert verify_at_once(rig.core) == []
