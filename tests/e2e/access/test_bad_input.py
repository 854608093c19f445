"""Bad requests: each kind gets a typed error, a status, and nothing changed or leaked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from cachesvc_client import (
    Conflict,
    InvalidRequest,
    KeyMisplaced,
    LeaseLost,
    LimitExceeded,
    NotFound,
    NotOwned,
    PoolExhausted,
    Registration,
)
from cachesvc_client.core.errors import error_of
from grpc import StatusCode
from kvcache.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2, lease_pb2

from cachesvc.model.answers import GroupCells
from cachesvc.wire.convert import cells_to_proto, layout_to_proto
from tests.e2e.engine import PLAIN, Engine, prompt
from tests.e2e.refusals import Bare, bare_stubs, refusal_of
from tests.e2e.rig import Node, check_books, running_node

pytestmark = pytest.mark.usefixtures("each_way")

NO_LEASE = "0" * 32
HUGE = 2**63
"""Larger than any number of ours, and still one that the wire can carry."""


class Site:
    """Two engines of one model, one open sequence with two sealed and two private blocks, and bare stubs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stack = ExitStack()
        self.bare: Bare = self.stack.enter_context(bare_stubs(node.socket))
        self.engine = self.stack.enter_context(Engine(node.socket, name="a", device_pages=16))
        self.other = self.stack.enter_context(Engine(node.socket, name="b", device_pages=16))
        self.keys = self.engine.keys(prompt(1, 6))
        self.sequence = self.engine.lease.match(self.keys)
        self.sequence.allocate(4)
        self.engine.fill(self.sequence, self.keys, range(4))
        self.sequence.publish(2)

    @property
    def lease(self) -> str:
        return self.engine.lease.id

    def register(self, **changes: Any) -> Any:
        """Register another model with something wrong."""
        return self.engine.client.register("other@1", PLAIN, **changes)

    def register_bare(self, **layout: Any) -> Any:
        """Register a layout that our own client would not even build."""
        message = layout_to_proto(PLAIN)
        message.MergeFrom(common_pb2.Layout(**layout))
        return self.bare.engine.Register(engine_pb2.RegisterRequest(model="other@1", layout=message))

    def misplace(self) -> Any:
        """Publish the second block of the prompt as a first one."""
        sequence = self.stack.enter_context(self.other.lease.match(self.keys[32:64]))
        sequence.allocate(1)
        return sequence.publish(1)

    def publish(self, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "lease_id": self.lease,
            "sequence_id": self.sequence.id,
            "first_block": 2,
            "blocks": 1,
        }
        return self.bare.cache.Publish(cache_pb2.PublishRequest(**{**values, **changes}))

    def match(self, keys: bytes, **changes: Any) -> Any:
        values: dict[str, Any] = {"lease_id": self.lease, "sequence_id": 50, "keys": keys}
        return self.bare.cache.Match(cache_pb2.MatchRequest(**{**values, **changes}))

    def recycle(self, *pages: int, group: int = 0, tokens: int = 0, sequence: int | None = None) -> Any:
        cells = cells_to_proto([GroupCells(group, 0, pages, (0,) * len(pages))]) if pages else []
        number = self.sequence.id if sequence is None else sequence
        return self.bare.cache.Recycle(
            cache_pb2.RecycleRequest(lease_id=self.lease, sequence_id=number, computed_tokens=tokens, pages=cells)
        )

    def release(self, sequence: int) -> Any:
        return self.bare.cache.Release(cache_pb2.ReleaseRequest(lease_id=self.lease, sequence_id=sequence))

    def allocate(self, blocks: int, lease: str | None = None) -> Any:
        return self.bare.cache.Allocate(
            cache_pb2.AllocateRequest(
                lease_id=self.lease if lease is None else lease,
                sequence_id=self.sequence.id,
                blocks=blocks,
            )
        )

    def close(self) -> None:
        self.sequence.release()
        self.stack.close()


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    with running_node() as node:
        yield node


