"""Memory of checksums is bounded, also where one block comes and goes."""

from __future__ import annotations

from cachesvc.questions.sealed import SealedPage
from cachesvc.service.checksums import MOST_SUMS, Checksums, Sums
from tests.fuzz.target import Target


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
