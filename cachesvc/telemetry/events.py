"""Logs are events: a constant name and fields, one JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time

_log = logging.getLogger("cachesvc")


class _JsonLines(logging.Formatter):
    """``{"time": ..., "level": ..., "event": ..., fields...}``"""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        line["event"] = record.getMessage()
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_logging(level: str) -> None:
    """Write events of ``level`` and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def event(name: str, **fields: object) -> None:
    """Something that operators want to know."""
    _log.info(name, extra={"fields": fields})


def warning(name: str, **fields: object) -> None:
    """Something that should not happen often."""
    _log.warning(name, extra={"fields": fields})


def failure(name: str, **fields: object) -> None:
    """Something broke; with the traceback of the exception at hand."""
    _log.error(name, exc_info=True, extra={"fields": fields})
