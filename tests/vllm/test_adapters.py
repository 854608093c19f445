"""Engines share where the files of a model are equal, whatever the names of their folders, and where they have loaded
equal adapters, whatever has become of the files since, and not where an adapter's name alone is equal."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.e2e.rig import running_node
from tests.vllm.rig import BLOCK_TOKENS, MODEL, Fleet, engines, make_saved_fleet, random_prompt
from tests.vllm.weights import write_adapter

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
STEP = {"weights_version": "step-0"}


def test_adapters_of_one_name_and_path_share_exactly_where_their_files_are_equal(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    saved = make_saved_fleet(tmp_path / "model")
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_adapter(mine, MODEL, seed=11)
    write_adapter(other, MODEL, seed=12)
    prompt = random_prompt(1, 6.5)
    asked = [prompt, replace(prompt, adapter=(1, str(mine))), replace(prompt, adapter=(2, str(other)))]

    with engines(saved.engine(None, caching=False, options=LORA)) as (plain,):
        expected = [plain.ask(each)[0].said for each in asked]
    assert len(set(expected)) == 3
    with running_node() as node:
        with engines(saved.engine(node.socket, options=LORA, extra=STEP)) as (first,):
            for found in (0, 6):
                answers = [first.ask(each)[0] for each in asked]
                assert [answer.said for answer in answers] == expected
                assert [answer.cached for answer in answers] == [found * BLOCK_TOKENS] * 3
            write_adapter(other, MODEL, seed=13)
            (answer,) = first.ask(asked[2])
            assert (answer.said, answer.cached) == (expected[2], 6 * BLOCK_TOKENS), "as it was loaded"
            first.load_adapter(2, str(other))
            newer = first.ask(asked[2])[0]
            assert newer.said not in expected
            assert newer.cached == 0
            write_adapter(other, MODEL, seed=12)
            first.load_adapter(2, str(other))
            assert first.reset()
            (answer,) = first.ask(asked[2])
            assert (answer.said, answer.cached) == (expected[2], 6 * BLOCK_TOKENS), "as any engine that has loaded it"
            write_adapter(other, MODEL, seed=14)
            first.load_adapter(2, str(other))
            assert first.reset()
            assert first.ask(asked[2])[0].cached == 0
        shutil.rmtree(other)
        write_adapter(other, MODEL, seed=13)
        renamed = shutil.copytree(tmp_path / "model", tmp_path / "renamed")
        with engines(Fleet(renamed, saved.load_format).engine(node.socket, options=LORA, extra=STEP)) as (second,):
            answers = [second.ask(each)[0] for each in asked]
            assert [answer.said for answer in answers[:2]] == expected[:2]
            assert answers[2].said == newer.said
            assert [answer.cached for answer in answers] == [6 * BLOCK_TOKENS] * 3
            both = second.ask(*asked[1:])  # in one batch; vLLM for processors answers others beside adapters wrongly
            assert [answer.said for answer in both] == [answer.said for answer in answers[1:]]
            assert [answer.cached for answer in both] == [6 * BLOCK_TOKENS] * 2
            second.plant_wrong_pages()
            assert second.ask(asked[1])[0].said != expected[1], "wrong pages would show"
