"""Networks as layers of Equinox, which `ostinato.nn.equinox` exports."""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp

from .. import RNNOutput, RNNSpec, _checks, rnn, rnn_step
from .._rnn.spec import check_spec
from .._typing import Array, ArrayLike, BiasMode, Bool, Float, Int, Padding, State
from . import _layers
from ._layers import FrozenLayer


class DropoutSwitch(eqx.Module):
    """The flag that turns the dropout of a layer off.

    Attributes:
        inference: True turns dropout off; `eqx.nn.inference_mode` sets it.
    """

    inference: bool = False


def call_key(
    switch: DropoutSwitch | None, key: Array | None, random: bool
) -> Array | None:
    """Return the key of one call of a layer, None for evaluation."""
    if switch is not None and switch.inference:
        return None
    if random and key is None:
        off = "eqx.nn.inference_mode turns it off"
        if switch is None:
            off = "give this call a cell without it for evaluation"
        raise ValueError(f"`key` must be given: there is dropout; {off}")
    return key


class Layer(eqx.Module):
    """A recurrent network of any spec, with one array a matrix.

    `LSTM`, `GRU` and `RNN` are this layer with a spec that they make from their
    arguments. Use it for weights from elsewhere, `Layer(spec, weights)`, and for
    options of `RNNSpec` that the others do not have.

    Parameters have the names and shapes of `torch.nn`: `weight_ih_l0`, `weight_hh_l0`,
    `bias_ih_l0`, `bias_hh_l0`, `weight_hr_l0`, with `_reverse` behind them for the
    second direction; rows by gate, `i f g o`, `i f z o` or `r z n`. They are attributes
    of the layer, `layer.weight_ih_l0`, also for `eqx.tree_at`.

    Args:
        spec: the network.
        weights: its flat vector `[num_params]`; None draws it as
            `ostinato.init_weights` does.
        dtype: of the parameters; None: that of `weights`, or float32.
        recompute: as for `ostinato.rnn`.
        key: a PRNG key that draws the parameters; None where `weights` are given.

    Attributes:
        params: the parameters by name.
        spec: the network.
        weights: the flat vector of the parameters, as `ostinato.rnn` takes it.
        dropout: `DropoutSwitch(inference)`, whose flag `eqx.nn.inference_mode` sets;
            None without dropout.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a wrong value, or weights that are not those of the spec.

    Holds under every JAX and Equinox transformation.
    """

    params: dict[str, Array]
    dropout: DropoutSwitch | None
    spec: RNNSpec = eqx.field(static=True)
    recompute: bool = eqx.field(static=True)

    def __init__(
        self,
        spec: RNNSpec,
        weights: Float[Array, " num_params"] | None = None,
        *,
        dtype: Any = None,
        recompute: bool = False,
        key: Array | None = None,
    ) -> None:
        check_spec(spec)
        self.spec = spec
        self.recompute = _checks.check_bool("recompute", recompute)
        if weights is not None and key is not None:
            raise ValueError("`key` must be None where `weights` are given")
        self.params = _layers.new_weights(spec, weights, dtype, lambda: key)
        self.dropout = DropoutSwitch() if _layers.needs_key(spec) else None

    def __getattr__(self, name: str) -> Array:
        params = vars(self).get("params")  # absent while a module is being made
        if isinstance(params, dict) and name in params:
            return params[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def weights(self) -> Float[Array, " num_params"]:
        """The flat vector of the parameters, as `ostinato.rnn` takes it."""
        return _layers.join_weights(self.spec, self.params)

    def __call__(
        self,
        x: Float[Array, "*B T I"],
        initial_state: State | None = None,
        *,
        seq_lengths: Int[ArrayLike, "*B"] | None = None,
        mask: Bool[ArrayLike, "*B T"] | None = None,
        resets: Bool[Array, "*B T"] | None = None,
        key: Array | None = None,
        padding: Padding = "zero",
        time_major: bool = False,
    ) -> RNNOutput:
        """Run the network over a batch of sequences, or over one.

        Args:
            x: `[B, T, I]`, `[T, B, I]` if `time_major`, or one sequence `[T, I]`; in
                the dtype of the parameters.
            initial_state: `h [L*D, B, S]`, for an LSTM `(h, c [L*D, B, H])`; None:
                zeros.
            seq_lengths: integers `[B]`, each in 0..T.
            mask: bool `[B, T]`, True at valid steps, instead of `seq_lengths`.
            resets: bool `[B, T]`: where True, the state becomes 0 before that step;
                they do nothing past the end of a sequence.
            key: a PRNG key for dropout, used where there is any; not needed in
                inference mode.
            padding: what outputs are past the end: `"zero"`, `"hold"` or `"drop"`.
            time_major: whether time is the first axis.

        Returns:
            `RNNOutput(y, state)`: `y [B, T, D*S]` in the layout of `x`, and the final
            state in the shape of `initial_state`.

        Raises:
            TypeError, ValueError: as `ostinato.rnn`, which says more on every argument;
                a parameter of another shape or dtype than the layer had.
            ValueError: there is dropout, no inference mode, and no `key`.
        """
        return rnn(
            self.spec,
            self.weights,
            x,
            initial_state,
            seq_lengths=seq_lengths,
            mask=mask,
            resets=resets,
            key=call_key(self.dropout, key, self.dropout is not None),
            padding=padding,
            time_major=time_major,
            recompute=self.recompute,
        )

    def step(
        self,
        x_t: Float[Array, "*B I"],
        state: State | None = None,
        *,
        resets: Bool[ArrayLike, "*B"] | None = None,
        active: Bool[ArrayLike, "*B"] | None = None,
    ) -> RNNOutput:
        """Run one step without dropout; the layer that `freeze` returns does it faster.

        Args:
            x_t: `[B, I]`, or `[I]` for one sequence.
            state: as the step before returned it; None: zeros.
            resets: bool `[B]`: where True, the state becomes 0 before the step.
            active: bool `[B]`: where False, a stream keeps its state, and its output is
                0.

        Returns:
            `RNNOutput(y, state)` with `y [B, S]`.

        Raises:
            TypeError, ValueError: as `ostinato.rnn_step`, for two directions above all.
        """
        return rnn_step(
            self.spec, self.weights, x_t, state, resets=resets, active=active
        )

    def initial_state(self, batch: int | None = None) -> State:
        """Return zeros for `batch` sequences, or for one without a batch axis."""
        first = self.params[_layers.parameters(self.spec)[0].name]
        return _layers.initial_state(self.spec, batch, first.dtype)

    def freeze(self) -> FrozenLayer:
        """Return the layer for serving, with its weights packed once."""
        return _layers.freeze(self.spec, self.weights)


class LSTM(Layer):
    """Stacked LSTM layers.

    Args:
        input_size: features of one input step, I.
        hidden_size: units per layer and direction, H.
        num_layers: L.
        bidirectional: run a second, reversed direction in every layer.
        proj_size: size of a projection of `h`; 0 means no projection.
        bias: which biases exist: `"double"`, `"input"`, `"recurrent"` or `"none"`.
        num_heads: heads that divide the units, see `ostinato.RNNSpec`.
        dropout: probability of dropout between layers, in training.
        dtype: of the parameters.
        recompute: as for `ostinato.rnn`.
        key: a PRNG key that draws the parameters.

    Parameters are drawn from U(-k, k), k = hidden_size ** -0.5, as in PyTorch; with
    heads, `w_hh` and `w_hr` with the units of a head in its place. Their names, the
    attributes and the transformations that hold are those of `Layer`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ostinato.nn.equinox import LSTM
        >>> layer = LSTM(3, 5, num_layers=2, key=jax.random.key(0))
        >>> y, (h, c) = layer(jnp.ones((4, 7, 3)), seq_lengths=jnp.array([7, 1, 0, 5]))
        >>> y.shape, h.shape, layer.weight_hh_l1.shape
        ((4, 7, 5), (2, 4, 5), (20, 5))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bidirectional: bool = False,
        proj_size: int = 0,
        bias: BiasMode = "double",
        num_heads: int = 1,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        recompute: bool = False,
        key: Array,
    ) -> None:
        spec = RNNSpec(
            "lstm",
            input_size,
            hidden_size,
            num_layers,
            bidirectional,
            proj_size=proj_size,
            bias=bias,
            num_heads=num_heads,
            dropout=dropout,
        )
        super().__init__(spec, dtype=dtype, recompute=recompute, key=key)


class GRU(Layer):
    """Stacked GRU layers.

    Args:
        input_size: features of one input step, I.
        hidden_size: units per layer and direction, H.
        num_layers: L.
        bidirectional: run a second, reversed direction in every layer.
        reset_after: apply the reset gate to the recurrent product, as PyTorch does;
            False: to the state before the product.
        bias: which biases exist: `"double"`, `"input"`, `"recurrent"` or `"none"`.
        num_heads: heads that divide the units, see `ostinato.RNNSpec`.
        dropout: probability of dropout between layers, in training.
        dtype: of the parameters.
        recompute: as for `ostinato.rnn`.
        key: a PRNG key that draws the parameters.

    Parameters are drawn from U(-k, k), k = hidden_size ** -0.5, as in PyTorch; with
    heads, `w_hh` with the units of a head in its place. Their names, the
    attributes and the transformations that hold are those of `Layer`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ostinato.nn.equinox import GRU
        >>> layer = GRU(3, 5, key=jax.random.key(0))
        >>> state = layer.initial_state(2)
        >>> y, state = layer.step(jnp.ones((2, 3)), state)
        >>> y.shape, state.shape
        ((2, 5), (1, 2, 5))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bidirectional: bool = False,
        reset_after: bool = True,
        bias: BiasMode = "double",
        num_heads: int = 1,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        recompute: bool = False,
        key: Array,
    ) -> None:
        spec = RNNSpec(
            "gru",
            input_size,
            hidden_size,
            num_layers,
            bidirectional,
            bias=bias,
            num_heads=num_heads,
            dropout=dropout,
            reset_after=reset_after,
        )
        super().__init__(spec, dtype=dtype, recompute=recompute, key=key)


