"""Wrong arguments are refused by name, with what the call takes; right ones cost no check."""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from typing import Any, get_type_hints

import numpy as np
import pytest
from cachesvc_client import (
    Expected,
    ExtraKey,
    InvalidRequest,
    NoSuchPlane,
    Registration,
    block_keys,
    events,
    from_bfloat16,
    gqa,
    to_bfloat16,
)
from cachesvc_client.client import CacheClient
from cachesvc_client.core.arguments import checks_arguments, explains_arguments, renamed
from cachesvc_client.core.keys import BlockHasher
from cachesvc_client.lease import Lease
from cachesvc_client.memory.pool import PlanesByKey, slot_of
from cachesvc_client.records.steps import StepBatch
from cachesvc_client.sequence import Sequence
from kvcache.v1 import cache_pb2, engine_pb2

from cachesvc.model.layout import Layout
from cachesvc.wire.convert import expected_to_proto, layout_to_proto
from tests.unit.rigs.client_rig import FakeDaemon

LAYOUT = gqa(layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="bfloat16")
CHECKED = (CacheClient, Lease, Sequence, StepBatch)


@explains_arguments
def register(
    model: str,
    layout: Layout,
    tenant_salt: bytes = b"",
    devices: Seq[str] = (),
    device_pages: Seq[int] | None = None,
    device_share: float | None = None,
) -> engine_pb2.RegisterRequest:
    pool = engine_pb2.PoolShare(pages=engine_pb2.PageCounts(pages=device_pages), share=device_share)  # type: ignore[arg-type]
    return engine_pb2.RegisterRequest(
        model=model, layout=layout_to_proto(layout), tenant_salt=tenant_salt, devices=devices, device_pool=pool
    )


@explains_arguments
def allocate(blocks: int) -> cache_pb2.AllocateRequest:
    return cache_pb2.AllocateRequest(blocks=blocks)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"device_pages": 10}, "device_pages is 10 (int); it takes a list of whole numbers or None"),
        ({"device_pages": [1, -1]}, "device_pages is -1; it counts from 0"),
        ({"device_pages": "10"}, "device_pages is '10' (str)"),
        ({"device_share": "half"}, "device_share is 'half' (str); it takes a number or None"),
        ({"model": 5}, "model is 5 (int); it takes text"),
        ({"model": "\ud800"}, "it takes text"),
        ({"layout": "layout"}, "layout is 'layout' (str); it takes Layout"),
        ({"tenant_salt": "secret"}, "it takes bytes"),
        ({"devices": "GPU-1", "device_pages": 1}, "devices is 'GPU-1' (str); it takes a list of texts"),
    ],
)
def test_names_the_argument_its_value_and_what_it_takes(named: dict[str, Any], words: str) -> None:
    wish: dict[str, Any] = {"model": "m", "layout": LAYOUT} | named
    with pytest.raises(InvalidRequest) as refused:
        register(**wish)
    assert words in str(refused.value)
    assert refused.value.__suppress_context__  # no traceback of protobuf's before the sentence


