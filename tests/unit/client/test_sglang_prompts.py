"""Keys of SGLang's requests, and the settings of its plugin."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace

import pytest
from cachesvc_client.core.keys import block_keys
from cachesvc_sglang.plain import EngineRefused, PromptKeys, may_share
from cachesvc_sglang.settings import EngineSettings, read_settings

NAMESPACE = bytes(range(32))
TOKENS = array("q", range(100, 170))


def keys_of(extra: str | None = None, salt: str | None = None) -> list[bytes]:
    return PromptKeys(NAMESPACE, 16, extra, salt).extend(TOKENS)


def test_keys_are_the_clients_own_and_grow_with_the_tokens() -> None:
    keys = PromptKeys(NAMESPACE, 16, None, None)
    for count in (5, 40, 40, len(TOKENS)):
        keys.extend(TOKENS[:count])
        assert len(keys.hashes) == count // 16
    assert b"".join(keys.hashes) == block_keys(NAMESPACE, list(TOKENS), 16)


def test_adapters_extra_keys_and_salts_separate_from_the_first_block_on() -> None:
    kinds = [keys_of(), keys_of(extra="a"), keys_of(salt="a"), keys_of("a", "a"), keys_of(salt="b"), keys_of(extra="b")]
    assert len({keys[0] for keys in kinds}) == len(kinds)
    assert keys_of(extra="", salt="") == keys_of()


@pytest.mark.parametrize("name", ["multimodal_inputs", "input_embeds", "positional_embed_overrides"])
def test_what_tokens_do_not_say_is_not_shared(name: str) -> None:
    plain = {"multimodal_inputs": None, "input_embeds": None, "positional_embed_overrides": None}
    request = SimpleNamespace(**plain, skip_radix_cache_insert=False)
    assert may_share(request)
    setattr(request, name, object())
    assert not may_share(request)


def test_settings_are_read_from_one_variable() -> None:
    assert read_settings({}) == EngineSettings()
    assert read_settings({"CACHESVC_SGLANG": json.dumps({"stock_blocks": 8})}) == EngineSettings(stock_blocks=8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no JSON"),
        ("[]", "is a JSON object"),
        ('{"stock": 1}', "has stock; what can be set is socket"),
        ('{"stock_blocks": 0}', "stock_blocks is at least 1, got 0"),
        ('{"stock_blocks": "1"}', "stock_blocks is int, got '1'"),
        ('{"stock_blocks": true}', "stock_blocks is int, got True"),
    ],
)
def test_settings_that_are_none_are_refused(text: str, reason: str) -> None:
    with pytest.raises(EngineRefused, match=reason):
        read_settings({"CACHESVC_SGLANG": text})
