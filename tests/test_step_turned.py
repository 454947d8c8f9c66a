"""Steps with matrices for states that are read and written in both orders of axes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from numpy_loop import native_and_loop

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
B, T, D = 3, 4, 5
STEPS = {}


@pytest.fixture(autouse=True)
def any_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def of_all(step):
    STEPS[step.__name__] = step


def of_each(one):
    """Keep a step for all sequences of one for a sequence, `one(p, w, x)`."""
    STEPS[one.__name__] = lambda p, w, x, t: jax.vmap(one, (None, 0, 0))(p, w, x)


@of_all
def delta_rule(p, w, x, t):
    k, v, q = x @ p["k"], x @ p["v"], x @ p["q"]
    error = jnp.einsum("bd,bde->be", k, w) - v
    w = w - 0.2 * k[:, :, None] * error[:, None]
    return w, jnp.einsum("bd,bde->be", q, w)


@of_each
def transposed_product(p, w, x):
    k, v = x @ p["k"], x @ p["v"]
    w = w - 0.2 * jnp.outer(k @ w - v, k).T
    return w, k @ w


@of_each
def gradient_in_the_step(p, w, x):
    k, v = x @ p["k"], x @ p["v"]
    w = w - 0.2 * jax.grad(lambda w: 0.5 * jnp.sum((k @ w - v) ** 2))(w)
    return w, v @ w


@of_each
def product_in_both_orders(p, w, x):
    both = jnp.tanh(jnp.outer(x, x @ p["v"]) + x)
    return 0.5 * w + both.T * x - both, jnp.sum(jnp.sin(both.T) * w, 0)


@of_each
def covariance(p, w, x):
    w = 0.4 * p["k"] @ w @ p["k"].T + jnp.outer(x, x)
    w = 0.5 * (w + w.T)
    return w, jnp.exp(-w.T).sum(1)


@of_each
def covariance_alone(p, w, x):
    w = 0.5 * w + jnp.outer(x @ p["k"], x) / len(x)
    w = 0.5 * (w + w.T)
    return w, jnp.tanh(w * x).sum(1) - w.T[0]


@of_each
def chain_of_a_transpose(p, w, x):
    turned = jnp.tanh(w.T) * x + 1
    turned = jnp.where(turned > 0.9, turned, 0.5 * turned)
    return 0.6 * turned, turned.T * x - turned


@of_each
def entry_and_transpose(p, w, x):
    """Write one row of what is all 1, then read columns."""
    i = jnp.argmax(w[0])
    w = 0.5 * w + jax.lax.dynamic_update_index_in_dim(jnp.ones((D, D)), x, i, 0).T * x
    return w, w @ x


@of_each
def three_axes(p, w, x):
    cube = w[:, :, None] * x + (x @ p["q"])[:, None]
    turned = jnp.tanh(jnp.transpose(cube, (2, 0, 1)))
    return 0.5 * turned[1] + 0.1 * w.T, (turned * w).sum((0, 2))


@of_each
def shared_matrix(p, w, x):
    """The gradient of `p["q"]` is a sum over sequences of transposed products."""
    k = jnp.tanh(x + w.sum(0))
    scaled = p["q"].T * jnp.outer(k, x @ p["k"])
    return 0.5 * w + jnp.outer(k, k), scaled.sum(1) + jnp.sin(p["q"]).T @ k


@of_each
def columns_for_all_rows(p, w, x):
    """Columns are repeated, alone and beside a value that has rows."""
    spread = jnp.broadcast_to(w[:, 1], w.shape) * jnp.outer(x, x)
    return jnp.tanh(0.5 * spread + w[::-1, :1].T), w[:, 2] + spread.T[0] * x


@of_each
def both_orders_of_parts(p, w, x):
    part = w[1:, :3]
    wide = jnp.concatenate([part.T, part[:3] + w.T[:3, :3]], 1)
    return 0.7 * w.T + 0.1 * w, jnp.sin(wide).sum() + (w * w.T)[1]


@of_all
def sequences_between(p, w, x, t):
    """The sequences are the second of three axes for a while."""
    turned = jnp.einsum("bd,be->dbe", x, x @ p["k"])
    w = jnp.tanh(0.5 * w + jnp.transpose(turned, (1, 2, 0)))
    return w, (turned * jnp.swapaxes(w, 0, 1)).sum(0)


def given(size=D, dtype="float64", batch=B):
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.5 * rng.standard_normal(shape).astype(dtype)  # noqa: E731
    params = {name: draw(size, size) for name in "kvq"}
    return params, draw(batch, size, size), draw(batch, T, size)


@pytest.mark.parametrize("batch", [B, 1])
@pytest.mark.parametrize("name", STEPS)
def test_values_and_gradients_equal_those_of_scan(name, batch):
    lengths = np.array([4, 0, 3])[:batch]

    def run(backend):
        def of(params, w, x):
            out = ost.recurrent_net(
                STEPS[name], x, w, params=params, seq_lengths=lengths, backend=backend
            )
            return out.outputs, out.states

        def both(*arguments):
            results, pull = jax.vjp(of, *arguments)
            return results, pull(jax.tree.map(jnp.cos, results))

        return fast_jit(both)(*given(batch=batch))

    for a, b in zip(*map(jax.tree.leaves, map(run, ("cpu", "scan"))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [17, 70])
def test_matrices_of_many_columns_are_transposed(size, dtype):
    """There is no row of a vector for each column of them."""
    params, w, x = given(size, dtype)

    def run(backend):
        def of(params, w, x):
            out = ost.recurrent_net(
                STEPS["covariance_alone"], x, w, params=params, backend=backend
            )
            return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states**2)

        return fast_jit(jax.value_and_grad(of, (0, 1, 2)))(params, w, x)

    tolerance = 1e-4 if dtype == "float32" else 1e-10
    for a, b in zip(*map(jax.tree.leaves, map(run, ("cpu", "scan"))), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["delta_rule", "transposed_product", "gradient_in_the_step"]
)
def test_an_outer_product_is_written_in_the_order_in_which_it_is_read(name):
    """Row by row, it would be an operation for each of 48 rows."""
    params, w, x = given(48)
    told = str(ost.explain(STEPS[name], x, w, params=params, backend="cpu"))
    forward = re.search(r"(\d+) operations? forward", told)
    assert forward is not None and int(forward[1]) < 20
    backward = re.search(r"(\d+) backward", told)
    assert backward is not None and int(backward[1]) < 40


def both_ways(p, h, x, np):
    """Multiply one factor by a matrix, and by the transpose of another."""
    return np.tanh(h @ p["u"] + h @ p["v"].T + x)


def some_at_a_time(p, h, x, np):
    """Need what products give in operations that run for some sequences at a time."""
    gate, new = np.tanh(h @ p["u"] - x), np.tanh(x @ p["v"])
    z = np.tanh(gate * new + h)
    return z + np.sin(z @ p["u"] * gate)


def of_two(p, h, x, np):
    angles = np.arctan2(h, x)
    return np.sin(angles + (1.5 + h) ** x)


@pytest.mark.parametrize(
    "step, batch, size",
    [(both_ways, 1, 16), (both_ways, 3, 16), (some_at_a_time, 70, 48)]
    + [(of_two, batch, 150) for batch in (1, 3)],
)
def test_values_and_gradients(step, batch, size):
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.3 * rng.standard_normal(shape)  # noqa: E731
    params = {"u": draw(size, size), "v": draw(size, size)}
    x, h_0 = draw(3, batch, size), draw(batch, size)

    native, loop = native_and_loop(step, x, h_0)

    def net(p):
        outputs = native(p)
        return jnp.sum(jnp.sin(outputs)), outputs

    slopes, got = fast_jit(jax.grad(net, has_aux=True))(params)
    np.testing.assert_allclose(got, loop(params, np), rtol=1e-9, atol=1e-9)
    want = fast_jit(jax.grad(lambda p: jnp.sum(jnp.sin(loop(p, jnp)))))(params)
    for name, slope in want.items():
        np.testing.assert_allclose(slopes[name], slope, rtol=1e-9, atol=1e-9)
