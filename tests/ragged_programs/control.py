"""Loops and branches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ostinato import ragged

from .program import STATES, D, Program, programs

SCANS = ({"scan": "padded"}, {"scan": "packed", "lanes": 2})


def rnn(x, w, u, *, reverse=False):
    def step(h, x_t):
        h = jnp.tanh(x_t @ u + h @ w)
        return h, 2 * h

    return lax.scan(step, jnp.zeros(D), x, reverse=reverse)


def rnn_reverse(x, w, u):
    return rnn(x, w, u, reverse=True)


def both_directions(x, w, u):
    return jnp.concatenate([rnn(x, w, u)[1], rnn_reverse(x, u, w)[1]], 1)


def lstm(x, w_gates):
    def step(state, x_t):
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x_t, h]) @ w_gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (jnp.zeros(D), jnp.zeros(D)), x)


def own_start(x, d, w, e):
    """The state and a factor of the step are the example's own."""

    def step(h, x_t):
        h = jnp.tanh(x_t + e * (h @ w))
        return h, h.sum()

    return lax.scan(step, d, x)


def many_inputs(x, s, i, table):
    """A pytree of inputs, a dict of carries, several results of each step."""

    def step(state, inputs):
        x_t, s_t, i_t = inputs
        h = jnp.tanh(s_t * state["h"] + x_t + table[i_t])
        return {"h": h, "count": state["count"] + i_t}, (h[0], {"same": x_t})

    return lax.scan(step, {"h": jnp.ones(D), "count": jnp.int32(0)}, (x, s, i))


def counted(x):
    """Steps that know their number."""

    def step(total, inputs):
        t, x_t = inputs
        total = 0.5 * total + jnp.cos(t.astype(x_t.dtype)) * x_t
        return total, total

    return lax.scan(step, jnp.zeros(D), (jnp.arange(x.shape[0]), x))


def over_the_rest(x, w):
    """From the second token on, starting with the first."""
    return lax.scan(lambda h, a: (jnp.tanh(h @ w + a),) * 2, x[0], x[1:])


def resets_inside(x, i):
    """A state that some inputs set back."""

    def step(h, inputs):
        x_t, i_t = inputs
        h = jnp.where(i_t == 0, 0, h) * 0.5 + x_t
        return h, h

    return lax.scan(step, jnp.zeros(D), (x, i))[1]


def decoder(x, y, w):
    """Each step reads a memory of its own length."""

    def step(h, x_t):
        context = jax.nn.softmax(y @ h) @ y
        h = jnp.tanh(x_t + h @ w + context)
        return h, (h, context)

    return lax.scan(step, jnp.zeros(D), x)


def loop_in_loop(x, y):
    def outer(h, x_t):
        inner = lax.scan(lambda g, y_t: (0.5 * g + y_t * x_t, None), h, y)[0]
        return jnp.tanh(inner), inner.sum()

    return lax.scan(outer, jnp.zeros(D), x)


def grid(x, y):
    """Soft alignment cost: the carry is a token as long as the other sequence."""
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)

    def step(above, cost_t):
        reached = cost_t + jnp.minimum(above, jnp.roll(above, 1))
        return reached, reached.sum()

    return lax.scan(step, jnp.zeros(y.shape[0]), cost)


def shared_steps(x, w):
    """As many steps as the weights say, each over all tokens."""

    def step(h, token):
        return jnp.tanh(h @ w + token[None]), h.sum()

    return lax.scan(step, x, w)


def no_steps(x, w):
    """A scan of as many steps as there are: none."""
    none = jnp.zeros((0, D, D))
    own = lax.scan(lambda h, v: (jnp.tanh(h @ v), h.sum()), x, none)
    return own, lax.scan(lambda h, v: (h @ v + x.sum(), h[0]), w, none)


def unrolled(x):
    return lax.scan(lambda c, a: (0.9 * c + a, c), jnp.zeros(D), x, unroll=2)


def integer_state(i):
    return lax.scan(lambda c, a: ((3 * c + a) % 7, c), jnp.int32(1), i)


def noise_in_loop(x, key):
    def step(key, x_t):
        key, sub = jax.random.split(key)
        return key, x_t * jax.random.normal(sub, (D,))

    return lax.scan(step, key, x)[1]


