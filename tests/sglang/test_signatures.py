"""SGLang's insides are no public API: what the plugin hooks, replaces and reads is as the installed release has it."""

from __future__ import annotations

import json

import pytest

from tests.sglang.rig import forker

SRT = "sglang.srt"


def test_the_installed_sglang_has_what_the_plugin_relies_on() -> None:
    assert json.loads(forker().run("tests.sglang.signatures")[-1]) == []


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (
            f"{SRT}.managers.scheduler.Scheduler.run_batch",
            f"SGLang has no {SRT}.managers.scheduler.Scheduler.run_batch, which the plugin hooks or calls",
        ),
        (
            f"{SRT}.mem_cache.base_prefix_cache.BasePrefixCache.on_release",
            "SGLang's base of PageCache.on_release has no on_release: it would never be called",
        ),
    ],
)
def test_a_release_without_a_name_is_found_out_in_one_line(target: str, line: str) -> None:
    assert json.loads(forker().run("tests.sglang.signatures", target)[-1]) == [line]
