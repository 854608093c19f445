"""The replay lab: traces, replays through real pages, reports and pictures."""

from __future__ import annotations
