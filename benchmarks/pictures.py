"""Pictures: how cost grows with one size, log-log, and the costs of cells."""

from pathlib import Path
from typing import Any

import numpy as np

from ostinato.apps.bench.peers import OURS

from . import rows
from .results import Results, Row

CAPTIONS = {
    "T": "time over the number of steps",
    "N": "time over the number of sequences in a batch",
    "H": "time over the number of units",
    "threads": "time over the number of threads",
}
_AXES = {
    "T": "steps T",
    "N": "sequences N",
    "H": "units H (and inputs)",
    "threads": "threads",
}
_BASE = dict(T=100, N=32, H=256)
_PANELS = {"infer": "one pass", "train": "one pass with all gradients"}
_COLORS = {  # "prepared" is not drawn: at these sizes it coincides with ours
    OURS: "#c1272d",
    "torch": "#ee7c0e",
    "onnxruntime": "#7a4fb5",
    "flax": "#1b8a5a",
    "scan": "#0f6fb7",
}


def draw(
    measured: Results, folder: Path, kind: str, mode: str = "lstm"
) -> dict[str, Path]:
    """Draw a picture for every size that the results vary.

    Return paths by size, also of pictures that earlier results have left in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for size in CAPTIONS:
        path = folder / f"cost_{size}_{kind.lower()}.png"
        panels = {kind: series(measured, mode, kind, size) for kind in rows.SWEEP_KINDS}
        # The tables alone have two numbers of sequences, which make no picture.
        least = 2 if size == "threads" else 3
        if all(len(points) >= least for points in panels.values()):
            _figure(panels, mode, size).savefig(path)
        if path.exists():
            found[size] = path
    return found


def series(measured: Results, mode: str, kind: str, size: str) -> list[Row]:
    """Return the rows in which only `size` differs from the base, by that size."""
    base = {**_BASE, "threads": measured.threads}
    del base[size]
    found = [
        row
        for row in measured.rows.values()
        if (row.mode, row.name.split("-")[1:]) == (mode, [kind])
        and base.items() <= _sizes(row).items()
    ]
    return sorted(found, key=lambda row: _sizes(row)[size])


def _sizes(row: Row) -> dict[str, int]:
    return {**row.sizes, "threads": row.threads}


def _figure(panels: dict[str, list[Row]], mode: str, size: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (kind, points) in zip(
        figure.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        values = [_sizes(row)[size] for row in points]
        for name, color in _COLORS.items():
            shown = [
                (value, row.median(name) * 1e3)
                for value, row in zip(values, points, strict=True)
                if name in row.seconds
            ]
            if shown:
                width = 2.4 if name == OURS else 1.4
                axes.plot(*np.transpose(shown), "o-", color=color, lw=width, label=name)
        floor = [row.floor * 1e3 for row in points]
        axes.plot(values, floor, "--", color="#555555", lw=1.2, label="floor")
        axes.set(xscale="log", yscale="log", xlabel=_AXES[size], title=_PANELS[kind])
        axes.set_xticks(values, labels=[str(value) for value in values], minor=False)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("milliseconds")
    # Not every contender has gradients, but all are in the first panel.
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(_COLORS) + 1,
        frameon=False,
    )
    held = ", ".join(f"{k} = {v}" for k, v in _BASE.items() if k != size)
    figure.suptitle(f"{mode.upper()}: {CAPTIONS[size]}, {held}")
    return figure


def draw_cells(steps: dict[str, dict[str, float]], path: Path) -> None:
    """Draw a bar for each cell and kind of pass: microseconds of a step, by name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [*steps]
    for k, (kind, color) in enumerate((("infer", "#0f6fb7"), ("train", "#c1272d"))):
        places = np.arange(len(names)) + 0.38 * (k - 0.5)
        taken = [steps[name][kind] for name in names]
        bars = axes.barh(places, taken, 0.36, color=color, label=_PANELS[kind])
        axes.bar_label(bars, [f"{t:.0f}" for t in taken], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), labels=names)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds of a step of 8 sequences, 256 inputs and units")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
