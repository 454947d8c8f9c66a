"""Recurrent layers of `flax.linen` over the user's own cells, on the fused operator.

    from ostinato.nn.linen import RNN, ScannedRNN

`RNN` takes the place of `flax.linen.RNN`, `ScannedRNN` that of the layer that many
reinforcement learning programs define on `linen.scan`: the same variables, the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._modules import not_installed

try:
    from flax import linen
except ModuleNotFoundError as error:
    raise not_installed(error, "flax") from None

from .._rnn import backends
from .._rnn.backends import Explanation
from .._typing import Array, Bool, Float, Int
from ..interop.flax import ImportKind, from_cell
from ..interop.imported import Imported
from . import _flax_serialization as _flax_serialization
from ._sequences import (
    cell_dtype_reason,
    check_carry,
    from_carry,
    run_fused,
    select_carry,
    to_carry,
    too_short_reason,
)

__all__ = ["RNN", "ScannedRNN"]

_KINDS: dict[Any, ImportKind] = {
    linen.LSTMCell: "lstm",
    linen.OptimizedLSTMCell: "lstm",
    linen.GRUCell: "gru",
    linen.SimpleCell: "rnn_tanh",
}
_LAYERS: dict[ImportKind, tuple[str, str]] = {
    "lstm": ("ii if ig io", "hi hf hg ho"),
    "gru": ("hr hz", "ir iz in hn"),
    "rnn_tanh": ("h", "i"),
}
"""The layers of a cell without a bias, and those with one."""
_SIGMOIDS = (linen.sigmoid, jax.nn.sigmoid, jax.lax.logistic)
_TANHS = (linen.tanh, jnp.tanh, jax.lax.tanh)


class RNN(linen.RNN):
    """`linen.RNN` that runs standard cells on the fused operator.

    Takes the fields of `linen.RNN`. The fused operator runs `LSTMCell`,
    `OptimizedLSTMCell`, `GRUCell` and `SimpleCell` with their default activations and
    without a residual connection, on inputs, parameters and carry of one dtype; every
    other cell, every initialisation, and calls of a few steps without `seq_lengths` run
    as in `linen.RNN`.

    Past the end of a sequence, the fused operator returns outputs of 0, where
    `linen.RNN` goes on with the padding; a sequence of length 0 then returns its
    initial carry.

    Holds under every JAX and linen transformation. Functions that
    `linen.intercept_methods` puts around calls see that of this layer, and of what it
    consists of only where it runs as in `linen.RNN`.
    """

    def __call__(
        self,
        inputs: Float[Array, "*B T I"],
        *,
        initial_carry: Any = None,
        init_key: Any = None,
        seq_lengths: Int[Array, "*B"] | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Run the cell over the sequences; arguments and results as for `linen.RNN`."""
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        network = _network(self, self.cell, inputs, initial_carry, seq_lengths)
        if isinstance(network, str):
            return super().__call__(
                inputs,
                initial_carry=initial_carry,
                init_key=init_key,
                seq_lengths=seq_lengths,
                return_carry=return_carry,
                time_major=time_major,
                reverse=reverse,
                keep_order=keep_order,
            )
        if initial_carry is None:
            key = jax.random.key(0) if init_key is None else init_key
            axis = 0 if time_major else inputs.ndim - 2
            shape = inputs.shape[:axis] + inputs.shape[axis + 1 :]
            initial_carry = self.cell.initialize_carry(key, shape)
        check_carry("initial_carry", initial_carry, network.spec, inputs, time_major)
        states, outputs = run_fused(
            network.spec,
            network.weights,
            inputs,
            from_carry(initial_carry),
            seq_lengths=seq_lengths,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
        )
        return (to_carry(states), outputs) if return_carry else outputs

    def explain(self, inputs: Any) -> Explanation:
        """Say whether the fused operator runs the cell on `inputs`, and why not.

        Call it on a bound module, or through `apply(variables, x, method="explain")`.
        """
        network = _network(self, self.cell, inputs, None)
        if not isinstance(network, str):
            return backends.explain(network.spec, inputs)
        rejected = {name: network for name in ("cuda", "cpu", "xla")}
        return Explanation("flax", "step by step, as linen.RNN runs it", rejected)