def scan_of_results(x, w):
    """The second loop runs over what the first one gave, backwards."""
    forward = lax.scan(lambda c, a: (jnp.tanh(c @ w + a),) * 2, jnp.zeros(D), x)[1]
    back = lambda c, a: (0.5 * c + a, c * a)  # noqa: E731
    return lax.scan(back, forward[-1], forward, reverse=True)


def sum_by_index(x):
    body = lambda k, total: total * 0.5 + x[k]  # noqa: E731
    return lax.fori_loop(0, x.shape[0], body, jnp.zeros(D))


def five_times(x):
    body = lambda k, a: jnp.sin(a) + a[:1]  # noqa: E731
    return lax.fori_loop(0, 5, body, x)


def until_small(x):
    """Examples leave the loop at different turns."""
    return lax.while_loop(lambda a: (a**2).sum() > 0.5, lambda a: 0.6 * a, x)


def until_small_counting(x, e):
    def body(state):
        k, total = state
        return k + 1, 0.5 * total

    return lax.while_loop(
        lambda state: jnp.abs(state[1]) > 0.1, body, (jnp.int32(0), x.sum() + e)
    )


def chosen(x, choice, b):
    branches = [
        lambda a: a * 2,
        lambda a: a[::-1] + b[None],
        lambda a: jnp.cumsum(a, 0),
    ]
    return lax.switch(choice, branches, x)


def by_sign(x):
    return lax.cond(x.sum() > 0, lambda a: a.mean(0), lambda a: a.max(0), x)


@jax.custom_jvp
def root(a):
    """A square root by steps that get smaller, which a negative number never does."""
    return lax.while_loop(
        lambda y: jnp.abs(y * y - a) > 1e-13 * a, lambda y: (y + a / y) / 2, 1 + a
    )


@root.defjvp
def _root_jvp(primals, tangents):
    y = root(*primals)
    return y, tangents[0] / (2 * y)


def root_in_branch(x):
    total = x.sum()
    return lax.cond(total > 0, lambda a: root(a + 1), lambda a: a, total)


def branch_in_loop(x, w):
    def step(h, x_t):
        h = lax.cond(x_t[0] > 0, lambda g: jnp.tanh(g @ w), lambda g: g + 1, h)
        return h, h + x_t

    return lax.scan(step, jnp.zeros(D), x)


def vmap_of_pairs(x, y, w):
    near = lambda a, b: jnp.tanh(a @ w) @ b  # noqa: E731
    return jax.vmap(lambda a: jax.vmap(lambda b: near(a, b))(y))(x)


def vmap_of_loop(x):
    """A loop of its own for every feature."""
    one = lambda s: lax.scan(lambda c, a: (0.5 * c + a,) * 2, 0.0, s)[1]  # noqa: E731
    return jax.vmap(one, 1, 1)(x)


def viterbi(emissions, transitions):
    """The best path and its score."""

    def forward(best, emitted):
        scores = best[:, None] + transitions
        return scores.max(0) + emitted, scores.argmax(0)

    def back(state, pointers):
        return pointers[state], state

    best, pointers = lax.scan(forward, jnp.zeros(STATES), emissions)
    return best.max(), lax.scan(back, best.argmax(), pointers, reverse=True)[1]


def forward_algorithm(emissions, transitions):
    def step(alpha, emitted):
        alpha = jax.nn.logsumexp(alpha[:, None] + transitions, axis=0) + emitted
        return alpha, None

    start = jnp.full(STATES, -np.log(STATES))
    return jax.nn.logsumexp(lax.scan(step, start, emissions)[0])


def kalman(s, scale):
    """A random walk seen with noise: means, variances."""

    def step(state, seen):
        mean, variance = state
        variance = variance + 0.1 + scale**2
        gain = variance / (variance + 1)
        state = mean + gain * (seen - mean), (1 - gain) * variance
        return state, state

    return lax.scan(step, (0.0, 1.0), s)


