"""Every kind of failure reaches the caller under its own name, however it came."""

from __future__ import annotations

from pathlib import Path

import cachesvc_client
import pytest
from cachesvc_client.errors import BY_CODE, CacheClientError, DaemonFault, DaemonUnavailable, DeadlineExceeded, error_of
from kvcache.v1 import cache_pb2

from cachesvc.model.errors import ErrorCode

ERRORS_TABLE = Path(__file__).resolve().parents[2] / "proto/ERRORS.md"


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_failed_operation_becomes_the_error_of_its_code(code: ErrorCode) -> None:
    error = error_of(cache_pb2.OperationError(code=code.value, message="what to do"))
    assert type(error) is BY_CODE[code]
    assert error.code is code
    assert str(error) == "what to do"


def test_what_the_daemon_said_itself_is_told_from_what_happened_on_the_way() -> None:
    draining = error_of(cache_pb2.OperationError(code="UNAVAILABLE", message="draining"))
    assert isinstance(draining, DaemonUnavailable)
    assert draining.is_draining
    late = error_of(cache_pb2.OperationError(code="DEADLINE", message="late"))
    assert isinstance(late, DeadlineExceeded)
    assert late.was_answered
    assert not DeadlineExceeded("on the way").was_answered


def test_a_code_of_a_newer_daemon_keeps_its_name_and_message() -> None:
    error = error_of(cache_pb2.OperationError(code="FROM_THE_FUTURE", message="soon"))
    assert type(error) is DaemonFault
    assert str(error) == "FROM_THE_FUTURE: soon"


def test_every_error_is_exported_and_in_the_drawn_tree() -> None:
    tree = cachesvc_client.errors.__doc__ or ""
    for kind in _all_kinds(CacheClientError):
        assert kind.__name__ in cachesvc_client.__all__
        assert kind.__name__ in tree


def test_the_table_of_errors_names_every_code_that_callers_can_see() -> None:
    table = ERRORS_TABLE.read_text()
    assert [code.value for code in ErrorCode if f"`{code.value}`" not in table] == []


def _all_kinds(kind: type[CacheClientError]) -> list[type[CacheClientError]]:
    return [kind] + [below for child in kind.__subclasses__() for below in _all_kinds(child)]
