"""Weights of haiku's `LSTM`, `GRU` and `VanillaRNN`, in.

    from ostinato.interop import haiku as from_haiku

    spec, weights, notes = from_haiku.from_params(params, "lstm")
    y, state = ostinato.rnn(spec, weights, x)

Haiku's LSTM orders gates `i g f o` and adds 1 to the forget gate at run time, which
here becomes part of the bias. Its GRU orders `z r n` with the meaning of `z` reversed,
so the rows of `z` change their sign, and it resets the state before the product. Only
mappings of arrays are read: haiku need not be installed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp

from .. import LayerWeights, _checks
from .._typing import Array
from .imported import Imported, as_array, build

__all__ = ["from_params"]

Kind = Literal["lstm", "gru", "vanilla_rnn"]

GATES = {"lstm": "i g f o", "gru": "z r n", "vanilla_rnn": "h"}
"""How haiku orders the gates, under this package's names."""

_MODES = {"lstm": "lstm", "gru": "gru", "vanilla_rnn": "rnn_relu"}
_MODULES = {
    "lstm": ("linear",),
    "gru": ("",),
    "vanilla_rnn": ("linear", "linear_1"),
}
"""The modules with parameters, under the core's own name; `""` is the core itself."""


def from_params(
    params: Mapping[str, Mapping[str, Any]], kind: Kind, name: str | None = None
) -> Imported:
    """Convert the parameters of a recurrent core of haiku.

    Args:
        params: what `init` of a transformed function returned, by module.
        kind: `"lstm"`, `"gru"` or `"vanilla_rnn"`.
        name: the core's name among the modules, such as `"policy/~/lstm"`; None: the
            one core of this kind.

    Returns:
        `Imported(spec, weights, notes)`, in the dtype of the parameters. A `gru` has
        `reset_after=False`, a `vanilla_rnn` the mode `"rnn_relu"`.

    Raises:
        TypeError: `params` or a module of it is no mapping, a parameter is no array of
            floats, or dtypes differ.
        ValueError: there is no such core, or several and no `name`; a parameter is
            missing; shapes do not fit each other.

    Holds under every JAX transformation.
    """
    _checks.check_choice("kind", kind, get_args(Kind))
    if not isinstance(params, Mapping):
        raise TypeError(f"`params` must be a mapping, got {_checks.describe(params)}")
    name = _name(params, kind) if name is None else name
    modules = [f"{name}/{part}" if part else name for part in _MODULES[kind]]

    def take(module: str, leaf: str, *axes: str) -> Array:
        found = params.get(module, {})
        if not isinstance(found, Mapping):
            raise TypeError(
                f"`params[{module!r}]` must be a mapping, got {_checks.describe(found)}"
            )
        if leaf not in found:
            modules = reprlib.repr(sorted(map(str, params)))
            raise ValueError(
                f"`params[{module!r}][{leaf!r}]` must be given for the core {name!r}, "
                f"got the modules {modules}"
            )
        array = as_array(f"params[{module!r}][{leaf!r}]", found[leaf])
        _checks.check_rank(f"params[{module!r}][{leaf!r}]", array, *axes)
        return array

    first, last = modules[0], modules[-1]
    b_hh = None
    leaves = {"w_ih": "w", "w_hh": "w", "b_ih": "b", "b_hh": "b"}
    if kind == "lstm":
        w, b_ih = take(first, "w", "I+H", "4*H"), take(first, "b", "4*H")
        hidden = w.shape[1] // 4
        if w.shape[1] % 4 or b_ih.shape[0] != w.shape[1] or not 0 < hidden < w.shape[0]:
            raise ValueError(
                f"`params[{first!r}]` must have shapes w [I+H, 4*H] and b [4*H], got "
                f"{list(w.shape)} and {list(b_ih.shape)}"
            )
        w_ih, w_hh = w[:-hidden].T, w[-hidden:].T
        forget = jnp.array([gate == "f" for gate in GATES[kind].split()], b_ih.dtype)
        b_ih = b_ih + jnp.repeat(forget, hidden)
    elif kind == "gru":
        leaves = {"w_ih": "w_i", "w_hh": "w_h", "b_ih": "b"}
        w_ih, w_hh = take(first, "w_i", "I", "3*H").T, take(first, "w_h", "H", "3*H").T
        b_ih = take(first, "b", "3*H")
        w_ih, w_hh, b_ih = map(_negate_z, (w_ih, w_hh, b_ih))
    else:
        w_ih, w_hh = take(first, "w", "I", "H").T, take(last, "w", "H", "H").T
        b_ih = take(first, "b", "H")
        if "b" in params[last]:
            b_hh = take(last, "b", "H")

    def label(_: int, field: str) -> str:
        module = last if field.endswith("hh") else first
        return f"params[{module!r}][{leaves[field]!r}]"

    options: dict[str, Any] = {"reset_after": False} if kind == "gru" else {}
    layer = LayerWeights(w_ih, w_hh, b_ih, b_hh, None)
    return build(_MODES[kind], [layer], label, order=GATES[kind], **options)


def _negate_z(a: Array) -> Array:
    """Return rows by gate with those of `z` negated: sigmoid(-a) = 1 - sigmoid(a)."""
    gates = GATES["gru"].split()
    if a.shape[0] % len(gates):
        return a  # an error that `build` words
    signs = jnp.array([-1 if gate == "z" else 1 for gate in gates], a.dtype)
    signs = jnp.repeat(signs, a.shape[0] // len(gates))
    return a * signs.reshape(-1, *[1] * (a.ndim - 1))


def _name(params: Mapping[str, Any], kind: str) -> str:
    """Return the one core whose name ends as haiku names cores of this kind."""
    found = []
    for module in params:
        core = str(module)
        if _MODULES[kind][0]:
            core, _, part = core.rpartition("/")
            if part != _MODULES[kind][0]:
                continue
        head, _, number = core.rpartition("/")[2].rpartition("_")
        if core.rpartition("/")[2] == kind or head == kind and number.isdigit():
            found.append(core)
    if len(found) != 1:
        there = ", ".join(found) or "no such core among " + ", ".join(map(str, params))
        raise ValueError(
            f"`params` must hold one core of kind {kind!r} unless `name` says which, "
            f"got {there[:300]}"
        )
    return found[0]
