"""Announcements of a worker's blocks to routers: no more than a match finds, none without tokens and parent."""

from __future__ import annotations

import random

import pytest
from cachesvc_client import KEY_BYTES, BlockHasher, InvalidRequest, gqa_windowed
from cachesvc_client.adapters.kv_events import CLEARED, Adapter, Event, KnownTokens, KvEventMapper, hash_of
from cachesvc_client.events import CopyLocation
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.model.layout import Layout, Plane, PlaneGroup
from tests.unit.client.adapters.test_kv_events import (
    BLOCK_TOKENS,
    GPU,
    HOST,
    KEYS,
    LAYOUT,
    TOKENS,
    Feeder,
    knowing,
    removed,
    stored,
)

DISK = CopyLocation(0, "storage", 0)


def hashes(events: list[Event]) -> list[tuple[str, list[int]]]:
    """Kind and blocks of each event, by the blocks' places in the prompt."""
    order = [hash_of(key) for key in KEYS]
    return [(event["type"], [order.index(each) for each in event.get("block_hashes", ())]) for event in events]


def learn(tokens: KnownTokens, first: int, end: int) -> None:
    tokens.learn(b"".join(KEYS[first:end]), TOKENS[first * BLOCK_TOKENS : end * BLOCK_TOKENS], BLOCK_TOKENS)


def tokens_of(tokens: KnownTokens, key: bytes) -> list[int] | None:
    block = tokens.find(key)
    return block and block.token_ids


def test_what_tokens_are_known_of_later_is_announced_then() -> None:
    tokens, feeder = KnownTokens(), Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=tokens)
    batches = feeder.snapshot(stored(GPU, KEYS[:4]), stored(HOST, KEYS[:1]))
    assert [mapper.events_of(batch) for batch in batches] == [[], [CLEARED]], (
        "a router cannot use a block without its tokens"
    )
    learn(tokens, 0, 2)
    events = mapper.news()
    assert hashes(events) == [("BlockStored", [0, 1]), ("BlockStored", [0])]
    assert [event["medium"] for event in events] == ["GPU", "CPU"]
    assert events[0]["token_ids"] == TOKENS[: 2 * BLOCK_TOKENS]
    assert mapper.news() == []
    assert hashes(mapper.events_of(feeder.changes(removed(GPU, KEYS[3:4]), removed(GPU, KEYS[1:2])))) == [
        ("BlockRemoved", [1])
    ], "what was not announced does not go"


def test_a_block_waits_for_its_parent() -> None:
    tokens, feeder = KnownTokens(), Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=tokens)
    for batch in feeder.snapshot(stored(GPU, KEYS[:4])):
        mapper.events_of(batch)
    learn(tokens, 1, 4)
    assert mapper.news() == []
    learn(tokens, 0, 1)
    assert hashes(mapper.news()) == [
        ("BlockStored", [0]),
        ("BlockStored", [1]),
        ("BlockStored", [2]),
        ("BlockStored", [3]),
    ]


def test_a_parent_in_another_tier_is_enough() -> None:
    mapper, feeder = KvEventMapper(LAYOUT, tokens=knowing()), Feeder()
    mapper.events_of(feeder.changes(stored(GPU, KEYS[:1])))
    (event,) = mapper.events_of(feeder.changes(stored(HOST, KEYS[1:2], KEYS[0])))
    assert (event["medium"], event["parent_block_hash"]) == ("CPU", hash_of(KEYS[0]))


def test_a_block_that_comes_and_goes_at_once_is_not_announced() -> None:
    mapper, feeder = KvEventMapper(LAYOUT, tokens=knowing()), Feeder()
    batch = feeder.changes(stored(GPU, KEYS[:2]), removed(GPU, KEYS[1:2]))
    assert hashes(mapper.events_of(batch)) == [("BlockStored", [0])]
    batch = feeder.changes(removed(GPU, KEYS[:1]), stored(GPU, KEYS[:1]))
    assert mapper.events_of(batch) == [], "it is where it was"


def test_what_was_forgotten_is_void_for_routers() -> None:
    tokens, feeder = knowing(2), Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=tokens)
    for batch in feeder.snapshot(stored(GPU, KEYS[:2])):
        mapper.events_of(batch)
    mapper.news()
    tokens.forget()
    learn(tokens, 0, 1)
    assert hashes(mapper.news()) == [("AllBlocksCleared", []), ("BlockStored", [0])]


def test_nothing_is_announced_from_an_old_snapshot() -> None:
    tokens, feeder = KnownTokens(), Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=tokens)
    for batch in feeder.snapshot(stored(GPU, KEYS[:2])):
        mapper.events_of(batch)
    assert mapper.forget() == [CLEARED]
    learn(tokens, 0, 2)
    assert mapper.news() == []


def test_adapters_divide_events_and_are_named() -> None:
    tokens = KnownTokens()
    learn(tokens, 0, 2)
    tokens.learn(
        b"".join(KEYS[2:4]), TOKENS[8:16], BLOCK_TOKENS, adapter=Adapter(7, "law"), extra_keys=lambda: [("law",), None]
    )
    plain, adapted = KvEventMapper(LAYOUT, tokens=tokens).events_of(Feeder().changes(stored(GPU, KEYS[:4])))
    assert (plain["lora_id"], plain["lora_name"], "extra_keys" in plain) == (None, None, False)
    assert (adapted["lora_id"], adapted["lora_name"], adapted["extra_keys"]) == (7, "law", [("law",), None])
    assert adapted["parent_block_hash"] == hash_of(KEYS[1])