class RNN(Layer):
    """Stacked plain RNN layers.

    Args:
        input_size: features of one input step, I.
        hidden_size: units per layer and direction, H.
        num_layers: L.
        nonlinearity: `"tanh"` or `"relu"`.
        bidirectional: run a second, reversed direction in every layer.
        bias: which biases exist: `"double"`, `"input"`, `"recurrent"` or `"none"`.
        num_heads: heads that divide the units, see `ostinato.RNNSpec`.
        dropout: probability of dropout between layers, in training.
        dtype: of the parameters.
        recompute: as for `ostinato.rnn`.
        key: a PRNG key that draws the parameters.

    Parameters are drawn from U(-k, k), k = hidden_size ** -0.5, as in PyTorch; with
    heads, `w_hh` with the units of a head in its place. Their names, the
    attributes and the transformations that hold are those of `Layer`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ostinato.nn.equinox import RNN
        >>> layer = RNN(3, 5, nonlinearity="relu", key=jax.random.key(0))
        >>> layer(jnp.ones((2, 7, 3))).y.shape
        (2, 7, 5)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        bidirectional: bool = False,
        bias: BiasMode = "double",
        num_heads: int = 1,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        recompute: bool = False,
        key: Array,
    ) -> None:
        spec = RNNSpec(
            _layers.mode_of(nonlinearity),
            input_size,
            hidden_size,
            num_layers,
            bidirectional,
            bias=bias,
            num_heads=num_heads,
            dropout=dropout,
        )
        super().__init__(spec, dtype=dtype, recompute=recompute, key=key)
