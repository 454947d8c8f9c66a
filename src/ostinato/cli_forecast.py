"""The commands `ostinato train forecast` and `ostinato forecast`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import interrupts
from .apps.errors import require
from .apps.wording import counted
from .cli_training import Ensemble, Model, Out, Resume, Seed, check_apart, report
from .cli_training import file as file_path

FORECAST, NEXT = Path("out/forecast"), Path("forecast.csv")


def train(
    file: Annotated[
        Path,
        typer.Argument(
            parser=file_path, help="CSV file: names, a column of dates, numbers."
        ),
    ],
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop learning after this time, compilation included; what was "
            "learned is measured after it. Default 2, without --epochs."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Stop after this many passes over the windows.")
    ] = None,
    out: Out = FORECAST,
    resume: Resume = False,
    look_back: Annotated[
        int | None, typer.Option(help="Rows that a forecast reads. Default 96.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(help="Rows that it forecasts. Default 96.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="Rows that are read in one step. Default 24.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Shares or numbers of rows to learn from, to choose by, to test on. "
            "Default 0.6,0.2,0.2."
        ),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="GRU units, an even number. Default 128.")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout rate. Default 0.3.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows in a batch. Default 64.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate of AdamW. Default 5e-3.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Weights to keep: best, with the least error on the rows to choose "
            "by, or last. Default best."
        ),
    ] = None,
    seed: Seed = None,
    ensemble: Ensemble = None,
    devices: int | None = None,
) -> Any:
    """Learn to forecast the columns of a table of numbers with a date column.

    Missing numbers are taken to be the ones before them. Ctrl-C ends the run with code
    130, SIGTERM with 143, within seconds; what was learned is saved, and the same
    command with --resume continues.
    """
    for package in ("optax", "rich", "safetensors", "matplotlib"):
        require(package)
    from .apps.forecast import train as job

    return job.train(
        file,
        out,
        minutes=minutes,
        epochs=epochs,
        resume=resume,
        look_back=look_back,
        horizon=horizon,
        segment=segment,
        split=split,
        hidden=hidden,
        dropout=dropout,
        batch=batch,
        lr=lr,
        keep=keep,
        seed=seed,
        ensemble=ensemble,
        guard=interrupts.keeping,
        devices=devices,
    )


def forecast(
    file: Annotated[
        Path,
        typer.Argument(
            parser=file_path, help="CSV file with the columns of the training file."
        ),
    ],
    model: Model = FORECAST,
    out: Annotated[
        Path, typer.Option(parser=file_path, help="CSV file to write.")
    ] = NEXT,
) -> None:
    """Write forecasts of the rows after the last one of a file, as CSV."""
    for package in ("optax", "safetensors"):
        require(package)
    from .apps.devices import all_devices
    from .apps.forecast import table, use

    all_devices()
    check_apart("the given one", file, out)
    trained, given = use.load(model), table.read(file)
    values = use.forecast(trained, given)
    use.write(out, trained, given, values)
    rows = counted(len(values), "row")
    report(f"wrote {rows} after {given.dates[-1]} to {out}", out)