class ScannedRNN(linen.Module):
    """A recurrent layer whose carry becomes 0 at resets, time first.

    Attributes:
        cell: the cell; None: a `linen.GRUCell` of as many features as the inputs have.
        cell_name: the name of the cell among the variables; None: the name that it has
            in the variables that are applied, or a new one, such as `"GRUCell_0"`.

    Called as `(carry, (inputs, resets)) -> (carry, outputs)`, with `inputs [T, B, I]`,
    `resets [T, B]`, True where a sequence begins, and outputs `[T, B, H]`. Its
    variables are those of the usual module of reinforcement learning, which calls
    `linen.GRUCell` inside of `linen.scan`: `{"GRUCell_0": ...}`, or
    `{"GRUCell_1": ...}` where a cell that makes the first carry took the first name. To
    draw the parameters that such a module draws, give that name as `cell_name`.

    References:
        Lu et al., Discovered Policy Optimisation (2022), whose program PureJaxRL is.
    """

    cell: linen.RNNCellBase | None = None
    cell_name: str | None = None

    @linen.compact
    def __call__(
        self,
        carry: Any,
        inputs_and_resets: tuple[Float[Array, "T B I"], Bool[Array, "T B"]],
    ) -> tuple[Any, Float[Array, "T B H"]]:
        """Run the cell over all steps."""
        inputs, resets = inputs_and_resets
        cell = self.cell or linen.GRUCell(features=inputs.shape[-1], parent=None)
        name = self.cell_name or _stored_name(self, f"{type(cell).__name__}_")
        cell = cell.clone(parent=self, name=name)
        network = _network(self, cell, inputs, carry)
        if isinstance(network, str):
            return _scan(cell, carry, inputs, resets)
        check_carry("carry", carry, network.spec, inputs, time_major=True)
        states, outputs = run_fused(
            network.spec,
            network.weights,
            inputs,
            from_carry(carry),
            resets=resets.astype(bool),
            time_major=True,
        )
        return to_carry(states), outputs

    @staticmethod
    def initialize_carry(batch_size: int, hidden_size: int) -> Array:
        """Return the zeros `[B, H]` that a GRU begins with."""
        return jnp.zeros((batch_size, hidden_size))


def _stored_name(module: linen.Module, prefix: str) -> str:
    """Return the name of the cell in the variables of a module, or a new one."""
    names = [n for n in module.variables.get("params", {}) if n.startswith(prefix)]
    return names[0] if len(names) == 1 else f"{prefix}0"


def _scan(cell: Any, carry: Any, inputs: Array, resets: Array) -> tuple[Any, Array]:
    """Run any cell step by step, with a carry that becomes 0 at resets."""

    def step(cell: Any, carry: Any, at: tuple[Array, Array]) -> tuple[Any, Array]:
        x, reset = at
        return cell(select_carry(reset, carry), x)

    scan: Callable = linen.scan(
        step, variable_broadcast="params", split_rngs={"params": False}
    )
    return scan(cell, carry, (inputs, resets.astype(bool)))


def _shares_params(rnn: linen.RNN) -> bool:
    """Return whether the fields for `linen.scan` are those of every RNN."""
    return (
        not rnn.variable_axes
        and rnn.variable_broadcast == "params"
        and not rnn.variable_carry
        and not any(rnn.split_rngs.values())
    )


def _network(
    module: Any, cell: Any, inputs: Any, carry: Any, seq_lengths: Any = None
) -> Imported | str:
    """Return the cell as the fused operator runs it, or why it does not."""
    if isinstance(module, linen.RNN) and not _shares_params(module):
        return "the RNN does not share the parameters alone between its steps"
    if type(cell) not in _KINDS:
        return f"there is no fused operator for {type(cell).__name__}"
    kind = _KINDS[type(cell)]
    for name, usual in (("gate_fn", _SIGMOIDS), ("activation_fn", _TANHS)):
        if getattr(cell, name, usual[0]) not in usual:
            return f"`{name}` of the {type(cell).__name__} is not the usual one"
    if getattr(cell, "residual", False):
        return "`residual` is True"
    if module.is_initializing():
        return "the variables are being initialised"
    params = cell.variables.get("params", {})
    if not _has_layers(params, kind):  # linen names what lacks
        return f"the parameters are not those of the {type(cell).__name__}"
    try:
        network = from_cell(params, kind=kind)
    except (TypeError, ValueError) as error:  # such as mixed dtypes
        return str(error)
    sizes = network.spec.input_size, network.spec.hidden_size
    if sizes != (inputs.shape[-1], cell.features):
        return f"the parameters are those of {sizes[0]} inputs and {sizes[1]} features"
    reason = cell_dtype_reason(cell, network.weights.dtype, inputs, carry)
    if reason is None and seq_lengths is None:  # with them, our outputs differ
        reason = too_short_reason(network.spec, inputs)
    return reason or network


def _has_layers(params: Mapping[str, Any], kind: ImportKind) -> bool:
    """Return whether parameters are those that a cell of linen asks for, and no more.

    Linen passes over what else there is.
    """
    plain, biased = (names.split() for names in _LAYERS[kind])
    wanted = dict.fromkeys(plain, {"kernel"})
    wanted |= dict.fromkeys(biased, {"kernel", "bias"})
    found = {n: set(p) if isinstance(p, Mapping) else None for n, p in params.items()}
    return found == wanted
