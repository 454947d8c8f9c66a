"""`ost.rnn`, `recurrent_net` and cells on one sequence."""

import functools

import jax
import jax.numpy as jnp

import ostinato as ost
from ostinato import cells

from .program import D, programs

LSTM = ost.RNNSpec("lstm", D, 2)
GRU = ost.RNNSpec("gru", D, 2)
DEEP = ost.RNNSpec("lstm", D, 2, num_layers=2, bidirectional=True)
TANH = ost.RNNSpec("rnn_tanh", D, 2, bidirectional=True)
DROPPING = ost.RNNSpec("gru", D, 2, num_layers=2, dropout=0.5)
PROJECTED = ost.RNNSpec("lstm", D, 3, proj_size=2)


@functools.cache
def weights(spec):
    with jax.ensure_compile_time_eval():
        return ost.init_weights(jax.random.key(1), spec, jnp.float64)


def run(spec, x, scale, *args, **options):
    """The whole result; the weights depend on `scale`, so that it has a gradient."""
    return ost.rnn(spec, scale * weights(spec), x, *args, **options)


def own_state(x, d, scale):
    h = jnp.tanh(d[None, :2])
    return run(LSTM, x, scale, (h, 2 * h))


def in_the_middle(x, w, u, scale):
    y, _ = run(GRU, jnp.tanh(x @ w), scale)
    return jax.nn.relu(y @ u[:2]).mean(0)


def two_operators(x, scale):
    y, _ = run(TANH, x, scale)
    return run(LSTM, jnp.tanh(y[:, :D]), scale).y[::-1]


def with_dropout(x, key, scale):
    return run(DROPPING, x, scale, key=key)


def step_by_step(x, scale):
    def step(state, x_t):
        y, state = ost.rnn_step(GRU, scale * weights(GRU), x_t, state)
        return state, y

    return jax.lax.scan(step, jnp.zeros((1, 2)), x)


@functools.cache
def parameters(cell):
    with jax.ensure_compile_time_eval():
        return cell.init(jax.random.key(2), jnp.float64)


def net(cell, x, scale, **options):
    params = jax.tree.map(lambda a: scale * a, parameters(cell))
    start = cell.initial_state(1, x.dtype)
    out = ost.recurrent_net(cell, x[None], start, params=params, **options)
    return out.outputs[0], out.states


def with_cell(cell, **options):
    return lambda x, scale: net(cell, x, scale, **options)


def plain_step(x, w, d, **options):
    def step(params, h, x_t, t):
        gate = ost.tag(jax.nn.sigmoid(x_t @ params), "gate")
        h = gate * jnp.sin(h) + (1 - gate) * x_t + 0.1 * t.astype(x_t.dtype)
        return h, (h, h.sum(-1))

    outputs, states, every = ost.recurrent_net(
        step, x[None], d[None], params=w, **options
    )
    return jax.tree.map(lambda a: a[0], outputs), states


def attend(kind):
    cell = cells.Attention(cells.GRU(2 * D, 2), kind, memory_size=D)

    def program(x, y, scale):
        params = jax.tree.map(lambda a: scale * a, parameters(cell))
        reader = cell.attend(y[None])
        start = reader.initial_state(1, x.dtype)
        out = ost.recurrent_net(reader, x[None], start, params=params)
        return out.outputs[0], out.states.context[0]

    return program


def linear(x, x2, d, scale):
    h, h_n = ost.linear_recurrence(jnp.tanh(x)[None], scale * x2[None], d[None])
    return h[0], h_n[0]


def linear_reversed(x, d, scale):
    resets = (x[:, 0] > 0.5)[None]
    a = jnp.tanh(d)  # of its own in every example
    h, h_n = ost.linear_recurrence(a, x[None], scale * d[None], reverse=True,
                                   resets=resets)  # fmt: skip
    return h[0], h_n[0]


def linear_blocks(square, x, scale):
    a = 0.3 * jnp.tanh(square)
    h, _ = ost.linear_recurrence(a[None], x[None], scale * jnp.ones((1, D)))
    return h[0]


def linear_over_units(x, scale):
    return ost.linear_recurrence(0.5 * scale[None], x.T[None]).h[0]


def linear_batch(x, scale):
    h, h_n = ost.linear_recurrence(0.5 * jnp.sin(x), scale * x)
    return h, h_n


def linear_gradient(x, d):
    def loss(x):
        out = ost.linear_recurrence(jnp.tanh(d), x[None], jnp.sin(d)[None])
        return jnp.sum(out.h**2) + jnp.sum(out.h_n)

    return jax.grad(loss)(x)


def filtered(x, scale):
    b, a = jnp.array([0.5, 0.2, -0.1]), jnp.array([1.0, -0.4, 0.2])
    return ost.lfilter(scale * b, a, x, axis=0)


def advantages(s, x, e):
    ends = x[:, 0] > 1
    return ost.gae(s, x[:, 1], e, discounts=0.9, lambda_=0.8, terminations=ends)


PROGRAMS = programs(
    {
        "rnn_lstm": lambda x, scale: run(LSTM, x, scale),
        "rnn_gru": lambda x, scale: run(GRU, x, scale).y,
        "rnn_deep": lambda x, scale: run(DEEP, x, scale),
        "rnn_both_directions": lambda x, scale: run(TANH, x, scale).state,
        "rnn_projected": lambda x, scale: run(PROJECTED, x, scale),
        "rnn_recompute": lambda x, scale: run(LSTM, x, scale, recompute=True).y,
        "rnn_own_state": own_state,
        "rnn_with_batch_axis": lambda x, scale: run(LSTM, x[None], scale).y[0],
        "rnn_in_the_middle": in_the_middle,
        "rnn_step_by_step": step_by_step,
        "rnn_two_operators": two_operators,
        "rnn_dropout": with_dropout,
        "linear": linear,
        "linear_reversed": linear_reversed,
        "linear_blocks": linear_blocks,
        "linear_over_units": linear_over_units,
        "linear_batch": linear_batch,
        "linear_gradient": linear_gradient,
        "filtered": filtered,
        "gae": advantages,
        "net_gru": with_cell(cells.GRU(D, 2)),
        "net_peephole": with_cell(cells.PeepholeLSTM(D, 2)),
        "net_milstm": with_cell(cells.MILSTM(D, 2)),
        "net_layer_norm": with_cell(cells.LayerNormLSTM(D, 2)),
        "net_reverse": with_cell(cells.IndRNN(D, 2), reverse=True),
        "net_recompute": with_cell(cells.MILSTM(D, 2), recompute=True),
        "net_plain_step": plain_step,
        "net_plain_step_recompute": functools.partial(plain_step, recompute=("gate",)),
        "attention_regular": attend("regular"),
        "attention_recurrent": attend("recurrent"),
        "attention_dot": attend("dot"),
        "attention_coverage": attend("soft_coverage"),
    }
)
