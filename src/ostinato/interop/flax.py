"""Weights of flax's recurrent cells, nnx and linen, in and out.

    from ostinato.interop import flax as from_flax

    spec, weights, notes = from_flax.from_cell(cell)             # an nnx cell
    spec, weights, notes = from_flax.from_cell(variables)        # parameters of linen
    y, state = ostinato.rnn(spec, weights, x)

Flax orders gates as this package does. Its LSTM has a bias for the recurrent products,
the GRU of nnx one for the input products, that of linen one more inside the candidate.
A carry of flax is `(c, h)`, a state here `(h, c)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from .. import LayerWeights, RNNSpec, _checks
from .._modules import needs
from .._rnn.joining import Rows, transposed
from .._typing import Array, Float
from .exported import join_biases, pseudo_layer, refuse_candidate_bias, require
from .imported import Imported, as_array, build, gate_order, reorder_gates

__all__ = ["from_cell", "to_cell"]

ImportKind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
ExportKind = Literal["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell", "linen"]

GATES = {"lstm": "i f g o", "gru": "r z n", "rnn_tanh": "h", "rnn_relu": "h"}
"""How flax orders the gates, or calls them, where this package has its own order."""

_SIDES = (("i", "w_ih", "b_ih"), ("h", "w_hh", "b_hh"))
_MODES = {
    "LSTMCell": ("lstm",),
    "OptimizedLSTMCell": ("lstm",),
    "GRUCell": ("gru",),
    "SimpleCell": ("rnn_tanh", "rnn_relu"),
}
_UNTOLD = {
    "rnn_tanh": (
        "parameters do not tell tanh from relu: taken as tanh",
        "parameters do not tell `residual`: taken as False",
    )
}
_UNTOLD_GATES = (
    "parameters do not tell `gate_fn` and `activation_fn`: taken as sigmoid and tanh",
)
_GATE_COUNTS = {4: "lstm", 3: "gru", 1: "rnn_tanh"}


def from_cell(cell_or_params: Any, kind: ImportKind | None = None) -> Imported:
    """Convert a cell of flax, or its parameters.

    Args:
        cell_or_params: an `nnx.LSTMCell`, `OptimizedLSTMCell`, `GRUCell` or
            `SimpleCell`; or the state of one, also as orbax restores it; or the
            parameters of a cell of linen, with or without the outer `"params"`.
        kind: the mode that parameters belong to; None tells it from their names. Needed
            for a `SimpleCell` with relu, which its parameters do not tell.

    Returns:
        `Imported(spec, weights, notes)`, in the dtype of the parameters. Unless `kind`
        is given, the notes say what parameters do not tell: the functions of the cell.

    Raises:
        TypeError: the value is none of these, holds no floats, or dtypes differ.
        ValueError: another `gate_fn` or `activation_fn`, `residual=True`, or a layer of
            the cell that is no plain `nnx.Linear`, such as an adapter; parameters that
            are not those of a cell, or not of `kind`; shapes that do not fit.

    Holds under every JAX transformation.
    """
    if kind is not None:
        _checks.check_choice("kind", kind, get_args(ImportKind))
    if isinstance(cell_or_params, Mapping):
        name, params = _peeled(cell_or_params)
        mode = _mode_of_params(params, name)
        notes = _UNTOLD.get(mode, _UNTOLD_GATES) if kind is None else ()
        if mode == "rnn_tanh" and kind == "rnn_relu":
            mode = kind
    else:
        name, (mode, params, notes) = "cell_or_params", _of_nnx(cell_or_params)
    if kind not in (None, mode):
        raise ValueError(f"`kind` must be {mode!r} for this cell, got {kind!r}")
    dense = "dense_i" in params
    layer = LayerWeights(None, None, None, None, None)
    for side, w, b in _SIDES:
        names = [f"dense_{side}"] if dense else _names(mode, side)
        kernel, bias = _side(params, names, name)
        layer = layer._replace(**{w: kernel, b: bias})

    def label(_: int, field: str) -> str:
        side, leaf = field[2], {"w": "kernel", "b": "bias"}[field[0]]
        part = f"dense_{side}" if dense else " ".join(_names(mode, side))
        return f"{name}[{part!r}][{leaf!r}]"

    return build(
        mode, [layer], label, order=GATES[mode] if dense else None, notes=notes
    )


def to_cell(
    spec: RNNSpec,
    weights: Float[Array, " num_params"],
    kind: ExportKind | None = None,
    *,
    layer: int = 0,
    reverse: bool = False,
    fold: bool = False,
) -> Any:
    """Convert one layer to a cell of flax.

    Args:
        spec: the network; what flax cannot express raises ValueError.
        weights: its flat vector.
        kind: the class of nnx, or `"linen"` for the parameters of a linen cell, without
            the outer `"params"`; None takes the class of nnx that has the mode.
        layer: which layer.
        reverse: which direction of a bidirectional network.
        fold: export the sum of two biases where flax has one.

    Returns:
        A cell of nnx, or nested dicts of arrays. Biases that the spec lacks are 0.

    Raises:
        TypeError: `weights` is no array of floats; `reverse` or `fold` is no bool.
        ValueError: `kind` has another mode; `proj_size`, `cell_clip`,
            `reset_after=False`, `input_mode="skip"` or several heads; two biases
            without `fold`; a recurrent bias of the candidate for nnx's GRU, which has
            no place for it.
        ImportError: flax is not installed, and `kind` is not `"linen"`.
    """
    if kind is not None:
        _checks.check_choice("kind", kind, get_args(ExportKind))
    named = {None: "cell", "linen": "linen cell"}
    target = f"a {named.get(kind, kind)} of flax"
    require(
        spec,
        target,
        reset_after=True,
        proj_size=0,
        cell_clip=None,
        input_mode="linear",
    )
    usual = next(name for name, modes in _MODES.items() if spec.mode in modes)
    wanted: str = usual if kind is None else kind
    if wanted != "linen" and spec.mode not in _MODES[wanted]:
        modes = " or ".join(map(repr, _MODES[wanted]))
        raise ValueError(
            f"`spec` must have mode {modes} for {target}, got {spec.mode!r}"
        )
    parts = pseudo_layer(spec, weights, layer, reverse, traced=True)
    b, b_n = join_biases(spec, parts, target, fold)
    if b is None:
        b = jnp.zeros(parts.w_hh.shape[0], parts.w_hh.dtype)
    if wanted == "linen":
        return _to_linen(spec, parts, b, b_n)
    refuse_candidate_bias(b_n, target, "linen and equinox have a bias there")
    return _to_nnx(spec, parts, b, wanted)


def _names(mode: str, side: str) -> list[str]:
    """Return what linen calls the products of one side, such as `"ii"` to `"io"`.

    They are in this package's order of gates. The side of a `SimpleCell` is one name.
    """
    gates = GATES[mode].split()
    return [side] if len(gates) == 1 else [side + gate for gate in gates]


def _peeled(params: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the mapping inside those of one item, and its name."""
    name = "cell_or_params"
    while True:
        # A cell, or what holds it, may keep random numbers, which are no parameters.
        kept = {key: value for key, value in params.items() if key != "rngs"}
        (key, inner), *others = kept.items() or [("", None)]
        if others or not isinstance(inner, Mapping):
            break
        name, params = f"{name}[{key!r}]", inner
    # A Python attribute cannot be called `if`; nnx calls it `if_`.
    return name, {"if" if key == "if_" else key: value for key, value in kept.items()}


