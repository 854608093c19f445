"""Common style of the lab's pictures: colours, plain axes, titles and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cachesvc_ctl.core.command import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

DPI = 130
LEGEND_GAP = 0.07
"""Room, in widths of a panel, between it and its legend: the scale of the sums stands there."""

INK = "#1f2933"
FAINT_INK = "#6b7785"
GRID = "#e4e7eb"
BLUE, RED, GREEN, YELLOW, GREY = "#3f6fd1", "#c4473a", "#2f7d6b", "#d99a2b", "#c9ced6"
DEVICE, HOST, STORAGE, COMPUTED = GREEN, BLUE, YELLOW, GREY
MOVED_IN, MOVED_OUT = BLUE, YELLOW
"""One colour for each tier and direction: those of the daemon's page and of the dashboard."""


def empty_figure(size_inches: tuple[float, float], purpose: str) -> Figure:
    """A white page. Raises MissingExtraError, with the ``purpose``, where there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "replay", purpose) from error

    # A figure with its own canvas: pyplot would choose a backend, and keep the figure, for the whole process.
    figure = Figure(figsize=size_inches, dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def make_plain(axes: Axes) -> None:
    """Remove the frame, and draw a faint grid for heights."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT_INK)
    axes.tick_params(colors=FAINT_INK, labelsize=9, length=0, which="both")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def write_titles(axes: Axes, title: str, x_label: str) -> None:
    """Write the title and the label of the x axis."""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(x_label, fontsize=9.5, color=FAINT_INK)


def add_legend(axes: Axes, handles: Sequence[Artist | BarContainer], labels: Sequence[str], *, title: str = "") -> None:
    """Draw a legend to the right of the axes."""
    legend = axes.legend(
        handles,
        labels,
        title=title,
        loc="upper left",
        bbox_to_anchor=(1.0 + LEGEND_GAP, 1.04),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.2,
        borderaxespad=0,
        labelspacing=0.7,
        alignment="left",
    )
    legend.get_title().set(color=FAINT_INK, fontsize=9)