def test_of_storage_no_more_is_kept_than_tokens_are() -> None:
    tokens, feeder = KnownTokens(limit=2), Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=tokens)
    for batch in feeder.snapshot():
        mapper.events_of(batch)
    learn(tokens, 0, 2)
    assert hashes(mapper.events_of(feeder.changes(stored(DISK, KEYS[:3])))) == [("BlockStored", [0, 1])]
    assert set(mapper.mirror.locations) == set(KEYS[:2])
    mapper.news()
    learn(tokens, 4, 5)
    assert hashes(mapper.news()) == [("BlockRemoved", [1])], "the end of a chain is dropped before its beginning"
    assert set(mapper.mirror.locations) == {KEYS[0]}


def test_a_marker_group_is_no_place() -> None:
    layout = gqa_windowed(
        window_layers=[True, True], kv_heads=2, head_dim=8, block_tokens=BLOCK_TOKENS, window_tokens=8
    )
    assert layout.marker == 1
    locations = [CopyLocation(group, "device", 0) for group in range(2)]
    for mapper in (KvEventMapper(layout), KvEventMapper(layout, tokens=knowing())):
        events = mapper.events_of(Feeder().changes(*(stored(location, KEYS[:2]) for location in locations)))
        assert [(event["group_idx"], event["kv_cache_spec_kind"]) for event in events] == [(0, "sliding_window")]


def test_groups_are_named_by_their_kind() -> None:
    groups = (PlaneGroup("w", 8, pool="kv"), PlaneGroup("s", pool="kv", is_state=True), PlaneGroup("f", pool="kv"))
    layout = Layout(BLOCK_TOKENS, 1, groups, tuple(Plane("kv", 0, each.name, (64,), "uint8") for each in groups))
    locations = [CopyLocation(group, "device", 0) for group in range(3)]
    events = KvEventMapper(layout).events_of(Feeder().changes(*(stored(location, KEYS[:2]) for location in locations)))
    assert {event["group_idx"]: event["kv_cache_spec_kind"] for event in events} == {
        0: "sliding_window",
        1: "mamba",
        2: "full_attention",
    }


def test_keys_are_learned_as_hashers_have_them() -> None:
    hasher = BlockHasher(bytes(KEY_BYTES), BLOCK_TOKENS)
    hasher.extend(TOKENS)
    for keys in (hasher.keys, bytes(hasher.keys), memoryview(hasher.keys)):
        tokens = KnownTokens()
        tokens.learn(keys, TOKENS, BLOCK_TOKENS)
        assert tokens_of(tokens, KEYS[1]) == TOKENS[4:8]


def test_tokens_that_do_not_fill_their_blocks_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="each key needs its tokens"):
        KnownTokens().learn(KEYS[0], TOKENS[:3], BLOCK_TOKENS)
    with pytest.raises(InvalidRequest):
        KnownTokens().learn(KEYS[0][:5], TOKENS, BLOCK_TOKENS)


def test_news_that_are_not_taken_stay_bounded() -> None:
    tokens = KnownTokens(limit=2)
    for block in range(6):
        learn(tokens, block, block + 1)
        assert tokens.find(KEYS[block]) is not None
    news = tokens.take()
    assert (news.fresh, news.dropped) == (list(KEYS[4:6]), list(KEYS[2:4]))


def test_a_caller_may_use_its_list_again() -> None:
    tokens, mine = KnownTokens(), TOKENS[:4]
    tokens.learn(KEYS[0], mine, BLOCK_TOKENS)
    mine[0] = 0
    assert tokens_of(tokens, KEYS[0]) == TOKENS[:4]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_routers_have_exactly_the_known_blocks_whatever_the_order(seed: int, steps: int) -> None:
    """A tree of blocks, of which leaves come and go in two tiers while tokens become known."""
    dice = random.Random(seed)
    tree = {bytes([n]) * KEY_BYTES: b"" if n < 2 else bytes([dice.randrange(n)]) * KEY_BYTES for n in range(12)}
    tokens, feeder = KnownTokens(), Feeder()
    mapper = KvEventMapper(LAYOUT, tokens=tokens)
    here: dict[CopyLocation, set[bytes]] = {GPU: set(), HOST: set()}
    index: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
    known: set[bytes] = set()

    def take(events: list[Event]) -> None:
        for event in events:
            if event["type"] == "BlockStored":
                parent = event["parent_block_hash"]
                assert parent is None or any(parent in there for there in index.values()), "its parent came first"
                index[event["medium"]] |= set(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                assert set(event["block_hashes"]) <= index[event["medium"]]
                index[event["medium"]] -= set(event["block_hashes"])

    for batch in feeder.snapshot():
        take(mapper.events_of(batch))
    for _ in range(steps):
        runs = []
        for _ in range(dice.randint(0, 3)):
            location, key = dice.choice([GPU, HOST]), dice.choice(list(tree))
            everywhere = here[GPU] | here[HOST]
            if key in here[location]:
                rest = (here[GPU] - {key} if location == GPU else here[GPU]) | (
                    here[HOST] - {key} if location == HOST else here[HOST]
                )
                if key in rest or not any(tree[child] == key for child in everywhere):
                    here[location].discard(key)
                    runs.append(removed(location, (key,)))
            elif not tree[key] or tree[key] in everywhere:
                here[location].add(key)
                runs.append(stored(location, (key,), tree[key]))
        path = [dice.choice(list(tree))]
        while tree[path[0]]:
            path.insert(0, tree[path[0]])
        if dice.random() < 0.3:
            known |= set(path)
            tokens.learn(b"".join(path), list(range(BLOCK_TOKENS * len(path))), BLOCK_TOKENS)
            if dice.random() < 0.5:
                take(mapper.news())
        take(mapper.events_of(feeder.changes(*runs)))
        take(mapper.news())
        for location, medium in ((GPU, "GPU"), (HOST, "CPU")):
            assert index[medium] == {hash_of(key) for key in here[location] & known}
