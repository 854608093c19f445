"""``cachesvc verify``: whether all pages and counts are consistent, and pages what they were when published."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc_ctl.core.command import flag
from cachesvc_ctl.core.text import describe_bytes
from cachesvc_ctl.questions.models import model_flag, model_number
from cachesvc_ctl.questions.question import Admin, Question

VERIFY_DEADLINE_SECONDS = 600.0
WRONG = 1
NOT_CARRIED_OUT = 2
UNREAD = 3


class Verify(Question[admin_pb2.VerifyResponse]):
    """Verify."""

    name = "verify"
    about = "check that all pages and counts are consistent"
    epilog = (
        "Exit codes: 0 all is well; 1 counts or bytes are wrong; 2 it was not carried out, as where no checksums are "
        "taken; 3 nothing is wrong, but pages could not be read, as those of a lost device."
    )
    flags = (
        model_flag("every model"),
        flag("--checksums", action="store_true", help="also compare sealed pages with their checksums"),
    )

    def ask(self, admin: Admin) -> admin_pb2.VerifyResponse:
        """Takes long where there are many checksums to compare."""
        model = model_number(admin, self.arguments.model)
        request = admin_pb2.VerifyRequest(checksums=self.arguments.checksums, model_id=model)
        return admin.Verify(request, timeout=VERIFY_DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.VerifyResponse) -> str:
        """Counts of what was checked, and each problem."""
        took = f"{answer.blocks_checked:,} blocks checked in {answer.seconds:.2f} s"
        pause = f"none kept calls waiting for more than {answer.longest_pause_ms:.1f} ms"
        lines = [
            f"{'ok' if answer.ok else 'NOT ok'}: {answer.pages_checked:,} pages and {took},",
            f"in {len(answer.checks)} parts of which {pause}",
            *(_checksums(answer.checksums) if self.arguments.checksums else ()),
            *answer.problems,
        ]
        return "\n".join(lines)

    def code(self, answer: admin_pb2.VerifyResponse) -> int:
        """Return the exit code: faults count before pages that could not be read."""
        if not answer.ok:
            return WRONG
        if self.arguments.checksums and answer.checksums.mode == "off":
            return NOT_CARRIED_OUT
        return UNREAD if answer.checksums.pages_unread else 0


def _checksums(c: inspect_pb2.ChecksumStatus) -> Iterator[str]:
    if c.mode == "off":
        yield "no checksums are taken: start the daemon with --checksums sample or --checksums all"
        return
    yield (
        f"{c.pages_checked:,} pages of {c.known_blocks:,} blocks read ({describe_bytes(c.bytes_read)}) and compared "
        "with their checksums;"
    )
    yield f"{c.pages_skipped:,} skipped, {c.passed_over_blocks:,} blocks have none"
    if c.pages_unread:
        yield f"NOT verified: {c.pages_unread:,} pages could not be read ({'; '.join(c.unread_reasons)})"
    for m in c.mismatches:
        yield (
            f"model {m.model_id}, {m.place}, group {m.group}, rank {m.rank}, page {m.page}: the bytes of block "
            f"{m.key_hex} changed since they were published ({m.published} then, {m.found} now)"
        )
