"""Step functions from lists of numbers: random programs of common operations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MEMORY = 3  # the places of a memory
ERF_HAS_BITS = "bitcast" in str(jax.make_jaxpr(jax.grad(jax.lax.erf))(1.0))
"""Whether the derivative of erf takes numbers apart, as from JAX 0.12 on."""


class Spec(NamedTuple):
    """A step function.

    Attributes:
        operations: each a name of `OPERATIONS` and numbers that choose its operands.
        states: the features of each state.
        inputs: the features of the input.
        batch: the number of sequences.
    """

    operations: Sequence[tuple[str, int, int, int]]
    states: Sequence[int]
    inputs: int
    batch: int


class Values:
    """The values of a step so far, each `[batch, features]`, and its parameters.

    Without parameters, they are drawn; so a first run of the step makes them.
    """

    def __init__(self, values: Sequence[Any], t: Any, params: Any, seed: int) -> None:
        self.values, self.t = list(values), t
        self.params, self.drawn = params, {}
        self.rng = np.random.default_rng(seed)

    def pick(self, i: int) -> Any:
        return self.values[-1 - i % len(self.values)]

    def param(self, *shape: int) -> Any:
        """Return the next parameter; one in three of equal shape is the last again."""
        draw = self.rng.standard_normal(shape) / np.sqrt(max((1, *shape[:1])))
        same = [k for k in self.drawn if self.drawn[k].shape == shape]
        if same and len(self.drawn) % 3 == 2:
            name = same[-1]
        else:
            name = f"p{len(self.drawn):02}"
            self.drawn[name] = draw
        return jnp.asarray(draw) if self.params is None else self.params[name]


def fit(a: Any, size: int) -> Any:
    """Return `a` with another number of features, by leaving out or repeating some."""
    have = a.shape[1]
    if have < size:
        return jnp.concatenate([a] * -(-size // have), axis=1)[:, :size]
    return a[:, have - size :] if size % 2 else a[:, :size]


def heads(a: Any) -> Any:
    return fit(a, a.shape[1] // 2 * 2 or 2).reshape(a.shape[0], 2, -1)


def norm(a: Any) -> Any:
    a = a - a.mean(axis=1, keepdims=True)
    return a * jax.lax.rsqrt(jnp.square(a).mean(axis=1, keepdims=True) + 0.3)


UNARY: dict[str, Callable] = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "exp": lambda a: jnp.exp(jnp.tanh(a)),
    "expm1": lambda a: jnp.expm1(-jnp.abs(a)),
    "log": lambda a: jnp.log(1.5 + jnp.square(a)),
    "log1p": lambda a: jnp.log1p(jnp.abs(a)),
    "sqrt": lambda a: jnp.sqrt(a * a + 0.1),
    "rsqrt": lambda a: jax.lax.rsqrt(a * a + 0.4),
    "softplus": jax.nn.softplus,
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "cube": lambda a: jnp.tanh(a) ** 3,
    "inverse": lambda a: 1 / (1 + jnp.square(a)),
    "clip": lambda a: jnp.clip(a, -0.4, 0.7),
    "floor": lambda a: a - jax.lax.stop_gradient(jnp.floor(2.2 * a)),
    "sign": lambda a: a * jnp.sign(a + 0.05),
    "softmax": lambda a: jax.nn.softmax(a, axis=1),
    "log_softmax": lambda a: jax.nn.log_softmax(a, axis=-1),
    "norm": norm,
    "mean": lambda a: a - a.mean(axis=1, keepdims=True),
    "sum": lambda a: jnp.sum(a, axis=1, keepdims=True) / a.shape[1],
    "max": lambda a: jnp.max(a, axis=1, keepdims=True),
    "total": lambda a: jnp.sum(a, axis=1, keepdims=True),
    "largest": lambda a: jnp.broadcast_to(jnp.max(a, axis=1)[:, None], a.shape),
    "min": lambda a: jnp.broadcast_to(jnp.min(a, axis=1)[:, None], a.shape),
    "logsumexp": lambda a: a - jax.nn.logsumexp(a, axis=1)[:, None],
    "turn": lambda a: heads(a).swapaxes(1, 2).reshape(a.shape[0], -1),
    "heads": lambda a: heads(a).max(axis=1),
    "spread": lambda a: jnp.einsum("bi,bj->bij", a, 0.5 * a).sum(axis=1),
    "pad": lambda a: jnp.pad(a, ((0, 0), (1, 2))),
    "any": lambda a: a * jnp.any(a > 0.6, axis=1, keepdims=True).astype(a.dtype),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": lambda a: jnp.tan(jnp.tanh(a)),
    "arcs": lambda a: jnp.arcsin(0.9 * jnp.tanh(a)) - jnp.arccos(0.8 * jnp.sin(a)),
    "arctan": lambda a: jnp.arctan(a) + jnp.arctan2(a, 1 + a * a),
    "hyperbolic": lambda a: jnp.sinh(jnp.tanh(a)) / jnp.cosh(jnp.sin(a)),
    "areas": lambda a: jnp.arcsinh(a) + jnp.arccosh(1.1 + a * a),
    "artanh": lambda a: jnp.arctanh(0.9 * jnp.tanh(a)),
    "erf": lambda a: jax.scipy.special.erf(a) - jax.scipy.special.erfc(0.3 * a),
    "cbrt": lambda a: jnp.cbrt(2 + jnp.tanh(a)),
    "power": lambda a: jnp.power(a * a + 0.5, 0.7 + 0.1 * jnp.tanh(a)),
    "remainder": lambda a: jnp.remainder(a, 0.7) + jnp.fmod(a, 3.0),
    "flip": lambda a: jnp.flip(a, axis=1),
    "strided": lambda a: a[:, ::2],
    "cumsum": lambda a: jnp.cumsum(a, axis=1) / a.shape[1],
    "cumsum back": lambda a: jax.lax.cumsum(a, axis=1, reverse=True) / a.shape[1],
    "cummax": lambda a: jax.lax.stop_gradient(jax.lax.cummax(a, axis=1)) - a,
    "prod": lambda a: jnp.prod(jnp.tanh(a) + 0.9, axis=1, keepdims=True),
    "argmax": lambda a: a * jnp.argmax(a, axis=1)[:, None].astype(a.dtype) / 9,
    "argmin": lambda a: jnp.where(
        jnp.arange(a.shape[1])[None] == jnp.argmin(a, axis=1)[:, None], 0, a
    ),
    "fixed number of times": lambda a: jax.lax.fori_loop(
        0, 3, lambda i, b: jnp.sin(b) + i * 0.1 * a, a
    ),
    "count": lambda a: a * jnp.arange(a.shape[1])[None].astype(a.dtype) / a.shape[1],
}


def unary(function: Callable) -> Callable:
    return lambda v, i, j, k: function(v.pick(i))


def binary(function: Callable) -> Callable:
    def run(v, i, j, k):
        a = v.pick(i)
        b = v.pick(j)
        return function(a, b if b.shape[1] == 1 else fit(b, a.shape[1]))

    return run


def part(v, i, j, k):
    a = v.pick(i)
    start = j % a.shape[1]
    return a[:, start : start + 1 + k % (a.shape[1] - start)]


def split(v, i, j, k):
    a = v.pick(i)
    one, two = jnp.split(a, [j % (a.shape[1] + 1)], axis=1)
    return jnp.concatenate([two, one], axis=1)


def matrix(v, i, j, k):
    a = v.pick(i)
    return a @ v.param(a.shape[1], 1 + j % 5)


def transposed(v, i, j, k):
    a = v.pick(i)
    return a @ v.param(1 + j % 5, a.shape[1]).T


def matrix_first(v, i, j, k):
    a = v.pick(i)
    return jnp.einsum("mn,bn->bm", v.param(1 + j % 5, a.shape[1]), a)


def tied(v, i, j, k):
    a = v.pick(i)
    w = v.param(a.shape[1], 1 + j % 5)
    return jnp.tanh(a @ w) @ w.T


def square_matrix(v, i, j, k):
    a = v.pick(i)
    return a @ v.param(a.shape[1], a.shape[1])


def matrix_and_number(v, i, j, k):
    """Return a product to whose features a number of each sequence is added."""
    a, b = v.pick(i), v.pick(j)
    numbers = [
        lambda: b.sum(axis=1),
        lambda: b.max(axis=1),
        lambda: jax.lax.dynamic_index_in_dim(b, v.t, axis=1, keepdims=False),
        lambda: jnp.einsum("bi,bi->b", b, fit(a, b.shape[1])),
        lambda: b @ v.param(b.shape[1]),
    ]
    # As many features are added up as there are results.
    return a @ v.param(a.shape[1], b.shape[1]) + numbers[k % 5]()[:, None]


def sliced_matrix(v, i, j, k):
    a = v.pick(i)
    w = v.param(a.shape[1] + 2, 4)
    return a @ w[1:-1, j % 4 :]


def by_head(v, i, j, k):
    a = heads(v.pick(i))
    w = v.param(2, a.shape[2], 1 + j % 3)
    return jnp.einsum("bni,nij->bnj", a, w).reshape(a.shape[0], -1)


def dense_of_heads(v, i, j, k):
    a = heads(v.pick(i))
    return (a @ v.param(a.shape[2], 1 + j % 3)).reshape(a.shape[0], -1)


def attend(v, i, j, k):
    a = v.pick(i)
    memory = v.param(a.shape[0], MEMORY, a.shape[1])
    scores = jnp.einsum("bi,bmi->bm", a, memory)
    return jnp.einsum("bm,bmi->bi", jax.nn.softmax(scores), memory)


def additive_scores(v, i, j, k):
    a = v.pick(i)
    memory = v.param(a.shape[0], MEMORY, a.shape[1])
    return jnp.tanh(a[:, None] + memory) @ v.param(a.shape[1])


def shared_memory(v, i, j, k):
    a = v.pick(i)
    memory = v.param(MEMORY, a.shape[1])
    return jax.nn.softmax(a @ memory.T) @ memory


def row_dot(v, i, j, k):
    a = v.pick(i)
    b = fit(v.pick(j), a.shape[1])
    return jnp.einsum("bi,bi->b", a, b)[:, None] * a / a.shape[1]


def outer(v, i, j, k):
    a, b, c = v.pick(i), v.pick(j), v.pick(k)
    both = jnp.tanh(a[:, :, None] * b[:, None, :])
    return jnp.einsum("bij,bj->bi", both, fit(c, b.shape[1])) / b.shape[1]


def turned(v, i, j, k):
    """Read an outer product in both orders of its axes."""
    a, b = v.pick(i), v.pick(j)
    both = jnp.tanh(a[:, :, None] * b[:, None, :])
    other = jnp.swapaxes(both, 1, 2) * v.param(b.shape[1], a.shape[1])[None]
    more = jnp.swapaxes(other, 1, 2) - both if k % 2 else jnp.swapaxes(both, 1, 2)
    return (other.sum(1) if k % 3 else other.max(1)) + more.sum(2 if k % 2 else 1)


def row_matrices(v, i, j, k):
    a = heads(v.pick(i))
    b = heads(v.pick(j))[:, :, : a.shape[2]]
    return jnp.einsum("bni,bmj->bij" if k % 2 else "bni,bnj->bij", a, b).sum(2) / 4


def vector(v, i, j, k):
    a = v.pick(i)
    return a * v.param(a.shape[1])[None] + v.param(1, a.shape[1])


def number(v, i, j, k):
    return v.pick(i) * v.param()


def for_each_sequence(v, i, j, k):
    a = v.pick(i)
    return a + v.param(a.shape[0], a.shape[1]) * v.param(a.shape[0])[:, None]


def step_number(v, i, j, k):
    a = v.pick(i)
    return jnp.where(v.t > j % 3, a, 0.5 * a) / (1 + v.t.astype(a.dtype))


def branch(v, i, j, k):
    a = v.pick(i)
    w = v.param(a.shape[1], a.shape[1])
    branches = [lambda a: jnp.tanh(a @ w), lambda a: jnp.sqrt(1 + a * a) / 2, jnp.sin]
    return jax.lax.switch((v.t + j) % 3, branches, a)


def integers(v, i, j, k):
    a = v.pick(i)
    signs = jnp.where(a > 0, jnp.int32(1), jnp.int32(-1)) * (v.t + 1)
    parts = [signs // 2, signs % 3, jnp.abs(signs) ** 2, jnp.flip(signs, 1)]
    total = sum(parts) + signs.sum(axis=1, keepdims=True, dtype=jnp.int32)
    return a * total.astype(a.dtype) / 20


def row_of_table(v, i, j, k):
    a = v.pick(i)
    return a + v.param(4, a.shape[1])[(v.t + j) % 4][None]


def several_rows(v, i, j, k):
    """Read rows of a table, which may be one row, at places that each sequence has."""
    a = v.pick(i)
    places = jnp.stack([jnp.argmax(a, 1) % 5, (jnp.argmin(a, 1) + j) % 5], 1)
    rows = v.param(5, 1 + k % 4)[places]
    return rows[:, 0] - jnp.sin(rows[:, 1]) * a[:, :1]


def top(v, i, j, k):
    a = v.pick(i)
    values, places = jax.lax.top_k(a, 1 + j % min(3, a.shape[1]))
    return jnp.sin(values) * (1 + places.astype(a.dtype)) / a.shape[1]


def wave(v, i, j, k):
    """Add what all sequences share, and what depends on the number of the step."""
    a = v.pick(i)
    t = v.t.astype(a.dtype)
    return a + jnp.sin(t * v.param(2 * a.shape[1]))[j % 2 :: 2][None]


def sorted_wave(v, i, j, k):
    a = v.pick(i)
    shared = jnp.sort(jnp.cos(v.t.astype(a.dtype) + v.param(a.shape[1])))
    return jnp.broadcast_to(shared, a.shape) if k % 2 else a * shared[None]


def choose(v, i, j, k):
    a = v.pick(i)
    b, c = (fit(v.pick(n), a.shape[1]) for n in (j, k))
    return jnp.where((a > b) & ~(c >= 0.3) | (a < -0.5), b, c)


OPERATIONS: dict[str, Callable] = {
    **{name: unary(function) for name, function in UNARY.items()},
    "add": binary(lambda a, b: a + b),
    "subtract": binary(lambda a, b: a - b),
    "multiply": binary(lambda a, b: a * jnp.tanh(b)),
    "divide": binary(lambda a, b: a / (1.1 + b * b)),
    "gate": binary(lambda a, b: jax.nn.sigmoid(b) * a + (1 - jax.nn.sigmoid(b)) * 0.2),
    "maximum": binary(jnp.maximum),
    "minimum": binary(jnp.minimum),
    "concatenate": lambda v, i, j, k: jnp.concatenate(
        [v.pick(i)[:, :9], v.pick(j)[:, :9]], axis=1
    ),
}
OPERATIONS |= {
    f.__name__: f
    for f in (
        part, split, matrix, transposed, matrix_first, tied, square_matrix, by_head,
        sliced_matrix, matrix_and_number, dense_of_heads, attend, additive_scores,
        shared_memory, row_dot, outer, row_matrices, vector, number, for_each_sequence,
        step_number, wave, sorted_wave, choose, branch, integers, row_of_table, turned,
        several_rows, top,
    )
}  # fmt: skip


def run(spec: Spec, values: Values) -> tuple[list[Any], Any]:
    """Return new states, and outputs of several shapes."""
    states = values.values[: len(spec.states)]
    first = values.values[0]
    product = first @ values.param(first.shape[1], spec.states[0])
    values.values.append(product)
    for name, *which in spec.operations:
        values.values.append(OPERATIONS[name](values, *which))
    new = values.values[-len(states) :]
    states = [
        0.3 * old + jnp.tanh(fit(a, old.shape[1]))
        for old, a in zip(states, new, strict=True)
    ]
    last = values.values[-1]
    outputs = {"last": last, "bent": jnp.tanh(1.5 * last), "mean": last.mean(axis=1)}
    return states, outputs | {"product": product}


def make(spec: Spec, seed: int = 0) -> tuple[Callable, Any, list[Any]]:
    """Return a step function, parameters and initial states, in float64."""

    def step(params, states, x, t):
        return run(spec, Values([*states, x], t, params, seed))

    rng = np.random.default_rng(seed + 1)
    states = [rng.standard_normal((spec.batch, n)) for n in spec.states]
    shape = jax.ShapeDtypeStruct((spec.batch, spec.inputs), np.float64)
    drawn = {}

    def draw(states, x, t):
        first = Values([*states, x], t, None, seed)
        results = run(spec, first)
        drawn.update(first.drawn)
        return results

    jax.eval_shape(draw, states, shape, jax.ShapeDtypeStruct((), np.int32))
    states, params = jax.device_put((states, drawn))
    return step, params, states
