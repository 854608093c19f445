"""Options of requests beside tokens: each request finds what it may find, and is answered as without a cache."""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.rig import running_node
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, engines, random_prompt


def test_samples_prompt_logprobs_and_salts_are_answered_as_without_a_cache(fleet: Fleet, plain: Engine) -> None:
    prompt = random_prompt(300, 6.5)
    asked = [
        replace(prompt, sampling={"n": 3, "temperature": 0.8, "seed": 5}),
        replace(prompt, sampling={"n": 3, "temperature": 0.8, "seed": 5}),
        replace(prompt, sampling={"prompt_logprobs": 1}),
        replace(prompt, salt="a"),
        replace(prompt, salt="a"),
        replace(prompt, salt="b"),
    ]
    with running_node() as node, engines(fleet.engine(node.socket)) as (mine,):
        answers = [mine.ask(each)[0] for each in asked]
        assert [answer.said for answer in answers] == [plain.ask(each)[0].said for each in asked]
        assert len(set(answers[0].tokens)) > 1
        found = [answer.cached // BLOCK_TOKENS for answer in answers]
        assert found == [0, 6, 0, 0, 6, 0], "prompt log-probabilities are computed, and salts share nothing"
