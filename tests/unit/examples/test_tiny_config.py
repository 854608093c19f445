"""The tiny transformer's config, weights and texts: what they list, what they refuse, what they share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.texts import conversations
from examples.tiny_transformer.config import Group, Layer, TinyConfig, alike, head_wise, list_groups, list_planes
from examples.tiny_transformer.digest import digest_model
from examples.tiny_transformer.families import Gqa, Mla
from examples.tiny_transformer.model import build_model
from examples.tiny_transformer.packed import PackedMla
from examples.tiny_transformer.tokens import ASSISTANT, BEGIN, END, USER, VOCAB_SIZE, chat_prompt, decode
from examples.tiny_transformer.variants import DSA, GQA, HEAD_WISE, MLA, MLA_SWA, MTP, WINDOWED_GQA

FULL = Group("full")
SMALL = TinyConfig(
    name="small",
    groups=(FULL, Group("window", window_tokens=7, sink_tokens=5)),
    layers=alike(Gqa(heads=4, kv_heads=2, head_dim=6), ("window", "full", "window")),
    block_tokens=4,
    d_model=24,
    ff_dim=40,
)


def test_planes_and_groups_are_listed_for_a_layout() -> None:
    assert list_planes(SMALL) == (
        ("k", 0, "window", (2, 4, 6), "float32"),
        ("v", 0, "window", (2, 4, 6), "float32"),
        ("k", 1, "full", (2, 4, 6), "float32"),
        ("v", 1, "full", (2, 4, 6), "float32"),
        ("k", 2, "window", (2, 4, 6), "float32"),
        ("v", 2, "window", (2, 4, 6), "float32"),
    )
    assert list_groups(SMALL) == (("full", None, 0, False), ("window", 7, 5, False))
    mla = list_planes(MLA)
    assert [plane[:4] for plane in mla[:2]] == [
        ("latent", 0, "full", (1, 16, 160)),
        ("latent", 1, "full", (1, 16, 160)),
    ]
    assert list_planes(DSA)[:3] == (
        ("latent", 0, "full", (1, 16, 656), "uint8"),
        ("index_key", 0, "full", (1, 16, 128), "uint8"),
        ("index_scale", 0, "full", (1, 16, 1), "float32"),
    )
    assert [plane[1:] for plane in list_planes(MLA_SWA)] == [
        (0, "window", (1, 16, 656), "uint8"),
        (1, "window", (1, 16, 656), "uint8"),
        (2, "full", (1, 16, 576), "float32"),
    ]
    heads = {(plane[1], plane[2]): plane[3][0] for plane in list_planes(HEAD_WISE)}
    assert heads == {(0, "full"): 2, (0, "window"): 2, (1, "window"): 4, (2, "full"): 1, (2, "window"): 3}
    assert list_planes(MTP)[-3:] == (
        ("k", 3, "draft", (2, 16, 32), "float32"),
        ("v", 3, "draft", (2, 16, 32), "float32"),
        ("hidden", 3, "draft-hidden", (1, 16, 256), "float32"),
    )


def test_a_rank_holds_its_heads_and_all_of_a_latent() -> None:
    assert list_planes(WINDOWED_GQA.shard(2))[0] == ("k", 0, "window", (1, 16, 64), "float32")
    assert list_planes(MLA.shard(4)) == list_planes(MLA)
    with pytest.raises(ValueError, match="do not divide"):
        GQA.shard(4)
    with pytest.raises(ValueError, match="different groups"):
        HEAD_WISE.shard(2)
    even = replace(HEAD_WISE, layers=head_wise(HEAD_WISE.layers[0].attention, [[True, False] * 2], "full", "window"))
    assert even.shard(2).layers[0].head_groups == ("window", "full")


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 0},
        {"block_tokens": 48},
        {"vocab_size": VOCAB_SIZE - 1},
        {"layers": alike(GQA.layers[0].attention, ("full", "other"))},
        {"groups": (FULL, FULL)},
        {"groups": (FULL, Group("window", 8))},
    ],
)
def test_configs_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tiny-gqa"):
        replace(GQA, **change)  # type: ignore[arg-type]


def test_groups_and_families_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="window_tokens"):
        Group("window", 0)
    with pytest.raises(ValueError, match="sink_tokens"):
        Group("full", None, 4)
    with pytest.raises(ValueError, match="name one a head"):
        Layer(Gqa(heads=4, kv_heads=2, head_dim=8), ("full",))
    with pytest.raises(ValueError, match="whole tiles"):
        PackedMla(heads=4, kv_lora_rank=100, rope_dim=4, nope_dim=8, value_dim=8).rows()
    with pytest.raises(ValueError, match="kv_heads"):
        Gqa(heads=4, kv_heads=3, head_dim=8)
    with pytest.raises(ValueError, match="even"):
        Mla(heads=4, kv_lora_rank=8, rope_dim=3, nope_dim=8, value_dim=8)


def test_equal_configs_make_equal_digests_and_others_make_others() -> None:
    config = replace(SMALL, max_positions=64)
    digest = digest_model(build_model(config))
    assert digest_model(build_model(config)) == digest
    assert digest_model(build_model(replace(config, seed=8))) != digest
    assert digest_model(build_model(replace(config, rope_theta=500.0))) != digest  # same weights, other logits


def test_conversations_share_their_document_and_prompts_grow_by_appending() -> None:
    by_document: dict[str, list[str]] = {}
    for conversation in conversations():
        by_document.setdefault(conversation.document, []).append(conversation.name)
        answers: list[list[int]] = []
        earlier: list[int] = []
        for count in range(1, len(conversation.turns) + 1):
            prompt = chat_prompt(conversation.document, conversation.turns[:count], answers).tolist()
            assert prompt[: len(earlier)] == earlier
            assert prompt[0] == BEGIN
            assert prompt[-1] == ASSISTANT
            assert prompt.count(USER) == count
            answers.append([72, 105])
            earlier = prompt + answers[-1]
        assert decode(earlier).startswith(conversation.document)
        assert earlier.count(END) == len(answers) - 1
    assert len(by_document) == 2
    assert min(map(len, by_document.values())) >= 2
    assert min(map(len, by_document)) > 1500
    with pytest.raises(ValueError, match="answers"):
        chat_prompt("text", ("one", "two"), [])
