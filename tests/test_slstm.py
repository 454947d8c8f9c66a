"""Tests of mode `slstm`: derivatives, its states, its initialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from harness import assert_says
from tolerance import assert_close

import ostinato as ost
from ostinato import ragged

B, T, I, H, K = 3, 5, 2, 4, 2  # noqa: E741
SPEC = ost.RNNSpec("slstm", I, H, num_heads=K)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def state_of(seed=0):
    h, c, n, m = draw(4, 1, B, H, seed=seed)
    return h, c, abs(n) + 0.1, m


def published(weights, x, state, cut=lambda m: m):
    """Run the equations of the paper in JAX, which differentiates them itself."""
    (w,) = ost.unpack_weights(weights, SPEC)
    recurrent = w.w_hh.reshape(4, K, H // K, H // K)
    carry = tuple(a[0] for a in state)

    def step(carry, x_t):
        h, c, n, m = carry
        heads = h.reshape(B, K, H // K)
        gh = jnp.einsum("gkud,bkd->bgku", recurrent, heads).reshape(B, 4 * H)
        i, f, z, o = jnp.split(
            x_t @ w.w_ih.T + (w.b_ih + w.b_hh)[None] + gh, 4, axis=-1
        )
        log_f = m - jnp.logaddexp(0.0, -f)
        m = cut(jnp.where(n == 0, i, jnp.maximum(i, log_f)))
        i, f = jnp.exp(i - m), jnp.exp(jnp.where(log_f > m, 0.0, log_f - m))
        c, n = f * c + i * jnp.tanh(z), f * n + i
        h = jax.nn.sigmoid(o) * c / n
        return (h, c, n, m), h

    carry, y = jax.lax.scan(step, carry, jnp.swapaxes(x, 0, 1))
    return ost.RNNOutput(jnp.swapaxes(y, 0, 1), tuple(a[None] for a in carry))


def operator(weights, x, state):
    return ost.rnn(SPEC, weights, x, state)


def on_xla(weights, x, state):
    return ost.rnn(SPEC, weights, x, state, backend="xla")


@fast_jit
def with_input_bias(weights, bias):
    """Add to the bias of all input gates."""
    (w,) = ost.unpack_weights(weights, SPEC)
    return ost.pack_weights([w._replace(b_ih=w.b_ih.at[:H].add(bias))], SPEC)


def loss_of(run, states=True):
    def loss(weights, x, state):
        out = run(weights, x, state)
        weighted = [i * jnp.sum(jnp.cos(s)) for i, s in enumerate(out.state, 1)]
        return jnp.sum(jnp.sin(3 * out.y)) + sum(weighted if states else [])

    return loss


@functools.cache
def values_and_gradients(run, states=True):
    gradients = jax.grad(loss_of(run, states), (0, 1, 2))
    return fast_jit(lambda *given: (run(*given), gradients(*given)))


def same(got, want, terms=300):
    jax.tree.map(lambda g, w: assert_close(g, w, terms=terms), got, want)


def arguments(seed=0):
    x = draw(B, T, I, seed=seed)
    return jax.device_put((draw(SPEC.num_params, seed=seed) / 2, x, state_of(seed)))


def test_values_and_gradients_are_those_of_the_equations():
    given = arguments()
    got, want = (values_and_gradients(f)(*given) for f in (operator, published))
    same(got, want)
    same(operator(*given), want[0])


def test_second_derivatives_are_those_of_the_equations():
    given, step = arguments(), arguments(1)

    def second(run):
        slope = lambda *a: jax.jvp(loss_of(run), a, step)[1]  # noqa: E731
        return fast_jit(jax.value_and_grad(slope, (0, 1, 2)))(*given)

    same(second(operator), second(published))


def test_outputs_do_not_depend_on_the_scale_of_the_states():
    """Check that c, n and m with another m, and no gradient through m, are the same."""
    weights, x, (h, c, n, m) = jax.device_get(arguments())
    shift = draw(1, B, H, seed=2)
    scaled = (h, c * np.exp(-shift), n * np.exp(-shift), m + shift)
    both = values_and_gradients(operator, False)
    out, (dweights, dx, (_, dc, dn, dm)) = jax.device_get(
        both(weights, x, (h, c, n, m))
    )
    same(both(weights, x, scaled)[0].y, out.y)
    same(dm, c * dc + n * dn)
    detached = loss_of(
        lambda *a: published(*a, cut=jax.lax.stop_gradient), states=False
    )
    same((dweights, dx), fast_jit(jax.grad(detached, (0, 1)))(weights, x, (h, c, n, m)))


@pytest.mark.parametrize("run", [on_xla, operator])
@pytest.mark.parametrize("i_bias", [0.0, -120.0, -2000.0])
def test_every_row_has_a_zero_state_of_its_own(run, i_bias):
    """Check zeros beside active states, and beside other units, at any input gate."""
    weights, x, (h, *cells) = jax.device_get(arguments())
    weights = with_input_bias(weights, i_bias)
    zero = (np.arange(B) == 1)[:, None] | (np.arange(H) == 2)
    state = h, *(np.where(zero, 0.0, a) for a in cells)
    given = jax.device_put((weights, x, state))

    near = functools.partial(  # exponents as large as the bias have errors of that size
        np.testing.assert_allclose, rtol=1e-13 * (1 - i_bias), atol=1e-13 * (1 - i_bias)
    )
    got, (want, wanted) = run(*given), values_and_gradients(published, False)(*given)
    jax.tree.map(near, got, want)
    alone = run(*jax.device_put((weights, x[1:2], tuple(a[:, 1:2] for a in state))))
    same(alone.y, np.asarray(got.y)[1:2])
    jax.tree.map(near, values_and_gradients(run, False)(*given)[1], wanted)


def test_lengths_and_their_second_derivatives_are_finite():
    """Check that n, which is 0 for a sequence without steps, divides nothing."""
    weights, x, _ = arguments()
    x = np.array(x)
    x[1] = x[2, 3:] = np.nan

    def loss(weights):
        return jnp.sum(ost.rnn(SPEC, weights, x, seq_lengths=(5, 0, 3)).y ** 2)

    def slope(w):
        return jax.jvp(loss, (w,), (jnp.ones_like(w),))[1]

    def length(w):
        return jnp.sum(jax.grad(loss)(w) ** 2)

    both = fast_jit(lambda w: (jax.grad(slope)(w), jax.grad(length)(w)))
    for seconds in both(weights):
        assert np.isfinite(seconds).all()


def test_steps_bfloat16_and_ragged_vmap():
    weights, x, state = arguments()
    whole, streamed = ost.rnn(SPEC, weights, x, state), state
    x = np.asarray(x)
    for t in range(T):
        y, streamed = ost.rnn_step(SPEC, weights, jnp.asarray(x[:, t]), streamed)
        same(y, np.asarray(whole.y)[:, t])
    same(streamed, whole.state)
    sequences = [x[0], x[1, :2], x[2, :4]]
    batch = ragged.RaggedArray.from_list(sequences)
    outs = ragged.vmap(lambda s: ost.rnn(SPEC, weights, s).y)(batch).to_list()
    for got, alone in zip(outs, sequences, strict=True):
        same(jnp.asarray(got), ost.rnn(SPEC, weights, jnp.asarray(alone)).y)


def test_200_000_steps():
    """With constant gates every output is o z, n goes to 2, and m stays 0."""
    steps, spec = 200_000, ost.RNNSpec("slstm", 1, 2, num_heads=2, bias="input")
    weights = jnp.zeros(spec.num_params).at[-4:].set(jnp.array([1.0, 1.0, 0.5, 0.5]))
    x = jnp.zeros((1, steps, 1))
    run = lambda w: ost.rnn(spec, w, x)  # noqa: E731
    y, (_, c, n, m) = fast_jit(run)(weights)
    want = np.tanh(1.0) / (1 + np.exp(-0.5))
    assert_close(y, np.full(y.shape, want), terms=steps)
    assert_close(n, np.full(n.shape, 2.0), terms=steps)
    assert_close(m, np.zeros(m.shape))
    gradient = fast_jit(jax.grad(lambda w: jnp.sum(run(w).y[:, -1])))(weights)
    assert_close(gradient[-4:-2], np.full(2, want / np.tanh(1.0) / np.cosh(1.0) ** 2))


def test_a_long_sum_in_bfloat16_is_kept_in_float32():
    """Check n after 600 steps with equal gates, which bfloat16 could not count."""
    spec = ost.RNNSpec("slstm", 1, 1, bias="input")
    weights = jnp.zeros(spec.num_params).at[9].set(30.0).astype("bfloat16")
    x = jnp.zeros((1, 600, 1), "bfloat16")
    for backend in ("xla", None):
        _, (_, _, n, _) = ost.rnn(spec, weights, x, backend=backend)
        np.testing.assert_allclose(float(n[0, 0, 0]), 600, rtol=2**-7)


def test_initial_weights_are_those_of_the_authors():
    def drawn(spec, **options):
        """Draw weights and unpack them, in one program."""
        draw = lambda key: ost.init_weights(key, spec, **options)  # noqa: E731
        run = fast_jit(lambda key: ost.unpack_weights(draw(key), spec))
        return jax.device_get(run(jax.random.key(0)))

    spec = ost.RNNSpec("slstm", 64, 8, num_layers=3, num_heads=2)
    layers = drawn(spec, scheme="xlstm")
    for depth, layer in zip((0, 0.5, 1), layers, strict=True):
        bias = 5 - 12 * (np.arange(4) / 3) ** (0.3 + 1.3 * depth)
        want = np.zeros((4, 2, 4))
        want[1] = bias
        assert_close(layer.b_ih + layer.b_hh, want.ravel(), dtype="float32")
        assert not layer.w_hh.any()
        wanted = (2 / 5 / layer.w_ih.shape[1]) ** 0.5
        assert 0.8 < np.std(layer.w_ih) / wanted < 1.2
    one = ost.RNNSpec("slstm", 3, 2, num_heads=2, bias="recurrent")
    assert drawn(one, scheme="xlstm")[0].b_hh[2:4].tolist() == [5, 5]
    assert drawn(one, forget_bias=2.0)[0].b_hh[2:4].tolist() == [2, 2]


def test_errors_name_the_states_and_the_modes():
    weights, x, state = arguments()
    with pytest.raises(TypeError, match=r"`initial_state` must be \(h, c, n, m\)"):
        ost.rnn(SPEC, weights, x, state[:2])
    with pytest.raises(ValueError) as info:
        ost.RNNSpec("slstm", 2, 3, cell_clip=1.0)
    assert_says(info, "`cell_clip` 'lstm' 'slstm'")
    with pytest.raises(ValueError, match="needs mode 'slstm', got 'lstm'"):
        ost.init_weights(jax.random.key(0), ost.RNNSpec("lstm", 2, 3), scheme="xlstm")


def test_initial_biases_of_both_directions_are_those_of_their_layer():
    spec = ost.RNNSpec("slstm", 4, 3, num_layers=2, bidirectional=True, bias="input")
    weights = ost.init_weights(jax.random.key(0), spec, scheme="xlstm")
    for p, layer in enumerate(ost.unpack_weights(weights, spec)):
        depth = [0, 0, 1, 1][p]
        want = 5 - 12 * (np.arange(3) / 2) ** (0.3 + 1.3 * depth)
        np.testing.assert_allclose(layer.b_ih[3:6], want, rtol=1e-5)


WEIGHTS, X = 0.5 * draw(SPEC.num_params, seed=1), draw(B, T, I, seed=2)


def slopes(run, which, state, weights=WEIGHTS):
    """Return gradients of some of the states."""

    def loss(*some):
        given = list(map(jnp.asarray, state))
        for n, one in zip(which, some, strict=True):
            given[n] = one
        out = run(jnp.asarray(weights), jnp.asarray(X), tuple(given))
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out))

    given = [jnp.asarray(state[n]) for n in which]
    return fast_jit(jax.grad(loss, tuple(range(len(which)))))(*given)


@pytest.mark.parametrize("run", [on_xla, operator])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
def test_gradients_of_some_states_are_those_of_all(run, which):
    got = slopes(run, which, state_of())
    want = slopes(published, range(4), state_of())
    for one, n in zip(got, which, strict=True):
        assert_close(one, want[n], terms=1000)


@pytest.mark.parametrize("run", [on_xla, operator])
def test_a_cell_state_without_a_normalizer_has_a_gradient(run):
    """Of a state of which n alone is 0, f scales c, and has a gradient as in JAX."""
    h, c, n, m = state_of()
    state, weights = (h, c, np.zeros_like(n), m - 2), WEIGHTS

    def loss(run, w):
        out = run(w, jnp.asarray(X), tuple(map(jnp.asarray, state)))
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out))

    got, want = (
        fast_jit(jax.grad(lambda w, f=f: loss(f, w)))(jnp.asarray(weights))
        for f in (run, published)
    )
    assert_close(got, want, terms=1000)
