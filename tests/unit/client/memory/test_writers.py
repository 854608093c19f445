"""A pool is quiet once all have let go who copy into it, and no sooner."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from cachesvc_client import CacheClient
from cachesvc_client.memory.pool import Writers

from cachesvc.memory.timeline import MappedSheet
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from tests.unit.rigs.client_rig import FakeDaemon

WORDS = 64
LAYOUT = Layout(4, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (64,), "uint8"),))


def engine_of(sheet: MappedSheet) -> Writers:
    """The end of the pipe that an engine gets."""
    assert sheet.writers is not None
    return Writers(os.dup(sheet.writers[1]))


def test_an_engine_sees_the_end_of_the_last_who_copies() -> None:
    sheet, held = MappedSheet(WORDS), list[int]()
    engine = engine_of(sheet)
    sheet.hand_over(lambda _, writers: held.extend(os.dup(writers) for _ in range(2)))
    assert not engine.wait_over(0.0)
    os.close(held.pop())
    assert not engine.wait_over(0.0)
    waiter = threading.Thread(target=engine.wait_over, args=(3600.0,))
    waiter.start()
    os.close(held.pop())
    waiter.join()
    assert engine.wait_over(0.0)
    engine.close()
    assert engine.wait_over(0.0), "it stays over"
    sheet.close()
    assert sheet.writers is None


def test_what_this_process_copies_is_over_with_its_sheet() -> None:
    sheet = MappedSheet(WORDS)
    engine = engine_of(sheet)
    assert not engine.wait_over(0.0)
    sheet.close()
    assert engine.wait_over(0.0)


def test_an_end_that_was_closed_unseen_is_never_told() -> None:
    sheet = MappedSheet(WORDS)
    engine = engine_of(sheet)
    engine.close()
    sheet.close()
    assert not engine.wait_over(0.0)


def test_a_daemon_that_is_too_old_to_tell_counts_as_over_once_it_has_gone(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.start()
    with CacheClient(daemon.path) as client:
        pool = client.open_lease(client.register("m", LAYOUT)).attach()
        assert not pool.is_quiet
        daemon.close()
        assert client.wait_lost(3600.0)
        assert pool.is_quiet
