"""Tests of interop.jax_rnn against the reference of jax.experimental.rnn."""

import functools as ft
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import rnn as theirs
from tolerance import tolerance

import ostinato as ost
from ostinato.interop import jax_rnn as ours

STATIC = ("input_size", "hidden_size", "num_layers", "dropout", "bidirectional")
CASES = list(itertools.product((1, 2), (False, True)))


def sizes(num_layers, bidirectional, inputs=3, hidden=5):
    return dict(
        input_size=inputs,
        hidden_size=hidden,
        num_layers=num_layers,
        bidirectional=bidirectional,
    )


def make(num_layers, bidirectional, lengths, dtype):
    rng = np.random.default_rng(0)
    size = sizes(num_layers, bidirectional)
    rows = num_layers * (1 + bidirectional)
    batch, steps = len(lengths), 6
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    states = draw(rows, batch, 5), draw(rows, batch, 5)
    weights = draw(theirs.get_num_params_in_lstm(**size)) * jnp.asarray(0.4, dtype)
    return (draw(batch, steps, 3), *states, weights, jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize("name", ours.__all__)
def test_signature_is_theirs(name):
    def names(f):
        return [
            (p.name, p.default is not p.empty)
            for p in inspect.signature(inspect.unwrap(f)).parameters.values()
        ]

    assert names(getattr(ours, name)) == names(getattr(theirs, name))


def test_every_public_name_is_there():
    def defined(module):
        return {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        }

    primitives = {"rnn_abstract_eval", "rnn_bwd_abstract_eval"}  # of cuDNN
    assert defined(theirs) - primitives <= set(ours.__all__)
    for name in ("PRNGKeyArray", "sigmoid", "tanh"):
        assert getattr(ours, name) is getattr(theirs, name)


@pytest.mark.parametrize(("num_layers", "bidirectional"), CASES)
def test_weights_have_their_layout(num_layers, bidirectional):
    size = sizes(num_layers, bidirectional)
    count = theirs.get_num_params_in_lstm(**size)
    assert ours.get_num_params_in_lstm(**size) == count
    flat = jnp.arange(count, dtype=jnp.float32)
    for a, b in zip(
        ours.unpack_lstm_weights(flat, **size),
        theirs.unpack_lstm_weights(flat, **size),
        strict=True,
    ):
        assert a.keys() == b.keys()
        for p in a:
            np.testing.assert_array_equal(a[p], b[p])
    np.testing.assert_array_equal(
        ours.swap_lstm_gates(flat, **size), theirs.swap_lstm_gates(flat, **size)
    )
    drawn = ours.init_lstm_weight(jax.random.key(0), **size)
    assert drawn.shape == (count,) and drawn.dtype == jnp.float32
    assert 0.4 < float(jnp.abs(drawn).max()) <= 5**-0.5


@pytest.mark.parametrize(("num_layers", "bidirectional"), CASES)
def test_lstm_equals_their_reference(num_layers, bidirectional):
    args = make(num_layers, bidirectional, [6, 1, 4], jnp.float64)
    size = dict(sizes(num_layers, bidirectional), dropout=False)

    def loss(run, x, h, c, w):
        y, h_n, c_n = run(x, h, c, w)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(h_n)) + jnp.sum(c_n**2)

    def ref(x, h, c, w):
        layers = theirs.unpack_lstm_weights(w, **sizes(num_layers, bidirectional))
        return theirs.lstm_ref(x, h, c, *layers, args[4], *_positional(size))

    def fused(x, h, c, w):
        run = jax.jit(ours.lstm, static_argnames=STATIC)
        return run(x, h, c, w, args[4], **size)

    def unpacked(x, h, c, w):
        layers = ours.unpack_lstm_weights(w, **sizes(num_layers, bidirectional))
        return ours.lstm_ref(x, h, c, *layers, args[4], **size)

    def explicit(x, h, c, w):
        @ft.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9, 10))
        def again(*arguments):
            return ours.lstm_fwd(*arguments)[0]

        again.defvjp(ours.lstm_fwd, ours.lstm_bwd)
        return again(x, h, c, w, args[4], *_positional(size), None)

    tol = tolerance(np.float64, terms=100)
    for run in (fused, unpacked, explicit):
        values, grads = jax.value_and_grad(ft.partial(loss, run), (0, 1, 2, 3))(
            *args[:4]
        )
        wanted, want_grads = jax.value_and_grad(ft.partial(loss, ref), (0, 1, 2, 3))(
            *args[:4]
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol),
            (values, grads),
            (wanted, want_grads),
        )


def _positional(size):
    return [size[name] for name in STATIC]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_row_of_length_zero_returns_its_initial_state(dtype):
    x, h, c, w, lengths = make(1, True, [0, 6, 2], dtype)
    size = dict(sizes(1, True), dropout=0.0)
    y, h_n, c_n = jax.jit(ours.lstm, static_argnames=STATIC)(
        x, h, c, w, lengths, **size
    )
    assert y.dtype == h_n.dtype == c_n.dtype == dtype
    np.testing.assert_array_equal(np.asarray(h_n[:, 0]), np.asarray(h[:, 0]))
    np.testing.assert_array_equal(np.asarray(c_n[:, 0]), np.asarray(c[:, 0]))
    assert not np.asarray(y[0]).any()


def test_dropout_is_refused_with_a_way_out():
    args = make(1, False, [6], jnp.float32)
    with pytest.raises(NotImplementedError, match=r"`dropout` must be 0.*key="):
        ours.lstm(*args, **sizes(1, False), dropout=0.5)


@pytest.mark.parametrize("name", ["lstm", "lstm_fwd", "lstm_ref"])
def test_sequences_end_at_their_lengths(name):
    """Every function runs each sequence as if it were alone."""
    sizes = 3, 4, 1, False
    w = ours.init_lstm_weight(jax.random.key(0), *sizes)
    x = np.random.default_rng(0).standard_normal((3, 5, 3)).astype("f4")
    lengths, zeros = jnp.array([2, 0, 5]), jnp.zeros((1, 3, 4), "f4")
    args = jnp.asarray(x), zeros, zeros
    if name == "lstm_ref":
        y, h, c = ours.lstm_ref(
            *args, *ours.unpack_lstm_weights(w, *sizes), lengths, 3, 4, 1, 0.0, False
        )
    elif name == "lstm_fwd":
        (y, h, c), _ = ours.lstm_fwd(*args, w, lengths, 3, 4, 1, 0.0, False, None)
    else:
        y, h, c = ours.lstm(*args, w, lengths, 3, 4, 1, 0.0, False)
    for b, n in enumerate(lengths.tolist()):
        want = ost.rnn(ost.RNNSpec("lstm", 3, 4), w, jnp.asarray(x[b, :n]))
        np.testing.assert_allclose(y[b, :n], want.y, rtol=1e-5, atol=1e-6)
        assert not np.any(y[b, n:])
        for got, state in zip((h, c), want.state, strict=True):
            np.testing.assert_allclose(got[:, b], state, rtol=1e-5, atol=1e-6)