@pytest.mark.parametrize("blocks", [-1, 2**32, 1.5, "4"])
def test_refuses_a_count_that_is_none(blocks: Any) -> None:
    with pytest.raises(InvalidRequest, match="allocate: blocks is"):
        allocate(blocks)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (Expected("a:1", blocks=1 << 36), "expected.blocks is 68719476736"),
        (Expected("a:1", blocks=-1), "expected.blocks is -1"),
        (Expected("a:1", patience=-1.0), "expected.patience is -1.0"),
        (Expected("a:1", patience=float("nan")), "expected.patience is nan"),
    ],
)
def test_refuses_an_expectation_that_no_message_takes(expected: Expected, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        expected_to_proto(expected)
    longest = expected_to_proto(Expected("a:1", patience=float("inf")))
    assert longest.patience_ms == (1 << 32) - 1


def test_takes_numbers_of_numpy_and_names_that_a_message_takes() -> None:
    assert allocate(np.int64(4)).blocks == 4  # type: ignore[arg-type]
    assert list(register("m", LAYOUT, device_pages=np.array([3])).device_pool.pages.pages) == [3]  # type: ignore[arg-type]


def test_an_error_that_no_argument_caused_stays_what_it_is() -> None:
    @explains_arguments
    def broken(blocks: int) -> int:
        raise ValueError(f"a defect at {blocks}")

    with pytest.raises(ValueError, match="a defect at 3"):
        broken(3)
    with pytest.raises(TypeError, match="missing"):
        broken()  # type: ignore[call-arg]


def test_checks_what_is_kept_before_it_is_kept() -> None:
    kept: list[float] = []

    @checks_arguments
    def keep(seconds: float) -> None:
        kept.append(seconds)

    with pytest.raises(InvalidRequest, match="seconds is 'long'"):
        keep("long")  # type: ignore[arg-type]
    keep(1)
    assert kept == [1]
    with pytest.raises(InvalidRequest, match="CacheClient: timeouts is 3"):
        CacheClient("/tmp/kv.sock", timeouts=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="CacheClient: socket_path is 123"):
        CacheClient(123)  # type: ignore[arg-type]


def test_every_checked_call_has_annotations_that_can_be_read() -> None:
    members = [member for kind in CHECKED for member in inspect.getmembers(kind, inspect.isfunction)]
    calls = [call for _, call in members if hasattr(call, "__wrapped__")]
    assert len(calls) > 25
    for call in calls:
        assert get_type_hints(call.__wrapped__)


def test_refuses_what_is_no_plane_ticket_or_namespace() -> None:
    planes = PlanesByKey({(0, "k"): 1, (3, "v"): 2})
    with pytest.raises(NoSuchPlane, match=r"no plane .7, 'k'. here; .* layers 0 to 3 with k, v") as missing:
        planes[7, "k"]
    assert isinstance(missing.value, KeyError)
    assert (7, "k") not in planes
    assert planes.get((7, "k")) is None
    with pytest.raises(InvalidRequest, match="not 'x'"):
        slot_of("x")  # type: ignore[arg-type]
    for namespace, tokens in (("a" * 32, 16), (b"a" * 32, "16"), (b"a", 16), (b"a" * 32, 0)):
        with pytest.raises(InvalidRequest):
            BlockHasher(namespace, tokens)  # type: ignore[arg-type]


def test_an_earlier_name_of_an_argument_counts_with_a_warning() -> None:
    @renamed(blocks="upto_blocks")
    @explains_arguments
    def grow(upto_blocks: int) -> bytes:
        return upto_blocks.to_bytes(1, "little")

    assert grow(3) == grow(upto_blocks=3) == b"\x03"
    with pytest.warns(DeprecationWarning, match="grow: blocks is called upto_blocks now"):
        assert grow(blocks=3) == b"\x03"  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="grow: upto_blocks is 'a'"):
        grow("a")  # type: ignore[arg-type]


def test_numbers_become_bits_of_bfloat16_rounded_to_the_nearest_even() -> None:
    values = np.array([0.7, -2.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.nan], np.float32)
    bits = to_bfloat16(values)
    assert bits.dtype == np.uint16
    assert bits[:6].tolist() == [0x3F33, 0xC000, 0x7F80, 0xFF80, 0x3F80, 0x3F82]
    assert bits[6] == 0x7F80, "beyond the largest number it rounds to infinity"
    assert np.isnan(from_bfloat16(bits)[7])
    assert abs(from_bfloat16(bits)[0] - 0.7) < 2**-9


def test_a_leases_hasher_has_its_namespace_and_block_size(daemon: FakeDaemon) -> None:
    namespace = b"n" * 32
    registration = Registration(1, 0, namespace, (8,), (8,), ("shm-0",), 7, LAYOUT)
    with CacheClient(daemon.path) as client:
        lease = client.open_lease(registration)
    assert bytes(lease.hasher(range(40)).keys) == block_keys(namespace, range(40), 16)
    assert lease.hasher(range(40), [ExtraKey.of_prompt("adapter", b"a")]).keys != lease.hasher(range(40)).keys
    hasher = lease.hasher()
    assert (hasher.extend(range(16)), hasher.block_tokens) == (1, 16)
    assert "n" * 8 not in repr(lease) + repr(registration), "a namespace has the tenant's salt in it"


def test_earlier_names_of_events_count_with_a_warning() -> None:
    """They go after one release."""
    with pytest.warns(DeprecationWarning, match="Spot is called CopyLocation now"):
        assert events.Spot is events.CopyLocation
    location = events.CopyLocation(0, "host", 0)
    run = events.Run(events.Kind.STORED, True, location, b"", (bytes(32),), "")
    with pytest.warns(DeprecationWarning, match=r"Run\.spot is called Run\.location now") as warned:
        assert run.spot == location
    assert warned[0].filename == __file__, "it names the caller's line"
    mirror = events.BlockMirror()
    mirror.apply(events.Batch(1, 1, events.Part.FIRST, 0, 0, (run,)))
    with pytest.warns(DeprecationWarning, match=r"BlockMirror\.spots is called BlockMirror\.locations now"):
        assert mirror.spots == {bytes(32): {location}}
    with pytest.raises(AttributeError):
        _ = events.Nothing
