"""Functions of one example, for a comparison of `ragged.vmap` with a Python loop."""

from . import (
    attention,
    calls,
    control,
    empty,
    indexing,
    matrices,
    pointwise,
    recurrent,
    shapes,
    sums,
    tasks,
    windows,
)
from .program import Program

FAMILIES: dict[str, list[Program]] = {
    "pointwise": pointwise.PROGRAMS,
    "sums": sums.PROGRAMS,
    "shapes": shapes.PROGRAMS,
    "indexing": indexing.PROGRAMS,
    "windows": windows.PROGRAMS,
    "matrices": matrices.PROGRAMS,
    "attention": attention.PROGRAMS,
    "control": control.PROGRAMS,
    "empty": empty.PROGRAMS,
    "calls": calls.PROGRAMS,
    "recurrent": recurrent.PROGRAMS,
    "tasks": tasks.PROGRAMS,
}
PROGRAMS = [program for family in FAMILIES.values() for program in family]
BY_NAME = {program.name: program for program in PROGRAMS}
