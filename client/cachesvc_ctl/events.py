"""``cachesvc events``: live changes of blocks; for people, for scripts, and for routers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence

from cachesvc_client.adapters.kv_events import MEDIA, Event, Form, KvEventBridge, KvEventMapper, wire_batch
from cachesvc_client.adapters.zmq_events import ZmqPublisher
from cachesvc_client.core.errors import InvalidRequest
from cachesvc_client.events import Batch, EventSubscriber, Part, Run
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc.wire.convert import layout_from_proto
from cachesvc_ctl.core.command import DaemonCommand, Target, count, flag, target_of
from cachesvc_ctl.status import model_flag, require_model

Say = Callable[[str], None]


class Events(DaemonCommand):
    """EventService: for people, for scripts, or in the form that routers read."""

    name = "events"
    about = "follow what happens to the blocks of a model"
    flags = (
        model_flag(),
        flag("--no-snapshot", action="store_true", help="begin with what happens next, not with what is there"),
        flag("--storage", action="store_true", help="tell too what is written to storage, and what goes from there"),
        flag("--count", type=count, default=0, metavar="N", help="end after N changes (default 0: never)"),
        flag(
            "--format", choices=("text", "json", "vllm"), default="text", help="vllm: the KV events that routers read"
        ),
        flag(
            "--zmq",
            default="",
            metavar="ENDPOINT",
            help="publish there instead, e.g. tcp://*:5557 (with --format vllm)",
        ),
        flag("--replay", default="", metavar="ENDPOINT", help="where subscribers fetch what they missed (with --zmq)"),
        flag("--topic", default="", metavar="TEXT", help="llm-d: kv@POD@MODEL (with --zmq)"),
        flag(
            "--replica", type=count, default=0, metavar="N", help="whose device is GPU (with --format vllm; default 0)"
        ),
        flag("--host-medium", default=MEDIA["host"], metavar="WORD", help="older Dynamo: CPU_PINNED (default CPU)"),
        flag("--event-form", choices=[form.value for form in Form], default="map", help="array: vLLM before mid-2026"),
    )

    def run(self) -> int:
        return follow(self.arguments)


def follow(arguments: argparse.Namespace, say: Say = print) -> int:
    """Follow until interrupted, or until ``--count`` is reached."""
    target = target_of(arguments)
    model = _model(target, arguments.model)

    def connect() -> EventSubscriber:
        return EventSubscriber(
            target.address, model.namespace, make_channel=target.make_channel, storage=arguments.storage
        )

    if arguments.zmq and arguments.format != "vllm":
        raise InvalidRequest("--zmq publishes what routers read: say --format vllm as well")
    if arguments.format == "vllm":
        mapper = KvEventMapper(
            layout_from_proto(model.layout),
            replica=arguments.replica,
            media={**MEDIA, "host": arguments.host_medium},
        )
        return _for_routers(arguments, connect, mapper, say)
    with connect() as subscriber:
        left = arguments.count
        for batch in subscriber.subscribe(snapshot=not arguments.no_snapshot):
            for line in _lines(batch, as_json=arguments.format == "json"):
                say(line)
            left -= sum(len(run.keys) for run in batch.runs)
            if arguments.count and left <= 0:
                break
    return 0


def _for_routers(
    arguments: argparse.Namespace, connect: Callable[[], EventSubscriber], mapper: KvEventMapper, say: Say
) -> int:
    form = Form(arguments.event_form)
    if arguments.zmq:
        with ZmqPublisher(arguments.zmq, arguments.replay, topic=arguments.topic, form=form) as publisher:
            say(f"publishing on {publisher.endpoint}" + (f", replay on {arguments.replay}" if arguments.replay else ""))
            KvEventBridge(connect, mapper, publisher.publish).run()
        return 0

    def show(events: Sequence[Event]) -> None:
        say(json.dumps(wire_batch(events, 0.0, None, form)[1]))

    KvEventBridge(connect, mapper, show).run()
    return 0


def _model(target: Target, wanted: str | None) -> admin_pb2.ModelStatus:
    """The model's namespace and layout, which operators may know. Raises UnknownModel, InvalidRequest."""
    with target.open() as channel:
        return require_model(admin_pb2_grpc.AdminServiceStub(channel), wanted)


def _lines(batch: Batch, *, as_json: bool) -> Iterator[str]:
    if as_json:
        yield json.dumps(_plain(batch))
        return
    if batch.part is Part.FIRST:
        yield f"snapshot of model {batch.model}, epoch {batch.epoch}"
    for run in batch.runs:
        yield _line(run, batch)
    if batch.part is Part.LAST:
        yield f"snapshot complete at change {batch.last}"


def _line(run: Run, batch: Batch) -> str:
    where = f"replica {run.location.replica}" if run.location.tier == "device" else run.location.tier
    what = "here" if batch.part is not Part.NONE else f"{run.kind.name.lower()} ({run.reason})"
    way = "at" if run.present else "gone from"
    first = run.keys[0].hex()[:16] if run.keys else "-"
    more = f" and {len(run.keys) - 1} more" if len(run.keys) > 1 else ""
    return f"{batch.last}  {what}: {way} {where}, group {run.location.group}: {first}{more}"


def _plain(batch: Batch) -> dict[str, object]:
    runs = [
        {
            "kind": run.kind.name,
            "present": run.present,
            "tier": run.location.tier,
            "replica": run.location.replica,
            "group": run.location.group,
            "parent": run.parent.hex(),
            "keys": [key.hex() for key in run.keys],
            "reason": run.reason,
        }
        for run in batch.runs
    ]
    return {
        "epoch": batch.epoch,
        "model": batch.model,
        "part": batch.part.name,
        "first": batch.first,
        "last": batch.last,
        "runs": runs,
    }
