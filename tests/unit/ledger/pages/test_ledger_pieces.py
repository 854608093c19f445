"""Block tables joined from kept pieces: always those of a walk, and nothing is walked twice."""

from __future__ import annotations

from array import array
from functools import partial

import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.match import match
from cachesvc.ledger.counted_tables import PIECE_BLOCKS
from cachesvc.ledger.planner import Evictor
from cachesvc.ledger.sequences import OpenSequence
from cachesvc.ledger.tier_copies import NO_ROW
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES, NO_PAGE, PageState
from cachesvc.wire.convert import cells_from_proto, matched_to_proto
from tests.unit.ledger.test_costs import LAYOUT, Node, node_of
from tests.unit.rigs.ledger_rig import chain, one_group, rig_of, serve
from tests.work import steps_of

TWO_FULL = Layout(
    4,
    1,
    (PlaneGroup("full"), PlaneGroup("window", 8), PlaneGroup("draft")),
    tuple(Plane("k", layer, group, (8,), "uint8") for layer, group in enumerate(("full", "window", "draft"))),
)


def walked(node: Node, row: int) -> list[array[int]]:
    path = node.blocks.index.path(row)
    return [array("i", [node.place.pages[group][each] for each in path]) for group in node.place.full_groups]


def opened(node: Node, keys: bytes) -> OpenSequence:
    """A sequence on the longest hit, as Match opens it."""
    sequence = OpenSequence(1, "lease", 1, 0, node.blocks, node.place, keys)
    sequence.hold(node.blocks.find(keys, node.place), 1 << 30)
    return sequence


def open_and_end(node: Node, keys: bytes) -> None:
    opened(node, keys).end()


def evict(node: Node, blocks: int) -> None:
    evictor = Evictor(node.blocks)
    plan, met = evictor.plan_device(node.place, blocks, to_host=False)
    assert met
    evictor.carry_out(plan)


@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 127, 128, 200])
def test_a_table_is_that_of_a_walk_at_each_length(blocks: int) -> None:
    node = node_of(TWO_FULL, (256, 256, 256), (0, 0, 0))
    keys, tip = node.publish(blocks, 1)
    for _ in range(2):
        sequence = opened(node, keys)
        assert [sequence.tables[0], sequence.tables[2]] == walked(node, tip)
        window = [NO_PAGE] * blocks
        for position, row in enumerate(node.blocks.index.path(tip)):
            if position >= blocks - 2:
                window[position] = node.place.pages[1][row]
        assert sequence.tables[1].tolist() == window
        sequence.end()
    assert len(node.place.pieces.kept) == blocks // PIECE_BLOCKS


def publish_again(node: Node, keys: bytes) -> int:
    """The same blocks, on whatever pages are free; the last row."""
    row = NO_ROW
    for at in range(0, len(keys), KEY_BYTES):
        row = node.blocks.index.insert(keys[at : at + KEY_BYTES], row, 3)
        node.blocks.seal(node.place, row, node.place.pools[0].take(1, PageState.PRIVATE))
        node.blocks.offer(node.place, row)
    return row


def test_a_piece_goes_with_its_last_row_and_is_made_anew_on_other_pages() -> None:
    node = node_of(one_group(), (200,), (0,))
    keys, tip = node.publish(130, 1)
    open_and_end(node, keys)
    before = walked(node, tip)
    kept = []
    for blocks in (2, 1, 63, 1, 63):
        evict(node, blocks)
        kept.append(len(node.place.pieces.kept))
    assert kept == [2, 1, 1, 0, 0], "with the rows of blocks 127 and 63"
    node.publish(60, 2)
    tip = publish_again(node, keys)
    assert opened(node, keys).tables == walked(node, tip) != before


def test_the_second_match_of_a_prefix_does_not_walk_it() -> None:
    node = node_of(one_group(), (4096,), (0,))
    keys, _ = node.publish(2048, 1)
    first, second = (steps_of(partial(open_and_end, node, keys)) for _ in range(2))
    assert second * 2 < first, f"{second} steps for a table that is known, {first} for one that is not"


@pytest.mark.parametrize("layout", [one_group(), LAYOUT], ids=["full", "windowed"])
def test_a_match_costs_the_same_beside_many_blocks(layout: Layout) -> None:
    """And a known prompt costs a few steps for each piece, windows or not."""
    steps = []
    for others in (0, 400):
        size = 1024 + 16 * others
        node = node_of(layout, (size,) * len(layout.groups), (0,) * len(layout.groups))
        keys, _ = node.publish(1024, 1)
        for other in range(others):
            open_and_end(node, node.publish(16, 2 + other)[0])
        open_and_end(node, keys)
        steps.append(steps_of(partial(open_and_end, node, keys)))
    alone, beside = steps
    assert beside < 1.2 * alone, f"{beside} steps beside 6,400 blocks, {alone} alone"


def test_an_answer_is_packed_and_of_its_moment() -> None:
    """No list of integers lies between the ledger and the message, and the answer does not change afterwards."""
    rig = rig_of(one_group(), device=(16,))
    lease = rig.lease()
    serve(rig, lease, 1, "abcd")
    answer = rig.run(match, lease, 2, chain(*"abcd"), 0)
    told = answer.tables[0].pages
    assert isinstance(told, array)
    assert told.tolist() == [0, 1, 2, 3]
    rig.run(allocate, lease, 2, 6)
    assert told == array("i", range(4))
    [cells] = matched_to_proto(answer).tables
    assert cells.pages == told.tobytes()
    assert cells_from_proto([cells])[0].pages == told
