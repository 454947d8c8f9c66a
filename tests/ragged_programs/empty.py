"""Values that are NaN or infinite where an example is empty, and never used there.

An example without tokens takes no step of a loop over them, and has no element in a
result of their size. The values that it would compute there reach no gradient: neither
that of another example's token nor that of shared weights.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

import ostinato as ost
from ostinato import ragged

from .program import D, Program
from .recurrent import GRU, LSTM, parameters, run

LOOPS = ({"scan": "padded"}, {"scan": "packed", "lanes": 2})
TIERS = ({}, {"tiers": 2})

# Functions of an example's tokens that return a vector [D], without tokens NaN, -inf,
# or 0 with an infinite derivative.
SOURCES = {
    "mean": lambda x: x.mean(0),
    "log": lambda x: jnp.log((x**2).sum(0)),
    "norm": lambda x: jnp.sqrt((x**2).sum(0)),
}


def as_state(x, v, w):
    return lax.scan(lambda h, a: (jnp.tanh(h @ w + a),) * 2, v, x)[1]


def as_constant(x, v, w):
    def step(h, a):
        h = jnp.tanh(h + (a * v) @ w)
        return h, jnp.sin(h)

    return lax.scan(step, jnp.zeros(D), x, reverse=True)[1]


def as_both_in_loops(x, v, w):
    """The inner one is over as many steps again."""

    def outer(h, a):
        h = lax.scan(lambda g, b: (jnp.tanh(g @ w + a * b), None), h * v, x)[0]
        return h, h + x.mean(0)

    return lax.scan(outer, v, x)[1]


def as_size_in_loop(x, v, w):
    n = jnp.asarray(x.shape[0], x.dtype)
    return lax.scan(lambda h, a: ((h @ w + a * v) / n,) * 2, v, x)[1]


def in_turns(x, v, w):
    """A loop that a size counts; the first state is kept where it takes no turn."""
    body = lambda k, h: jnp.tanh(h @ w + v * k.astype(h.dtype))  # noqa: E731
    return lax.fori_loop(0, x.shape[0], body, v)[None] + x


def in_tokens(x, v, w):
    return jnp.tanh((x * v[None]) @ w)


def in_pairs(x, v, w):
    return jax.nn.softmax((x * v[None]) @ w @ x.T) @ (x + v[None])


def in_pairs_of_vectors(x, v, w):
    return jnp.tanh((x[:, None] * v[None, None] + x[None]) @ w).sum(1)


def in_pairs_with_weights(x, v, w):
    scores = (x @ x.T)[:, :, None] * v[None, None]
    scores = jnp.sin(scores @ w)
    return jnp.cumsum(jnp.sort(scores, 1), 0).sum(1)


def in_fixed_scan(x, v, w):
    step = lambda h, token: (jnp.tanh(h @ w + token[None]), None)  # noqa: E731
    return lax.scan(step, x * v[None], w)[0]


def in_associative_scan(x, v, w):
    join = lambda a, b: a + b + v[None]  # noqa: E731
    return ragged.associative_scan(join, x) @ w


def in_window(x, v, w):
    kernel = jnp.stack([w, 2 * w, w])
    tokens = (x * v[None])[None]
    return lax.conv_general_dilated(
        tokens, kernel, (1,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
    )[0]


def in_checkpoint(x, v, w):
    return jax.checkpoint(as_state)(x, v, w)


@jax.custom_vjp
def scaled(x, v, w):
    return (x * v[None]) @ w


def _scaled_back(kept, dy):
    x, v, w = kept
    dx = dy @ w.T
    return 2 * dx * v[None], (dx * x).sum(0), 3 * (x * v[None]).T @ dy


scaled.defvjp(lambda *args: (scaled(*args), args), _scaled_back)


def in_own_derivative(x, v, w):
    return jnp.sin(scaled(x, v, w))


def in_rnn(x, v, w):
    h = v[None, :2]
    return run(LSTM, x @ w, w[0, 0], (h, 2 * h)).y


def in_rnn_weights(x, v, w):
    return run(GRU, x @ w, v[0]).y


def in_net(x, v, w):
    def step(params, h, x_t, _):
        h = jnp.tanh(h @ params + x_t)
        return h, h

    return ost.recurrent_net(step, x[None], v[None], params=w).outputs[0]


def in_cell(x, v, w):
    cell = ost.cells.PeepholeLSTM(D, 2)
    params = jax.tree.map(lambda a: w[0, 0] * a, parameters(cell))
    start = jax.tree.map(lambda a: a + v[0], cell.initial_state(1, x.dtype))
    return ost.recurrent_net(cell, x[None], start, params=params).outputs[0]


def in_branch(x, v, w):
    return lax.cond(
        w[0, 0] > 0, lambda a: jnp.tanh((a * v[None]) @ w), lambda a: a @ w, x
    )


def in_vmap(x, v, w):
    def of_token(a):
        return lax.scan(lambda h, b: (jnp.sin(0.3 * h @ w + a * b), None), v, x)[0]

    return jax.vmap(of_token)(x)


CONSUMERS = {
    as_state: LOOPS,
    as_constant: LOOPS,
    as_both_in_loops: LOOPS,
    as_size_in_loop: LOOPS,
    in_turns: LOOPS,
    in_tokens: ({},),
    in_pairs: TIERS,
    in_pairs_of_vectors: TIERS,
    in_pairs_with_weights: TIERS,
    in_fixed_scan: ({},),
    in_associative_scan: ({},),
    in_window: ({},),
    in_checkpoint: ({},),
    in_own_derivative: ({},),
    in_rnn: ({},),
    in_rnn_weights: ({},),
    in_net: LOOPS,
    in_cell: ({},),
    in_branch: ({},),
    in_vmap: LOOPS,
}


def _made(consumer, source):
    return lambda x, w: consumer(x, SOURCES[source](x), w)


def _of_rest(consumer, source):
    """The same of the tokens behind the first, of which there may be none."""
    return lambda x, w: consumer(x[1:], SOURCES[source](x[1:]), w)


def _programs():
    """Each consumer with one source; a third of them also of the rest of the tokens."""
    sources = itertools.cycle(SOURCES)
    for number, (consumer, options) in enumerate(CONSUMERS.items()):
        for name, make, least in (("empty", _made, 0), ("rest", _of_rest, 1)):
            source = next(sources)
            if least == 0 or number % 3 == 0:
                yield Program(
                    f"{name}_{consumer.__name__}_of_{source}",
                    make(consumer, source),
                    at_least=least,
                    shortest=True,
                    options=options,
                )


PROGRAMS = list(_programs())
