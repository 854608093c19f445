"""Models: their list, and the one that ``--model`` names."""

from __future__ import annotations

from cachesvc_client.core.errors import InvalidRequest
from kvcache.v1 import admin_pb2

from cachesvc_ctl.core.command import Flag, flag
from cachesvc_ctl.core.text import table
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, Admin, Question


class UnknownModel(Exception):
    """The daemon has no model of that name or number; ``wanted`` None: it has none at all."""

    def __init__(self, wanted: str | None) -> None:
        super().__init__(wanted)
        self.wanted = wanted

    def __str__(self) -> str:
        there_is = "no model is registered yet" if self.wanted is None else f"there is no model {self.wanted}"
        return f"{there_is}; cachesvc models lists those that are"


class Models(Question[admin_pb2.ListModelsResponse]):
    """ListModels."""

    name = "models"
    about = "models, layouts and replicas"

    def ask(self, admin: Admin) -> admin_pb2.ListModelsResponse:
        """Ask for the models that the caller may see."""
        return list_models(admin)

    def show(self, answer: admin_pb2.ListModelsResponse) -> str:
        """Show one model a line."""
        rows = [
            (
                m.model_id,
                m.display_name or m.model,
                m.model if m.display_name else "",
                m.weights_version,
                m.namespace_hex[:12],
                m.layout.block_tokens,
                m.layout.ranks,
                len(m.layout.planes),
                ",".join(g.name for g in m.layout.groups),
                m.blocks,
                " ".join(map(str, m.device_pages)),
                " ".join(map(str, m.host_pages)),
                sum(r.leases for r in m.replicas),
            )
            for m in answer.models
        ]
        head = (
            *("id", "model", "identity", "weights", "namespace", "tokens", "ranks", "planes", "groups", "blocks"),
            *("device", "host", "leases"),
        )
        return table(head, rows)


def list_models(admin: Admin) -> admin_pb2.ListModelsResponse:
    """Every model that the caller may see. Raises grpc.RpcError."""
    return admin.ListModels(admin_pb2.ListModelsRequest(), timeout=DEADLINE_SECONDS)


def model_flag(otherwise: str = "the only one") -> Flag:
    """``--model``; ``otherwise``: what is meant where it is left out."""
    return flag("--model", metavar="MODEL", help=f"its name or number (default: {otherwise})")


def pick_model(admin: Admin, wanted: str | None) -> admin_pb2.ModelStatus | None:
    """The model that was named, by number, identity or display name. Where none was: the only one, or None while there
    is none.

    Raises UnknownModel for one that is not there, InvalidRequest where several could be meant.
    """
    models = list(list_models(admin).models)
    if wanted is not None:
        found = [each for each in models if str(each.model_id) == wanted]
        found = found or [each for each in models if each.model == wanted]
        found = found or [each for each in models if each.display_name == wanted]
        if not found:
            raise UnknownModel(wanted)
        models = found
    if len(models) > 1:
        named = ", ".join(f"{each.model_id} ({_shown(each)})" for each in models[:8])
        raise InvalidRequest(f"which of {len(models)} models? name one by its number: {named}")
    return models[0] if models else None


def require_model(admin: Admin, wanted: str | None) -> admin_pb2.ModelStatus:
    """``pick_model``, where without one there is nothing to do. Raises UnknownModel, InvalidRequest."""
    model = pick_model(admin, wanted)
    if model is None:
        raise UnknownModel(None)
    return model


def identity_of(admin: Admin, wanted: str) -> str:
    """Return the identity of the model that has the display name ``wanted``; ``wanted`` itself where no registered
    model has it. Raises InvalidRequest where several have."""
    models = list_models(admin).models
    if any(each.model == wanted for each in models) or all(each.display_name != wanted for each in models):
        return wanted
    return require_model(admin, wanted).model


def _shown(model: admin_pb2.ModelStatus) -> str:
    return f"{model.display_name}, {model.model}" if model.display_name else model.model


def model_number(admin: Admin, wanted: str | None) -> int:
    """Number of a model; 0, which stands for every model, where none was named. Raises UnknownModel, InvalidRequest."""
    return 0 if wanted is None else require_model(admin, wanted).model_id
