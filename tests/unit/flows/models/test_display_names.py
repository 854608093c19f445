"""Names that operators see beside a model's identity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachesvc.flows.registration import register
from cachesvc.model.errors import InvalidRequest
from tests.unit.flows.models.test_flows_models import Desk, ask


def test_a_display_name_is_no_part_of_the_namespace_and_the_first_one_stays() -> None:
    desk, wish = Desk(), ask("m", 10)
    made = register(desk.core, desk.vault, wish, 0.0)
    assert made.model.shown == "m"
    for name in ("llama", "another"):
        again = register(desk.core, desk.vault, replace(wish, display_name=name), 0.0)
        assert again.model is made.model
        assert made.model.shown == "llama"


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\u202e", "x" * 129, "\u00e9" * 65])
def test_a_display_name_that_terminals_would_obey_or_that_is_too_long_is_refused(name: str) -> None:
    desk = Desk()
    with pytest.raises(InvalidRequest, match="display_name must be at most 128 bytes of printable text"):
        register(desk.core, desk.vault, replace(ask("m", 10), display_name=name), 0.0)
    assert desk.names == []
