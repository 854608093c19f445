"""The facts behind the name under which engines share, in a form that all processes agree on, and the name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import MappingProxyType

DISPLAY_BYTES = 128

Fields = Mapping[str, frozenset[str]]
NO_FIELDS: Fields = MappingProxyType({})

HUB_NOTES = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
"""Notes in a model's ``config.json`` about its origin."""

LENGTH_FREE_ROPES = frozenset({"", "default", "linear", "llama3", "yarn", "deepseek_yarn", "mrope", "proportional"})
"""Kinds of position embeddings that do not look at the longest request; LongRoPE, for one, does."""


LENGTH_READERS = ("llama4",)
"""Beginnings of the names of model types that scale attention by the longest request and the generation config."""


def named(engine: str, facts: Mapping[str, str]) -> str:
    """Return the identity of what a kind of engine computes."""
    text = json.dumps(dict(facts), sort_keys=True).encode()
    person = f"kv-{engine}-name"[:16].encode()
    return f"{engine}-{hashlib.blake2b(text, digest_size=16, person=person).hexdigest()}"


def display_name(model: str) -> str:
    """Return what operators see beside the identity: the last part of the model's path or name, as far as the daemon
    takes it: printable, at most ``DISPLAY_BYTES``."""
    text = "".join(each if each.isprintable() else "?" for each in PurePath(model).name)
    return text.encode(errors="replace")[:DISPLAY_BYTES].decode(errors="ignore")


def length_fact(text_config: object, longest_tokens: int, generation: Callable[[], object]) -> str:
    """Return what a model's attention takes from the length of its longest request, an empty text where it takes
    nothing. ``generation``: gives the defaults of sampling that the checkpoint has."""
    config = canonical(text_config)
    if str(config.get("model_type") if isinstance(config, dict) else "").startswith(LENGTH_READERS):
        return f"{longest_tokens}.{digest_of(canonical(generation()))}"
    kinds = {str(kind) for kind in _rope_kinds(config)}
    return "" if kinds <= LENGTH_FREE_ROPES else str(longest_tokens)


def canonical(value: object, harmless: Fields = NO_FIELDS, inside: tuple[int, ...] = ()) -> object:
    """Turn a value into what JSON has, equal in all processes for equal values. ``harmless``: fields by the name of
    their class that are left out. ``inside``: the values around it, which it may lead back to."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Enum):
        return [_type_name(type(value)), value.name]
    if isinstance(value, type) or id(value) in inside:
        return _type_name(value if isinstance(value, type) else type(value))
    if isinstance(value, Path):
        return str(value)
    inside = (*inside, id(value))
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):  # a configuration of a model
        return canonical(without_notes(to_dict()), harmless, inside)
    if isinstance(value, Mapping):
        return {str(key): canonical(each, harmless, inside) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((canonical(each, harmless, inside) for each in value), key=repr)
    if isinstance(value, list | tuple):
        return [canonical(each, harmless, inside) for each in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__ == "torch":  # dtypes and devices
        return str(value)
    left_out = harmless.get(type(value).__name__, frozenset())
    parts = {name: each for name, each in fields_of(value).items() if name not in left_out}
    return [_type_name(type(value)), {name: canonical(parts[name], harmless, inside) for name in sorted(parts)}]


def without_notes(config: Mapping[str, object]) -> dict[str, object]:
    """Leave out where a model's configuration came from, at each level."""
    return {
        key: without_notes(each) if isinstance(each, Mapping) else each
        for key, each in config.items()
        if key not in HUB_NOTES
    }


def digest_of(value: object) -> str:
    """Return 16 hexadecimal digits of what ``canonical`` made."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"kv-vllm-fact").hexdigest()


def fields_of(value: object) -> dict[str, object]:
    """Fields of a value, or what else it has; nothing of what is no data."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name, None) for each in fields(value)}
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _rope_kinds(config: object, *, is_rope: bool = False) -> Iterable[object]:
    """All kinds of position embeddings that a model's configuration names, at any depth."""
    for key, each in config.items() if isinstance(config, Mapping) else ():
        if is_rope and key in ("rope_type", "type"):
            yield each
        elif isinstance(each, Mapping):
            yield from _rope_kinds(each, is_rope=is_rope or key in ("rope_parameters", "rope_scaling"))
