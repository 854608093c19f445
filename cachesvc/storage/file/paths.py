"""Paths of objects, and the names in them."""

from __future__ import annotations

import re
from pathlib import Path

from cachesvc.model.keys import KEY_BYTES
from cachesvc.storage.seam import LAYOUT_ID_BYTES, ObjectName, Part, Scope

FORMAT_TEXT = "cachesvc storage, files, format 1\n"
FAN_DIGITS = 3
"""4,096 folders a scope: a million objects are some 250 files in each."""
LABEL = "label"
_SCOPE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})-([0-9a-f]{{{2 * LAYOUT_ID_BYTES}}})")
_OBJECT = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.([0-9]{{1,5}})\.([0-9]{{1,5}})of([0-9]{{1,5}})")


def scope_folder(scope: Scope) -> str:
    """Name of a scope's folder."""
    return f"{scope.namespace.hex()}-{scope.layout.hex()}"


def scope_of(folder: str) -> Scope | None:
    """The scope that a folder is of; None for one that is none's."""
    found = _SCOPE.fullmatch(folder)
    return None if found is None else Scope(bytes.fromhex(found[1]), bytes.fromhex(found[2]))


def object_path(objects: Path, name: ObjectName) -> str:
    """Path of an object."""
    key, (group, rank, ranks) = name.key.hex(), name.part
    return f"{objects}/{scope_folder(name.scope)}/{key[:FAN_DIGITS]}/{key}.{group}.{rank}of{ranks}"


def object_of(scope: Scope, file: str) -> ObjectName | None:
    """The object that a file is; None for one that is none."""
    found = _OBJECT.fullmatch(file)
    if found is None:
        return None
    part = Part(int(found[2]), int(found[3]), int(found[4]))
    return ObjectName(scope, bytes.fromhex(found[1]), part) if max(part) <= 0xFFFF else None
