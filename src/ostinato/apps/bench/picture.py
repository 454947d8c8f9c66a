"""The picture of a run: a panel for each row, a bar for each contender."""

import io
from collections.abc import Sequence
from typing import Any

from ..wording import counted
from . import results
from .peers import OURS, XLA
from .results import Row

COLORS = {
    OURS: "#c1272d",
    XLA: "#d98a8d",
    "torch": "#ee7c0e",
    "onnxruntime": "#7a4fb5",
    "flax": "#1b8a5a",
    "scan": "#0f6fb7",
}
NAMES = {OURS: "ostinato", XLA: "ostinato on XLA", "scan": "lax.scan"}
COLUMNS = 2
BAR, HEAD, WIDTH = 0.26, 0.62, 5.2  # inches: of a bar, around a panel, of a panel


def draw(rows: Sequence[Row], machine: dict[str, Any]) -> bytes:
    """Draw milliseconds as bars, every panel to its own scale; return a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    problems = [row.problem for row in rows]
    columns = min(COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    bars = len(results.contenders(rows))
    size = WIDTH * columns, 0.7 + lines * (HEAD + BAR * bars)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, row in zip(panels, rows, strict=False):
        _panel(axes, row)
        axes.set_title(results.label(row.problem, problems), fontsize=10, loc="left")
    for axes in panels[len(rows) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"Milliseconds a call: {results.common(problems)}\n"
        f"{machine['cpu']}, {counted(machine['threads'], 'thread')}",
        fontsize=10,
    )
    written = io.BytesIO()
    FigureCanvasAgg(figure).print_png(written)
    return written.getvalue()


def _panel(axes: Any, row: Row) -> None:
    times = [
        (name, median * 1e3)
        for name in COLORS
        if (median := row.median(name)) is not None
    ]
    axes.barh(
        range(len(times)),
        [time for _, time in times],
        color=[COLORS[name] for name, _ in times],
        height=0.75,
    )
    for place, (name, time) in enumerate(times):
        text = results.milliseconds(time / 1e3)
        if name != OURS:
            text += f"  ({results.times(row.ratio(name))}x ours)"
        axes.annotate(
            text,
            (time, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(
        range(len(times)), [NAMES.get(name, name) for name, _ in times], fontsize=9
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(time for _, time in times))  # room for the numbers
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
