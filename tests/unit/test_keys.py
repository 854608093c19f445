"""Block keys: frozen digests, canonical input, namespaces, and what images add to the blocks that they touch."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.keys import KEY_BYTES, BlockHasher, ExtraKey, block_keys, extras_for_block, namespace_of

NAMESPACE = namespace_of("m", b"f" * 32, b"salt")
TOKENS = list(range(1, 9))


def test_the_digests_are_frozen() -> None:
    """Computed once, 2026-11-21. A change here makes every stored block unreachable: raise a version instead."""
    assert NAMESPACE.hex() == "18178254936f17aae210db841aae16db4b020f3a5177bc5f2711c82c29c67016"
    assert block_keys(NAMESPACE, TOKENS, 4).hex() == (
        "6ef1fdcd7a3fa023766359b6f789ca2027297f9cc5f401e1a1be7e609db4b64c"
        "2b5ad5580fac2b0f252211c74d291e52c8012bb09f9342bc2fa23bafcc735827"
    )
    with_image = block_keys(NAMESPACE, TOKENS[:4], 4, (ExtraKey(1, 3, b"img"),))
    assert with_image.hex() == "45cb8be853dfe2d5121b1796e886fbed9db41f12f8143684a70c50fa1a9f3906"


def test_a_key_is_the_hash_that_the_format_says() -> None:
    body = NAMESPACE + struct.pack("<I4I", 4, 1, 2, 3, 4) + struct.pack("<II", 1, 3) + b"img"
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
    assert seen == [([b"h0"], 0), ([b"h0"], 1), ([b"h1"], 2), ([b"h2"], 2)]


def test_an_image_counts_where_it_lies_and_no_further() -> None:
    plain = block_keys(NAMESPACE, TOKENS, 4)
    ends_at_border = block_keys(NAMESPACE, TOKENS, 4, (ExtraKey(2, 4, b"img"),))
    starts_at_border = block_keys(NAMESPACE, TOKENS, 4, (ExtraKey(4, 6, b"img"),))
    assert starts_at_border[:KEY_BYTES] == plain[:KEY_BYTES]
    assert starts_at_border[KEY_BYTES:] != plain[KEY_BYTES:]
    assert ends_at_border[:KEY_BYTES] != plain[:KEY_BYTES]
    second = hashlib.blake2b(
        ends_at_border[:KEY_BYTES] + struct.pack("<I4I", 4, 5, 6, 7, 8) + struct.pack("<I", 0),
        digest_size=32,
        person=b"kv-block",
    ).digest()
    assert ends_at_border[KEY_BYTES:] == second


def test_other_images_diverge_for_good() -> None:
    tokens = [7] * 16
    one = block_keys(NAMESPACE, tokens, 4, (ExtraKey(5, 7, b"cat"),))
    two = block_keys(NAMESPACE, tokens, 4, (ExtraKey(5, 7, b"dog"),))
    same = [one[i : i + KEY_BYTES] == two[i : i + KEY_BYTES] for i in range(0, len(one), KEY_BYTES)]
    assert same == [True, False, False, False]


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
        assert found == [e.digest for e in extras if e.start_token < end and e.end_token > start]


@pytest.mark.parametrize(
    ("namespace", "block_tokens", "extras"),
    [
        (b"short", 4, ()),
        (NAMESPACE, 0, ()),
        (NAMESPACE, 4, (ExtraKey(3, 3, b""),)),
        (NAMESPACE, 4, (ExtraKey(-1, 3, b""),)),
        (NAMESPACE, 4, (ExtraKey(0, 3, b"x" * 5000),)),
        (NAMESPACE, 4, (ExtraKey(0, 3, b"a"), ExtraKey(2, 5, b"b"))),
    ],
)
def test_what_cannot_be_hashed(namespace: bytes, block_tokens: int, extras: tuple[ExtraKey, ...]) -> None:
    with pytest.raises(InvalidRequest):
        BlockHasher(namespace, block_tokens, extras)


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], np.zeros((2, 2), np.int32), np.array([-1]), ["a"]])
def test_what_is_no_token(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        BlockHasher(NAMESPACE, 1).extend(tokens)
