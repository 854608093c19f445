"""The planes of one attached pool, found by layer and name; arrays of them are made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cachesvc.model.layout import Layout, Plane
from cachesvc_client.core.errors import DaemonFault, InvalidRequest, NoSuchPlane

PlaneKey = tuple[int, str]


class PlanesByKey(dict[PlaneKey, Any]):
    """Arrays by layer and name."""

    def __missing__(self, key: object) -> Any:
        layers = sorted({layer for layer, _ in self})
        names = sorted({name for _, name in self})
        there = f"layers {layers[0]} to {layers[-1]} with {', '.join(names)}" if layers else "none"
        raise NoSuchPlane(
            f"there is no plane {key!r} here; planes go by (layer, name), and there are {there}; a plane that two "
            "groups have is found by group_planes"
        )


class PoolPlanes:
    """``show`` makes the array of a plane as it was mapped; on a GPU that needs a library which may be missing."""

    def __init__(self, layout: Layout, show: Callable[[Any], Any]) -> None:
        self._specs = {(plane.group, plane.layer, plane.name): plane for plane in layout.planes}
        self._marker = None if layout.marker is None else layout.groups[layout.marker].name
        self._show = show
        self._mapped: dict[str, dict[PlaneKey, Any]] = {group.name: {} for group in layout.groups}
        self._arrays: dict[str, PlanesByKey] = {}

    def spec(self, group: str, layer: int, name: str) -> Plane:
        """Specification of a plane in the layout. Raises DaemonFault for an unknown plane."""
        spec = self._specs.get((group, layer, name))
        if spec is None:
            raise DaemonFault(f"plane {name}.{layer}.{group} is not in the layout")
        return spec

    def require(self, group: str) -> None:
        """Check a group's name. Raises InvalidRequest for an unknown group."""
        if group not in self._mapped:
            raise InvalidRequest(f"there is no group {group!r}; the layout has {', '.join(self._mapped)}")

    def put(self, spec: Plane, mapped: Any) -> None:
        """Add a plane."""
        self._mapped[spec.group][spec.layer, spec.name] = mapped

    def of_group(self, group: str) -> PlanesByKey:
        """Arrays of one group. Raises InvalidRequest, and NotSupported where arrays cannot be made."""
        self.require(group)
        arrays = self._arrays.get(group)
        if arrays is None:
            shown = {key: self._show(plane) for key, plane in self._mapped[group].items()}
            arrays = self._arrays[group] = PlanesByKey(shown)
        return arrays

    def unambiguous(self) -> PlanesByKey:
        """Arrays of all groups, without those whose key two groups have. Raises as ``of_group``."""
        merged: dict[PlaneKey, Any] = {}
        doubled: set[PlaneKey] = set()
        for group in self._mapped:
            if group == self._marker:
                continue
            planes = self.of_group(group)
            doubled |= merged.keys() & planes.keys()
            merged.update(planes)
        return PlanesByKey((key, plane) for key, plane in merged.items() if key not in doubled)

    def find(self, layer: int, name: str, group: str | None) -> tuple[Plane, Any]:
        """One plane as it was mapped, and what the layout says of it. Raises InvalidRequest: none, or several."""
        groups = [group] if group is not None else list(self._mapped)
        found = [each for each in groups if (layer, name) in self._mapped.get(each, {})]
        if len(found) != 1:
            raise InvalidRequest(
                f"plane {name!r} of layer {layer} is in {len(found)} groups ({', '.join(found)}); name one that has it"
            )
        return self._specs[found[0], layer, name], self._mapped[found[0]][layer, name]

    def array(self, spec: Plane) -> Any:
        """The array of a plane. Raises as ``of_group``."""
        return self.of_group(spec.group)[spec.layer, spec.name]

    def clear(self) -> None:
        """Hold no plane any more."""
        self._mapped.clear()
        self._arrays.clear()