@pytest.fixture
def site(shared_node: Node) -> Iterator[Site]:
    made = Site(shared_node)
    before = (shared_node.pages("private"), shared_node.pages("sealed"), list(made.node.lease_states().values()))
    yield made
    after = (shared_node.pages("private"), shared_node.pages("sealed"), list(made.node.lease_states().values()))
    assert after == before, "what was refused must change nothing"
    assert made.engine.bad(made.sequence, made.keys, range(4)) == []
    made.close()
    check_books(shared_node)


class Case(NamedTuple):
    """One bad call, and what it must get."""

    name: str
    call: Callable[[Site], Any]
    error: type[Exception]
    status: StatusCode
    message: str


REGISTERING = [
    Case("no model name", lambda s: s.engine.client.register("", PLAIN), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "model must be a name"),
    Case("a long model name", lambda s: s.engine.client.register("m" * 513, PLAIN), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "1 to 512 bytes"),
    Case("a long salt", lambda s: s.register(tenant_salt=b"s" * 257), LimitExceeded, StatusCode.OUT_OF_RANGE,
         "tenant_salt bytes: 257 is more than the limit of 256"),
    Case("no layout", lambda s: s.bare.engine.Register(engine_pb2.RegisterRequest(model="m")), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "block_tokens must be in 1"),
    Case("a huge block", lambda s: s.register_bare(block_tokens=1 << 20), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "block_tokens must be in 1..4096, got 1048576"),
    Case("a plane twice", lambda s: s.register_bare(planes=[layout_to_proto(PLAIN).planes[0]]), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "is listed twice"),
    Case("a group twice", lambda s: s.register_bare(groups=[common_pb2.PlaneGroup(name="full")]), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "group 'full' is listed twice"),
    Case("an unknown dtype", lambda s: s.register_bare(planes=[common_pb2.Plane(
        name="k", layer=0, group="full", page_shape=[4], dtype="float12")]), InvalidRequest,
        StatusCode.INVALID_ARGUMENT, "unknown dtype 'float12'"),
    Case("a plane beyond all memory", lambda s: s.register_bare(planes=[common_pb2.Plane(
        name="k", layer=0, group="full", page_shape=[HUGE, HUGE], dtype="uint8")]), InvalidRequest,
        StatusCode.INVALID_ARGUMENT, "bad page_shape"),
    Case("a share above 1", lambda s: s.register(device_share=2.0), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "a pool share must be between 0 and 1, got 2"),
    Case("a negative share", lambda s: s.register(host_share=-0.5), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "a pool share must be between 0 and 1"),
    Case("a share that is no number", lambda s: s.register(device_share=float("nan")), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "a pool share must be between 0 and 1, got nan"),
    Case("no share", lambda s: s.register(device_share=0.0), PoolExhausted, StatusCode.RESOURCE_EXHAUSTED,
         "bytes left"),
    Case("counts for other groups", lambda s: s.register(device_pages=[4, 4]), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "2 page counts for 1 groups"),
    Case("no page", lambda s: s.register(device_pages=[0]), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "at least one page"),
    Case("an unknown device", lambda s: s.register(devices=["GPU-1"]), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "unknown device 'GPU-1'; this daemon has shm-0"),
    Case("too many devices", lambda s: s.register(devices=["shm-0", "shm-0"]), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "1 ranks need as many distinct devices, got 2"),
    Case("more pages than the device has", lambda s: s.register(device_pages=[1 << 20]), PoolExhausted,
         StatusCode.RESOURCE_EXHAUSTED, "wanted 1048576 pages"),
    Case("more pages than the host has", lambda s: s.register(device_pages=[1], host_pages=[1 << 20]), PoolExhausted,
         StatusCode.RESOURCE_EXHAUSTED, "host"),
    Case("pages without end", lambda s: s.register(device_pages=[(1 << 32) - 1]), PoolExhausted,
         StatusCode.RESOURCE_EXHAUSTED, "wanted 4294967295 pages"),
]  # fmt: skip

