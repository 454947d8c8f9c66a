"""The table and the picture that compare `ragged.vmap` with padding."""

import statistics
from pathlib import Path
from typing import Any

from . import results
from .ragged_models import BATCH, LONGEST, MODELS, NETS, SHORTEST, D
from .report import GOALS, RESULTS, between_marks
from .tables import duration, markdown, ratio

MARK = "ragged"
KINDS = {"infer": "one pass", "train": "with gradients"}
DRAWN = [name for name in MODELS if name not in ("lengths", "packed", *NETS)]
_COLORS = {"ragged": "#c1272d", "padded": "#555555"}
_STYLES = {"infer": "-", "train": "--"}

Row = dict[str, Any]


def median(row: Row, contender: str, what: str = "seconds") -> float:
    return statistics.median(row[what][contender])


def over(row: Row, what: str = "seconds") -> float:
    """Return the time of the padded contender over that of the ragged one."""
    return median(row, "padded", what) / median(row, "ragged", what)


def line(row: Row) -> str:
    """Format a row in one line, to print as soon as it is measured."""
    times = ", ".join(
        f"{name} {duration(median(row, name))} ms" for name in row["seconds"]
    )
    where = f"{row['model']}/{row['kind']} at {row['padding_ratio']:.2f}"
    text = f"{where}: {times}, {over(row):.2f}x"
    if row["compile_seconds"]["ragged"]:
        text += f", compiles in {1 / over(row, 'compile_seconds'):.2f}x the time"
    return text


def table(rows: list[Row]) -> str:
    """Format the times of the rows as a Markdown table, a line for each model."""
    heads = ["model"]
    for title in KINDS.values():
        heads += [f"{title}: ragged", "padded", "padded / ragged"]
    heads += ["compile, ragged / padded"]
    lines = []
    for name, found in by_model(rows).items():
        cells, compiles = [MODELS[name].title], []
        for kind in KINDS:
            row = found[kind]
            cells += [duration(median(row, c)) for c in ("ragged", "padded")]
            cells += [ratio(over(row))]
            compiles.append(f"{1 / over(row, 'compile_seconds'):.1f}")
        lines.append([*cells, " / ".join(compiles)])
    return markdown(heads, lines)


def goals(rows: list[Row]) -> str:
    """Format the ratios of the rows and their goals as a Markdown table."""
    heads = ["padded / ragged"]
    for title in KINDS.values():
        heads += [title, "goal"]
    lines = []
    for name, found in by_model(rows).items():
        if (wanted := MODELS[name].goals) is not None:
            cells = [MODELS[name].title]
            for kind, goal in zip(KINDS, wanted, strict=True):
                cells += [ratio(over(found[kind])), f"{goal:g}"]
            lines.append(cells)
    return markdown(heads, lines)


def by_model(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows by model, in the order of MODELS, and kind."""
    found = {
        name: {row["kind"]: row for row in rows if row["model"] == name}
        for name in MODELS
    }
    return {name: kinds for name, kinds in found.items() if kinds}


def write(measured: dict[str, Any], docs: Path, table_ratio: float) -> None:
    """Replace the tables of both pages, and draw the picture."""
    rows, machine = measured["rows"], measured["machine"]
    kind = results.kind_of(machine)
    chosen = [row for row in rows if row["ratio"] == table_ratio]
    bound = chosen[0]["padding_ratio"]
    said = (
        f"Measured {machine['date']} on {results.cpu_of(machine)}, "
        f"{machine['cpus']} CPUs, jax {machine['packages']['jax']}, float32. "
        f"{BATCH} sequences of {SHORTEST} to {LONGEST} steps of {D} features, "
        f"lognormal lengths; padding multiplies the steps by {bound:.1f}. Times in "
        "milliseconds, medians of rounds in turns; the last column is the ratio of "
        "compilation times, one pass / with gradients."
    )
    parts = [said, table(chosen)]
    if len({row["ratio"] for row in rows}) > 1:
        picture = docs / "images" / f"ragged_{kind.lower()}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(rows).savefig(picture)
        parts.append(f"![time over the padding ratio](images/{picture.name})")
    written = {RESULTS: "\n\n".join(parts), GOALS: goals(chosen)}
    for name, text in written.items():
        page = docs / name
        page.write_text(between_marks(page.read_text(), text, f"{MARK} {kind}"))


def draw(rows: list[Row]) -> Any:
    """Draw time over the padding ratio, a panel for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    names = [n for n in DRAWN if any(row["model"] == n for row in rows)]
    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    size = (3.6 * columns, 2.9 * lines + 0.6)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        for kind, style in _STYLES.items():
            found = [r for r in rows if (r["model"], r["kind"]) == (name, kind)]
            found.sort(key=lambda row: row["padding_ratio"])
            ratios = [row["padding_ratio"] for row in found]
            for contender, color in _COLORS.items():
                times = [1e3 * median(row, contender) for row in found]
                label = f"{contender}, {KINDS[kind]}"
                axes.plot(
                    ratios, times, style, marker="o", ms=3, color=color, label=label
                )
        axes.set(xscale="log", yscale="log", title=MODELS[name].title.replace("`", ""))
        axes.set_xticks([1, 2, 3, 5, 10], labels=["1", "2", "3", "5", "10"])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_size(10)
    for axes in panels[::columns]:
        axes.set_ylabel("milliseconds")
    for axes in panels[max(0, len(names) - columns) : len(names)]:
        axes.set_xlabel("padded steps / tokens")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.suptitle(f"{BATCH} sequences of up to {LONGEST} steps of {D} features")
    return figure
