"""The rows of the tables: the problems that are measured, and their goals."""

import dataclasses
from typing import NamedTuple

from cases import WORKLOADS

from ostinato.apps.bench.problem import Problem

MODES = ("lstm", "gru", "rnn_tanh")


class Goal(NamedTuple):
    """The goals for torch's time over ours: a minimum, and a higher aim."""

    must: float
    aim: float | None = None


_ROWS: dict[str, tuple[tuple[float, ...], ...]] = {  # (must, aim) of each of MODES
    "N1H64-infer": ((3.5, 5), (10, 18), (4,)),
    "N1H256-infer": ((1.4, 1.6), (5, 6), (2,)),
    "N1H64-train": ((3, 5), (20, 50), (10,)),
    "N1H256-train": ((2.2, 2.6), (14, 22), (6,)),
    "N16H128-infer": ((1.12, 1.25), (1.6,), (1.5,)),
    "N32H256-infer": ((1.04, 1.12), (1.65,), (1.5,)),
    "N64H512-infer": ((1.05, 1.1), (1.5,), (1.5,)),
    "N16H128-train": ((1.2, 1.4), (1.7, 1.9), (1.5,)),
    "N32H256-train": ((1.25, 1.35), (1.7, 1.9), (1.5,)),
    "N64H512-train": ((1.13, 1.25), (1.5, 1.9), (1.5,)),
    "N16H128-ragged-infer": ((3.5, 4), (3,), (2,)),
    "N32H256-ragged-infer": ((2, 2.2), (1.9,), (2,)),
    "N64H512-ragged-infer": ((1.6, 1.7), (1.5,), (2,)),
    "N16H128-ragged-train": ((5, 6), (6,), (2.5,)),
    "N32H256-ragged-train": ((2.7, 3.2), (2.6,), (2.5,)),
    "N64H512-ragged-train": ((2.5, 2.9), (2.4,), (2.5,)),
    "N32H256-L2-bi-train": ((1.3,), (1.7,), (1.5,)),
    "N32H256-L2-bi-ragged-train": ((2.7,), (2.6,), (2.5,)),
    "N1H256-bf16-infer": ((1.85, 2.2), (5,), ()),
    "N32H256-bf16-infer": ((1.05, 1.15), (1.5,), ()),
    "N64H512-bf16-infer": ((1.1, 1.5), (), ()),
    "N32H256-bf16-train": ((1.1, 1.5), (), ()),
    "N64H512-bf16-train": ((1.1, 1.5), (), ()),
    "N1H64-step": ((2, 2.5), (2, 2.5), ()),
    "N1H256-step": ((2.8, 4), (2.8, 4), ()),
}
FLOOR_RATIO = 1.25  # ours over the floor, for batches of FLOOR_BATCH and more
FLOOR_BATCH = 16
COMPILE_SECONDS = 0.06  # most for a training step, for every T

SWEEPS = {  # variations of N32H256, one size at a time
    "T": (10, 30, 100, 300, 1000),
    "N": (1, 2, 4, 8, 16, 32, 64, 128),
    "H": (32, 64, 128, 256, 512, 1024),
}
SWEEP_KINDS = ("infer", "train")
_FIELDS = {"T": ("steps",), "N": ("batch",), "H": ("hidden_size", "input_size")}
_FLAGS = {
    "bf16": dict(dtype="bfloat16"),
    "L2": dict(num_layers=2),
    "bi": dict(bidirectional=True),
    "ragged": dict(ragged=True),
}


def row(mode: str, name: str) -> Problem:
    """Return the problem of a name such as `N32H256-ragged-train`."""
    size, *flags, kind = name.split("-")
    sizes = WORKLOADS[size] | (dict(steps=1) if kind == "step" else {})
    options = {k: v for flag in flags for k, v in _FLAGS[flag].items()}
    return Problem(mode, kind, **sizes, **options)


_COMPILES = ("N32H256-compile", "N32H256T1000-compile")


def table(mode: str) -> list[Problem]:
    """Return the problems of docs/results.md for one mode."""
    names = [name for name in _ROWS if goal(mode, name)]
    return [row(mode, name) for name in (*names, *_COMPILES)]


def goal(mode: str, name: str) -> Goal | None:
    """Return the goal of a row, or None if it has no goal."""
    goals = _ROWS.get(name, ((),) * len(MODES))[MODES.index(mode)]
    return Goal(*goals) if goals else None


def sweep(mode: str, size: str) -> list[Problem]:
    """Return problems that differ in one size, `T`, `N` or `H`."""
    return [
        dataclasses.replace(
            row(mode, f"N32H256-{kind}"), **dict.fromkeys(_FIELDS[size], value)
        )
        for kind in SWEEP_KINDS
        for value in SWEEPS[size]
    ]
