"""Log lines of the connector in vLLM's form, with time and process: Python prints those of a logger without handlers
bare."""

from __future__ import annotations

import logging

OURS = ("cachesvc_client", "cachesvc_vllm")


def log_as_vllm() -> None:
    """Give the connector's loggers vLLM's handlers, unless the program has set handlers for them. Idempotent."""
    theirs = logging.getLogger("vllm").handlers
    for logger in map(logging.getLogger, OURS):
        if theirs and not logger.hasHandlers():
            logger.handlers = list(theirs)
            logger.propagate = False
