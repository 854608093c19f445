"""Log lines of the connector have vLLM's form, with time and process, where the program has set no other."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from cachesvc_vllm.plain import OURS, log_as_vllm


@pytest.fixture
def bare() -> Iterator[io.StringIO]:
    """Loggers as in an engine: vLLM's own has a handler, the root and ours have none."""
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    handler.setFormatter(logging.Formatter("%(process)d %(asctime)s %(message)s"))
    loggers = [logging.getLogger(), logging.getLogger("vllm"), *map(logging.getLogger, OURS)]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    logging.getLogger("vllm").handlers = [handler]
    yield told
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate


def test_a_line_has_time_and_process_once(bare: io.StringIO) -> None:
    logging.getLogger().handlers = []  # those of pytest
    log_as_vllm()
    log_as_vllm()
    logging.getLogger("cachesvc_client.wire.connection").warning("daemon_lost path=%s", "/tmp/kv.sock")
    assert bare.getvalue().count("daemon_lost") == 1
    assert bare.getvalue().split()[0].isdecimal()


def test_handlers_of_the_program_are_left_as_they_are(bare: io.StringIO) -> None:
    own = logging.NullHandler()
    logging.getLogger().handlers = [own]
    log_as_vllm()
    assert [logging.getLogger(name).handlers for name in OURS] == [[], []]
    assert bare.getvalue() == ""
