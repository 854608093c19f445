"""Ranks of one engine have the daemon's memory together, or none has."""

from __future__ import annotations

import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.plain import Start, agreed_model


def test_ranks_that_started_alike_share_as_one_model() -> None:
    assert agreed_model([Start("m")]) == "m"
    assert agreed_model([Start("m"), Start("m")]) == "m"


def test_where_one_found_no_daemon_none_uses_it() -> None:
    assert agreed_model([Start("m"), Start()]) == ""


def test_what_kept_one_from_starting_is_told_by_all() -> None:
    with pytest.raises(ConnectorRefused, match="rank 1 did not start: no room"):
        agreed_model([Start("m"), Start(failure="no room")])


def test_ranks_with_different_weights_do_not_serve() -> None:
    with pytest.raises(ConnectorRefused, match="share as m, n: they read different weights"):
        agreed_model([Start("m"), Start("n")])
