"""Models for one sequence, and the same models for padded data with masks."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ostinato as ost
from ostinato import ragged

from .steps import networks

BATCH = 256
SHORTEST, LONGEST = 5, 200
D = 64
SPEC = ost.RNNSpec("lstm", D, D)
NETS = ("LSTM", "GRU", "MI-LSTM")
"""Networks as step functions; padded, they run as `lax.scan` under `jax.vmap`."""
Params = dict[str, Any]


def make_params(seed: int = 0) -> Params:
    """Draw the weights of all models; each uses its own."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        scale = D**-0.5
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    names = ("query", "key", "value", "up", "down")
    return {name: draw(D, D) for name in names} | {
        "gates": draw(2 * D, 4 * D),
        "lstm": ost.init_weights(jax.random.key(seed), SPEC),
        **{name: networks(D)[name].init(jax.random.key(seed)) for name in NETS},
    }


# ------------------------------------------------------------------ for one sequence


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def mean_pooling(p: Params, x: jax.Array) -> jax.Array:
    return mlp(p, x).mean(0)


def lstm_operator(p: Params, x: jax.Array) -> jax.Array:
    return ost.rnn(SPEC, p["lstm"], x).y


def lstm_scan(p: Params, x: jax.Array) -> jax.Array:
    def step(state: Any, x_t: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x_t, h]) @ p["gates"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros(D, x.dtype)
    return lax.scan(step, (zeros, zeros), x)[1]


def _net(name: str, backend: Any) -> Callable:
    """Return `recurrent_net` with one of the step functions of `steps`."""
    network = networks(D)[name]
    state = network.cell.initial_state(1)

    def run(p: Params, x: jax.Array) -> jax.Array:
        out = ost.recurrent_net(
            network.step_on(x), x[None], state, params=p[name], backend=backend
        )
        return out.outputs[0]

    return run


def _attend(p: Params, x: jax.Array, scores: Callable) -> jax.Array:
    energies = (x @ p["query"]) @ (x @ p["key"]).T * D**-0.5
    return jax.nn.softmax(scores(energies), axis=-1) @ (x @ p["value"])


def attention(p: Params, x: jax.Array) -> jax.Array:
    return _attend(p, x, lambda energies: energies)


def all_three(p: Params, x: jax.Array) -> jax.Array:
    x = x + attention(p, x)
    x = x + mlp(p, x)
    return lstm_scan(p, x)


# ------------------------------------------------ for one padded sequence, with masks


def _cut(y: jax.Array, length: jax.Array) -> jax.Array:
    """Set the steps of `y` past `length` to 0."""
    valid = jnp.arange(y.shape[0], dtype=length.dtype) < length
    return jnp.where(valid[:, None], y, 0)


def masked_mean_pooling(p: Params, x: jax.Array, length: jax.Array) -> jax.Array:
    return _cut(mlp(p, x), length).sum(0) / length.astype(x.dtype)


def lstm_with_lengths(p: Params, x: jax.Array, length: jax.Array) -> jax.Array:
    return ost.rnn(SPEC, p["lstm"], x, seq_lengths=length).y


def masked_attention(p: Params, x: jax.Array, length: jax.Array) -> jax.Array:
    valid = jnp.arange(x.shape[0], dtype=length.dtype) < length
    seen = lambda e: jnp.where(valid[None], e, -jnp.inf)  # noqa: E731
    return _cut(_attend(p, x, seen), length)


def masked_all_three(p: Params, x: jax.Array, length: jax.Array) -> jax.Array:
    x = x + masked_attention(p, x, length)
    x = x + mlp(p, x)
    return _cut(lstm_scan(p, x), length)


def _masked(function: Callable) -> Callable:
    """Mask the results of a function in which no step depends on a later one."""
    return lambda p, x, length: _cut(function(p, x), length)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of one sequence: one row of the table.

    Attributes:
        title: in the table and the picture.
        one: the function of one sequence.
        padded: the same function of one padded sequence and its length.
        options: of `ragged.vmap`; `tiers` is a number of tiers, computed from the data.
        goals: padded time over ragged time, for a forward pass and with gradients.
    """

    title: str
    one: Callable
    padded: Callable
    options: Mapping[str, Any]
    goals: tuple[float, float] | None


TIERS = {"tiers": 3}
PACKED_SCAN = {"scan": "packed"}
MODELS = {
    "mlp": Model("MLP", mlp, _masked(mlp), {}, (5, 4.5)),
    "pool": Model("MLP, mean pooling", mean_pooling, masked_mean_pooling, {}, (5, 4.5)),
    "lstm": Model("LSTM, `ost.rnn`", lstm_operator, _masked(lstm_operator), {}, (5, 4)),
    "lengths": Model(
        "the same, padding with `seq_lengths`",
        lstm_operator,
        lstm_with_lengths,
        {},
        None,
    ),
    "scan": Model("LSTM, `lax.scan`", lstm_scan, _masked(lstm_scan), {}, (4.5, 3)),
    "packed": Model(
        "the same as a packed scan", lstm_scan, _masked(lstm_scan), PACKED_SCAN, None
    ),
    **{
        name: Model(
            f"{name}, `recurrent_net`",
            _net(name, None),
            _masked(_net(name, "scan")),
            {},
            (5, 4),
        )
        for name in NETS
    },
    "attention": Model("self-attention", attention, masked_attention, TIERS, (3, 3)),
    "all": Model(
        "attention, MLP, LSTM",
        all_three,
        masked_all_three,
        TIERS,
        (2.5, 2.5),
    ),
}


# --------------------------------------------------------------------------- the data


class Data(NamedTuple):
    """The same sequences without and with padding."""

    flat: ragged.RaggedArray
    padded: jax.Array
    lengths: jax.Array

    @property
    def padding_ratio(self) -> float:
        """The ratio of padded steps to tokens."""
        batch, longest, _ = self.padded.shape
        return batch * longest / int(self.lengths.sum())


def draw_lengths(mean: float, batch: int, longest: int, seed: int = 1) -> np.ndarray:
    """Draw lognormal lengths of a given mean, the longest length among them."""
    rng = np.random.default_rng(seed)
    shape = np.exp(0.75 * rng.standard_normal(batch))
    shape[0] = np.inf
    low, high = 1e-3, 1e4  # factors; the mean grows with the factor
    for _ in range(60):
        middle = (low * high) ** 0.5
        lengths = np.clip(middle * shape, SHORTEST, longest).round().astype(np.int32)
        low, high = (middle, high) if lengths.mean() < mean else (low, middle)
    return lengths


_capacity = functools.partial(ragged.round_capacity, per_octave=16)


def make_data(padding_ratio: float, batch: int = BATCH, longest: int = LONGEST) -> Data:
    """Draw sequences that padding makes `padding_ratio` times as long on average."""
    rng = np.random.default_rng(2)
    lengths = draw_lengths(longest / padding_ratio, batch, longest)
    x = [rng.standard_normal((n, D)).astype(np.float32) for n in lengths]
    flat = ragged.RaggedArray.from_list(x, capacity=_capacity, max_length=longest)
    return Data(flat, flat.to_padded(), flat.lengths)


# ------------------------------------------------------------------- what is measured


def build(model: Model, kind: str, data: Data) -> dict[str, tuple[Callable, tuple]]:
    """Return the function and the arguments of both contenders, by name.

    The functions of the kind `train` return the gradients of the mean square of all
    results.
    """
    options = dict(model.options)
    if "tiers" in options:
        options["tiers"] = ragged.length_tiers(data.lengths, options["tiers"])
    run = ragged.vmap(model.one, in_axes=(None, 0), **options)
    padded = jax.vmap(model.padded, in_axes=(None, 0, 0))
    total = int(data.lengths.sum())

    def ragged_loss(p: Params, x: ragged.RaggedArray) -> jax.Array:
        y = run(p, x)
        squares = (_valid(y) if is_ragged(y) else y) ** 2
        return squares.sum() / total

    def padded_loss(p: Params, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return (padded(p, x, lengths) ** 2).sum() / total

    functions = (run, padded)
    if kind == "train":
        functions = (jax.grad(ragged_loss), jax.grad(padded_loss))
    p = make_params()
    return {
        "ragged": (functions[0], (p, data.flat)),
        "padded": (functions[1], (p, data.padded, data.lengths)),
    }


def _valid(y: ragged.RaggedArray) -> jax.Array:
    there = jnp.arange(y.capacity, dtype=jnp.int32) < y.lengths.sum()
    return jnp.where(there[:, None], y.data, 0)


def is_ragged(y: Any) -> bool:
    return isinstance(y, ragged.RaggedArray)


def comparable(result: Any) -> list[jax.Array]:
    """Return the arrays of a result, ragged ones padded with zeros."""
    leaves = jax.tree.leaves(result, is_leaf=is_ragged)
    return [y.to_padded() if is_ragged(y) else y for y in leaves]
