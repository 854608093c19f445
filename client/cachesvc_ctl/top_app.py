"""The terminal view of ``cachesvc top``; needs the extra ``top``."""

from __future__ import annotations

from typing import ClassVar

import grpc
from cachesvc_client.core.errors import CacheClientError, error_of
from kvcache.v1 import admin_pb2_grpc
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from cachesvc_ctl.core.command import Target, one_line
from cachesvc_ctl.looks import (
    MARKS,
    TITLE,
    History,
    Look,
    Rates,
    bar,
    hot_rows,
    lease_rows,
    per_second,
    percent,
    pool_title,
    pool_use,
    spark,
    take_look,
    ticket_rows,
)
from cachesvc_ctl.status import describe_hits

COLOURS = dict(zip(MARKS, ("green", "dodger_blue1", "yellow", "red"), strict=True))
LEGEND = ("cached", "requests' own", "moving", "quarantined")
MOST_POOLS = 6
SORTS = ("silent", "private", "pinned", "engine")


class TopApp(App[None]):
    """Looks every ``every`` seconds on a thread of its own; what is shown is always the last look."""

    CSS = """
    Screen { layout: vertical; }
    #head { height: auto; max-height: 4; padding: 0 1; background: $panel; }
    #rates { height: 3; padding: 0 1; }
    #pools { height: auto; max-height: 9; padding: 0 1; }
    #below { height: 1fr; }
    #left { width: 42fr; }
    #right { width: 38fr; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort", "Sort leases"),
        Binding("t", "tickets", "Prefixes/tickets"),
        Binding("p", "pause", "Pause"),
    ]
    TITLE = "cachesvc top"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, target: Target, every: float) -> None:
        super().__init__()
        self._target = target
        self._every = every
        self._history = History()
        self._sort = 0
        self._shows_tickets = False
        self._is_paused = False
        self._is_looking = False
        self._lost = ""

    @property
    def looks(self) -> int:
        """Number of kept looks: 0 until the daemon has answered."""
        return len(self._history.looks)

    def compose(self) -> ComposeResult:
        """Head, rates, pools; leases beside prefixes or tickets."""
        yield Static(f"connecting to {self._target.address}", id="head", markup=False)
        yield Static("", id="rates", markup=False)
        yield Static("", id="pools", markup=False)
        with Horizontal(id="below"):
            with Vertical(id="left"):
                yield DataTable(id="leases", cursor_type="none", zebra_stripes=True)
            with Vertical(id="right"):
                yield DataTable(id="hot", cursor_type="none", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#leases", DataTable).add_columns("engine", "lease", "silent", "open", "own", "pin")
        self._hot_columns()
        self.set_interval(self._every, self.look)
        self.look()

    def look(self) -> None:
        """Ask, unless the last question is still open or the view is paused."""
        if not (self._is_paused or self._is_looking):
            self._is_looking = True
            self._ask()

    @work(thread=True, exit_on_error=True)
    def _ask(self) -> None:
        worker = get_current_worker()
        try:
            with self._target.open() as channel:
                found: Look | str = take_look(admin_pb2_grpc.AdminServiceStub(channel))
        except grpc.RpcError as error:
            found = str(error_of(error))
        except CacheClientError as error:  # a token file that is gone, say: it may come back
            found = str(error)
        if not worker.is_cancelled:
            self.call_from_thread(self._answered, found)

    def _answered(self, found: Look | str) -> None:
        self._is_looking = False
        if isinstance(found, str):
            self._lost = found
        else:
            self._lost = ""
            if self._history.add(found):
                self.notify("the daemon was restarted", severity="warning")
        self._show()

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(SORTS)
        self._show()

    def action_tickets(self) -> None:
        """Show tickets in place of prefixes, or the other way round."""
        self._shows_tickets = not self._shows_tickets
        self._hot_columns()
        self._show()

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._show()

    def _hot_columns(self) -> None:
        hot = self.query_one("#hot", DataTable)
        hot.clear(columns=True)
        heads = (
            ("ticket", "way", "state", "blocks", "size")
            if self._shows_tickets
            else ("prefix", "blocks", "hits", "on", "model")
        )
        hot.add_columns(*heads)

    def _show(self) -> None:
        look = self._history.looks[-1] if self._history.looks else None
        self.query_one("#head", Static).update(self._head(look))
        if look is None:
            return
        rates = self._history.rates()
        self.query_one("#rates", Static).update(_rates(rates, self.size.width))
        self.query_one("#pools", Static).update(_pools(look, self.size.width))
        _fill(self.query_one("#leases", DataTable), self._leases(look))
        _fill(self.query_one("#hot", DataTable), ticket_rows(look) if self._shows_tickets else hot_rows(look))

    def _head(self, look: Look | None) -> Text:
        text = Text()
        if self._lost:
            text.append(f"NO ANSWER on {self._target.address}: trying again. {one_line(self._lost):.120}\n", "bold red")
        if look is None:
            return text if self._lost else Text(f"connecting to {self._target.address}")
        status = look.status
        moving = status.transfers
        text.append(f"cachesvcd {status.version} {status.backend}", "bold")
        text.append(f", up {status.uptime_seconds:.0f} s, {moving.running_loads} loads {moving.running_stores} stores")
        text.append(f", sorted by {SORTS[self._sort]}")
        text.append(", PAUSED" if self._is_paused else "", "bold yellow")
        text.append(", DRAINING" if status.draining else "", "bold red")
        text.append(f"\n{describe_hits(status.hits)}")
        for line in status.attention[:2]:
            text.append(f"\n! {one_line(line)}", "yellow")
        return text

    def _leases(self, look: Look) -> list[tuple[object, ...]]:
        rows = lease_rows(look)  # the longest silence first
        by = SORTS[self._sort]
        if by == "engine":
            return sorted(rows, key=lambda row: str(row[0]))
        if by == "silent":
            return rows
        return sorted(rows, key=lambda row: -int(str(row[4 if by == "private" else 5])))


def _rates(rates: list[Rates], width: int) -> Text:
    """Sparklines of hits in place, of computed blocks, and of bytes each way."""
    wide = max(8, min(60, width - 46))
    now = rates[-1] if rates else Rates(0.0, None, None, None, 0.0, 0.0)
    hits = spark([one.device or 0.0 for one in rates], wide, 1.0)
    blocks = spark([one.looked_up for one in rates], wide)
    moved = spark([one.in_bytes + one.out_bytes for one in rates], wide)
    text = Text("hits   ")
    text.append(hits, "green")
    text.append(f"  {percent(now.device)} in place {percent(now.host)} host {percent(now.computed)} computed\nlookup ")
    text.append(blocks, "cyan")
    text.append(f"  {now.looked_up:,.0f} blocks/s\nswaps  ")
    text.append(moved, "yellow")
    text.append(f"  {per_second(now.in_bytes)} in, {per_second(now.out_bytes)} out")
    return text


def _pools(look: Look, width: int) -> Text:
    text = Text()
    wide = max(10, width - 31 - TITLE)
    pools = look.status.pools
    for pool in pools[:MOST_POOLS]:
        text.append(f"{pool_title(pool)} ")
        for mark in bar(pool, wide):
            text.append(" " if mark == " " else "█", COLOURS.get(mark))
        text.append(f" {pool_use(pool)}\n")
    if len(pools) > MOST_POOLS:
        text.append(f"and {len(pools) - MOST_POOLS} more pools")
    for mark, name in zip(MARKS, LEGEND, strict=True):
        text.append("█ ", COLOURS[mark])
        text.append(f"{name}  ", "dim")
    text.append("\nopen: requests; own: private pages; pin: pinned blocks; r0: replica 0", "dim")
    return text


def _fill(shown: DataTable[object], rows: list[tuple[object, ...]]) -> None:
    shown.clear()
    for row in rows:
        # A plain str would be read as markup.
        shown.add_row(*(f"{cell:,}" if isinstance(cell, int) else Text(one_line(str(cell))) for cell in row))
