"""A problem to measure: the network, the shapes, and the data for all contenders."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax.numpy as jnp
import numpy as np

import ostinato as ost

Kind = Literal["infer", "train", "step", "compile"]
STEPS = 100  # unless a row's name says otherwise


@dataclass(frozen=True)
class Problem:
    """A network with its sizes; the field names are those of the operator.

    `kind` is a forward pass over the sequences (`infer`), the same with all gradients
    (`train`), one step of streams (`step`), or the compilation of a training step
    (`compile`).
    """

    mode: str
    kind: Kind
    batch: int
    steps: int
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bidirectional: bool = False
    ragged: bool = False
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """The name of the row, such as `N32H256-ragged-train`."""
        parts = [f"N{self.batch}H{self.hidden_size}"]
        if self.steps != STEPS and self.kind != "step":
            parts[0] += f"T{self.steps}"
        parts += ["bf16"] * (self.dtype == "bfloat16")
        parts += [f"L{self.num_layers}"] * (self.num_layers > 1)
        parts += ["bi"] * self.bidirectional + ["ragged"] * self.ragged
        return "-".join([*parts, self.kind])

    @property
    def spec(self) -> ost.RNNSpec:
        """The network."""
        return ost.RNNSpec(
            mode=cast(Any, self.mode),
            input_size=self.input_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            bidirectional=self.bidirectional,
        )

    @property
    def differentiates(self) -> bool:
        """True if gradients are computed, or a computation of them is compiled."""
        return self.kind in ("train", "compile")

    @property
    def terms(self) -> int:
        """The length of the longest accumulation, for the tolerance."""
        spec = self.spec
        width = self.input_size + (1 + spec.num_directions) * self.hidden_size
        return self.steps * self.num_layers * (width + self.batch)


class Data(NamedTuple):
    """The data of a problem, float32 and time first, the layout that peers prefer.

    If the problem's dtype is bfloat16, the values are representable in it.
    """

    layers: list[ost.LayerWeights]
    x: np.ndarray
    h_0: np.ndarray
    c_0: np.ndarray | None
    lengths: np.ndarray | None
    dy: np.ndarray

    @property
    def state(self) -> Any:
        """The initial state, as the operator takes it."""
        return self.h_0 if self.c_0 is None else (self.h_0, self.c_0)


Results = dict[str, np.ndarray]
"""Outputs and gradients by name, float32, in the layout of `Data` and of `weights`."""


def make_data(problem: Problem, seed: int = 0) -> Data:
    """Draw the data of a problem, the same for the same seed."""
    rng, spec = np.random.default_rng(seed), problem.spec

    def rounded(array: Any) -> np.ndarray:
        array = np.asarray(array, np.float32)
        if problem.dtype == "bfloat16":
            array = array.astype(jnp.bfloat16).astype(np.float32)
        return array

    def uniform(shape: tuple[int, ...] | None) -> np.ndarray | None:
        bound = spec.hidden_size**-0.5  # torch's initial weights
        return None if shape is None else rounded(rng.uniform(-bound, bound, shape))

    layers = [
        ost.LayerWeights(*map(uniform, shapes)) for shapes in ost.param_shapes(spec)
    ]
    if problem.mode == "gru":
        for layer in layers:  # flax's cell lacks this bias
            layer.b_hh[2 * spec.hidden_size :] = 0
    lengths = None
    steps, batch, hidden = problem.steps, problem.batch, problem.hidden_size
    if problem.ragged:
        lengths = rng.integers(max(1, steps // 10), steps + 1, batch)
        lengths = np.sort(lengths)[::-1].astype(np.int32)  # the order torch prefers
        lengths[0] = steps
    dy = rng.standard_normal((steps, batch, spec.num_directions * hidden))
    if lengths is not None:
        dy[np.arange(steps)[:, None] >= lengths] = 0
    pseudo_layers = spec.num_layers * spec.num_directions
    h_0, c_0 = 0.1 * rng.standard_normal((2, pseudo_layers, batch, hidden))
    return Data(
        layers=layers,
        x=rounded(rng.standard_normal((steps, batch, problem.input_size))),
        h_0=rounded(h_0),
        c_0=rounded(c_0) if problem.mode == "lstm" else None,
        lengths=lengths,
        dy=rounded(dy),
    )
