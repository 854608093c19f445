"""Paths of objects in a bucket, and the names in them."""

from __future__ import annotations

import re

from cachesvc.model.keys import KEY_BYTES
from cachesvc.storage.seam import FORMAT, LAYOUT_ID_BYTES, WHOLE, ObjectName, Part, Scope

OBJECTS = FORMAT
LABELS = f"{FORMAT}-labels"
MOST_LABEL_BYTES = 256
_SCOPE = rf"([0-9a-f]{{{2 * KEY_BYTES}}})/([0-9a-f]{{{2 * LAYOUT_ID_BYTES}}})"
_OBJECT = re.compile(
    rf"{FORMAT}/{_SCOPE}/([0-9a-f]{{{2 * KEY_BYTES}}})/(w|[0-9]{{1,5}})\.([0-9]{{1,5}})of([0-9]{{1,5}})"
)
_LABEL = re.compile(rf"{LABELS}/{_SCOPE}")


def label_path(scope: Scope) -> str:
    """Path of a scope's label."""
    return f"{LABELS}/{scope.text}"


def object_of(path: str) -> ObjectName | None:
    """The object that lies there; None for what is none of ours. Its path is the name's ``text``."""
    found = _OBJECT.fullmatch(path)
    if found is None:
        return None
    group = WHOLE if found[4] == "w" else int(found[4])
    part = Part(group, int(found[5]), int(found[6]))
    scope = Scope(bytes.fromhex(found[1]), bytes.fromhex(found[2]))
    return ObjectName(scope, bytes.fromhex(found[3]), part) if max(part) <= WHOLE else None


def scope_of_label(path: str) -> Scope | None:
    """The scope whose label lies there."""
    found = _LABEL.fullmatch(path)
    return None if found is None else Scope(bytes.fromhex(found[1]), bytes.fromhex(found[2]))
