"""The end of a copy job: its waiters are released, then its owner hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cachesvc.memory.interface import CopyJob

log = logging.getLogger(__name__)

WriteWord = Callable[[int, int], None]


def end_job(job: CopyJob, error: Exception | None, write_word: WriteWord) -> None:
    """Release a failed job's waiters and tell its owner how it ended; an owner that raises is logged,
    once."""
    if error is not None:
        if job.failed_word is not None:
            write_word(job.failed_word, job.end_value)
        if job.word is not None:
            write_word(job.word, job.end_value)
    try:
        job.done(error)
    except Exception:
        log.exception("copy_done_callback_failed ticket=%d", job.ticket)
