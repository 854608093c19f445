"""The few calls of operators that change something: evict, pin, drain, reload."""

from __future__ import annotations

import argparse

from google.protobuf.message import Message
from kvcache.v1 import admin_pb2, inspect_pb2

from cachesvc_ctl.core.command import count, flag, hex_digits
from cachesvc_ctl.core.text import table
from cachesvc_ctl.questions.models import list_models, model_flag, require_model
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, Admin, Question
from cachesvc_ctl.questions.status import describe_setting, pins_table


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
        """The sum over the models."""
        said = self.arguments
        models = list_models(admin).models if said.all else [require_model(admin, said.model)]
        evicted = 0
        for model in models:
            request = admin_pb2.EvictRequest(model_id=model.model_id, tier=said.tier, blocks=said.blocks)
            evicted += admin.Evict(request, timeout=DEADLINE_SECONDS).evicted
        return admin_pb2.EvictResponse(evicted=evicted)

    def show(self, answer: admin_pb2.EvictResponse) -> str:
        """Number of evicted blocks."""
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
        """The version, and the one before."""
        if isinstance(answer, admin_pb2.ModelStatus):
            return answer.weights_version or "no version of weights was announced"
        assert isinstance(answer, admin_pb2.SetWeightsVersionResponse)
        return f"announced {self.arguments.version}; before: {answer.previous or 'none'}"


class Pin(Question[inspect_pb2.PinResponse]):
    """Pin."""

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
        """The pin as ``status`` lists it."""
        return pins_table([answer.pin])


class Unpin(Question[inspect_pb2.UnpinResponse]):
    """Unpin."""

    name = "unpin"
    about = "end a pin before its time"
    epilog = "The blocks stay until they are evicted. status lists the pins."
    flags = (flag("key", type=hex_digits, metavar="KEY", help="of the pin, or how it begins"), model_flag())

    def ask(self, admin: Admin) -> inspect_pb2.UnpinResponse:
        """End it."""
        model = require_model(admin, self.arguments.model)
        request = inspect_pb2.UnpinRequest(model_id=model.model_id, key_hex=self.arguments.key)
        return admin.Unpin(request, timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.UnpinResponse) -> str:
        """The blocks that it kept."""
        return f"unpinned {answer.pin.blocks:,} blocks of {answer.pin.model}"


class Drain(Question[admin_pb2.DrainResponse]):
    """Drain."""

    name = "drain"
    about = "open nothing new from now on; only a restart ends it"

    def ask(self, admin: Admin) -> admin_pb2.DrainResponse:
        """Have the daemon drain. Idempotent."""
        return admin.Drain(admin_pb2.DrainRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.DrainResponse) -> str:
        """Leases that are still live."""
        return f"draining; {answer.live_leases} leases are still live"


class Reload(Question[inspect_pb2.ReloadResponse]):
    """Reload."""

    name = "reload"
    about = "read the configuration file again: all of it or nothing"
    epilog = "cachesvcd --help marks the settings that change live; for others it is refused, by name."

    def ask(self, admin: Admin) -> inspect_pb2.ReloadResponse:
        """Changed settings; the daemon refuses all of them where one cannot change live."""
        return admin.Reload(inspect_pb2.ReloadRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.ReloadResponse) -> str:
        """Show one setting a line."""
        rows = [
            (change.name, describe_setting(change.name, change.before), describe_setting(change.name, change.after))
            for change in answer.changes
        ]
        return table(("setting", "before", "now"), rows) if rows else "nothing changed"
