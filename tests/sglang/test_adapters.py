"""SGLang engines with adapters of ``--lora-paths``: what one has computed with an adapter is found by those alone that
have loaded equal bytes, whatever the adapter's name and path."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.rig import running_node
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, MODEL, Engine, check_daemon, engines, random_prompt
from tests.vllm.weights import write_adapter

PROMPT = random_prompt(1, 6.5)
FOUND = 6 * BLOCK_TOKENS


def with_adapters(fleet: SglangFleet, socket: str | None, paths: Mapping[str, Path]) -> Engine:
    """An engine that loads adapters by name when it starts."""
    options: dict[str, Any] = {
        "lora_paths": {name: str(path) for name, path in paths.items()},
        "lora_backend": "torch_native",
        "max_loras_per_batch": 3,
    }
    return fleet.engine(socket, options=options)


def asked(engine: Engine, *names: str) -> list[tuple[object, int]]:
    """The answer under each adapter, and how much of the prompt was found."""
    answers = [engine.ask(replace(PROMPT, adapter=(0, name)))[0] for name in names]
    return [(answer.said, answer.cached) for answer in answers]


def test_adapters_share_by_the_bytes_that_were_loaded(fleet: SglangFleet, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_adapter(mine, MODEL, seed=11)
    write_adapter(other, MODEL, seed=12)
    with engines(with_adapters(fleet, None, {"mine": mine, "other": other})) as (alone,):
        (old, _), (new, _) = asked(alone, "mine", "other")
        plain = alone.ask(PROMPT)[0].said
    assert len({old, new, plain}) == 3
    with running_node() as node:
        with engines(with_adapters(fleet, node.socket, {"mine": mine})) as (first,):
            assert asked(first, "mine", "mine") == [(old, 0), (old, FOUND)]
            assert first.ask(PROMPT)[0].cached == 0
            write_adapter(mine, MODEL, seed=12)
            assert asked(first, "mine") == [(old, FOUND)], "as it was loaded"
        write_adapter(tmp_path / "renamed", MODEL, seed=11)
        shutil.rmtree(other)
        with engines(with_adapters(fleet, node.socket, {"mine": mine, "older": tmp_path / "renamed"})) as (second,):
            assert asked(second, "mine", "mine") == [(new, 0), (new, FOUND)], "new files at an old path"
            assert asked(second, "older") == [(old, FOUND)], "equal bytes under another name, after a restart"
            answer = second.ask(PROMPT)[0]
            assert (answer.said, answer.cached) == (plain, FOUND)
            second.plant_wrong_pages()
            assert asked(second, "older")[0][0] != old, "wrong pages would show"
        check_daemon(node.socket)
