"""Networks as layers of `flax.nnx`, which `ostinato.nn.flax` exports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
from flax import nnx

from .. import RNNOutput, RNNSpec, _checks, rnn, rnn_step
from .._rnn.spec import check_spec
from .._typing import Array, ArrayLike, BiasMode, Bool, Float, Int, Padding, State
from . import _layers
from ._flax_rngs import call_key, check_rngs, dropout_stream
from ._layers import FrozenLayer

Metadata = Mapping[str, Mapping[str, Any]]
"""For each kind of parameter, such as `weight_hh`, the metadata of its `nnx.Param`."""

_NO_METADATA: Metadata = MappingProxyType({})

nnx.register_data_type(FrozenLayer)  # so that a module can have one as an attribute


class Layer(nnx.Module):
    """A recurrent network of any spec, with one `nnx.Param` a matrix.

    `LSTM`, `GRU` and `PlainRNN` are this layer with a spec that they make from their
    arguments. Use it for weights from elsewhere, `Layer(spec, weights)`, and for
    options of `RNNSpec` that the others do not have.

    Parameters have the names and shapes of `torch.nn`: `weight_ih_l0`, `weight_hh_l0`,
    `bias_ih_l0`, `bias_hh_l0`, `weight_hr_l0`, with `_reverse` behind them for the
    second direction; rows by gate, `i f g o`, `i f z o` or `r z n`.

    Args:
        spec: the network.
        weights: its flat vector `[num_params]`; None draws it as
            `ostinato.init_weights` does.
        dtype: of the parameters; None: that of `weights`, or float32.
        recompute: as for `ostinato.rnn`.
        rngs: the stream `params` draws the parameters; if the spec has dropout, the
            stream `dropout` gives a key to each call.
        metadata: for each kind of parameter the metadata of its `nnx.Param`, such as
            `{"weight_hh": {"out_sharding": ("model", None)}}`. Kinds are `weight_ih`,
            `weight_hh`, `weight_hr`, `bias_ih` and `bias_hh`.

    Attributes:
        spec: the network.
        weights: the flat vector of the parameters, as `ostinato.rnn` takes it.
        deterministic: True turns dropout off; `eval()` and `train()` set it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a wrong value, or weights that are not those of the spec; an unknown
            kind in `metadata`.

    Holds under every JAX and nnx transformation.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the parameters

    def __init__(
        self,
        spec: RNNSpec,
        weights: Float[Array, " num_params"] | None = None,
        *,
        dtype: Any = None,
        recompute: bool = False,
        rngs: nnx.Rngs | None = None,
        metadata: Metadata = _NO_METADATA,
    ) -> None:
        check_spec(spec)
        self.spec = spec
        self.recompute = _checks.check_bool("recompute", recompute)
        self.deterministic = False
        for kind in metadata:
            _checks.check_choice("metadata", kind, tuple(_layers.KINDS.values()))
        draw = lambda: check_rngs(rngs).params()  # noqa: E731
        values = _layers.new_weights(spec, weights, dtype, draw)
        for p in _layers.parameters(spec):
            about = metadata.get(p.kind, {})
            setattr(self, p.name, nnx.Param(values[p.name], **about))
        self.rngs = dropout_stream(rngs) if _layers.needs_key(spec) else nnx.data(None)

    @property
    def weights(self) -> Float[Array, " num_params"]:
        """The flat vector of the parameters, as `ostinato.rnn` takes it."""
        names = [p.name for p in _layers.parameters(self.spec)]
        return _layers.join_weights(self.spec, {n: getattr(self, n) for n in names})

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
            initial_state: `h [L*D, B, S]`, for an LSTM `(h, c [L*D, B, H])`, for an
                sLSTM `(h, c, n, m)`; None: zeros.
            seq_lengths: integers `[B]`, each in 0..T.
            mask: bool `[B, T]`, True at valid steps, instead of `seq_lengths`.
            resets: bool `[B, T]`: where True, the state becomes 0 before that step;
                they do nothing past the end of a sequence.
            key: a PRNG key for dropout, used where there is any; None takes one from
                the stream `dropout`.
            padding: what outputs are past the end: `"zero"`, `"hold"` or `"drop"`.
            time_major: whether time is the first axis.

        Returns:
            `RNNOutput(y, state)`: `y [B, T, D*S]` in the layout of `x`, and the final
            state in the shape of `initial_state`.

        Raises:
            TypeError, ValueError: as `ostinato.rnn`, which says more on every argument;
                a parameter of another shape or dtype than the layer had.
            ValueError: there is dropout, and neither a `key` nor a stream.
        """
        return rnn(
            self.spec,
            self.weights,
            x,
            initial_state,
            seq_lengths=seq_lengths,
            mask=mask,
            resets=resets,
            key=call_key(self, key, _layers.needs_key(self.spec)),
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
        first = getattr(self, _layers.parameters(self.spec)[0].name)
        return _layers.initial_state(self.spec, batch, _checks.unwrap(first).dtype)

    def freeze(self) -> FrozenLayer:
        """Return the layer for serving, with its weights packed once."""
        return _layers.freeze(self.spec, self.weights)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the attribute `deterministic`, for `nnx.view`.

        Args:
            deterministic: True turns dropout off; None leaves it as it is.
        """
        if deterministic is not None:
            self.deterministic = deterministic


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
        rngs: as for `Layer`.
        metadata: as for `Layer`.

    Parameters are drawn from U(-k, k), k = hidden_size ** -0.5, as in PyTorch; with
    heads, `w_hh` and `w_hr` with the units of a head in its place. Their names, the
    attributes and the transformations that hold are those of `Layer`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from ostinato.nn.flax import LSTM
        >>> layer = LSTM(3, 5, num_layers=2, rngs=nnx.Rngs(0))
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
        rngs: nnx.Rngs,
        metadata: Metadata = _NO_METADATA,
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
        super().__init__(
            spec, dtype=dtype, recompute=recompute, rngs=rngs, metadata=metadata
        )


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
        rngs: as for `Layer`.
        metadata: as for `Layer`.

    Parameters are drawn from U(-k, k), k = hidden_size ** -0.5, as in PyTorch; with
    heads, `w_hh` with the units of a head in its place. Their names, the
    attributes and the transformations that hold are those of `Layer`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from ostinato.nn.flax import GRU
        >>> layer = GRU(3, 5, rngs=nnx.Rngs(0))
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
        rngs: nnx.Rngs,
        metadata: Metadata = _NO_METADATA,
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
        super().__init__(
            spec, dtype=dtype, recompute=recompute, rngs=rngs, metadata=metadata
        )


class PlainRNN(Layer):
    """Stacked plain RNN layers; `RNN(input_size, hidden_size, ...)` makes them, too.

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
        rngs: as for `Layer`.
        metadata: as for `Layer`.

    Parameters are drawn from U(-k, k), k = hidden_size ** -0.5, as in PyTorch; with
    heads, `w_hh` with the units of a head in its place. Their names, the
    attributes and the transformations that hold are those of `Layer`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from ostinato.nn.flax import RNN
        >>> layer = RNN(3, 5, nonlinearity="relu", rngs=nnx.Rngs(0))
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
        rngs: nnx.Rngs,
        metadata: Metadata = _NO_METADATA,
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
        super().__init__(
            spec, dtype=dtype, recompute=recompute, rngs=rngs, metadata=metadata
        )
