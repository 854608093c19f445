"""vLLM's block pool is no public API: what the connector takes the place of is as the installed release has it."""

from __future__ import annotations

import json

from tests.vllm.rig import forker


def test_the_installed_vllm_has_what_the_connector_replaces_and_implements() -> None:
    assert json.loads(forker().run("tests.vllm.signatures")[-1]) == []
