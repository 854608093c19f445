"""Words of routers with a request, read and answered; nonsense is ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cachesvc_client import Expected
from cachesvc_vllm.handover import answer_of, expected_of, hands_over

from cachesvc.wire.convert import expected_to_proto

PROMPT_TOKENS = 110
PLACE = {"remote_host": "10.0.0.1", "remote_port": 7100}
READY = Expected("10.0.0.1:7100", 3, 5.0, is_computed=True, waits=False)
WHOLE, RUNNING = READY._replace(blocks=0), READY._replace(is_computed=False)


def request(params: Any, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        num_computed_tokens=100,
        num_tokens=PROMPT_TOKENS,
        max_tokens=1,
        status=SimpleNamespace(name=status),
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (
            {"do_remote_prefill": True, **PLACE, "remote_num_tokens": 100},
            READY,
        ),
        ({"do_remote_prefill": True, **PLACE}, WHOLE),
        ({"do_remote_prefill": True, **PLACE, "remote_num_tokens": PROMPT_TOKENS}, WHOLE),
        ({"remote_prefiller": {**PLACE, "remote_num_tokens": 64}}, RUNNING._replace(blocks=2)),
        ({"remote_prefiller": {**PLACE, "remote_num_tokens": 1 << 62}}, RUNNING),
        ({"do_remote_prefill": True, **PLACE, "remote_num_tokens": 1 << 62}, WHOLE),
        ({"remote_prefiller": {**PLACE, "kv_request_id": "x"}}, RUNNING),
        ({"remote_kv_source": PLACE}, WHOLE),
        (
            {"do_remote_prefill": True, "remote_host": "fd00::1", "remote_port": "7100"},
            Expected("[fd00::1]:7100", 0, 5.0, True, False),
        ),
        ({"do_remote_prefill": True, **PLACE, "remote_num_tokens": 31}, None),
        ({"do_remote_decode": True}, None),
        (None, None),
        ("words", None),
        ({"do_remote_prefill": True}, None),
        ({"do_remote_prefill": True, "remote_host": "a b", "remote_port": 1}, None),
        ({"do_remote_prefill": True, "remote_host": "fe80::1%\ud800", "remote_port": 1}, None),
        ({"do_remote_prefill": True, "remote_host": "fe80::1%a\n", "remote_port": 1}, None),
        ({"do_remote_prefill": True, "remote_host": 5, "remote_port": 1}, None),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1 << 40}, None),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 0}, None),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": True}, None),
        ({"do_remote_prefill": True, "remote_host": "h" * 300, "remote_port": 1}, None),
        ({"remote_prefiller": ["10.0.0.1"]}, None),
    ],
)
def test_what_a_router_says_is_expected_or_ignored(params: Any, expected: Expected | None) -> None:
    assert expected_of(request(params), 5.0, 32) == expected


@pytest.mark.parametrize("tokens", [1 << 31, 1 << 40, 10**30])
def test_a_number_of_tokens_that_no_message_holds_is_as_none(tokens: int) -> None:
    expected = expected_of(request({"do_remote_prefill": True, **PLACE, "remote_num_tokens": tokens}), 5.0, 1)
    assert expected is not None
    assert expected_to_proto(expected).blocks == 0


def test_a_router_that_asks_for_it_learns_where_the_blocks_are() -> None:
    told = answer_of(request({"do_remote_decode": True}), "10.0.0.1:7100", "e", 2)
    assert told is not None
    assert (told["remote_host"], told["remote_port"], told["remote_num_tokens"]) == ("10.0.0.1", 7100, 100)
    assert expected_of(request(told), 5.0, 32) == READY


@pytest.mark.parametrize(
    ("params", "address", "status"),
    [
        ({"do_remote_decode": True}, "", "FINISHED_LENGTH_CAPPED"),
        ({"do_remote_decode": False}, "10.0.0.1:7100", "FINISHED_LENGTH_CAPPED"),
        ({"do_remote_decode": True}, "10.0.0.1:7100", "FINISHED_ABORTED"),
        (None, "10.0.0.1:7100", "FINISHED_STOPPED"),
    ],
)
def test_there_is_no_answer_where_nothing_is_lent_or_asked(params: Any, address: str, status: str) -> None:
    assert answer_of(request(params, status), address, "e", 1) is None


@pytest.mark.parametrize(
    ("params", "max_tokens", "is_handed_over"),
    [
        ({"do_remote_decode": True}, 1, True),
        ({"do_remote_decode": True}, 2, False),  # it writes on in the prompt's last block
        ({"do_remote_decode": False}, 1, False),
        ({"do_remote_prefill": True, **PLACE}, 1, False),
        (None, 1, False),
        ("words", 1, False),
    ],
)
def test_a_prompt_is_handed_over_by_a_request_that_ends_with_it(
    params: Any, max_tokens: int, *, is_handed_over: bool
) -> None:
    asked = request(params)
    asked.max_tokens = max_tokens
    assert hands_over(asked) is is_handed_over
