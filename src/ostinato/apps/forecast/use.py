"""The file of a trained forecaster, and forecasts with it."""

import csv
import dataclasses
import io
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import files
from ..errors import UserError
from ..fields import check, check_range, make
from ..tensors import MODEL_FILE, TensorFiles, fitting, named
from ..wording import counted
from . import dates, table
from .model import MOST_PARAMS, Forecaster, Params
from .windows import Scale

MOST_DIGITS = 15  # that a float64 has in decimal
FILES = TensorFiles(
    "ostinato-forecast-2",
    "train one with: ostinato train forecast FILE.csv",
    MOST_PARAMS,
)


class Trained(NamedTuple):
    """A trained model of the columns `names`; `figures` are those of its run."""

    model: Forecaster
    params: Params
    names: tuple[str, ...]
    scale: Scale
    figures: dict[str, Any]


def save(folder: Path, trained: Trained) -> None:
    """Write `model.safetensors`; if that fails, the old file stays as it was."""
    tensors = {name: np.asarray(leaf) for name, leaf in named(trained.params)}
    tensors |= {f"scale.{k}": v for k, v in trained.scale._asdict().items()}
    header = {
        "model": dataclasses.asdict(trained.model),
        "names": trained.names,
        "figures": trained.figures,
    }
    FILES.save(folder / MODEL_FILE, tensors, header)


def load(folder: Path) -> Trained:
    """Read `model.safetensors`.

    Raises:
        UserError: the file is missing, damaged, or of another program.
    """
    path = folder / MODEL_FILE
    tensors, header = FILES.read(path)
    with FILES.damage(path):
        check("model", dict, header["model"])
        sizes = header["model"]
        constant = tuple(sizes.get("constant", ()))
        model = make(Forecaster, {**sizes, "constant": constant})
        check("names", list, header["names"])
        check("names", tuple[str, ...], names := tuple(header["names"]))
        check_range("names", f"{model.columns}", names, len(names) == model.columns)
        check("figures", dict, header["figures"])
        scale = Scale(tensors.pop("scale.mean"), tensors.pop("scale.deviation"))
        for one in scale:
            good = one.shape == (model.columns,) and one.dtype == np.float64
            good = good and bool(np.isfinite(one).all())
            check_range("scale", "a number for each column", one.tolist(), good)
        check_range("scale", "above 0", "0", bool((scale.deviation > 0).all()))
        template = jax.eval_shape(model.init, jax.random.key(0))
        leaves = fitting(tensors, dict(named(template)))
    params = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Trained(model, params, names, scale, header["figures"])


def forecast(trained: Trained, given: table.Table) -> np.ndarray:
    """Forecast the rows after the last one of a table, `[horizon, C]`.

    Raises:
        UserError: the table has other columns, or too few rows.
    """
    if given.names != trained.names:
        raise UserError(
            f"the file must have the columns {table.shortened(trained.names)}, as the "
            f"one that was learned from, got {table.shortened(given.names)}"
        )
    need = trained.model.look_back
    if len(given.values) < need:
        wanted = counted(need, "row")
        raise UserError(
            f"the file must have {wanted} at least, got {len(given.values)}"
        )
    filled = table.filled(given)[-need:]
    past = trained.scale.apply(filled, trained.names)
    y = trained.model.forecast(trained.params, jnp.asarray(past[None]))[0]
    values = trained.scale.undo(np.asarray(y, np.float64))
    constant = list(trained.model.constant)
    values[:, constant] = filled[-1, constant]  # without rounding
    return values


def write(path: Path, trained: Trained, given: table.Table, values: np.ndarray) -> None:
    """Write forecasts as CSV, with the dates after the last one of the table.

    Raises:
        UserError: the dates end, or the file cannot be written.
    """
    after, cells = dates.following(given.dates, len(values)), _cells(trained, values)
    text = io.StringIO()
    head = given.dated, *given.names
    quoting = csv.QUOTE_ALL if "\r" in "".join(head) else csv.QUOTE_MINIMAL
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)
    writer.writerow(head)
    for date, row in zip(after, cells, strict=True):
        cell = str(date).removesuffix("+00:00") + "Z" if given.utc else date
        writer.writerow([cell, *row])
    files.write(path, text.getvalue().encode())


def _cells(trained: Trained, values: np.ndarray) -> list[list[str]]:
    """Return each value with the digits that show 1e-4 deviations, and 6 at least.

    The values of a constant column have all digits.
    """
    with np.errstate(divide="ignore"):
        shares = np.log10(np.abs(values)) - np.log10(trained.scale.deviation)
    digits = np.clip(np.ceil(shares) + 5, 6, MOST_DIGITS).astype(int)
    cells = [
        [f"{value:.{n}g}" for value, n in zip(*row, strict=True)]
        for row in zip(values, digits, strict=True)
    ]
    for column in trained.model.constant:
        for row, value in zip(cells, values[:, column].tolist(), strict=True):
            row[column] = repr(value).removesuffix(".0")
    return cells
