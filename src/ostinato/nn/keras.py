"""Recurrent layers of Keras 3 on the fused operator, for Keras's JAX backend.

    from ostinato.nn.keras import LSTM

`LSTM`, `GRU` and `SimpleRNN` take the place of those of `keras.layers`: the same
arguments, variables and names, the same numbers. They are registered for saving as
`ostinato>LSTM` and so on, so a program that loads a `.keras` file with them imports
this module first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks, rnn
from .._modules import not_installed
from .._padding import select
from .._rnn import backends
from .._rnn.backends import Explanation
from .._rnn.output import as_state
from .._typing import Array, Bool, Float
from ..interop.imported import Imported
from ..interop.keras import from_layer
from ._sequences import too_short_reason

__all__ = ["GRU", "LSTM", "SimpleRNN"]

_BACKENDS = ("tensorflow", "torch", "openvino")  # packages that Keras imports


def _other_backend(backend: str) -> ImportError:
    return ImportError(
        f"`ostinato.nn.keras` needs the JAX backend of Keras, got {backend!r}; set the "
        "environment variable KERAS_BACKEND=jax before `keras` is imported"
    )


try:
    import keras
except ModuleNotFoundError as error:
    missing = (error.name or "").split(".")[0]
    if missing in _BACKENDS:
        raise _other_backend(missing) from None
    raise not_installed(error, "keras") from None

if keras.config.backend() != "jax":
    raise _other_backend(keras.config.backend())


class Fused(keras.layers.RNN):
    """The methods of the layers below, which stand before those of Keras."""

    def inner_loop(
        self,
        sequences: Float[Array, "B T I"],
        initial_state: Any,
        mask: Bool[Array, "B T"] | None,
        training: bool = False,
    ) -> Any:
        """Run all steps; `call` of Keras does the rest.

        Returns:
            The last output `[B, H]`, all outputs `[B, T, H]` and the final states, all
            in the order in which the steps were run.
        """
        network = _network(self, sequences, mask, training)
        if isinstance(network, str):
            return super().inner_loop(sequences, initial_state, mask, training=training)
        x, valid = sequences, _first(mask)
        if training and self.dropout:
            x = x * jnp.expand_dims(self.cell.get_dropout_mask(x[:, 0]), 1)
        if valid is not None:
            valid = jnp.asarray(valid).astype(bool)
        if self.go_backwards:
            x = jnp.flip(x, 1)
            valid = None if valid is None else jnp.flip(valid, 1)
        # With `unroll` Keras ignores `zero_output_for_mask`.
        zero = self.zero_output_for_mask and not self.unroll
        y, final = rnn(
            network.spec,
            network.weights.astype(x.dtype),
            x,
            as_state(tuple(h[None] for h in initial_state)),
            mask=valid,
            padding="zero" if zero else "hold",
        )
        if valid is not None and self.unroll:
            # Keras then begins with outputs of 0, where it else repeats h_0.
            y = select(jnp.cumsum(valid, 1) > 0, y)
        final = final if isinstance(final, tuple) else (final,)
        return y[:, -1], y, [h[0] for h in final]

    def explain(
        self, inputs: Any, *, mask: Any = None, training: bool = False
    ) -> Explanation:
        """Say whether the fused operator runs a call of the layer, and why not.

        Builds the layer for `inputs` if it is not built.

        Args:
            inputs: `[B, T, I]`, as the layer is called with.
            mask: as the layer is called with.
            training: as the layer is called with; dropout acts in training only.

        Returns:
            `ostinato.Explanation`: that of `ostinato.explain`, or the backend
            `"keras"` with the reason why the layer runs as in Keras.

        Raises:
            TypeError: `inputs` or `mask` is no array.
            ValueError: `inputs` has another rank.
        """
        mask = _first(mask)
        _check_array("inputs", inputs)
        _checks.check_rank("inputs", inputs, "B", "T", "I")
        if mask is not None:
            _check_array("mask", mask)
        if not self.built:
            self.build(inputs.shape)
        x = self.dtype_policy.convert_input(inputs, self.autocast, self.input_dtype)
        network = _network(self, x, mask, training)
        if not isinstance(network, str):
            return backends.explain(network.spec, x)
        rejected = {name: network for name in ("cuda", "cpu", "xla")}
        return Explanation(
            "keras", f"as keras.layers.{type(self).__name__} runs it", rejected
        )


@keras.saving.register_keras_serializable(package="ostinato")
class LSTM(Fused, keras.layers.LSTM):
    """`keras.layers.LSTM` that runs on the fused operator.

    Takes the arguments of `keras.layers.LSTM`, and does the same with masks, which may
    have gaps, with `stateful`, `go_backwards`, `initial_state` and dtype policies, also
    inside of `keras.layers.Bidirectional`. In 16-bit dtypes it keeps the cell state in
    float32 between steps, where Keras rounds it.

    These run as in Keras, and `explain(inputs)` says so: activations other than tanh
    and sigmoid; `recurrent_dropout` in training; `dropout` in training with
    `implementation=1`; `use_cudnn=True`, and on a GPU without a mask, where Keras may
    take cuDNN, `use_cudnn="auto"`; calls of a few steps, for which the weights are not
    worth gathering. `unroll` means nothing to the fused operator.

    Holds under every JAX transformation, of `stateless_call` for example.
    """


@keras.saving.register_keras_serializable(package="ostinato")
class GRU(Fused, keras.layers.GRU):
    """`keras.layers.GRU` that runs on the fused operator.

    Takes the arguments of `keras.layers.GRU`, `reset_after=False` too. What is said of
    `LSTM` holds; without cuDNN, which Keras has for `LSTM` only, "auto" is fused.
    """


@keras.saving.register_keras_serializable(package="ostinato")
class SimpleRNN(Fused, keras.layers.SimpleRNN):
    """`keras.layers.SimpleRNN` that runs on the fused operator.

    Takes the arguments of `keras.layers.SimpleRNN`. What is said of `LSTM` holds; the
    fused activations are tanh and relu.
    """


def _network(layer: Any, inputs: Any, mask: Any, training: bool) -> Imported | str:
    """Return the layer as the fused operator runs it, or why it does not."""
    cell, mask = layer.cell, _first(mask)
    if training and cell.recurrent_dropout:
        return "`recurrent_dropout` acts in training on the states between steps"
    if training and cell.dropout and getattr(cell, "implementation", 2) == 1:
        return "`dropout` with implementation=1 acts in training on each gate by itself"
    if training and cell.dropout == 1:
        return "`dropout` is 1"
    cudnn = getattr(layer, "use_cudnn", False)
    if cudnn is True:
        return "`use_cudnn` is True"
    may_take = isinstance(layer, keras.layers.LSTM) and mask is None
    if cudnn and may_take and jax.default_backend() == "gpu":
        return "without a mask, Keras may take cuDNN; use_cudnn=False prevents that"
    if mask is not None and mask.ndim != 2:
        return f"`mask` has the shape {list(mask.shape)}, not [B, T]"
    if inputs.dtype != cell.compute_dtype:
        return (
            f"`inputs` is {inputs.dtype} and the cell computes in {cell.compute_dtype}"
        )
    try:
        network = from_layer(layer)
    except (TypeError, ValueError) as error:
        return str(error)
    return too_short_reason(network.spec, inputs) or network


def _first(mask: Any) -> Any:
    """Return the mask of the inputs, where Keras may list those of states too."""
    return mask[0] if isinstance(mask, (list, tuple)) else mask


def _check_array(name: str, value: Any) -> None:
    """Check that `value` is an array of any library, or a symbolic one of Keras."""
    if not hasattr(value, "ndim"):
        _checks.check_array(name, value)  # raises
