"""An engine starts without a daemon where its operator allows it, and says what is missing where not."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.rig import Engine, Fleet, engines, random_prompt


def test_without_a_daemon_an_engine_refuses_to_start_or_serves_as_plain_vllm(
    fleet: Fleet, plain: Engine, tmp_path: Path
) -> None:
    socket, prompt = str(tmp_path / "kv.sock"), random_prompt(5, 3.5)
    with engines(fleet.engine(socket, extra={"required": False})) as (alone,):
        strict = fleet.engine(socket)
        try:
            assert f"no cachesvcd answers at {socket}" in strict.refusal()
        finally:
            strict.kill_if_running()
        assert alone.ask(prompt)[0].said == plain.ask(prompt)[0].said