def _mode_of_params(params: Mapping[str, Any], name: str) -> str:
    """Tell the mode from the names of parameters, or from the shape of dense ones."""
    for mode in GATES:
        if set(params) == {*_names(mode, "i"), *_names(mode, "h")}:
            return mode
    if set(params) == {"dense_i", "dense_h"}:
        shape = _leaf(params, "dense_h", "kernel", name).shape
        if len(shape) == 2 and shape[0] and not shape[1] % shape[0]:
            if shape[1] // shape[0] in _GATE_COUNTS:
                return _GATE_COUNTS[shape[1] // shape[0]]
    raise ValueError(
        f"`{name}` must be the parameters of one LSTMCell, OptimizedLSTMCell, GRUCell "
        f"or SimpleCell, such as variables['params']['cell'], got the names "
        f"{', '.join(map(str, params))[:200]}"
    )


def _leaf(params: Mapping[str, Any], part: str, leaf: str, name: str) -> Array:
    inner = params[part]
    if not isinstance(inner, Mapping) or leaf not in inner:
        raise ValueError(f"`{name}[{part!r}]` must hold {leaf!r}, and does not")
    value = inner[leaf]
    if isinstance(value, Mapping) and {*value} == {"value"}:  # from orbax, of nnx
        value = value["value"]
    if callable(unbox := getattr(value, "unbox", None)):  # of linen's metadata
        value = unbox()
    return as_array(f"{name}[{part!r}][{leaf!r}]", value)


def _side(
    params: Mapping[str, Any], names: list[str], name: str
) -> tuple[Rows, Array | None]:
    """Return the weight `[G*H, ...]` and the bias `[G*H]` of one side's products."""
    kernels = [_leaf(params, part, "kernel", name) for part in names]
    first = kernels[0]
    for part, kernel in zip(names, kernels, strict=True):
        if kernel.ndim != 2:
            raise ValueError(
                f"`{name}[{part!r}]['kernel']` must be a matrix, got shape "
                f"{list(kernel.shape)}"
            )
        if kernel.shape != first.shape:
            raise ValueError(
                f"`{name}[{part!r}]['kernel']` must have the shape of that of "
                f"{names[0]!r}, {list(first.shape)}, got {list(kernel.shape)}"
            )
    biases = [
        _leaf(params, part, "bias", name)
        if params[part].get("bias") is not None
        else None
        for part in names
    ]
    weight = transposed(*kernels)
    if all(bias is None for bias in biases):
        return weight, None
    lacking = [n for n, bias in zip(names, biases, strict=True) if bias is None]
    if {*lacking} not in (set(), {"hr", "hz"}):  # of a GRU, the candidate has one
        raise ValueError(
            f"`{name}[{lacking[0]!r}]` must hold 'bias', as others of the cell do"
        )
    rows = first.shape[1]
    for part, bias in zip(names, biases, strict=True):
        if bias is not None and bias.shape != (rows,):
            raise ValueError(
                f"`{name}[{part!r}]['bias']` must have shape [{rows}], got "
                f"{list(bias.shape)}"
            )
    zeros = jnp.zeros(rows, first.dtype)
    return weight, jnp.concatenate([zeros if b is None else b for b in biases])


def _of_nnx(cell: Any) -> tuple[str, dict[str, Any], list[str]]:
    """Return the mode and the parameters of a cell of nnx, under linen's names."""
    with needs("flax"):
        from flax import nnx

    kind = next(
        (k for k in _MODES if type(cell).__call__ is getattr(nnx, k).__call__), None
    )
    if kind is None:
        raise TypeError(
            "`cell_or_params` must be an nnx.LSTMCell, OptimizedLSTMCell, GRUCell or "
            "SimpleCell, or the parameters of a cell, got "
            f"{type(cell).__module__}.{type(cell).__qualname__}"
        )
    mode = _MODES[kind][0]
    if getattr(cell, "residual", False):
        raise ValueError(f"`residual` of the {kind} must be False, got True")
    if kind == "SimpleCell" and cell.activation_fn in (jax.nn.relu, nnx.relu):
        mode = "rnn_relu"
    elif cell.activation_fn not in (jnp.tanh, jax.lax.tanh, nnx.tanh):
        _refuse_function(kind, "activation_fn", "tanh", cell.activation_fn)
    gate_fn = getattr(cell, "gate_fn", nnx.sigmoid)
    if gate_fn not in (jax.nn.sigmoid, jax.lax.logistic, nnx.sigmoid):
        _refuse_function(kind, "gate_fn", "sigmoid", gate_fn)
    names = (
        [*_names(mode, "i"), *_names(mode, "h")]
        if kind == "LSTMCell"
        else ["dense_i", "dense_h"]
    )
    params = {}
    for part in names:
        linear = getattr(cell, "if_" if part == "if" else part)
        if reason := _not_linear(linear):
            raise ValueError(f"`{part}` of the {kind} must be an nnx.Linear{reason}")
        if linear.dtype != cell.dtype:
            raise ValueError(
                f"`{part}.dtype` of the {kind} must be that of the cell, {cell.dtype}, "
                f"got {linear.dtype}"
            )
        params[part] = {"kernel": linear.kernel, "bias": linear.bias}
    notes, dtype = [], jnp.dtype(params[names[0]]["kernel"].dtype)
    if cell.dtype is not None and jnp.dtype(cell.dtype) != dtype:
        notes.append(
            f"the cell computes in {jnp.dtype(cell.dtype)}: cast weights and inputs"
        )
    if getattr(cell, "carry_init", None) not in (None, jax.nn.initializers.zeros):
        notes.append("the cell begins with a carry of its own `carry_init`, not with 0")
    return mode, params, notes


def _not_linear(layer: Any) -> str | None:
    """Return what a layer of a cell has that is not an `nnx.Linear`'s; None if nothing.

    Adapters, quantised products and reparametrisations take the place of such a layer,
    or of the functions that it calls.
    """
    with needs("flax"):
        from flax import nnx
        from flax.nnx.nn import dtypes

    call = getattr(type(layer), "__call__", None)  # noqa: B004
    if call is not nnx.Linear.__call__:
        return f", got {type(layer).__module__}.{type(layer).__qualname__}"
    usual = {
        "dot_general": (jax.lax.dot_general, None),
        "promote_dtype": (dtypes.promote_dtype,),
        "preferred_element_type": (None,),
    }
    for name, values in usual.items():
        if getattr(layer, name, values[0]) not in values:
            return f" without a `{name}` of its own"
    return None


def _refuse_function(kind: str, name: str, wanted: str, got: Any) -> None:
    got = getattr(got, "__name__", got)
    raise ValueError(f"`{name}` of the {kind} must be {wanted}, got {got}")


def _to_linen(
    spec: RNNSpec, parts: LayerWeights, b: Array, b_n: Array | None
) -> dict[str, dict[str, Array]]:
    """Return the parameters of a linen cell: LSTM biases recurrent, others input."""
    params = {}
    count = spec.num_gates
    for side, w, _ in _SIDES:
        names = _names(spec.mode, side)
        kernels = jnp.split(getattr(parts, w), count)
        params |= {n: {"kernel": k.T} for n, k in zip(names, kernels, strict=True)}
    names = _names(spec.mode, "h" if spec.mode == "lstm" else "i")
    for name, bias in zip(names, jnp.split(b, count), strict=True):
        params[name]["bias"] = bias
    if spec.mode == "gru":
        last = _names(spec.mode, "h")[-1]
        params[last]["bias"] = (
            jnp.zeros_like(b[: spec.hidden_size]) if b_n is None else b_n
        )
    return params


def _to_nnx(spec: RNNSpec, parts: LayerWeights, b: Array, kind: str) -> Any:
    """Return a cell of nnx with these weights."""
    with needs("flax"):
        from flax import nnx

    options: dict[str, Any] = {}
    if spec.mode == "rnn_relu":
        options["activation_fn"] = nnx.relu
    if kind == "SimpleCell":
        options["dtype"] = b.dtype  # float32 by default, whatever the weights
    cell = nnx.eval_shape(
        lambda: getattr(nnx, kind)(
            parts.w_ih.shape[1],
            spec.hidden_size,
            param_dtype=b.dtype,
            rngs=nnx.Rngs(0),
            **options,
        )
    )
    if kind == "LSTMCell":
        params = _to_linen(spec, parts, b, None)
        params["if_"] = params.pop("if")
    else:
        order = gate_order(spec.mode), GATES[spec.mode]
        params = {
            f"dense_{side}": {"kernel": reorder_gates(getattr(parts, w), *order).T}
            for side, w, _ in _SIDES
        }
        side = "h" if spec.mode == "lstm" else "i"
        params[f"dense_{side}"]["bias"] = reorder_gates(b, *order)
    for part, leaves in params.items():
        for leaf, value in leaves.items():
            getattr(getattr(cell, part), leaf).set_value(value)
    return cell
