"""The commands `ostinato train music` and `ostinato sample`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import interrupts
from .apps.errors import UserError, require
from .apps.wording import counted
from .cli_training import (
    Model,
    Out,
    Resume,
    Seed,
    check_apart,
    file,
    file_or_folder,
    report,
)

MUSIC, SAMPLE = Path("out/music"), Path("sample.mid")
PACKAGES = "optax", "rich", "safetensors", "matplotlib", "mido", "scipy"


def train(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            parser=file_or_folder,
            help="MIDI files, piano rolls (.mat, .pickle, .npz, .json), or folders.",
        ),
    ],
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop learning after this time, compilation included; what was "
            "learned is measured after it. Default 5, without --epochs."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Stop after this many passes over the pieces.")
    ] = None,
    out: Out = MUSIC,
    resume: Resume = False,
    mode: Annotated[
        str | None, typer.Option(help="Kind of network: gru or lstm. Default lstm.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Units of a layer. Default 144.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers. Default 2.")] = None,
    chords: Annotated[
        str | None,
        typer.Option(
            help="How the keys of a frame depend on each other: independent, or "
            "chained, each on the lower ones. Default independent."
        ),
    ] = None,
    transpose: Annotated[
        int | None,
        typer.Option(
            help="Semitones up or down by which pieces are moved at most, at random in "
            "each epoch; 0 turns it off. Default 6."
        ),
    ] = None,
    per_beat: Annotated[
        int | None,
        typer.Option(help="Frames of a quarter note. Default 2."),
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Dropout rate. Default 0.2.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Pieces in a batch. Default 2.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate of AdamW. Default 4e-3.")
    ] = None,
    seed: Seed = None,
    devices: int | None = None,
) -> Any:
    """Learn from pieces of music which notes come next.

    Ctrl-C ends the run with code 130, SIGTERM with 143, within seconds; what was
    learned is saved, and the same command with --resume continues.
    """
    for package in PACKAGES:
        require(package)
    from .apps.music import train as job

    return job.train(
        files,
        out,
        minutes=minutes,
        epochs=epochs,
        resume=resume,
        mode=mode,
        hidden=hidden,
        layers=layers,
        chords=chords,
        transpose=transpose,
        per_beat=per_beat,
        dropout=dropout,
        batch=batch,
        lr=lr,
        seed=seed,
        guard=interrupts.keeping,
        devices=devices,
    )


def sample(
    model: Model = MUSIC,
    out: Annotated[
        Path, typer.Option(parser=file, help="MIDI file to write.")
    ] = SAMPLE,
    seconds: Annotated[
        float | None, typer.Option(help="Duration of what is drawn. Default 30.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(help="The same as a number of frames.")
    ] = None,
    tempo: Annotated[float, typer.Option(help="Quarter notes in a minute.")] = 100,
    seed: Annotated[int, typer.Option(help="Decides the piece.")] = 0,
    temperature: Annotated[
        float, typer.Option(help="Below 1, likely notes become likelier.")
    ] = 1.0,
    prime: Annotated[
        Path | None,
        typer.Option(
            parser=file,
            help="File of a piece to go on with, the first one to test on if there are "
            "several.",
        ),
    ] = None,
    prime_frames: Annotated[
        int | None, typer.Option(help="Only so many first frames of it.")
    ] = None,
) -> None:
    """Draw a new piece from a trained model and write it as a MIDI file."""
    for package in ("optax", "safetensors", "mido", "scipy"):
        require(package)
    from .apps.devices import all_devices
    from .apps.fields import check_range
    from .apps.music import midi, read, rolls, use

    all_devices()
    if seconds is not None and frames is not None:
        raise UserError("one of --seconds and --frames must be given, got both")
    if prime is None and prime_frames is not None:
        raise UserError("--prime-frames needs --prime FILE")
    if prime is not None:
        check_apart("the piece to go on with", prime, out)
    good = midi.SLOWEST <= tempo <= midi.FASTEST
    check_range("tempo", f"{midi.SLOWEST} to {midi.FASTEST}", tempo, good)
    trained = use.load(model)
    if frames is None:
        seconds = 30.0 if seconds is None else seconds
        good = 0 < seconds <= 3600
        check_range("seconds", "above 0 and at most 3600", seconds, good)
        frames = max(1, round(seconds * tempo / 60 * trained.per_beat))
    start = None
    if prime is not None:
        whole = read.first_piece(prime, trained.per_beat)
        start = use.start_of(whole, prime_frames)
    most = rolls.MOST_FRAMES - (0 if start is None else len(start))
    if seconds is not None and frames > most:
        raise UserError(
            f"--seconds {seconds:g} at --tempo {tempo:g} are {frames:,} frames, and "
            f"{most:,} at most can be drawn; give fewer --seconds or a slower --tempo"
        )
    piece = use.sample(
        trained.model,
        trained.params,
        frames,
        seed=seed,
        temperature=temperature,
        prime=start,
    )
    midi.write(out, piece, trained.per_beat, tempo)
    begin = "" if start is None else f", the first {len(start)} of {prime}"
    report(f"wrote {counted(len(piece), 'frame')} to {out}{begin}", out)
