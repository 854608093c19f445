"""Settings of the connector, and the releases of vLLM that it takes."""

from __future__ import annotations

from typing import Any

import cachesvc_vllm
import pytest
from cachesvc_client.plugins.keeper import ConnectorRefused
from cachesvc_vllm.refusals import require_version
from cachesvc_vllm.settings import MOST_PATIENCE_MS, Settings, read_settings

from cachesvc.flows.expected import MOST_PATIENCE_SECONDS


def test_nothing_said_is_every_default() -> None:
    assert read_settings({}) == Settings()


def test_what_is_said_is_taken() -> None:
    said = {"socket": "/run/kv.sock", "required": False, "host_blocks": 0, "stock_blocks": 8}
    assert read_settings(said) == Settings("/run/kv.sock", required=False, host_blocks=0, stock_blocks=8)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"sockt": "/x"}, "sockt; what can be set is socket, required"),
        ({"socket": 3}, "socket is str, got 3"),
        ({"required": "no"}, "required is bool, got 'no'"),
        ({"required": None}, "required is bool, got None"),
        ({"stock_blocks": True}, "stock_blocks is int, got True"),
        ({"stock_blocks": 0}, "stock_blocks is at least 1, got 0"),
        ({"remote_patience_ms": 0}, "remote_patience_ms is 1 to 600000, got 0"),
        ({"remote_patience_ms": 600_001}, "remote_patience_ms is 1 to 600000, got 600001"),
        ({"host_blocks": -1}, "host_blocks is not negative, got -1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConnectorRefused, match=words):
        read_settings(said)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1.dev3+gabc", "0.32.0+cpu"])
def test_a_release_that_was_tried_is_taken(version: str) -> None:
    require_version(version, allow_any=False)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "dev"])
def test_another_release_is_refused_with_what_works_unless_the_operator_wants_it(version: str) -> None:
    with pytest.raises(ConnectorRefused, match=r"works with vLLM 0\.32 and 0\.33.*allow_untested_vllm"):
        require_version(version, allow_any=False)
    require_version(version, allow_any=True)


def test_the_package_is_imported_without_vllm_and_the_connector_is_not() -> None:
    assert cachesvc_vllm.__all__ == ["CachesvcConnector"]
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        _ = cachesvc_vllm.CachesvcConnector
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = cachesvc_vllm.Connector


def test_the_longest_patience_is_what_a_daemon_keeps() -> None:
    assert MOST_PATIENCE_MS == MOST_PATIENCE_SECONDS * 1000
