"""Settings that change while the daemon runs: the file is read again, and applied whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from cachesvc.flows.transfers import set_eviction
from cachesvc.memory.interface import DeviceMemory
from cachesvc.model.errors import CacheError, Conflict, InvalidRequest
from cachesvc.model.words import Direction, WritePolicy
from cachesvc.policy.eviction import same_order
from cachesvc.service.access.admission import Admission
from cachesvc.service.loop.node import Node
from cachesvc.telemetry import events

log = logging.getLogger(__name__)


class Change(NamedTuple):
    name: str
    before: str
    after: str


class Reloader:
    """``reread`` gives every setting as the file and the flags have it now; None: there is no file. ``live``: what may
    change, and how to apply it: these calls may not fail. ``current``, and as text ``shown``, are kept up to date."""

    def __init__(
        self,
        current: dict[str, Any],
        shown: dict[str, str],
        reread: Callable[[], Mapping[str, Any]] | None,
        live: Mapping[str, Callable[[Any], None]],
    ) -> None:
        self._current = current
        self._shown = shown
        self._reread = reread
        self._live = live

    def reload(self) -> list[Change]:
        """Apply what the file says now; what was changed. Logged, whatever comes of it.

        Raises InvalidRequest (no file, or one that cannot be) and Conflict (settings that need a restart, by
        name); nothing is changed then.
        """
        try:
            changes = self._apply()
        except CacheError as refused:
            events.warning("reload_refused", reason=str(refused))
            raise
        events.event("reloaded", **{change.name: f"{change.before} -> {change.after}" for change in changes})
        return changes

    def reload_by_signal(self) -> None:
        """Call ``reload``; a refusal goes to the log alone."""
        try:
            self.reload()
        except CacheError as refused:
            log.debug("reload_by_signal_refused code=%s", refused.code.value)

    def _apply(self) -> list[Change]:
        if self._reread is None:
            raise InvalidRequest("there is no configuration file to read again; start the daemon with --config FILE")
        wanted = self._reread()
        different = [name for name, value in wanted.items() if value != self._current[name]]
        fixed = [name for name in different if not self._may_change(name, wanted[name])]
        if fixed:
            said = ", ".join(f"{name} ({self._current[name]} -> {wanted[name]})" for name in fixed)
            raise Conflict(f"{said} cannot change while the daemon runs; nothing was changed: restart it, or undo")
        changes = [Change(name, str(self._current[name]), str(wanted[name])) for name in different]
        for name in different:
            self._live[name](wanted[name])
            self._current[name] = wanted[name]
            self._shown[name] = str(wanted[name])
        return changes

    def _may_change(self, name: str, wanted: Any) -> bool:
        if name == "eviction" and not same_order(self._current[name], wanted):
            return False
        return name in self._live


def live_settings(
    node: Node,
    admission: Admission,
    cache: object,
    lanes: object,
    backend: DeviceMemory,
    drain: object,
) -> dict[str, Callable[[Any], None]]:
    """Settings that may change while the daemon runs, and how. Not ``lease_seconds``: engines learned it when they
    opened. ``cache``, ``lanes`` and ``drain`` hold the limits of a step, a process's lanes and a drain."""
    core = node.core

    def limit(name: str, value: Any) -> None:
        core.limits = replace(core.limits, **{name: value})

    limits = ("blocks_per_sequence", "sequences_per_lease", "stock_pages_per_lease", "leases", "pin_share")
    return {
        **{name: partial(limit, name) for name in limits},
        "load_limit": partial(backend.limit_copies, Direction.LOAD),
        "store_limit": partial(backend.limit_copies, Direction.STORE),
        "eviction": partial(set_eviction, core),
        "write_policy": lambda value: setattr(core, "writing", replace(core.writing, policy=WritePolicy(value))),
        "write_back_share": lambda value: setattr(core, "writing", replace(core.writing, share=value)),
        "write_through_threshold": lambda value: setattr(core, "writing", replace(core.writing, threshold=value)),
        "wait_seconds": partial(setattr, node, "wait_seconds"),
        "operations_per_step": partial(setattr, cache, "operations_per_step"),
        "calls_in_flight": partial(setattr, admission.work, "limit"),
        "waiting_calls": partial(setattr, admission.waits, "limit"),
        "waiting_calls_per_process": partial(setattr, admission.waits, "each"),
        "lanes_per_process": partial(setattr, lanes, "each"),
        "log_level": lambda value: logging.getLogger().setLevel(value.upper()),
        "drain_seconds": partial(setattr, drain, "drain_seconds"),
    }
