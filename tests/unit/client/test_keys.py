"""Block keys: frozen digests, canonical input, namespaces, and what images add to the blocks that they touch."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
from cachesvc_client.core.keys import MAX_KIND_BYTES, BlockHasher, ExtraKey, as_bytes, block_keys, extras_for_block
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.words import KEY_BYTES, namespace_of

NAMESPACE = namespace_of("m", b"f" * 32, b"salt")
TOKENS = list(range(1, 9))


def test_the_digests_are_frozen() -> None:
    """Computed on 2026-11-21, with an image on 2026-11-25. A change here makes every stored block unreachable."""
    assert NAMESPACE.hex() == "18178254936f17aae210db841aae16db4b020f3a5177bc5f2711c82c29c67016"
    assert block_keys(NAMESPACE, TOKENS, 4).hex() == (
        "6ef1fdcd7a3fa023766359b6f789ca2027297f9cc5f401e1a1be7e609db4b64c"
        "2b5ad5580fac2b0f252211c74d291e52c8012bb09f9342bc2fa23bafcc735827"
    )
    with_image = block_keys(NAMESPACE, TOKENS[:4], 4, (ExtraKey(1, 3, b"img"),))
    assert with_image.hex() == "91be7bf7574ced3ea442fb13cbe47c4c25a4cd0f13bb40fe812cc15451595383"


def test_a_key_is_the_hash_that_the_format_says() -> None:
    body = NAMESPACE + struct.pack("<I4I", 4, 1, 2, 3, 4) + struct.pack("<IqII", 1, 1, 3, 3) + b"img"
    expected = hashlib.blake2b(body, digest_size=32, person=b"kv-block").digest()
    assert block_keys(NAMESPACE, [1, 2, 3, 4], 4, (ExtraKey(1, 3, b"img"),)) == expected


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        [np.int64(token) for token in TOKENS],
        np.array(TOKENS, np.int64),
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.uint16),
        np.array(TOKENS, ">u4"),
        np.array(TOKENS, ">i8"),
        np.array([[token, 0] for token in TOKENS], np.int32)[:, 0],
    ],
)
def test_equal_tokens_give_equal_keys_whatever_holds_them(tokens: list[int]) -> None:
    assert block_keys(NAMESPACE, tokens, 4) == block_keys(NAMESPACE, TOKENS, 4)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=9), max_size=6), st.integers(1, 5))
def test_keys_do_not_depend_on_how_tokens_arrive(parts: list[list[int]], block_tokens: int) -> None:
    hasher = BlockHasher(NAMESPACE, block_tokens)
    flat: list[int] = []
    for part in parts:
        flat += part
        assert hasher.extend(part) == len(flat) // block_tokens
    assert bytes(hasher.keys) == block_keys(NAMESPACE, flat, block_tokens)
    assert len(hasher.keys) == len(flat) // block_tokens * KEY_BYTES


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_keys_are_equal_exactly_as_far_as_prefixes_are(left: list[int], right: list[int]) -> None:
    ours, theirs = block_keys(NAMESPACE, left, 1), block_keys(NAMESPACE, right, 1)
    for i in range(min(len(left), len(right))):
        same = ours[i * KEY_BYTES : (i + 1) * KEY_BYTES] == theirs[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        assert same == (left[: i + 1] == right[: i + 1])


def test_nothing_is_shared_across_namespaces() -> None:
    spaces = {
        namespace_of("m", b"f" * 32, b""),
        namespace_of("m", b"f" * 32, b"a"),
        namespace_of("m", b"f" * 32, b"b"),
        namespace_of("n", b"f" * 32, b"a"),
        namespace_of("m", b"g" * 32, b"a"),
        namespace_of("mf", b"f" * 31, b"a"),
        namespace_of("m", b"f" * 32 + b"a", b""),
    }
    assert len(spaces) == 7
    assert len({block_keys(space, TOKENS, 4) for space in spaces}) == 7
    assert block_keys(NAMESPACE, TOKENS, 4)[:KEY_BYTES] != block_keys(NAMESPACE, TOKENS, 8)


def test_the_vector_of_the_specification() -> None:
    extras = [ExtraKey(2, 5, b"h0"), ExtraKey(8, 12, b"h1"), ExtraKey(14, 16, b"h2")]
    cursor, seen = 0, []
    for block in range(4):
        found, cursor = extras_for_block(extras, 4 * block, 4 * block + 4, cursor)
        seen.append((found, cursor))
    assert seen == [([(2, 4, b"h0")], 0), ([(-2, 1, b"h0")], 1), ([(0, 4, b"h1")], 2), ([(2, 4, b"h2")], 2)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=6), st.integers(1, 5))
def test_each_block_gets_the_images_that_overlap_it(gaps: list[tuple[int, int]], block_tokens: int) -> None:
    extras: list[ExtraKey] = []
    at = 0
    for gap, length in gaps:
        extras.append(ExtraKey(at + gap, at + gap + length, f"{len(extras)}".encode()))
        at += gap + length
    cursor = 0
    for block in range(40 // block_tokens):
        start, end = block * block_tokens, (block + 1) * block_tokens
        found, cursor = extras_for_block(extras, start, end, cursor)
        assert found == [
            (e.start_token - start, min(e.end_token, end) - start, e.digest)
            for e in extras
            if e.start_token < end and e.end_token > start
        ]


def test_named_kinds_follow_the_nameless_one_in_the_order_of_their_names() -> None:
    """Frozen like the digests: another order would make stored blocks unreachable."""
    extras = (ExtraKey.of_prompt("b", b"x"), ExtraKey(0, 9, b"yy", "a"), ExtraKey(0, 2, b"i"), ExtraKey(3, 4, b"jj"))
    tail = (
        struct.pack("<IqII", 2, 0, 2, 1) + b"i" + struct.pack("<qII", 3, 4, 2) + b"jj"
        + struct.pack("<I", 1) + b"a" + struct.pack("<IqII", 1, 0, 4, 2) + b"yy"
        + struct.pack("<I", 1) + b"b" + struct.pack("<IqII", 1, 0, 4, 1) + b"x"
    )  # fmt: skip
    body = NAMESPACE + struct.pack("<I4I", 4, *TOKENS[:4]) + tail
    expected = hashlib.blake2b(body, digest_size=32, person=b"kv-block").digest()
    assert block_keys(NAMESPACE, TOKENS[:4], 4, extras) == expected
    only_named = body[: -len(tail)] + struct.pack("<II", 0, 1) + b"b" + struct.pack("<IqII", 1, 0, 4, 1) + b"x"
    expected = hashlib.blake2b(only_named, digest_size=32, person=b"kv-block").digest()
    assert block_keys(NAMESPACE, TOKENS[:4], 4, extras[:1]) == expected


def test_a_named_kind_counts_where_it_lies_and_an_adapter_for_all_that_is_still_computed() -> None:
    plain, spans = BlockHasher(NAMESPACE, 2), BlockHasher(NAMESPACE, 2, (ExtraKey(2, 3, b"img", "image"),))
    adapted = BlockHasher(NAMESPACE, 2, (ExtraKey.of_prompt("adapter", b"lora-7"),))
    for hasher in (plain, spans, adapted):
        for token in TOKENS:
            hasher.extend([token])
    assert plain.key(0) == spans.key(0)
    assert len({plain.key(1), spans.key(1), adapted.key(1)}) == 3
    body = adapted.key(2) + struct.pack("<I2I", 2, *TOKENS[6:]) + struct.pack("<I", 0)
    body += struct.pack("<I", 7) + b"adapter" + struct.pack("<IqII", 1, -6, 2, 6) + b"lora-7"
    assert adapted.key(3) == hashlib.blake2b(body, digest_size=32, person=b"kv-block").digest()


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 9), st.integers(1, 5)), max_size=8))
def test_kinds_are_independent_of_each_other(spans: list[tuple[str, int, int]]) -> None:
    extras: list[ExtraKey] = []
    for number, (kind, start, length) in enumerate(spans):
        extra = ExtraKey(start, start + length, str(number).encode(), kind)
        if all(e.kind != kind or e.end_token <= start or extra.end_token <= e.start_token for e in extras):
            extras.append(extra)
    keys, parent = block_keys(NAMESPACE, list(range(15)), 3, extras), NAMESPACE
    for block in range(5):
        start, end = 3 * block, 3 * block + 3
        tail = b""
        for kind in ("", "a", "b"):
            mine = sorted(e for e in extras if e.kind == kind and e.start_token < end and e.end_token > start)
            if kind and mine:
                tail += struct.pack("<I", len(kind)) + kind.encode()
            if not kind or mine:
                tail += struct.pack("<I", len(mine)) + b"".join(
                    struct.pack("<qII", e.start_token - start, min(e.end_token, end) - start, len(e.digest)) + e.digest
                    for e in mine
                )
        body = parent + struct.pack("<I3I", 3, *range(start, end)) + tail
        parent = hashlib.blake2b(body, digest_size=32, person=b"kv-block").digest()
        assert keys[block * KEY_BYTES : (block + 1) * KEY_BYTES] == parent


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((ExtraKey(0, 4, b"A"),), (ExtraKey(6, 10, b"A"),)),
        ((ExtraKey(0, 4, b"A"),), (ExtraKey(0, 12, b"A"),)),
        ((ExtraKey(0, 4, b"A"), ExtraKey(4, 16, b"B")), (ExtraKey(0, 9, b"A"), ExtraKey(9, 16, b"B"))),
        ((ExtraKey(3, 1 << 62, b"L", "adapter"),), (ExtraKey(11, 1 << 62, b"L", "adapter"),)),
        ((ExtraKey(0, 4, b"A"), ExtraKey(4, 8, b"A")), (ExtraKey(0, 8, b"A"),)),
    ],
)
def test_the_place_of_an_extra_in_its_block_is_in_the_key(
    one: tuple[ExtraKey, ...], other: tuple[ExtraKey, ...]
) -> None:
    tokens = [151655] * 32
    ours, theirs = block_keys(NAMESPACE, tokens, 16, one), block_keys(NAMESPACE, tokens, 16, other)
    assert ours[:KEY_BYTES] != theirs[:KEY_BYTES]
    tails = []
    for extras in (one, other):
        hasher = BlockHasher(NAMESPACE, 16, extras)
        hasher.extend(tokens[:14])
        tails.append(hasher.tail_key())
    assert tails[0] != tails[1]


SPANS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b"]), st.integers(0, 5), st.integers(1, 5), st.sampled_from([b"", b"x", b"xy"])
    ),
    max_size=4,
)


def _extras_of(spans: list[tuple[str, int, int, bytes]]) -> list[ExtraKey]:
    """Those of ``spans`` that may stand together. Each has a digest object of its own."""
    extras: list[ExtraKey] = []
    for kind, start, length, digest in spans:
        extra = ExtraKey(start, start + length, bytes(bytearray(digest)), "".join(list(kind)))
        if all(e.kind != kind or e.end_token <= start or extra.end_token <= e.start_token for e in extras):
            extras.append(extra)
    return extras


@given(SPANS, SPANS, st.randoms())
def test_keys_are_equal_exactly_where_spans_and_digests_are(
    left: list[tuple[str, int, int, bytes]], right: list[tuple[str, int, int, bytes]], dice: random.Random
) -> None:
    ours, theirs = _extras_of(left), _extras_of(right)
    again = _extras_of([(e.kind, e.start_token, e.end_token - e.start_token, e.digest) for e in ours])
    dice.shuffle(again)
    tokens = [7] * 6
    keys = block_keys(NAMESPACE, tokens, 6, ours)
    assert keys == block_keys(NAMESPACE, tokens, 6, again), "of whatever objects, in whatever order"

    def covers(extras: list[ExtraKey]) -> set[tuple[str, int, int, bytes]]:
        return {(e.kind, e.start_token, min(e.end_token, 6), e.digest) for e in extras if e.start_token < 6}

    assert (keys == block_keys(NAMESPACE, tokens, 6, theirs)) == (covers(ours) == covers(theirs))


@pytest.mark.parametrize(
    ("namespace", "block_tokens", "extras"),
    [
        (b"short", 4, ()),
        (NAMESPACE, 0, ()),
        (NAMESPACE, 4, (ExtraKey(3, 3, b""),)),
        (NAMESPACE, 4, (ExtraKey(-1, 3, b""),)),
        (NAMESPACE, 4, (ExtraKey(0, 3, b"x" * 5000),)),
        (NAMESPACE, 4, (ExtraKey(0, 3, b"a"), ExtraKey(2, 5, b"b"))),
        (NAMESPACE, 4, (ExtraKey(0, 3, b"a", "k"), ExtraKey.of_prompt("k", b"b"))),
        (NAMESPACE, 4, (ExtraKey(0, 3, b"a", "k" * (MAX_KIND_BYTES + 1)),)),
    ],
)
def test_what_cannot_be_hashed(namespace: bytes, block_tokens: int, extras: tuple[ExtraKey, ...]) -> None:
    with pytest.raises(InvalidRequest):
        BlockHasher(namespace, block_tokens, extras)


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], np.zeros((2, 2), np.int32), np.array([-1]), ["a"]])
def test_what_is_no_token(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        BlockHasher(NAMESPACE, 1).extend(tokens)


def test_keys_are_copied_only_where_they_are_not_bytes() -> None:
    keys = bytes(range(64))
    assert as_bytes(keys) is keys
    for other in (bytearray(keys), memoryview(keys)):
        assert type(as_bytes(other)) is bytes
        assert as_bytes(other) == keys
    with pytest.raises(InvalidRequest):
        as_bytes("keys")  # type: ignore[arg-type]


def test_a_tail_has_a_key_of_its_length_that_no_full_block_has() -> None:
    tokens = list(range(40))
    tails = set()
    for length in range(1, 40):
        hasher = BlockHasher(NAMESPACE, 16)
        hasher.extend(tokens[:length])
        assert hasher.tail_tokens == length % 16
        assert bool(hasher.tail_key()) == bool(length % 16)
        tails.add(hasher.tail_key())
        before = bytes(hasher.keys)
        hasher.extend(tokens[length:])
        assert bytes(hasher.keys)[: len(before)] == before
        assert bytes(hasher.keys) == block_keys(NAMESPACE, tokens, 16), "asking for it changes nothing"
        assert hasher.tail_key() not in bytes(hasher.keys)
    assert len(tails) == 39 - 2 + 1, "each length has its own, and full blocks have none"


def test_a_tail_with_an_image_in_it_has_another_key() -> None:
    def tail(digest: bytes) -> bytes:
        hasher = BlockHasher(NAMESPACE, 16, (ExtraKey(18, 22, digest),))
        hasher.extend(range(20))
        key = hasher.tail_key()
        hasher.extend(range(20, 32))
        assert bytes(hasher.keys) == block_keys(NAMESPACE, range(32), 16, (ExtraKey(18, 22, digest),))
        return key

    assert tail(b"one") != tail(b"another")
