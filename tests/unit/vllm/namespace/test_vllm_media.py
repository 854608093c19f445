"""Keys of requests with images: by what the engine has of them, or, where the operator says so, by their names."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_vllm.adapters import DIGEST
from cachesvc_vllm.media import Media, Sharing

from cachesvc.model.words import KEY_BYTES

HASH = "0f" * 32
ADAPTER = b"a" * KEY_BYTES


class Item(UserDict[str, Any]):
    """A processed item, as vLLM's ``MultiModalKwargsItem``."""


def item(content: str) -> Item:
    """An item with the digest of its content."""
    made = Item(pixels=SimpleNamespace(data=None))
    setattr(made, DIGEST, content.encode().ljust(KEY_BYTES))
    return made


@dataclass
class Feature:
    """The part of vLLM's ``MultiModalFeatureSpec`` that is read."""

    identifier: str
    mm_hash: str | None = None
    data: Any = None
    modality: str = "image"
    mm_position: Any = field(default_factory=lambda: SimpleNamespace(length=4, is_embed=None))


@dataclass
class Request:
    """The part of vLLM's request that is read. ``block_hashes``: here the names that they were made with."""

    mm_features: list[Feature]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    request_id: str = "r"
    block_hashes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hash what has no hash."""
        self.block_hashes.extend(each.identifier for each in self.mm_features[len(self.block_hashes) :])


def red(name: str = "img-0") -> Request:
    """A request with a red image."""
    return Request([Feature(name, name, item("red"))])


def hashes(media: Media, request: Request, salt: bytes = b"") -> tuple[bytes | None, list[str]]:
    """Salt and hashes that a request is matched by."""
    found = media.salt(request, salt)  # type: ignore[arg-type]
    return found, request.block_hashes


def test_an_image_is_its_content_whatever_a_client_calls_it() -> None:
    one, other = Media(Sharing.CONTENT), Media(Sharing.CONTENT)
    expected = hashes(one, red())
    assert expected[0] == b""
    assert hashes(other, red(HASH)) == hashes(one, red(HASH)) == expected
    blue = Request([Feature(HASH, HASH, item("blue"))])
    assert hashes(other, blue)[0] == b""
    assert blue.block_hashes != expected[1]


def test_a_request_s_adapter_is_in_its_salt_and_in_names_where_towers_have_one() -> None:
    plain, towers = Media(Sharing.CONTENT), Media(Sharing.CONTENT, in_towers=True)
    assert hashes(plain, red(), ADAPTER) == (ADAPTER, hashes(plain, red())[1])
    names = [hashes(towers, red(), salt)[1][0] for salt in (b"", ADAPTER, b"b" * KEY_BYTES)]
    assert len(set(names)) == 3


def test_what_the_encoder_made_with_other_weights_has_another_name() -> None:
    salt = [b"1" * KEY_BYTES]
    media = Media(Sharing.CONTENT, lambda: salt[0])
    before = hashes(media, red())
    salt[0] = b"2" * KEY_BYTES
    assert hashes(media, red()) != before
    waits = red()
    hashes(media, waits)
    salt[0] = b"3" * KEY_BYTES
    assert hashes(media, waits) == hashes(media, red())


def test_a_request_that_vllm_has_begun_keeps_its_names_and_is_this_engine_s_own() -> None:
    salt = [b"1" * KEY_BYTES]
    media = Media(Sharing.CONTENT, lambda: salt[0])
    begun = red()
    before = hashes(media, begun)[1][:]
    begun.num_preemptions = 1
    assert hashes(media, begun) == (b"", before)
    salt[0] = b"2" * KEY_BYTES
    own, names = hashes(media, begun)
    assert own not in (b"", None)
    assert names == before


@pytest.mark.parametrize("data", [None, Item(address=SimpleNamespace(data=1), monotonic_id=SimpleNamespace(data=2))])
def test_what_the_engine_does_not_have_is_its_own(data: Item | None) -> None:
    one, other = Media(Sharing.CONTENT), Media(Sharing.CONTENT)
    request = Request([Feature("red", "red", item("red")), Feature(HASH, HASH, data)])
    assert one.salt(request, b"") == one.salt(request, b"")  # type: ignore[arg-type]
    assert len({one.salt(request, b""), other.salt(request, b""), b"", None}) == 4  # type: ignore[arg-type]
    assert request.block_hashes == ["red", HASH]


def test_others_hashes_of_a_renamed_request_are_told() -> None:
    renamed: list[str] = []
    media = Media(Sharing.CONTENT, renamed=renamed.append)
    request = red()
    for _ in range(3):
        hashes(media, request)
    assert renamed == ["r"]


@pytest.mark.parametrize("features", [[], [Feature(HASH)], [Feature("0f" * 64)], [Feature(f"lora:{HASH}", HASH)]])
def test_by_names_a_hash_of_content_is_every_engine_s(features: list[Feature]) -> None:
    media = Media(Sharing.NAMES)
    for salt in (b"", ADAPTER):
        assert media.salt(Request(features), salt) == salt  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["img-0", "0F" * 32, "0f" * 31, f"{HASH}-image-0", ""])
def test_by_names_what_a_client_names_otherwise_is_this_engine_s_own(name: str) -> None:
    one, other = Media(Sharing.NAMES), Media(Sharing.NAMES)
    request = Request([Feature(HASH), Feature(name, name)])
    assert hashes(one, request) == hashes(one, request)
    assert len({hashes(one, request)[0], hashes(other, request)[0], b""}) == 3
    assert hashes(one, request, ADAPTER)[0] not in (hashes(one, request)[0], ADAPTER)


@pytest.mark.parametrize("sharing", [Sharing.NONE, Sharing.NAMES])
def test_a_reset_ends_the_salt_of_what_is_this_engine_s_own(sharing: Sharing) -> None:
    media = Media(sharing)
    before = hashes(media, red())[0]
    assert before not in (b"", None)
    media.reset()
    assert hashes(media, red())[0] not in (b"", None, before)
    assert media.salt(Request([]), b"") == b""  # type: ignore[arg-type]
