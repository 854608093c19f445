"""The few calls of operators that change something: evict, pin, drain, reload."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator

import grpc
from cachesvc_client.core.errors import NotSupported, PermissionDenied, Unauthenticated, error_of
from cachesvc_client.wire.credentials import open_remote
from cachesvc_client.wire.settings import ChannelOptions
from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc_ctl.core.command import (
    DEADLINE_SECONDS,
    Admin,
    DaemonCommand,
    Question,
    Table,
    count,
    describe_bytes,
    flag,
    hex_digits,
    no_answer,
    seconds,
)
from cachesvc_ctl.status import PINS, describe_setting, list_models, model_flag, model_number, require_model


class Evict(Question[admin_pb2.EvictResponse]):
    """Evict, of one model or of each in turn. The call takes no keys: blocks go in the order of eviction."""

    name = "evict"
    about = "drop unpinned blocks of a model from a tier"
    epilog = "They go in the order of eviction; a single block cannot be named."
    flags = (
        flag("--tier", choices=("device", "host"), default="device", help="default device"),
        flag(
            "--blocks", type=count, default=0, metavar="N", help="of each model at most; 0: all that can go (default)"
        ),
    )

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add flags; a model or ``--all`` is required, so that no one drops a whole cache by mistake."""
        of = parser.add_mutually_exclusive_group(required=True)
        flag("--model", metavar="MODEL", help="its name or number").add_to(of)
        flag("--all", action="store_true", help="of every model").add_to(of)
        super().add_flags(parser)

    def ask(self, admin: Admin) -> admin_pb2.EvictResponse:
        said = self.arguments
        models = list_models(admin).models if said.all else [require_model(admin, said.model)]
        evicted = 0
        for model in models:
            request = admin_pb2.EvictRequest(model_id=model.model_id, tier=said.tier, blocks=said.blocks)
            evicted += admin.Evict(request, timeout=DEADLINE_SECONDS).evicted
        return admin_pb2.EvictResponse(evicted=evicted)

    def show(self, answer: admin_pb2.EvictResponse) -> str:
        return f"evicted {answer.evicted:,} blocks" if answer.evicted else "evicted none"


class Weights(Question[Message]):
    """SetWeightsVersion, or the announced version of a model in ListModels."""

    name = "weights"
    about = "announce which weights a model's engines load, or show it"
    epilog = (
        "Announce a version, have each engine load it, and reset the engine's prefix cache: it shares from then on."
    )
    flags = (
        flag("of", metavar="MODEL", help="its name or number"),
        flag("version", metavar="VERSION", nargs="?", help="printable text of 1 to 128 bytes (default: show it)"),
    )

    def ask(self, admin: Admin) -> Message:
        """Announce a version, or ask for the current one. Idempotent."""
        model = require_model(admin, self.arguments.of)
        if self.arguments.version is None:
            return model
        request = admin_pb2.SetWeightsVersionRequest(model_id=model.model_id, version=self.arguments.version)
        return admin.SetWeightsVersion(request, timeout=DEADLINE_SECONDS)

    def show(self, answer: Message) -> str:
        if isinstance(answer, admin_pb2.ModelStatus):
            return answer.weights_version or "no version of weights was announced"
        assert isinstance(answer, admin_pb2.SetWeightsVersionResponse)
        return f"announced {self.arguments.version}; before: {answer.previous or 'none'}"


class Pin(Question[inspect_pb2.PinResponse]):
    name = "pin"
    about = "keep a prefix from eviction for a time"
    epilog = (
        "KEY is that of the prefix's last block; blocks and tree show keys. All blocks above it stay too, where they "
        "are now. Pins take at most --pin-share of each pool of their model and end with the daemon. status lists them."
    )
    flags = (
        flag("key", type=hex_digits, metavar="KEY", help="in hexadecimal, or how it begins (4 digits or more)"),
        model_flag(),
        flag("--seconds", type=float, default=3600.0, metavar="S", help="from now on (default 3600, at most a week)"),
    )

    def ask(self, admin: Admin) -> inspect_pb2.PinResponse:
        """Pin, or set the end of a pin anew. Idempotent."""
        model = require_model(admin, self.arguments.model)
        request = inspect_pb2.PinRequest(
            model_id=model.model_id, key_hex=self.arguments.key, seconds=self.arguments.seconds
        )
        return admin.Pin(request, timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.PinResponse) -> str:
        return PINS.text([answer.pin])