LEASING = [
    Case("a lease of an unknown model", lambda s: s.bare.lease.Open(lease_pb2.OpenRequest(
        model_id=999, process_token=b"x" * 16)), NotFound, StatusCode.NOT_FOUND, "unknown process"),
    Case("a lease on an unknown replica", lambda s: s.engine.client.open_lease(
        replace_registration(s.engine, replica=7)), NotFound, StatusCode.NOT_FOUND, "unknown replica 7"),
    Case("a model that is not there", lambda s: s.engine.client.open_lease(
        replace_registration(s.engine, model_id=999)), NotFound, StatusCode.NOT_FOUND, "unknown model 999"),
    Case("attach with a stranger's token", lambda s: s.bare.engine.Attach(engine_pb2.AttachRequest(
        lease_id=s.lease, process_token=b"x" * 16)), NotFound, StatusCode.NOT_FOUND,
        "unknown process '7878.*connect to the life socket"),
    Case("attach without a token", lambda s: s.bare.engine.Attach(engine_pb2.AttachRequest(lease_id=s.lease)),
         NotFound, StatusCode.NOT_FOUND, "unknown process"),
    Case("attach a wrong rank", lambda s: s.engine.lease.attach(1), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "rank 1 is out of range; the model was registered with 1 ranks"),
    Case("attach to an unknown lease", lambda s: s.engine.client.attach(s.engine.registration, NO_LEASE), NotFound,
         StatusCode.NOT_FOUND, "unknown lease"),
    Case("close an unknown lease", lambda s: s.bare.lease.Close(lease_pb2.CloseRequest(lease_id=NO_LEASE)), NotFound,
         StatusCode.NOT_FOUND, "unknown lease"),
    Case("beats for an unknown lease", lambda s: list(s.bare.lease.KeepAlive(iter(
        [lease_pb2.KeepAliveRequest(lease_id=NO_LEASE)]))), NotFound, StatusCode.NOT_FOUND, "unknown lease"),
    Case("too long a pause", lambda s: list(s.bare.lease.KeepAlive(iter([lease_pb2.KeepAliveRequest(
        lease_id=s.engine.lease.id, pause_write_backs_ms=1001)]))), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "at most 1000 ms at a time, not 1001"),
    Case("match under an unknown lease", lambda s: s.match(b"", lease_id=NO_LEASE), NotFound, StatusCode.NOT_FOUND,
         "unknown lease"),
    Case("another engine's sequence", lambda s: s.allocate(5, lease=s.other.lease.id), NotFound, StatusCode.NOT_FOUND,
         "unknown sequence .* never matched under this lease"),
    Case("tickets that never were", lambda s: s.engine.lease.wait_tickets([HUGE]), NotFound, StatusCode.NOT_FOUND,
         "unknown ticket"),
    Case("too many tickets", lambda s: s.engine.lease.wait_tickets(range(1, 1026)), LimitExceeded,
         StatusCode.OUT_OF_RANGE, "tickets to wait for: 1025 is more than the limit of 1024"),
]  # fmt: skip

