"""Weights of equinox's `LSTMCell` and `GRUCell`, in and out.

    from ostinato.interop import equinox as from_equinox

    spec, weights, notes = from_equinox.from_cell(cell)
    y, state = ostinato.rnn(spec, weights, x)

Equinox orders gates as this package does. Its LSTM has one bias, its GRU one more
inside the candidate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import LayerWeights, RNNSpec
from .._modules import needs
from .._typing import Array, Float
from .exported import join_biases, pseudo_layer, require
from .imported import Imported, as_array, build, gate_order, reorder_gates

__all__ = ["from_cell", "to_cell"]

GATES = {"lstm": "i f g o", "gru": "r z n"}
"""How equinox orders the gates, under this package's names."""

_FIELDS = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias", "b_hh": "bias_n"}


def from_cell(cell: Any) -> Imported:
    """Convert a cell of equinox.

    Args:
        cell: an `eqx.nn.LSTMCell` or `eqx.nn.GRUCell`.

    Returns:
        `Imported(spec, weights, notes)`, in the dtype of the weights.

    Raises:
        TypeError: `cell` is neither, a leaf is no array of floats, or dtypes differ.
        ValueError: shapes do not fit each other.
        ImportError: equinox is not installed.

    Holds under every JAX transformation.
    """
    with needs("equinox"):
        import equinox as eqx

    call = getattr(type(cell), "__call__", None)  # noqa: B004
    if call is eqx.nn.LSTMCell.__call__:
        mode = "lstm"
    elif call is eqx.nn.GRUCell.__call__:
        mode = "gru"
    else:
        raise TypeError(
            "`cell` must be an eqx.nn.LSTMCell or eqx.nn.GRUCell, got "
            f"{type(cell).__module__}.{type(cell).__qualname__}"
        )

    def label(_: int, field: str) -> str:
        return f"cell.{_FIELDS[field]}"

    fields: dict[str, Any] = {"w_hr": None}
    for ours, theirs in _FIELDS.items():
        wanted = hasattr(cell, theirs) and (cell.use_bias or ours.startswith("w"))
        value = getattr(cell, theirs, None)
        fields[ours] = as_array(f"cell.{theirs}", value) if wanted else None
    b_n = fields["b_hh"]
    if b_n is not None and b_n.shape == (cell.hidden_size,):
        zeros = {gate: jnp.zeros_like(b_n) for gate in GATES[mode].split()}
        fields["b_hh"] = jnp.concatenate([*(zeros | {"n": b_n}).values()])
    layer = LayerWeights(**fields)
    return build(mode, [layer], label, order=GATES[mode])


def to_cell(
    spec: RNNSpec,
    weights: Float[Array, " num_params"],
    *,
    layer: int = 0,
    reverse: bool = False,
    fold: bool = False,
) -> Any:
    """Convert one layer to a cell of equinox.

    Args:
        spec: the network; what equinox cannot express raises ValueError.
        weights: its flat vector.
        layer: which layer.
        reverse: which direction of a bidirectional network.
        fold: export the sum of two biases where equinox has one.

    Returns:
        An `eqx.nn.LSTMCell` or `eqx.nn.GRUCell`, with `use_bias=False` for a spec
        without biases. A GRU with `bias="input"` gets a `bias_n` of 0.

    Raises:
        TypeError: `weights` is no array of floats; `reverse` or `fold` is no bool.
        ValueError: a plain RNN, `proj_size`, `cell_clip`, `reset_after=False`,
            `input_mode="skip"` or several heads; two biases without `fold`.
        ImportError: equinox is not installed.
    """
    with needs("equinox"):
        import equinox as eqx

    target = "a cell of equinox"
    require(
        spec,
        target,
        reset_after=True,
        proj_size=0,
        cell_clip=None,
        input_mode="linear",
    )
    if spec.mode not in GATES:
        raise ValueError(
            f"`spec` must have mode 'lstm' or 'gru' for {target}, got {spec.mode!r}"
        )
    parts = pseudo_layer(spec, weights, layer, reverse, traced=True)
    b, b_n = join_biases(spec, parts, target, fold)
    order = gate_order(spec.mode), GATES[spec.mode]
    leaves = {
        "weight_ih": reorder_gates(parts.w_ih, *order),
        "weight_hh": reorder_gates(parts.w_hh, *order),
    }
    if b is not None:
        leaves["bias"] = reorder_gates(b, *order)
    if b is not None and spec.mode == "gru":
        leaves["bias_n"] = jnp.zeros(spec.hidden_size, b.dtype) if b_n is None else b_n
    kind = eqx.nn.LSTMCell if spec.mode == "lstm" else eqx.nn.GRUCell
    cell = eqx.filter_eval_shape(
        kind,
        parts.w_ih.shape[1],
        spec.hidden_size,
        use_bias=b is not None,
        dtype=parts.w_hh.dtype,
        key=jax.random.key(0),
    )
    return eqx.tree_at(
        lambda c: [getattr(c, name) for name in leaves], cell, [*leaves.values()]
    )
