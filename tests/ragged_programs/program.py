"""What a program is: a function of one example, its inputs known by their names."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

D = 3  # features; odd
WORDS = 5  # of a vocabulary
STATES = 4


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument: `[dim, *shape]` where `dim` names a ragged axis, else `shape`.

    `below` makes it int32 in `[0, below)`; a dim's name stands for the length of the
    example. `shared` inputs are the same for all examples (`in_axes=None`).
    """

    dim: str | None = None
    shape: tuple[int, ...] = ()
    below: int | str | None = None
    shared: bool = False
    key: bool = False

    @property
    def differentiable(self) -> bool:
        return self.below is None and not self.key


INPUTS: dict[str, Input] = {
    # tokens of a ragged axis
    "x": Input("n", (D,)),
    "x2": Input("n", (D,)),
    "s": Input("n"),
    "square": Input("n", (D, D)),
    "i": Input("n", below=WORDS),
    "at_n": Input("n", below="n"),
    "pick": Input("n", below=D),
    "emissions": Input("n", (STATES,)),
    "y": Input("m", (D,)),
    "t": Input("m"),
    "j": Input("m", below=WORDS),
    "to_n": Input("m", below="n"),
    # one dense value for each example
    "d": Input(shape=(D,)),
    "e": Input(),
    "own_w": Input(shape=(D, D)),
    "own_table": Input(shape=(WORDS, D)),
    "one_of_n": Input(below="n"),
    "choice": Input(below=3),
    "key": Input(key=True),
    # weights
    "w": Input(shape=(D, D), shared=True),
    "u": Input(shape=(D, D), shared=True),
    "b": Input(shape=(D,), shared=True),
    "scale": Input(shared=True),
    "w_in": Input(shape=(D, 2 * STATES), shared=True),
    "w_out": Input(shape=(2 * STATES, D), shared=True),
    "w_gates": Input(shape=(2 * D, 4 * D), shared=True),
    "heads": Input(shape=(3, D, 2, 2), shared=True),
    "table": Input(shape=(WORDS, D), shared=True),
    "kernel": Input(shape=(3, D, 2), shared=True),
    "wide": Input(shape=(9, D, 2), shared=True),
    "taps": Input(shape=(3, 1, D), shared=True),
    "transitions": Input(shape=(STATES, STATES), shared=True),
    "to_words": Input(shape=(D, WORDS), shared=True),
    "ids": Input(shape=(STATES,), below=WORDS, shared=True),
    "shared_key": Input(key=True, shared=True),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of one example and how to run it.

    Attributes:
        name: as in test ids.
        fn: takes the inputs that its positional parameters name.
        at_least: shortest length of every dim that it is for; 0 lets examples be empty.
        shortest: whether some example of every batch has the shortest length.
        options: of `ragged.vmap`, more ways to run it, each with the same results.
        reference: what the loop calls where `fn` is made for `ragged.vmap` alone.
        gradients: whether derivatives are compared too.
        dtype: what it computes in, for the tolerance.
    """

    name: str
    fn: Callable[..., Any]
    at_least: int = 1
    shortest: bool = False
    options: tuple[Mapping[str, Any], ...] = ({},)
    reference: Callable[..., Any] | None = None
    gradients: bool = True
    dtype: str = "float64"

    @property
    def inputs(self) -> dict[str, Input]:
        parameters = inspect.signature(self.fn).parameters.values()
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return {p.name: INPUTS[p.name] for p in parameters if p.kind == positional}

    @property
    def dims(self) -> list[str]:
        return sorted({a.dim for a in self.inputs.values() if a.dim is not None})


def programs(functions: Mapping[str, Callable[..., Any]], **common) -> list[Program]:
    """Programs that differ in nothing but what they compute."""
    return [Program(name, fn, **common) for name, fn in functions.items()]
