"""One tree of errors for daemon and client: every kind of failure reaches the caller under its own name."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path

import cachesvc_client
import pytest
from cachesvc_client import BlockHasher, gqa, layout_of_config
from cachesvc_client.core import errors as client_errors
from cachesvc_client.core.errors import (
    BY_CODE,
    CacheClientError,
    DaemonDraining,
    DaemonFault,
    DaemonUnavailable,
    DeadlineExceeded,
    GpuFailed,
    error_of,
)
from kvcache.v1 import cache_pb2

from cachesvc.model import errors as model_errors
from cachesvc.model.errors import CacheError, ErrorCode, InvalidRequest, LeaseLost, LimitExceeded, PoolExhausted
from cachesvc.wire.status import GRPC_CODES, MAX_FACT_CHARACTERS, refusal

ERRORS_TABLE = Path(__file__).resolve().parents[3] / "proto/ERRORS.md"
OWN_TO_THE_DAEMON = {"KeyReused", "EventsForgotten", "OtherEpoch", "Unavailable"}
"""Errors that a client knows by the class above or below."""
DRAWN = re.compile(r"^([│ ├└─]*)([A-Z]\w+)  ", re.MULTILINE)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_failed_operation_becomes_the_error_of_its_code(code: ErrorCode) -> None:
    error = error_of(cache_pb2.OperationError(code=code.value, message="what to do"))
    assert type(error) is BY_CODE[code]
    assert error.code is code
    assert str(error) == "what to do"


def test_facts_cross_the_wire_by_name_and_unknown_ones_are_dropped() -> None:
    full = PoolExhausted(pool="p", wanted=3, free=1, evictable=0, pinned=1, quarantined=0, capacity=2)
    message = refusal(full)
    message.facts.add(name="from_the_future", number=1)
    message.facts.add(name="from_message", text="no")
    error = error_of(message)
    assert isinstance(error, PoolExhausted)
    assert error.facts() == full.facts()
    assert error.can_never_fit
    assert error.from_message("again").wanted is None


def test_a_fact_that_is_too_long_is_cut_and_a_number_that_is_too_large_left_out() -> None:
    assert len(refusal(LeaseLost("lease", "x" * 5000)).facts[1].text) == MAX_FACT_CHARACTERS
    assert [fact.name for fact in refusal(LimitExceeded("keys", 1 << 70, 1)).facts] == ["what", "limit"]


def test_one_table_leads_from_the_error_to_its_code_and_back() -> None:
    assert set(BY_CODE) == set(GRPC_CODES) == set(ErrorCode)
    for kind in _all_kinds(CacheError)[1:]:
        known = BY_CODE[kind.code]
        assert issubclass(kind, known) or issubclass(known, kind) or not _is_from_the_wire(kind), kind


def test_one_class_catches_all_that_either_side_raises() -> None:
    assert CacheClientError is CacheError
    for build in _bad_calls():
        with pytest.raises(CacheClientError):
            build()


def test_no_two_classes_have_one_name() -> None:
    names = [kind.__name__ for kind in _all_kinds(CacheError)]
    assert len(names) == len(set(names))
    for name in set(names) & set(cachesvc_client.__all__):
        assert issubclass(getattr(cachesvc_client, name), CacheError)


def test_draining_is_told_from_gone_and_the_daemons_word_from_what_happened_on_the_way() -> None:
    draining = error_of(cache_pb2.OperationError(code="DRAINING", message="draining"))
    assert isinstance(draining, DaemonDraining)
    assert draining.is_draining
    gone = error_of(cache_pb2.OperationError(code="UNAVAILABLE", message="stops"))
    assert isinstance(gone, DaemonUnavailable)
    assert not gone.is_draining
    late = error_of(cache_pb2.OperationError(code="DEADLINE", message="late"))
    assert isinstance(late, DeadlineExceeded)
    assert late.was_answered
    assert not DeadlineExceeded("on the way").was_answered


def test_a_code_of_a_newer_daemon_keeps_its_name_and_message() -> None:
    error = error_of(cache_pb2.OperationError(code="FROM_THE_FUTURE", message="soon"))
    assert type(error) is DaemonFault
    assert str(error) == "FROM_THE_FUTURE: soon"


def test_an_error_with_facts_can_be_made_of_its_sentence_alone() -> None:
    for kind in _all_kinds(CacheError):
        error = kind.from_message("what to do")
        assert (type(error), str(error)) == (kind, "what to do")
    assert PoolExhausted.from_message("full").wanted is None


@pytest.mark.parametrize("again", [copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_cross_from_process_to_process_with_their_facts(again: Callable[[CacheError], CacheError]) -> None:
    lost = again(LeaseLost("lease-1", "it fell silent"))
    assert isinstance(lost, LeaseLost)
    assert (lost.lease, str(lost)) == ("lease-1", str(LeaseLost("lease-1", "it fell silent")))
    broken = again(GpuFailed("no room", 2))
    assert isinstance(broken, GpuFailed)
    assert broken.driver_code == 2


@pytest.mark.parametrize("module", [client_errors, model_errors])
def test_the_tree_is_drawn_as_it_is(module: object) -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for indent, name in DRAWN.findall(getattr(module, "__doc__", None) or ""):
        del path[len(indent) // 4 :]
        drawn[name] = path[-1] if path else ""
        path.append(name)
    drawn = {name: {"CacheClientError": "CacheError"}.get(above, above) for name, above in drawn.items()}
    own = {
        kind.__name__: kind.__bases__[0].__name__
        for kind in _all_kinds(CacheError)[1:]
        if module is client_errors or kind.__module__ == model_errors.__name__
    }
    assert own.items() <= drawn.items()
    assert drawn.keys() - own.keys() <= {"CacheError", "CacheClientError", "LedgerBroken", "IllegalMove"}


def test_every_error_that_callers_can_see_is_exported() -> None:
    for kind in _all_kinds(CacheError)[1:]:
        if kind.__name__ not in OWN_TO_THE_DAEMON:
            assert kind.__name__ in cachesvc_client.__all__
            assert kind.__name__ in client_errors.__all__


def test_the_table_of_errors_names_every_code_that_callers_can_see() -> None:
    table = ERRORS_TABLE.read_text()
    for code in ErrorCode:
        row = next(line for line in table.splitlines() if line.startswith(f"| `{code.value}` |"))
        assert f"| {GRPC_CODES[code].name} | {BY_CODE[code].__name__} |" in row


def test_a_bug_of_the_daemons_own_is_no_error_of_callers() -> None:
    assert not issubclass(model_errors.LedgerBroken, CacheError)


def _bad_calls() -> tuple[Callable[[], object], ...]:
    return (
        lambda: gqa(layers=0, kv_heads=8, head_dim=128, block_tokens=64),
        lambda: BlockHasher(b"x", 64),
        lambda: layout_of_config({}, block_tokens=64),
    )


def _is_from_the_wire(kind: type[CacheError]) -> bool:
    return kind.__module__ == InvalidRequest.__module__


def _all_kinds(kind: type[CacheError]) -> list[type[CacheError]]:
    """The classes of our own packages: a test may define further ones."""
    below = [each for child in kind.__subclasses__() for each in _all_kinds(child)]
    return [kind] + [each for each in below if each.__module__ in (model_errors.__name__, client_errors.__name__)]
