"""The commands `ostinato train forecast` and `ostinato forecast`."""

from pathlib import Path
from typing import Annotated

import typer

from . import interrupts
from .apps.errors import UserError, require

FORECAST, NEXT = Path("out/forecast"), Path("forecast.csv")


def train(
    file: Annotated[
        Path, typer.Argument(help="CSV file: names, a column of dates, numbers.")
    ],
    minutes: Annotated[
        float, typer.Option(help="Stop after this time, compilation included.")
    ] = 2.0,
    epochs: Annotated[
        int | None, typer.Option(help="Stop after this many passes over the windows.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the model and figures.")
    ] = FORECAST,
    look_back: Annotated[int, typer.Option(help="Rows that a forecast reads.")] = 96,
    horizon: Annotated[int, typer.Option(help="Rows that it forecasts.")] = 96,
    segment: Annotated[int, typer.Option(help="Rows that are read in one step.")] = 24,
    split: Annotated[
        str,
        typer.Option(
            help="Shares or numbers of rows to learn from, to choose by, to test on."
        ),
    ] = "0.6,0.2,0.2",
    hidden: Annotated[int, typer.Option(help="GRU units, an even number.")] = 128,
    dropout: Annotated[float, typer.Option(help="Dropout rate.")] = 0.3,
    batch: Annotated[int, typer.Option(help="Windows in a batch.")] = 64,
    lr: Annotated[float, typer.Option(help="Highest learning rate of AdamW.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Seed of random numbers.")] = 0,
) -> None:
    """Learn to forecast the columns of a table of numbers with a date column.

    Missing numbers are taken to be the ones before them. Ctrl-C ends the run with code
    130, SIGTERM with 143, and keeps the best weights so far.
    """
    for package in ("optax", "rich", "safetensors", "matplotlib"):
        require(package)
    from .apps.forecast import train as job
    from .apps.forecast.settings import Settings

    figures = job.train(
        file,
        out,
        look_back=look_back,
        horizon=horizon,
        segment=segment,
        hidden=hidden,
        dropout=dropout,
        split=_numbers("split", split),
        settings=Settings(minutes, epochs, batch, lr, seed),
        guard=interrupts.keeping,
    )
    if figures is None:
        raise typer.Exit(130)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"`{name}` must be numbers with commas between, got {text!r}"
        ) from None


def forecast(
    file: Annotated[
        Path, typer.Argument(help="CSV file with the columns of the training file.")
    ],
    model: Annotated[Path, typer.Option(help="Folder of a training run.")] = FORECAST,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = NEXT,
) -> None:
    """Write forecasts of the rows after the last one of a file, as CSV."""
    for package in ("optax", "safetensors"):
        require(package)
    from .apps.forecast import table, use

    trained, given = use.load(model), table.read(file)
    values = use.forecast(trained, given)
    use.write(out, given, values)
    typer.echo(f"{len(values)} rows after {given.dates[-1]} are in {out}")
