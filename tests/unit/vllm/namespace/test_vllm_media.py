"""Keys of requests with images: shared where the content names them, this engine's own where a client does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cachesvc_vllm.namespace.media import Media

from cachesvc.model.keys import KEY_BYTES

HASH = "0f" * 32


@dataclass
class Feature:
    """The part of vLLM's ``MultiModalFeatureSpec`` that is read."""

    identifier: str
    mm_hash: str | None = None


@pytest.mark.parametrize("features", [None, [], [Feature(HASH)], [Feature("0f" * 64)], [Feature(f"lora:{HASH}", HASH)]])
def test_what_its_content_names_is_everybody_s(features: list[Feature] | None) -> None:
    assert Media(is_shared=True).salt(features, b"") == b""
    assert Media(is_shared=True).salt(features, b"a" * KEY_BYTES) == b"a" * KEY_BYTES


@pytest.mark.parametrize("name", ["img-0", "0F" * 32, "0f" * 31, f"{HASH}-image-0", ""])
def test_what_a_client_names_is_this_engine_s_own(name: str) -> None:
    one, other = Media(is_shared=True), Media(is_shared=True)
    features = [Feature(HASH), Feature(name, name)]
    assert one.salt(features, b"") == one.salt(features, b"")
    assert len({one.salt(features, b""), other.salt(features, b""), b""}) == 3
    assert one.salt(features, b"a" * KEY_BYTES) not in (one.salt(features, b""), b"a" * KEY_BYTES)


def test_an_operator_may_keep_all_media_apart() -> None:
    assert Media(is_shared=False).salt([Feature(HASH)], b"") != b""
    assert Media(is_shared=False).salt([], b"") == b""
