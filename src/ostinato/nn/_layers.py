"""The code that the layers of every library share: named parameters, serving."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import (
    LayerWeights,
    PreparedWeights,
    RNNOutput,
    RNNSpec,
    _checks,
    init_weights,
    pack_weights,
    param_shapes,
    prepare,
    rnn,
    rnn_step,
    unpack_weights,
)
from .._rnn.output import as_state
from .._rnn.spec import state_shapes
from .._typing import Array, ArrayLike, Bool, Float, Int, Padding, State

KINDS = {
    "w_ih": "weight_ih",
    "w_hh": "weight_hh",
    "b_ih": "bias_ih",
    "b_hh": "bias_hh",
    "w_hr": "weight_hr",
}
"""The fields of `LayerWeights`, and how PyTorch calls them."""


class Parameter(NamedTuple):
    """One matrix or bias of a network.

    Attributes:
        name: as PyTorch calls it, such as `bias_hh_l1_reverse`.
        kind: the name without its layer and direction, such as `bias_hh`.
        pseudo_layer: whose it is, in the order fwd0, rev0, fwd1, ...
        field: its name in `LayerWeights`.
        shape: as `param_shapes` says.
    """

    name: str
    kind: str
    pseudo_layer: int
    field: str
    shape: tuple[int, ...]


@ft.lru_cache
def parameters(spec: RNNSpec) -> tuple[Parameter, ...]:
    """Return the parameters of a network, in PyTorch's order."""
    found = []
    for p, shapes in enumerate(param_shapes(spec)):
        layer, reverse = divmod(p, spec.num_directions)
        place = f"_l{layer}" + ("_reverse" if reverse else "")
        for field, shape in shapes._asdict().items():
            if shape is not None:
                kind = KINDS[field]
                found.append(Parameter(kind + place, kind, p, field, shape))
    return tuple(found)


def new_weights(
    spec: RNNSpec, weights: Any, dtype: Any, key: Callable[[], Any]
) -> dict[str, Array]:
    """Return the parameters of a new layer by name, drawn where `weights` is None."""
    if weights is None:
        weights = init_weights(key(), spec, jnp.float32 if dtype is None else dtype)
    else:
        weights = _checks.check_array("weights", weights)
        weights = weights if dtype is None else weights.astype(dtype)
        _checks.check_floating("weights", weights, _checks.FLOATS)
    return split_weights(spec, weights)


def split_weights(spec: RNNSpec, weights: Array) -> dict[str, Array]:
    """Return the parameters of a flat vector by name."""
    layers = unpack_weights(weights, spec)
    return {p.name: getattr(layers[p.pseudo_layer], p.field) for p in parameters(spec)}


def join_weights(spec: RNNSpec, values: Mapping[str, Any]) -> Array:
    """Return the flat vector of named parameters; the inverse of `split_weights`.

    Raises:
        TypeError: a parameter is not an array, or dtypes differ.
        ValueError: a parameter has a wrong shape.
    """
    arrays = {}
    for p in parameters(spec):
        arrays[p.name] = _checks.check_array(p.name, values[p.name])
        if arrays[p.name].shape != p.shape:
            raise ValueError(
                f"`{p.name}` must have shape {p.shape}, got {arrays[p.name].shape}; "
                "layers with an ensemble axis run under vmap over the layer"
            )
    _checks.check_same_dtype(**arrays)
    return _join(spec, tuple(arrays.values()))


@ft.partial(jax.jit, static_argnums=0, inline=True)
def _join(spec: RNNSpec, arrays: tuple[Array, ...]) -> Array:
    """Join parameters in one compiled call, which eager layers would make for each."""
    fields = [dict.fromkeys(LayerWeights._fields) for _ in param_shapes(spec)]
    for p, array in zip(parameters(spec), arrays, strict=True):
        fields[p.pseudo_layer][p.field] = array
    return pack_weights([LayerWeights(**f) for f in fields], spec)


def needs_key(spec: RNNSpec) -> bool:
    """Return whether the dropout of a network does anything."""
    return spec.dropout > 0 and spec.num_layers > 1


def mode_of(nonlinearity: Any) -> Any:
    """Return the mode of a plain RNN."""
    _checks.check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
    return f"rnn_{nonlinearity}"


def initial_state(spec: RNNSpec, batch: int | None, dtype: Any) -> State:
    """Return the zeros that a network begins with; None: of one sequence."""
    if batch is not None:
        batch = _checks.check_batch(batch)
    return _zeros(spec, batch, jnp.dtype(dtype))


@ft.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _zeros(spec: RNNSpec, batch: int | None, dtype: Any) -> State:
    shapes = state_shapes(spec, 1 if batch is None else batch)
    zeros = [jnp.zeros(shape, dtype) for shape in shapes]
    return as_state([a[:, 0] for a in zeros] if batch is None else zeros)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FrozenLayer:
    """A recurrent layer for serving, as `.freeze()` of a layer returns it.

    Its weights are gathered and packed once, see `ostinato.prepare`. It is a pytree, an
    argument of jitted functions like any array, and it runs in evaluation, without
    dropout. It does not follow its layer: after a change of parameters, freeze again.

    Attributes:
        spec: the network.
        weights: its prepared weights.

    Holds under `jit` and `vmap`. Derivatives reach inputs and states; parameters are
    trained in the layer, and `jax.grad` with respect to a frozen one raises TypeError.
    """

    spec: RNNSpec = dataclasses.field(metadata={"static": True})
    weights: PreparedWeights

    def __call__(
        self,
        x: Float[Array, "*B T I"],
        initial_state: State | None = None,
        *,
        seq_lengths: Int[ArrayLike, "*B"] | None = None,
        mask: Bool[ArrayLike, "*B T"] | None = None,
        resets: Bool[Array, "*B T"] | None = None,
        padding: Padding = "zero",
        time_major: bool = False,
    ) -> RNNOutput:
        """Run the network over whole sequences; the arguments are those of `rnn`."""
        return rnn(
            self.spec,
            self.weights,
            x,
            initial_state,
            seq_lengths=seq_lengths,
            mask=mask,
            resets=resets,
            padding=padding,
            time_major=time_major,
        )

    def step(
        self,
        x_t: Float[Array, "*B I"],
        state: State | None = None,
        *,
        resets: Bool[ArrayLike, "*B"] | None = None,
        active: Bool[ArrayLike, "*B"] | None = None,
    ) -> RNNOutput:
        """Run one step; the arguments are those of `rnn_step`."""
        return rnn_step(
            self.spec, self.weights, x_t, state, resets=resets, active=active
        )

    def initial_state(self, batch: int | None = None) -> State:
        """Return zeros for `batch` sequences, or for one without a batch axis."""
        return initial_state(self.spec, batch, self.weights.weights.dtype)


def freeze(spec: RNNSpec, weights: Array) -> FrozenLayer:
    """Return the network with its weights packed once."""
    return FrozenLayer(spec, prepare(spec, weights))