def linear_recurrence(scan):
    """`h_t = a_t h_{t-1} + x_t` in logarithmic depth."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lambda x, x2: scan(combine, (jax.nn.sigmoid(x2), x))


def associative(name, **options):
    def scan_with(scan):
        return lambda x: scan(getattr(jnp, name), x, **options)

    return scan_with


def _scan(*args, **options):
    return ragged.associative_scan(*args, **options)


def associative_pairs(scan):
    """Scan over both axes of a matrix of pairs, also with a constant of all tokens."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def run(x, y):
        pairs, most = jnp.tanh(x @ y.T), jnp.max(y)
        gates = jax.nn.sigmoid(x[:, :1] + y[None, :, 0])
        across = scan(
            lambda a, b: a + b + y.sum(0)[None, :1], pairs, reverse=True, axis=1
        )
        return (
            scan(combine, (gates, pairs))[1],
            across,
            scan(lambda a, b: a + b + most * jnp.sum(y), x),
        )

    return run


def associative_under_vmap(scan):
    """Scan in an inner `vmap` over tokens, which adds a ragged axis to the tokens."""

    def run(x, y):
        scaled = jax.vmap(lambda c: scan(jnp.maximum, c[0] * x, reverse=True))(y)
        closed = jax.vmap(lambda c: scan(lambda a, b: a + b * c[0], x))(x)
        return scaled, closed

    return run


def loops_of_tokens(x, y):
    """One loop for each token, each until it is done; and one for each pair."""

    def halvings(a):
        more = lambda s: (jnp.abs(s[0]) > 0.1).any()  # noqa: E731
        return lax.while_loop(more, lambda s: (s[0] / 2, s[1] + 1), (a, 0))

    def until_far(a):
        def step(s):
            place, sum_ = s
            return place + 1, sum_ + jnp.abs(a @ y[place])

        near = lambda s: (s[0] < y.shape[0]) & (s[1] < 1.5)  # noqa: E731
        return lax.while_loop(near, step, (0, 0.0))

    pairs = jax.vmap(jax.vmap(lambda s: halvings(s[None])[1]))(x @ y.T)
    few = jax.vmap(lambda k: halvings(k * x[0])[0])(jnp.arange(3.0))
    return jax.vmap(halvings)(x), jax.vmap(until_far)(x), pairs, few


ASSOCIATIVE = {
    "associative_sum": associative("add"),
    "associative_max_reverse": associative("maximum", reverse=True),
    "associative_features": associative("multiply", axis=1),
    "associative_pairs": associative_pairs,
    "associative_under_vmap": associative_under_vmap,
    "linear_recurrence": linear_recurrence,
}
LOOPS = programs(
    {
        "rnn": rnn,
        "rnn_reverse": rnn_reverse,
        "lstm": lstm,
        "own_start": own_start,
        "many_inputs": many_inputs,
        "counted": counted,
        "resets_inside": resets_inside,
        "decoder": decoder,
        "noise_in_loop": noise_in_loop,
        "branch_in_loop": branch_in_loop,
        "forward_algorithm": forward_algorithm,
    },
    at_least=0,
    options=SCANS,
)
OTHERS = programs(
    {
        "both_directions": both_directions,
        "shared_steps": shared_steps,
        "no_steps": no_steps,
        "unrolled": unrolled,
        "integer_state": integer_state,
        "kalman": kalman,
        "map": lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x),
        "vmap_inside": lambda x, b: jax.vmap(lambda row: jnp.outer(row, b))(x),
        "vmap_of_pairs": vmap_of_pairs,
        "vmap_of_loop": vmap_of_loop,
        "five_times": lambda x, d: five_times(x + d[None]),
    }
)
FILLED = programs(
    {
        "over_the_rest": over_the_rest,
        "viterbi": viterbi,
        "scan_of_results": scan_of_results,
    },
    options=SCANS,
) + programs(
    {
        "loop_in_loop": loop_in_loop,
        "grid": grid,
        "chosen": chosen,
        "by_sign": by_sign,
        "root_in_branch": root_in_branch,
    }
)
NO_REVERSE_MODE = programs(
    {
        "sum_by_index": sum_by_index,
        "until_small": until_small,
        "until_small_counting": until_small_counting,
        "loops_of_tokens": loops_of_tokens,
    },
    gradients=False,
)
SCANNED = [
    Program(name, make(_scan), reference=make(lax.associative_scan))
    for name, make in ASSOCIATIVE.items()
] + [
    Program(
        "scan_of_jax",
        linear_recurrence(lambda *args: lax.associative_scan(*args)),
        reference=linear_recurrence(lax.associative_scan),
    )
]
PROGRAMS = LOOPS + OTHERS + FILLED + NO_REVERSE_MODE + SCANNED