WORKING = [
    Case("ragged keys", lambda s: s.engine.lease.match(b"k" * 33), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "33 bytes, which is not a multiple of 32"),
    Case("ragged keys of a prefetch", lambda s: s.engine.lease.prefetch(b"k" * 31), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "31 bytes"),
    Case("too many keys", lambda s: s.engine.lease.match(b"k" * 32 * 65537), LimitExceeded, StatusCode.OUT_OF_RANGE,
         "block keys: 65537 is more than the limit of 65536"),
    Case("a message that is too large", lambda s: s.match(b"k" * (9 << 20)), LimitExceeded,
         StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    Case("a message that the client itself does not send", lambda s: s.engine.lease.match(b"k" * (9 << 20)),
         LimitExceeded, StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    Case("a sequence that is open", lambda s: s.engine.lease.match(s.keys, sequence_id=s.sequence.id), Conflict,
         StatusCode.FAILED_PRECONDITION, "is open already"),
    Case("allocate more than the pool", lambda s: s.sequence.allocate(17), PoolExhausted,
         StatusCode.RESOURCE_EXHAUSTED, "wanted 13 pages beside 4 of its own, free 12, .*capacity 16; too large"),
    Case("allocate without end", lambda s: s.allocate((1 << 32) - 1), LimitExceeded, StatusCode.OUT_OF_RANGE,
         "blocks of a sequence: 4294967295 is more than the limit of 65536"),
    Case("allocate less than there is", lambda s: s.sequence.allocate(3), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "allocate at least as many"),
    Case("publish before allocate", lambda s: s.sequence.publish(6), NotOwned, StatusCode.PERMISSION_DENIED,
         "has pages for 4 blocks, not for 6; allocate first"),
    Case("publish what is sealed", lambda s: s.publish(first_block=0), Conflict, StatusCode.FAILED_PRECONDITION,
         "sealed already"),
    Case("publish out of order", lambda s: s.publish(first_block=3), Conflict, StatusCode.FAILED_PRECONDITION,
         "block 2 comes next, not 3; publish in order"),
    Case("publish ragged keys", lambda s: s.publish(keys=b"k" * 5), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "5 bytes"),
    Case("publish other keys than Match had", lambda s: s.publish(keys=b"k" * 32), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "contradict those of Match"),
    Case("publish other keys than Match had, by the client", lambda s: s.sequence.publish(4, b"k" * 32 * 4),
         InvalidRequest, StatusCode.INVALID_ARGUMENT, "contradict those of Match"),
    Case("publish keys for another count", lambda s: s.publish(keys=s.keys[64:128], blocks=1), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "2 keys were sent for 1 blocks"),
    Case("publish a key below another block than its own", lambda s: s.misplace(), KeyMisplaced,
         StatusCode.INVALID_ARGUMENT, "block 0: its key is not that of a block below"),
    Case("publish without a sequence", lambda s: s.publish(sequence_id=HUGE), NotFound, StatusCode.NOT_FOUND,
         "unknown sequence"),
    Case("release what is not there", lambda s: s.release(HUGE), NotFound, StatusCode.NOT_FOUND, "it was released"),
    Case("swap in what is here", lambda s: s.sequence.swap_in(), Conflict, StatusCode.FAILED_PRECONDITION,
         "on the device already"),
    Case("swap nowhere", lambda s: s.bare.cache.Swap(cache_pb2.SwapRequest(
        lease_id=s.lease, sequence_id=s.sequence.id)), InvalidRequest, StatusCode.INVALID_ARGUMENT,
        "needs a direction, OUT or IN"),
    Case("recycle a page that is in use", lambda s: s.recycle(int(s.sequence.tables[0][3])), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "still in the block table"),
    Case("recycle a sealed page", lambda s: s.recycle(int(s.sequence.tables[0][0])), NotOwned,
         StatusCode.PERMISSION_DENIED, "neither in the lease's stock nor a sequence's own"),
    Case("recycle a page beyond the pool", lambda s: s.recycle(99_999), NotOwned, StatusCode.PERMISSION_DENIED,
         "page 99999"),
    Case("recycle a hole", lambda s: s.recycle(-1), NotOwned, StatusCode.PERMISSION_DENIED, "page -1"),
    Case("recycle in a group that is not there", lambda s: s.recycle(1, group=9), InvalidRequest,
         StatusCode.INVALID_ARGUMENT, "no group 9"),
    Case("recycle beyond the blocks", lambda s: s.recycle(tokens=HUGE), InvalidRequest, StatusCode.INVALID_ARGUMENT,
         "beyond the 4 blocks"),
    Case("recycle nothing of an unknown sequence", lambda s: s.recycle(sequence=77), NotFound, StatusCode.NOT_FOUND,
         "unknown sequence"),
]  # fmt: skip

LOOKING = [
    Case("blocks of an unknown model", lambda s: s.bare.admin.ListBlocks(admin_pb2.ListBlocksRequest(model_id=99)),
         NotFound, StatusCode.NOT_FOUND, "unknown model 99"),
    Case("blocks of ragged keys", lambda s: s.bare.admin.ListBlocks(admin_pb2.ListBlocksRequest(
        model_id=s.engine.registration.model_id, keys=b"k")), InvalidRequest, StatusCode.INVALID_ARGUMENT, "1 bytes"),
    Case("a tree below nothing", lambda s: s.bare.admin.GetTree(admin_pb2.GetTreeRequest(
        model_id=s.engine.registration.model_id, key=b"k" * 32)), NotFound, StatusCode.NOT_FOUND, "not resident"),
    Case("evict from nowhere", lambda s: s.bare.admin.Evict(admin_pb2.EvictRequest(
        model_id=s.engine.registration.model_id, tier="moon")), InvalidRequest, StatusCode.INVALID_ARGUMENT,
        "'moon' is neither 'device' nor 'host'"),
]  # fmt: skip


def replace_registration(engine: Engine, **changes: Any) -> Registration:
    return replace(engine.registration, **changes)


@pytest.mark.parametrize("case", [*REGISTERING, *LEASING, *WORKING, *LOOKING], ids=lambda case: case.name)
def test_refused(site: Site, case: Case) -> None:
    refusal = refusal_of(lambda: case.call(site))
    assert type(refusal.error) is case.error, repr(refusal.error)
    assert refusal.status is case.status
    with pytest.raises(case.error, match=case.message):
        raise refusal.error
    assert all(str(fact) in str(refusal.error) for fact in refusal.error.facts().values())


@pytest.mark.usefixtures("each_way")
def test_the_facts_of_a_refusal_reach_the_client_as_fields(shared_node: Node) -> None:
    with Engine(shared_node.socket, device_pages=16) as engine:
        with engine.lease.match(b"") as sequence:
            sequence.allocate(16)  # other tests' blocks leave, so that the same pages are free each time
        with engine.lease.match(b"") as sequence, pytest.raises(PoolExhausted) as full:
            sequence.allocate(17)
        facts = full.value.facts()
        assert (facts["wanted"], facts["capacity"]) == (17, 16)
        assert f"free {facts['free']}, evictable {facts['evictable']}" in str(full.value)
        assert full.value.can_never_fit
        assert full.value.reason == "too large"
        with engine.lease.match(b"") as sequence, engine.lease.match(b"") as other:
            sequence.allocate(16)
            with pytest.raises(PoolExhausted) as later:
                other.allocate(1)
        assert (later.value.reason, later.value.can_never_fit) == ("full", False)
        with pytest.raises(LimitExceeded) as long:
            engine.lease.match(b"k" * 32 * 65537)
        assert (long.value.what, long.value.got, long.value.limit) == ("block keys", 65537, 65536)
        with pytest.raises(NotFound) as unknown:
            engine.lease.wait_tickets([77_777])
        assert (unknown.value.kind, unknown.value.name) == ("ticket", 77_777)
        with engine.lease.match(b"") as sequence, bare_stubs(shared_node.socket) as bare:
            allocate = cache_pb2.StepOperation(allocate=cache_pb2.AllocateRequest(sequence_id=sequence.id, blocks=17))
            step = cache_pb2.StepRequest(lease_id=engine.lease.id, request_id=1 << 41, operations=[allocate])
            assert error_of(bare.step(step).results[0].error).facts() == facts


def test_releasing_twice_is_told_by_the_client_and_by_the_daemon(site: Site) -> None:
    sequence = site.engine.lease.match(b"")
    sequence.release()
    assert "released" in str(refusal_of(sequence.release).error)
    assert isinstance(refusal_of(lambda: site.release(sequence.id)).error, NotFound)


def test_a_request_id_is_applied_once_and_answers_the_same(shared_node: Node) -> None:
    with Engine(shared_node.socket, device_pages=16) as engine, bare_stubs(shared_node.socket) as bare:
        lease = engine.lease.id
        match = cache_pb2.MatchRequest(lease_id=lease, request_id=1, sequence_id=5)
        allocate = cache_pb2.AllocateRequest(lease_id=lease, request_id=2, sequence_id=5, blocks=6)
        release = cache_pb2.ReleaseRequest(lease_id=lease, request_id=3, sequence_id=5)
        assert bare.cache.Match(match) == bare.cache.Match(match)
        granted = bare.cache.Allocate(allocate)
        assert len(granted.tables[0].pages) == 6 * 4
        assert bare.cache.Allocate(allocate) == granted
        assert shared_node.pages("private") == 6
        allocate.blocks = 7
        reused = refusal_of(lambda: bare.cache.Allocate(allocate))
        assert isinstance(reused.error, InvalidRequest)
        assert reused.status is StatusCode.INVALID_ARGUMENT
        assert "request_id 2 was used before for a different request" in str(reused.error)
        assert bare.cache.Release(release).freed_pages == 6
        assert bare.cache.Release(release).freed_pages == 6


def test_a_step_is_refused_as_a_whole_or_by_operation(site: Site) -> None:
    def step(request_id: int, operations: list[cache_pb2.StepOperation], **changes: Any) -> cache_pb2.StepResponse:
        values: dict[str, Any] = {"lease_id": site.lease, "request_id": request_id, "operations": operations}
        return site.bare.step(cache_pb2.StepRequest(**{**values, **changes}))

    release = cache_pb2.StepOperation(release=cache_pb2.ReleaseRequest(sequence_id=HUGE))
    assert step(0, [release]).error.code == "INVALID"
    assert step(1 << 42, [release], lease_id=NO_LEASE).error.code == "NOT_FOUND"
    oversized = step(1 << 42, [release] * 4097)
    assert (oversized.error.code, len(oversized.results)) == ("LIMIT", 0)
    assert "operations of a step: 4097 is more than the limit of 4096" in oversized.error.message

    stolen = cells_to_proto([GroupCells(0, 0, (15,), (0,))])
    extend = cache_pb2.ExtendRequest(sequence_id=site.sequence.id, pages=stolen)
    mixed = [cache_pb2.StepOperation(), release, cache_pb2.StepOperation(extend=extend)]
    first = step((1 << 42) + 1, mixed)
    assert [result.error.code for result in first.results] == ["INVALID", "NOT_FOUND", "NOT_OWNED"]
    assert step((1 << 42) + 1, mixed) == first
    assert step((1 << 42) + 1, [release]).error.code == "INVALID"
    assert "used before" in step((1 << 42) + 1, [release]).error.message
    stocked = step((1 << 42) + 2, [], stock_pages=[5000])
    assert (stocked.error.code, stocked.request_id) == ("LIMIT", (1 << 42) + 2)
    opening = cache_pb2.StepOperation(match=cache_pb2.MatchRequest(sequence_id=60))
    assert step((1 << 42) + 3, [opening], stock_pages=[1, 1]).error.code == "INVALID"
    assert isinstance(refusal_of(lambda: site.release(60)).error, NotFound), "a step that is refused applies nothing"
    nothing = step((1 << 42) + 4, [])
    assert (nothing.request_id, nothing.error.code, len(nothing.results)) == ((1 << 42) + 4, "", 0)


def test_a_closed_lease_is_lost_to_whoever_still_uses_it(shared_node: Node) -> None:
    with Engine(shared_node.socket, device_pages=16) as engine, bare_stubs(shared_node.socket) as bare:
        lease = engine.lease.id
        engine.lease.close()
        late = refusal_of(lambda: bare.cache.Match(cache_pb2.MatchRequest(lease_id=lease, sequence_id=1)))
        assert isinstance(late.error, LeaseLost)
        assert late.status is StatusCode.ABORTED
        assert "it was closed" in str(late.error)
        bare.lease.Close(lease_pb2.CloseRequest(lease_id=lease, quiesced=True))  # closing twice is fine
