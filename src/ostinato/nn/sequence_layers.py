"""Recurrent layers of Google's `sequence-layers` (JAX) on the fused operator.

    from ostinato.nn.sequence_layers import LSTM

    layer = LSTM.Config(units=8).make()

`LSTM` takes the place of `sequence_layers.jax.LSTM`: the same configuration, variables
and states, the same numbers, layer-wise and step-wise. `GRU` is a layer of the same
form, which `sequence_layers.jax` lacks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._modules import not_installed

try:
    import sequence_layers.jax as sl
    from flax import linen
    from flax.core import meta
except ModuleNotFoundError as error:
    raise not_installed(error, "sequence-layers") from None

from .. import _checks, rnn
from .._rnn import backends
from .._rnn.backends import Explanation
from .._rnn.output import as_state
from ..interop.imported import Imported
from ..interop.keras import from_arrays
from ._sequences import from_carry, to_carry

__all__ = ["GRU", "LSTM"]

_SIGMOIDS = (jax.nn.sigmoid, jax.lax.logistic)
_TANHS = (jax.nn.tanh, jnp.tanh, jax.lax.tanh)


class LSTM(sl.LSTM):
    """`sequence_layers.jax.LSTM` that runs on the fused operator.

    Made by `LSTM.Config(...).make()`, with the fields of `sequence_layers.jax.LSTM`.
    The fused operator runs `layer`, and `step` of blocks of several steps, with the
    default activations and precision and a state of the computation's dtype. A single
    step, every other configuration and every initialisation run as in
    `sequence_layers`; `explain` says which.

    Invalid steps, anywhere in a sequence, leave the state as it is. Their outputs, of
    which `sequence_layers` says nothing, are 0.

    Holds under every JAX and linen transformation.
    """

    @dataclasses.dataclass(frozen=True)
    class Config(sl.LSTM.Config):
        """The fields of `sequence_layers.jax.LSTM.Config`."""

        def make(self) -> LSTM:
            """Return the layer."""
            return LSTM(self, name=self.name)

    @sl.check_layer
    def layer(
        self, x: sl.Sequence, *, training: bool, constants: Any = None
    ) -> sl.Sequence:
        """Run whole sequences, from states of 0."""
        options = {"training": training, "constants": constants}
        state = self.get_initial_state(x.shape[0], x.channel_spec, **options)
        network = _network(self, x, state)
        if isinstance(network, str):
            return super().layer(x, **options)
        return _run(network, x, state)[0]

    @sl.check_step
    def step(
        self, x: sl.Sequence, state: Any, *, training: bool, constants: Any = None
    ) -> tuple[sl.Sequence, Any]:
        """Run a block of steps from the states `(c, h)`, each `[B, 1, H]`."""
        network = _network(self, x, state)
        if isinstance(network, str):
            return super().step(x, state, training=training, constants=constants)
        return _run(network, x, state)

    def explain(self, x: sl.Sequence) -> Explanation:
        """Say whether the fused operator runs `layer(x)`, and why not.

        Call it on a bound module, or through `apply(variables, x, method="explain")`.
        """
        state = self.get_initial_state(x.shape[0], x.channel_spec, training=False)
        network = _network(self, x, state)
        if not isinstance(network, str):
            return backends.explain(network.spec, network.weights)
        rejected = {name: network for name in ("cuda", "cpu", "xla")}
        return Explanation(
            "sequence_layers", "as sequence_layers.jax.LSTM runs it", rejected
        )


class GRU(sl.SequenceLayer):
    """A gated recurrent unit, layer-wise and step-wise.

    Made by `GRU.Config(...).make()`. Its variables are laid out as those of the GRU of
    Keras, gates in the order `z r h`: `kernel [I, 3*H]`, `recurrent_kernel [H, 3*H]`
    and `bias [2, 3*H]`, of the input and of the state, or `[3*H]` without
    `reset_after`. Its state is `h [B, 1, H]`.

    Invalid steps, anywhere in a sequence, leave the state as it is; their outputs are
    0.

    Holds under every JAX and linen transformation.
    """

    @dataclasses.dataclass(frozen=True)
    class Config(sl.SequenceLayerConfig):
        """The fields of a GRU.

        Attributes:
            units: H.
            compute_dtype: None: what inputs and parameters promote to.
            param_dtype: of the variables.
            use_bias: whether there is a bias.
            reset_after: whether the reset gate acts on the product with the state, as
                in cuDNN, or on the state before it.
            kernel_init: draws the kernel.
            recurrent_kernel_init: draws the recurrent kernel.
            bias_init: draws the bias.
            name: of the layer.
        """

        units: int
        compute_dtype: Any = None
        param_dtype: Any = jnp.float32
        use_bias: bool = True
        reset_after: bool = True
        kernel_init: Any = linen.linear.default_kernel_init
        recurrent_kernel_init: Any = linen.initializers.orthogonal()
        bias_init: Any = linen.initializers.zeros
        name: str | None = None

        def make(self) -> GRU:
            """Return the layer; raise TypeError or ValueError for wrong `units`."""
            _checks.check_size("units", self.units)
            return GRU(self, name=self.name)

    config: Config

    @sl.check_layer
    def layer(
        self, x: sl.Sequence, *, training: bool, constants: Any = None
    ) -> sl.Sequence:
        """Run whole sequences, from states of 0."""
        state = self.get_initial_state(x.shape[0], x.channel_spec, training=training)
        return _run(self._network(x), x, state)[0]

    @sl.check_step
    def step(
        self, x: sl.Sequence, state: Any, *, training: bool, constants: Any = None
    ) -> tuple[sl.Sequence, Any]:
        """Run a block of steps from the state `[B, 1, H]`."""
        return _run(self._network(x), x, state)

    @linen.compact
    def _network(self, x: sl.Sequence) -> Imported:
        self.get_output_shape(x.channel_shape)  # checks it
        config, gates = self.config, 3 * self.config.units
        dtype = config.param_dtype
        kernel = (*x.channel_shape, gates)
        arrays = [
            self.param("kernel", config.kernel_init, kernel, dtype),
            self.param(
                "recurrent_kernel",
                config.recurrent_kernel_init,
                (config.units, gates),
                dtype,
            ),
        ]
        if config.use_bias:
            bias = (2, gates) if config.reset_after else (gates,)
            arrays.append(self.param("bias", config.bias_init, bias, dtype))
        computed = self.get_output_dtype(x.dtype)
        return from_arrays(
            "gru",
            [a.astype(computed) for a in arrays],
            reset_after=config.reset_after,
        )

    @linen.nowrap
    def get_initial_state(
        self,
        batch_size: int,
        input_spec: Any,
        *,
        training: bool,
        constants: Any = None,
    ) -> Any:
        """Return zeros `[B, 1, H]`."""
        dtype = self.get_output_dtype(input_spec.dtype)
        return jnp.zeros((batch_size, 1, self.config.units), dtype)

    @linen.nowrap
    def get_output_shape(self, input_shape: Any, *, constants: Any = None) -> Any:
        """Return `(H,)`, for inputs with one axis of features."""
        if len(input_shape) != 1:
            raise ValueError(
                f"`input_shape` must be (I,), got {tuple(input_shape)}; flatten the "
                "features first"
            )
        return (self.config.units,)

    @linen.nowrap
    def get_output_dtype(self, input_dtype: Any, *, constants: Any = None) -> Any:
        """Return the dtype that the layer computes in."""
        if self.config.compute_dtype is not None:
            return jnp.dtype(self.config.compute_dtype)
        return jnp.result_type(input_dtype, self.config.param_dtype)

    @property
    def receptive_field_per_step(self) -> dict[int, Any]:
        """The range of inputs that an output depends on."""
        return {0: (-np.inf, 0)}


def _network(layer: LSTM, x: sl.Sequence, state: Any) -> Imported | str:
    """Return the layer as the fused operator runs it, or why it does not."""
    config = layer.config
    if layer.is_initializing():
        return "the variables are being initialised"
    if x.ndim != 3:
        return f"the values have the shape {list(x.shape)}, not [B, T, I]"
    if x.shape[1] == 1:
        return "a single step has no input products to join"
    for name, usual in (("activation", _TANHS), ("recurrent_activation", _SIGMOIDS)):
        if getattr(config, name) not in usual:
            return f"`{name}` is not the usual one"
    if config.precision is not None:
        return "`precision` is not None"
    dtype = jnp.dtype(layer.get_output_dtype(x.dtype))
    for name, a in zip("ch", state, strict=True):
        if a.dtype != dtype:
            return f"the state `{name}` is {a.dtype} and the layer computes in {dtype}"
    params = meta.unbox(layer.variables["params"])
    arrays = [params["kernel"]["kernel"], params["recurrent_kernel"]["kernel"]]
    if config.use_bias:
        arrays.append(params["bias"])
    try:
        return from_arrays("lstm", [a.astype(dtype) for a in arrays])
    except TypeError as error:  # a dtype that the operator does not take
        return str(error)


def _run(network: Imported, x: sl.Sequence, state: Any) -> tuple[sl.Sequence, Any]:
    """Run the steps of `x` from a state `h` or `(c, h)`, of arrays `[B, 1, H]`."""
    first = tuple(jnp.swapaxes(a, 0, 1) for a in from_carry(state))
    y, final = rnn(
        network.spec,
        network.weights,
        x.values.astype(network.weights.dtype),
        as_state(first),
        mask=x.mask,
    )
    final = final if isinstance(final, tuple) else (final,)
    outputs: Any = y
    return sl.Sequence(outputs, x.mask), to_carry(
        tuple(jnp.swapaxes(a, 0, 1) for a in final)
    )
