"""Places of storage tiers: no two tiers have one place, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest
from cachesvc.storages import check_storage


def test_one_folder_is_no_two_tiers_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for other in ("cache/", "./cache", "x/../cache", "link"):
        with pytest.raises(InvalidRequest, match="is given twice"):
            check_storage([f"file:{tmp_path}/{name}?capacity=1GiB" for name in ("cache", other)])
    with pytest.raises(InvalidRequest, match="is given twice"):
        check_storage(["s3://bucket/a", "s3://bucket/a/"])


def test_one_bucket_of_two_stores_is_two_places() -> None:
    texts = [f"s3://bucket?endpoint=https://{host}.example.com" for host in ("a", "b")]
    assert len(check_storage(texts)) == 2


def test_more_than_four_tiers_are_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="5 tiers, and there are at most 4"):
        check_storage([f"file:{tmp_path}/{at}?capacity=1GiB" for at in range(5)])
