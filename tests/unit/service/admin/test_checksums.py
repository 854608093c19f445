"""Memory of checksums is bounded, and pages that cannot be read count apart from wrong ones."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import AsyncIterator

import pytest
from cachesvc_ctl.actions import Verify
from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc.model.errors import Unavailable
from cachesvc.questions.dump import SealedPage
from cachesvc.service.admin.checksums import MOST_SUMS, Checksums, Sums
from cachesvc.service.loop.line import LoopWatch, TimeSlices
from tests.fuzz.target import Target, running_target
from tests.unit.questions.test_questions import BLOCKS, serve


def test_a_block_that_comes_and_goes_keeps_its_newest_checksums_alone() -> None:
    target = Target()
    sums = Checksums(target.node, target.engine.page_bytes, "all", 1)
    for generation in range(3 * MOST_SUMS):
        for group in (0, 1):
            sums._keep(Sums(SealedPage(1, 1, group, 7, generation, b"k" * 32), (generation,), 64))  # noqa: SLF001
    (kept,) = sums._known.values()  # noqa: SLF001
    newest = list(range(2 * MOST_SUMS, 3 * MOST_SUMS))
    for group in (0, 1):
        assert [each.page.generation for each in kept if each.page.group == group] == newest


class Memory:
    """Bytes of pages, on a device that may be lost."""

    def __init__(self) -> None:
        self.lost = ""
        self.content = b"as published"

    def read(self, _model: int, _replica: int | None, _rank: int, _group: int, _page: int) -> bytes:
        if self.lost:
            raise Unavailable(self.lost)
        return self.content


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    async with running_target() as made:
        yield made


async def test_pages_of_a_lost_device_are_unread_and_neither_wrong_nor_right(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    memory = Memory()
    sums = Checksums(target.node, memory.read, "all", 1 << 40)
    sums.start()
    try:
        await serve(target, 0, "")
        sound = await sums.compare(TimeSlices(LoopWatch()), {1})
        assert sound.pages_checked >= BLOCKS
        assert (sound.pages_unread, len(sound.mismatches)) == (0, 0)
        memory.lost = "GPU 7 no longer works"
        lost = await sums.compare(TimeSlices(LoopWatch()), {1})
        assert (lost.pages_checked, lost.pages_skipped, len(lost.mismatches)) == (0, sound.pages_skipped, 0)
        assert (lost.pages_unread, list(lost.unread_reasons)) == (sound.pages_checked, ["GPU 7 no longer works"])
        assert caplog.messages.count("page_not_read") == 1, "one line, not one for each page"
        memory.lost, memory.content = "", b"changed since"
        wrong = await sums.compare(TimeSlices(LoopWatch()), {1})
        assert (wrong.pages_unread, len(wrong.mismatches)) == (0, sound.pages_checked)
    finally:
        await sums.close()


@pytest.mark.parametrize(
    ("ok", "mode", "unread", "asked", "code"),
    [
        (True, "all", 0, True, 0),
        (True, "off", 0, False, 0),
        (False, "all", 0, True, 1),
        (False, "all", 5, True, 1),
        (False, "off", 0, True, 1),
        (True, "off", 0, True, 2),
        (True, "all", 5, True, 3),
    ],
)
def test_the_exit_code_tells_what_is_wrong_from_what_could_not_be_read(
    ok: bool, mode: str, unread: int, asked: bool, code: int
) -> None:
    found = inspect_pb2.ChecksumStatus(mode=mode, pages_unread=unread, unread_reasons=["GPU 7 is lost"] * bool(unread))
    answer = admin_pb2.VerifyResponse(ok=ok, checksums=found)
    command = Verify(Namespace(checksums=asked, model=None, json=False))
    assert command.code(answer) == code
    assert ("5 pages could not be read (GPU 7 is lost)" in command.show(answer)) == bool(unread)
