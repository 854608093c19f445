"""``cachesvc storage``: the storage tier, whether it is used, and the outcomes of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.protobuf.message import Message
from kvcache.v1 import storage_pb2

from cachesvc_ctl.core.command import flag
from cachesvc_ctl.core.text import describe_bytes, table
from cachesvc_ctl.questions.models import identity_of
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, Admin, Question

LONG_SECONDS = 3600.0
"""Reading a disk takes its time."""


class Storage(Question[Message]):
    """GetStorage, CheckStorage or PurgeStorage."""

    name = "storage"
    about = "what each storage tier keeps, its hits and errors"
    epilog = (
        "Exit code 1 where --verify finds what is wrong. A model is purged by its name or display name, with all its "
        "layouts."
    )
    flags = (
        flag("--verify", action="store_true", help="read every object; what is not what its name says is removed"),
        flag("--purge", metavar="MODEL", help="remove all objects of a model, or of one namespace of the listing"),
        flag("--purge-all", action="store_true", help="remove all objects of every model"),
    )

    def ask(self, admin: Admin) -> Message:
        """Make one of three calls."""
        said = self.arguments
        if said.verify:
            return admin.CheckStorage(storage_pb2.CheckStorageRequest(), timeout=LONG_SECONDS)
        if said.purge or said.purge_all:
            request = storage_pb2.PurgeStorageRequest(model=identity_of(admin, said.purge) if said.purge else "")
            return admin.PurgeStorage(request, timeout=LONG_SECONDS)
        return admin.GetStorage(storage_pb2.GetStorageRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: Message) -> str:
        """The answer for people."""
        if isinstance(answer, storage_pb2.CheckStorageResponse):
            return _checked(answer)
        if isinstance(answer, storage_pb2.PurgeStorageResponse):
            return f"removed {answer.objects:,} objects" if answer.objects else "there was nothing to remove"
        assert isinstance(answer, storage_pb2.GetStorageResponse)
        return "\n".join(_status(answer)) if answer.tiers else "no storage is configured; see cachesvcd --storage"

    def code(self, answer: Message) -> int:
        """1 where something is wrong."""
        return int(isinstance(answer, storage_pb2.CheckStorageResponse) and bool(answer.wrong + answer.unreadable))


def _checked(found: storage_pb2.CheckStorageResponse) -> str:
    verdict = "ok" if not found.wrong + found.unreadable else "NOT ok"
    read = f"{found.objects_checked:,} objects ({describe_bytes(found.size_bytes)}) read in {found.seconds:.1f} s"
    return (
        f"{verdict}: {read}; {found.wrong:,} were wrong and are removed, {found.unreadable:,} could not be read, "
        f"{found.missing:,} had gone"
    )


def _status(found: storage_pb2.GetStorageResponse) -> Iterator[str]:
    for number, tier in enumerate(found.tiers):
        if number:
            yield ""
        yield from _tier(tier)
    if len(found.tiers) > 1:
        yield ""
    yield (
        f"blocks     {found.fetched_blocks:,} came to the host; {found.kept_blocks:,} were kept, "
        f"{found.not_kept_blocks:,} were not, {found.waiting_blocks:,} wait"
    )


def _tier(found: storage_pb2.StorageTier) -> Iterator[str]:
    yield f"storage    {found.storage}"
    used = {"closed": "used", "open": "NOT used", "probing": "NOT used, being tried"}[found.breaker]
    why = f"; last: {found.breaker_reason}" if found.breaker_reason else ""
    yield f"engine     {used}, given up {found.breaker_opened:,} times{why}"
    of = f" of {describe_bytes(found.capacity_bytes)}" if found.capacity_bytes else ""
    counted = "" if found.complete else ", still counting"
    yield f"kept       {found.objects:,} objects, {describe_bytes(found.size_bytes)}{of}{counted}; write={found.write}"
    yield (
        f"read       {found.hits:,} objects, {describe_bytes(found.read_bytes)}, lately "
        f"{describe_bytes(found.read_bytes_per_second)}/s{_latency(found.read_p50_seconds, found.read_p99_seconds)}"
    )
    written = _latency(found.write_p50_seconds, found.write_p99_seconds)
    yield f"written    {describe_bytes(found.written_bytes)}{written}; {found.items_under_way:,} objects under way"
    if found.errors:
        yield f"errors     {found.errors:,}, last: {found.last_error}"
    if found.problem:
        yield f"problem    {found.problem}"
    if found.outcomes:
        yield ""
        yield table(("call", "ended", "items"), [(o.way, o.outcome, f"{o.items:,}") for o in found.outcomes])
    if found.scopes:
        yield ""
        yield _scopes(found.scopes)


def _latency(p50_seconds: float, p99_seconds: float) -> str:
    return f", p50 {p50_seconds * 1e3:.1f} ms, p99 {p99_seconds * 1e3:.1f} ms" if p99_seconds else ""


def _scopes(scopes: Sequence[storage_pb2.StoredScope]) -> str:
    has_tenants = any(each.tenant for each in scopes)
    head = ("model", *(("tenant",) if has_tenants else ()), "namespace", "objects", "bytes", "last use", "oldest use")
    rows = [
        (
            s.model or "-",
            *((s.tenant or "-",) if has_tenants else ()),
            s.namespace_hex[:12] or "-",
            f"{s.objects:,}",
            describe_bytes(s.size_bytes),
            f"{s.newest_seconds:,.0f} s",
            f"{s.oldest_seconds:,.0f} s",
        )
        for s in scopes
    ]
    return table(head, rows)
