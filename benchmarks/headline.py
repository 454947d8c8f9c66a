"""The picture of the first page: `python -m benchmarks.headline`, from docs/results.md.

It repeats measured rows, and measures nothing.
"""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

PAGE = Path("docs/results.md")
PICTURE = "images/speed.png"
CHOSEN = {  # a bar for each: its table and its row
    "GRU, training": ("GRU", "N32H256-train"),
    "GRU, training,\ndifferent lengths": ("GRU", "N32H256-ragged-train"),
    "LSTM, training": ("LSTM", "N32H256-train"),
    "LSTM, training,\ndifferent lengths": ("LSTM", "N32H256-ragged-train"),
    "GRU, one pass": ("GRU", "N32H256-infer"),
    "LSTM, one pass": ("LSTM", "N32H256-infer"),
}
PEERS = {"torch": "PyTorch", "flax": "Flax (nnx.RNN)", "scan": "lax.scan"}
_COLORS = {"torch": "#ee7c0e", "flax": "#1b8a5a", "scan": "#0f6fb7"}


def main(
    page: Annotated[Path, typer.Argument(help="The page of results.")] = PAGE,
) -> None:
    """Draw the picture beside the page of results."""
    path = page.parent / PICTURE
    draw(read(page.read_text())).savefig(path)
    typer.echo(path)


def read(page: str) -> dict[str, dict[str, float]]:
    """Return, for each bar, the time of every peer over ours, of the first vendor.

    Raises:
        ValueError: the page lacks a chosen row.
    """
    tables = {}
    for part in page.split("#### ")[1:]:
        title, _, text = part.partition("\n")
        lines = text.strip().splitlines()
        lines = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
        if not lines or title in tables:
            continue
        cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        tables[title] = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells}
    found = {}
    for label, (title, row) in CHOSEN.items():
        if row not in tables.get(title, {}):
            raise ValueError(f"the page lacks the row {row} of the table {title}")
        found[label] = {peer: float(tables[title][row][peer]) for peer in PEERS}
    return found


def draw(ratios: dict[str, dict[str, float]]) -> Any:
    """Draw a group of bars for each row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(PEERS)
    for n, (peer, name) in enumerate(PEERS.items()):
        places = [i + (n - (len(PEERS) - 1) / 2) * width for i in range(len(ratios))]
        heights = [row[peer] for row in ratios.values()]
        bars = axes.bar(places, heights, width * 0.92, color=_COLORS[peer], label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.axhline(1, color="#c1272d", lw=1.6, label="ostinato = 1")
    axes.set_xticks(range(len(ratios)), labels=list(ratios), fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("time over ostinato's")
    axes.set_ylim(0, 1.08 * max(max(row.values()) for row in ratios.values()))
    axes.set_yticks(range(5))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(PEERS) + 1, frameon=False)
    return figure


if __name__ == "__main__":
    typer.run(main)
