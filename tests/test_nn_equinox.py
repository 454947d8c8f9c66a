"""`nn.equinox.scan` against the cells of Equinox in a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_says

eqx = pytest.importorskip("equinox")
from ostinato.nn.equinox import scan  # noqa: E402

X = np.random.default_rng(0).standard_normal((3, 7, 4)).astype("f4")
RESETS = jnp.asarray(np.random.default_rng(1).random(7) < 0.4)


class Plain(eqx.Module):
    """A cell of the user's own, which has no fused operator."""

    cell: eqx.Module

    def __call__(self, x, state):
        return self.cell(x, state)


def close(a, b, tolerance=2e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", [eqx.nn.LSTMCell, eqx.nn.GRUCell])
@pytest.mark.parametrize(
    "options", [{}, {"resets": RESETS}, {"reverse": True}], ids=str
)
def test_scan(kind, use_bias, options):
    cell = kind(4, 5, use_bias=use_bias, dtype=jnp.float32, key=jax.random.key(0))
    start = jnp.full(5, 0.5, jnp.float32)
    state = (start, -start) if kind is eqx.nn.LSTMCell else start

    def run(cell, x):
        return jax.vmap(lambda x: scan(cell, x, state, **options))(x)

    close(run(cell, X), run(Plain(cell), X))

    def loss(cell):
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(run(cell, X)))

    close(eqx.filter_grad(loss)(cell), eqx.filter_grad(loss)(Plain(cell)), 5e-6)
    fused = str(jax.make_jaxpr(lambda x: run(cell, x))(X))
    assert "ostinato_rnn" in fused and "scan" not in fused


def test_arguments():
    cell = eqx.nn.GRUCell(4, 5, dtype=jnp.float32, key=jax.random.key(0))
    zeros = jnp.zeros(5, jnp.float32)
    close(scan(cell, X[0]), scan(cell, X[0], zeros), 0)
    with pytest.raises(TypeError, match="`state` must be given"):
        scan(Plain(cell), X[0])
    with pytest.raises(ValueError, match="`resets`"):
        scan(cell, X[0], resets=RESETS, reverse=True)


def test_wrong_shapes_and_dtypes():
    cell = eqx.nn.GRUCell(4, 5, dtype=jnp.float32, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"`xs` must have shape \[T, I\], got \[1, 7"):
        scan(cell, X[:1])  # jax.vmap was forgotten
    with pytest.raises(ValueError, match=r"`resets` must have shape \(T\) = \(7,\)"):
        scan(cell, X[0], resets=RESETS[:3])
    for other in (cell, Plain(cell)):
        with pytest.raises(TypeError, match="`resets` must be bool, got int32"):
            scan(other, X[0], jnp.zeros(5, "f4"), resets=RESETS.astype("i4"))


def test_a_list_of_states_is_taken_as_their_tuple():
    cell = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))
    xs, h, c = jnp.ones((5, 3)), jnp.ones(4), jnp.zeros(4)
    got, want = scan(cell, xs, [h, c]), scan(cell, xs, (h, c))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("steps", [7, 1])  # with the fused operator, and without
def test_errors_are_about_what_the_caller_gave(steps):
    gru = eqx.nn.GRUCell(4, 5, dtype=jnp.float32, key=jax.random.key(0))
    lstm = eqx.nn.LSTMCell(4, 5, dtype=jnp.float32, key=jax.random.key(0))
    xs, h = jnp.asarray(X[0, :steps]), jnp.zeros(5, jnp.float32)
    for cell, xs_, state, error, words in [
        (gru, xs, jnp.zeros((2, 5)), ValueError, "`state` (5,) (2, 5)"),
        (gru, xs, jnp.zeros(4), ValueError, "`state` (5,) (4,)"),
        (gru, xs[:, :3], h, ValueError, f"`xs` ({steps}, 4) ({steps}, 3)"),
        (gru, xs[:, :3], None, ValueError, f"`xs` ({steps}, 4) ({steps}, 3)"),
        (gru, xs, (h, h), TypeError, "`state` GRUCell tuple 2"),
        (lstm, xs, h, TypeError, "`state` (h, c) LSTMCell float32[5]"),
        (lstm, xs, (h,), TypeError, "`state` (h, c) LSTMCell tuple 1"),
        (lstm, xs, (h, jnp.zeros(4)), ValueError, "`state[1]` (5,) (4,)"),
        (lstm, xs, (h, [0.0]), TypeError, "`state[1]` array list"),
    ]:
        with pytest.raises(error) as info:
            scan(cell, xs_, state)
        assert_says(info, words)


@pytest.mark.usefixtures("jax_as_it_comes")
@pytest.mark.parametrize("kind", [eqx.nn.LSTMCell, eqx.nn.GRUCell])
def test_dtypes_that_the_operator_does_not_have_run_step_by_step(kind):
    cell = kind(4, 5, dtype=jnp.float32, key=jax.random.key(0))
    mixed = eqx.tree_at(lambda cell: cell.bias, cell, cell.bias.astype("bfloat16"))
    plain = eqx.tree_at(lambda c: c.bias, cell, mixed.bias.astype("float32"))
    close(scan(mixed, X[0]), scan(plain, X[0]))
    waves = kind(4, 5, dtype=jnp.complex64, key=jax.random.key(0))
    state = jnp.zeros(5, jnp.complex64)
    state = (state, state) if kind is eqx.nn.LSTMCell else state
    xs = jnp.asarray(X[0], jnp.complex64)
    close(scan(waves, xs), scan(Plain(waves), xs, state), 0)