class Unpin(Question[inspect_pb2.UnpinResponse]):
    name = "unpin"
    about = "end a pin before its time"
    epilog = "The blocks stay until they are evicted. status lists the pins."
    flags = (flag("key", type=hex_digits, metavar="KEY", help="of the pin, or how it begins"), model_flag())

    def ask(self, admin: Admin) -> inspect_pb2.UnpinResponse:
        model = require_model(admin, self.arguments.model)
        request = inspect_pb2.UnpinRequest(model_id=model.model_id, key_hex=self.arguments.key)
        return admin.Unpin(request, timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.UnpinResponse) -> str:
        return f"unpinned {answer.pin.blocks:,} blocks of {answer.pin.model}"


class Drain(Question[admin_pb2.DrainResponse]):
    name = "drain"
    about = "open nothing new from now on; only a restart ends it"

    def ask(self, admin: Admin) -> admin_pb2.DrainResponse:
        return admin.Drain(admin_pb2.DrainRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.DrainResponse) -> str:
        return f"draining; {answer.live_leases} leases are still live"


class Reload(Question[inspect_pb2.ReloadResponse]):
    name = "reload"
    about = "read the configuration file again: all of it or nothing"
    epilog = "cachesvcd --help marks the settings that change live; for others it is refused, by name."

    def ask(self, admin: Admin) -> inspect_pb2.ReloadResponse:
        """Changed settings; the daemon refuses all of them where one cannot change live."""
        return admin.Reload(inspect_pb2.ReloadRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.ReloadResponse) -> str:
        return CHANGES.text(answer.changes) if answer.changes else "nothing changed"


CHANGES = Table(
    "setting=name | before | now=after",
    before=lambda change: describe_setting(change.name, change.before),
    after=lambda change: describe_setting(change.name, change.after),
)


VERIFY_DEADLINE_SECONDS = 600.0
WRONG = 1
NOT_CARRIED_OUT = 2
UNREAD = 3


class Verify(Question[admin_pb2.VerifyResponse]):
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


METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""A HealthCheckResponse whose one field, the status, is SERVING. Its generated messages are the daemon's extra."""
LOOK_SECONDS = 0.2
CALL_SECONDS = 5.0
PERMANENT = (Unauthenticated, PermissionDenied, NotSupported)
"""Refusals that stay as they are until the operator changes a token, or names another daemon."""
OPTIONS = ChannelOptions(first_reconnect_ms=1000, longest_reconnect_ms=1000)
"""A daemon that comes is found within a second; an attempt to connect has as long."""


class Wait(DaemonCommand):
    """Asks for health, with whatever the caller proves itself by: any scope is enough."""

    name = "wait"
    about = "wait until the daemon takes new work, or fail in time"
    epilog = "A daemon that starts, drains or has lost its GPU is not ready. Exit code 1 when the time is over."
    flags = (
        flag("--ready", action="store_true", default=True, help="until health checks say SERVING"),
        flag("--timeout", type=seconds, default=300.0, metavar="SECONDS", help="at most so long (default 300)"),
    )

    def run(self) -> int:
        """Return 0 once the daemon is ready, 1 when the time is over. Raises grpc.RpcError for a permanent refusal."""
        target, timeout = self.target, self.arguments.timeout
        until = time.monotonic() + timeout
        pause = threading.Event()
        with open_remote(target.address, target.credentials, OPTIONS) as channel:
            check: Callable[..., bytes] = channel.unary_unary(
                METHOD, request_serializer=bytes, response_deserializer=bytes
            )
            while True:
                left = until - time.monotonic()
                why = self._look(check, min(CALL_SECONDS, max(LOOK_SECONDS, left)))
                if not why:
                    print("ready")
                    return 0
                if left <= LOOK_SECONDS:
                    print(f"not ready after {timeout:g} s: {why}")
                    return 1
                pause.wait(LOOK_SECONDS)

    def _look(self, check: Callable[..., bytes], limit: float) -> str:
        """Return why it is not ready; empty once it is. Raises grpc.RpcError for a refusal that no wait cures."""
        try:
            is_ready = check(b"", timeout=limit) == SERVING
        except grpc.RpcError as failure:
            if isinstance(error_of(failure), PERMANENT):
                raise
            return no_answer(failure, self.arguments)
        return "" if is_ready else f"{self.target.address} answers NOT_SERVING: it starts, drains or is broken"
