"""What commands have in common: paths, reports, what is the same in each `train`."""

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .apps import files
from .apps.errors import UserError, require


def _path_of(kind: str) -> Callable[[str], Path]:
    """Return a parser of paths; an empty text, as of an unset variable, is none."""

    def path(text: str) -> Path:  # the help of older versions of typer has this name
        if not text:
            raise typer.BadParameter(f"must name a {kind}, got ''")
        return Path(text)

    return path


folder, file = _path_of("folder"), _path_of("file")
file_or_folder = _path_of("file or a folder")
Out = Annotated[
    Path, typer.Option(parser=folder, help="Folder for the model and figures.")
]
Model = Annotated[Path, typer.Option(parser=folder, help="Folder of a training run.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in the folder.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of random numbers. Default 0.")]
Ensemble = Annotated[
    int | None,
    typer.Option(
        help="Train this many models that differ in their seed as one, and average "
        "what they say. Takes as many times the time. Default 1."
    ),
]
DEVICES: dict[str, Any] = {
    "devices": Annotated[
        int | None,
        typer.Option(
            help="Devices of this process that share each batch. Default 1; all if "
            "there are several processes."
        ),
    ],
    "distributed": Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Share each batch with other processes, found by the cluster or by "
            "the next three options.",
        ),
    ],
    "coordinator": Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of process 0.")
    ],
    "processes": Annotated[int | None, typer.Option(help="Number of processes.")],
    "process": Annotated[
        int | None, typer.Option(help="Number of this process, from 0.")
    ],
}


def check_apart(what: str, given: Path, out: Path) -> None:
    """Raise a UserError if the file to write is the one that a command reads."""
    if files.same(given, out):
        raise UserError(
            f"`out` must lead to another file than {what}, {given}, got {out}; give "
            "another --out"
        )


def report(text: str, out: Path) -> None:
    """Print what a command tells about the file that it has written.

    It goes to the standard error output where the file is a pipe or the standard
    output, as `is_stream` says, so that nothing but the content is read there.
    """
    typer.echo(text, err=files.is_stream(out))


def trains(command: Callable[..., Any]) -> Callable[..., None]:
    """Add the options of `DEVICES` to a command that returns the summary of a run.

    The command gets `devices` and connected processes. A run that was interrupted ends
    with code 130.
    """

    @functools.wraps(command)
    def connected(**given: Any) -> None:
        require("optax")
        from .apps.devices import connect

        names = "distributed", "coordinator", "processes", "process"
        connect(*(given.pop(name) for name in names))
        if command(**given).figures is None:
            raise typer.Exit(130)

    signature = inspect.signature(command)
    own = [p for name, p in signature.parameters.items() if name != "devices"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name == "distributed" else None,
            annotation=kind,
        )
        for name, kind in DEVICES.items()
    ]
    connected.__annotations__ = command.__annotations__ | DEVICES | {"return": None}
    connected.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return connected


def leave(code: object) -> None:
    """End a failed process of several at once, so that the others notice.

    An orderly end would wait for the others, and they for this one.
    """
    jax = sys.modules.get("jax")
    if code and jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def leave_after_error() -> None:
    """Do as `leave` does, after what Python prints for an error that was not caught."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        traceback.print_exc()
        leave(1)
