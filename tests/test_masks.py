"""`mask` with gaps, and steps of streams of which some are active."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost

B, T, I, H = 4, 7, 3, 5  # noqa: E741
RNG = np.random.default_rng(0)
MASK = RNG.random((B, T)) < 0.6
MASK[0] = False  # no step at all
MASK[1, :2] = False  # a gap in front
MASK[2, -2:] = False  # a gap at the end
MASK[3] = True
RESETS = RNG.random((B, T)) < 0.3
RESETS[2, -1] = True  # after the last valid step
# NaN at masked steps must reach nothing.
X = jnp.asarray(np.where(MASK[..., None], RNG.standard_normal((B, T, I)), np.nan), "f4")
MODES = [("lstm", False), ("lstm", True), ("gru", False), ("rnn_tanh", True)]


def network(mode, bidirectional):
    spec = ost.RNNSpec(mode, I, H, 2, bidirectional, dropout=0.3)
    states = jax.tree.map(
        lambda shape: jnp.asarray(RNG.standard_normal(shape), "f4"),
        spec.state_shape(B),
        is_leaf=lambda shape: isinstance(shape[0], int),
    )
    return spec, ost.init_weights(jax.random.key(1), spec), states


def close(a, b, tolerance=1e-6):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert all(np.allclose(x, y, rtol=0, atol=tolerance) for x, y in leaves)


@pytest.mark.parametrize(("mode", "bidirectional"), MODES)
@pytest.mark.parametrize("padding", ["zero", "hold"])
def test_a_mask_leaves_out_the_masked_steps(mode, bidirectional, padding):
    spec, weights, h_0 = network(mode, bidirectional)
    y, state = ost.rnn(spec, weights, X, h_0, mask=MASK, padding=padding)
    first = jax.tree.leaves(h_0)[0]
    for b in range(B):
        valid = np.flatnonzero(MASK[b])
        own = jax.tree.map(lambda a, b=b: a[:, b], h_0)
        alone = ost.rnn(spec, weights, X[b][valid], own)
        close(y[b][valid], alone.y)
        close(jax.tree.map(lambda a, b=b: a[:, b], state), alone.state)
        held = np.concatenate(list(first[-spec.num_directions :, b]))
        for t in np.flatnonzero(~MASK[b]):
            before = y[b][t - 1] if MASK[b][:t].any() else held
            close(y[b][t], before if padding == "hold" else np.zeros_like(held))
    major = ost.rnn(
        spec,
        weights,
        jnp.swapaxes(X, 0, 1),
        h_0,
        mask=MASK.T,
        padding=padding,
        time_major=True,
    )
    close((jnp.swapaxes(major.y, 0, 1), major.state), (y, state))


@pytest.mark.parametrize(("mode", "bidirectional"), MODES)
def test_gradients_of_a_mask(mode, bidirectional):
    spec, weights, h_0 = network(mode, bidirectional)
    options = {"mask": MASK, "padding": "hold", "key": jax.random.key(2)}

    def loss(weights, x, h_0):
        out = ost.rnn(spec, weights, x, h_0, **options)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out))

    wanted = jax.grad(loss, (0, 1, 2))(weights, X, h_0)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(wanted))
    assert not np.asarray(wanted[1])[~MASK].any()
    out, reserve = ost.rnn_forward(spec, weights, X, h_0, **options)
    close(out, ost.rnn(spec, weights, X, h_0, **options))
    got = ost.rnn_backward(
        spec, weights, reserve, jnp.cos(out.y), jax.tree.map(jnp.cos, out.state)
    )
    close((got.weights, got.x, got.initial_state), wanted, 1e-5)

    def value(scale):  # against finite differences, which share no rule
        return loss(weights * scale, jnp.where(MASK[..., None], X, 0) * scale, h_0)

    step = 1e-2
    numeric = (value(1 + step) - value(1 - step)) / (2 * step)
    assert abs(jax.grad(value)(1.0) - numeric) < 2e-2 * max(1, abs(numeric))


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_passes_of_a_mask_with_resets(mode, time_major):
    spec, weights, h_0 = network(mode, False)
    layout = (lambda a: jnp.swapaxes(a, 0, 1)) if time_major else jnp.asarray
    options = {
        "mask": layout(MASK), "resets": layout(RESETS), "padding": "hold",
        "time_major": time_major,
    }  # fmt: skip

    def loss(weights, x, h_0):
        out = ost.rnn(spec, weights, x, h_0, **options)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out))

    wanted = jax.grad(loss, (0, 1, 2))(weights, layout(X), h_0)
    out, reserve = ost.rnn_forward(spec, weights, layout(X), h_0, **options)
    got = ost.rnn_backward(
        spec, weights, reserve, jnp.cos(out.y), jax.tree.map(jnp.cos, out.state)
    )
    close((got.weights, got.x, got.initial_state), wanted, 1e-5)
    plain = {"mask": MASK, "resets": RESETS, "padding": "hold"}
    y, state = ost.rnn(spec, weights, X, h_0, **plain)
    close((layout(out.y), out.state), (y, state))


@pytest.mark.parametrize("time_major", [False, True])
def test_dropout_between_layers_is_that_of_a_step_wherever_it_moves(time_major):
    """Without recurrent weights, the outputs of a step depend on that step alone."""
    spec, weights, _ = network("rnn_tanh", False)
    layers = [
        p._replace(w_hh=jnp.zeros_like(p.w_hh))
        for p in ost.unpack_weights(weights, spec)
    ]
    weights = ost.pack_weights(layers, spec)
    layout = (lambda a: jnp.swapaxes(a, 0, 1)) if time_major else jnp.asarray
    options = {"key": jax.random.key(2), "time_major": time_major}
    x = layout(jnp.nan_to_num(X))
    whole = ost.rnn(spec, weights, x, **options).y
    y = ost.rnn(spec, weights, x, mask=layout(MASK), **options).y
    close(layout(y)[MASK], layout(whole)[MASK])
    assert not np.allclose(layout(whole), ost.rnn(spec, weights, layout(x)).y)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_steps_of_active_streams_are_a_mask_with_resets(mode):
    spec, weights, h_0 = network(mode, False)
    y, state = ost.rnn(spec, weights, X, h_0, mask=MASK, resets=jnp.asarray(RESETS))
    each, ys = h_0, []
    for t in range(T):
        out = ost.rnn_step(
            spec, weights, X[:, t], each, resets=RESETS[:, t], active=MASK[:, t]
        )
        each, ys = out.state, [*ys, out.y]
    close((jnp.stack(ys, 1), each), (y, state))
    one = jax.tree.map(lambda a: a[:, 2], h_0)
    kept = ost.rnn_step(spec, weights, X[2, -1], one, active=False)
    close(kept.state, one, 0)
    assert not kept.y.any()
    empty = ost.rnn_step(spec, weights, X[2, -1], one, resets=True, active=False)
    assert not any(a.any() for a in jax.tree.leaves(empty.state))


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_streams_that_join_and_leave_have_the_bits_of_whole_sequences(mode):
    steps, streams = 6, 100
    spec = ost.RNNSpec(mode, I, H, 2, batch_invariant=True)
    if not ost.backends()["cpu"].available:
        pytest.skip(ost.backends()["cpu"].detail)
    weights = ost.init_weights(jax.random.key(1), spec)
    x = jax.random.normal(jax.random.key(2), (streams, steps, I), "f4")
    active = np.random.default_rng(3).random((steps * 4, streams)) < 0.5
    step = jax.jit(
        lambda x, state, on: ost.rnn_step(spec, weights, x, state, active=on)
    )
    state = jax.tree.map(lambda a: jnp.zeros_like(a), ost.rnn(spec, weights, x).state)
    done, ys = np.zeros(streams, int), np.zeros((streams, steps, H), "f4")
    for on in active:
        on = on & (done < steps)
        here = np.minimum(done, steps - 1)
        out = step(x[np.arange(streams), here], state, on)
        state = out.state
        ys[on, here[on]] = np.asarray(out.y)[on]
        done += on
    whole = ost.rnn(spec, weights, x, seq_lengths=done)
    valid = np.arange(steps) < done[:, None]
    assert (ys[valid] == np.asarray(whole.y)[valid]).all()
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), state, whole.state)
    )


def test_one_sequence_and_transformations():
    spec, weights, _ = network("gru", False)
    y, state = ost.rnn(spec, weights, X[2], mask=MASK[2])
    close(y, ost.rnn(spec, weights, X, mask=MASK).y[2])
    many = jax.jit(jax.vmap(lambda x, m: ost.rnn(spec, weights, x, mask=m).y))
    close(many(X, jnp.asarray(MASK)), ost.rnn(spec, weights, X, mask=MASK).y)


def test_variables_with_jax_array_are_arrays():
    class Variable:
        def __init__(self, value):
            self.value = value
            self.shape, self.dtype = value.shape, value.dtype

        def __jax_array__(self):
            return self.value

    spec, weights, h_0 = network("lstm", False)
    wanted = ost.rnn(spec, weights, X, h_0, mask=MASK)
    names = jax.tree.map(Variable, (weights, X, h_0, jnp.asarray(MASK)))
    close(ost.rnn(spec, names[0], names[1], names[2], mask=names[3]), wanted)
    x, lengths = jnp.nan_to_num(X), jnp.array([1, 2, 3, 4])
    given = ost.rnn(spec, weights, x, seq_lengths=Variable(lengths)).y
    close(given, ost.rnn(spec, weights, x, seq_lengths=lengths).y)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mask": MASK, "seq_lengths": [1] * B}, ValueError, "`mask` `seq_lengths`"),
        ({"mask": MASK, "padding": "drop"}, ValueError, "`padding` 'hold' 'drop'"),
        ({"mask": MASK[:, :-1]}, ValueError, "`mask` (4, 7) (4, 6)"),
        ({"mask": MASK.astype("f4")}, TypeError, "`mask` bool float32"),
        ({"mask": MASK.tolist()[:2]}, ValueError, "`mask` (4, 7) (2, 7)"),
    ],
)
def test_bad_masks(options, error, words):
    spec, weights, _ = network("gru", False)
    with pytest.raises(error) as caught:
        ost.rnn(spec, weights, X, **options)
    assert all(word in str(caught.value) for word in words.split(" "))


def test_bad_streams():
    spec, weights, _ = network("gru", False)
    with pytest.raises(ValueError, match="`active` must have shape"):
        ost.rnn_step(spec, weights, X[:, 0], active=[True])
    with pytest.raises(TypeError, match="`resets` must be bool"):
        ost.rnn_step(spec, weights, X[:, 0], resets=np.ones(B))


@pytest.mark.parametrize("batch", [0, 2])
def test_no_steps_at_all(batch):
    spec, weights, _ = network("gru", False)
    none = np.zeros((batch, 0), bool)
    out = ost.rnn(spec, weights, jnp.zeros((batch, 0, I), "f4"), mask=none, resets=none)
    assert out.y.shape == (batch, 0, H)


def test_resets_may_be_lists_as_masks_may():
    x, spec = jnp.ones((2, 3, 2)), ost.RNNSpec("gru", 2, 3)
    weights = jnp.linspace(-1, 1, spec.num_params)
    resets = [[False, True, False], [False, False, True]]
    want = ost.rnn(spec, weights, x, resets=jnp.asarray(resets)).y
    np.testing.assert_array_equal(ost.rnn(spec, weights, x, resets=resets).y, want)
