"""Gradients of XLA's loop, whose products exist for one block of steps at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from test_step_hunt import assert_same, draw
from test_step_rows import native as native

import ostinato as ost

B, T, H = 3, 150, 32


def matrix(p, h, x, t):
    """Multiply by a matrix of sums for each sequence, a large value that is stored."""
    z = jnp.tanh(h + x @ p["w"])
    sums = jnp.cumsum(z[:, :, None] * jnp.cos(z @ p["dense"])[:, None], 1)
    return z + 0.1 * jnp.einsum("bh,bhj->bj", z, sums), z


def dense(p, h, x, t):
    h = jnp.tanh(x @ p["w"] + h @ p["dense"])
    return h, h


def scaled(p, h, x, t):
    """Multiply inputs by a vector of all sequences."""
    h = jnp.tanh(x * (1 + jnp.broadcast_to(p["b"], h.shape)) + h @ p["w"])
    return h, h


def slopes(step, backend, lengths):
    def loss(p, x, h):
        options = {"params": p, "seq_lengths": lengths, "padding": "zero"}
        out = ost.recurrent_net(step, x, h, backend=backend, **options)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states)

    return jax.value_and_grad(loss, (0, 1, 2))


def arguments():
    rng = np.random.default_rng(0)
    draw = lambda *shape: 0.4 * rng.standard_normal(shape)  # noqa: E731
    params = {"w": draw(5, H), "dense": draw(H, H) / 4}  # not chaotic
    return params, draw(B, T, 5), draw(B, H)


@pytest.mark.parametrize("lengths", [None, (150, 0, 70)], ids=["whole", "lengths"])
@pytest.mark.parametrize("step", [matrix, dense])
def test_values_and_gradients_equal_those_of_scan(step, lengths):
    found = [fast_jit(slopes(step, b, lengths))(*arguments()) for b in ("xla", "scan")]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("step, loops", [(matrix, 2), (dense, 4)])
def test_what_is_larger_than_the_products_is_not_copied_to_blocks(step, loops):
    """A loop over blocks has one over their steps inside."""
    text = jax.jit(slopes(step, "xla", None)).lower(*arguments()).as_text()
    assert text.count("stablehlo.while") == loops


def test_gradients_of_a_vector_of_short_floats_add_up_in_the_loop():
    """JAX refuses sums of two types here, as `numpy_dtype_promotion` is strict."""

    def gradient(backend):
        def loss(p, x, h):
            out = ost.recurrent_net(scaled, x, h, params=p, backend=backend).outputs
            return jnp.mean(out.astype(jnp.float32))

        return fast_jit(jax.grad(loss))(p, x, h)

    sizes = (8, 8), (8,), (3, 5, 8), (3, 8)
    w, b, x, h = (0.3 * draw(i, *s) for i, s in enumerate(sizes))
    w, b, x, h = (a.astype(jnp.bfloat16) for a in (w, b, x, h))
    p = {"w": w, "b": b}
    got, want = map(gradient, ("xla", "scan"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = (np.asarray(v, float) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.005)


@pytest.mark.parametrize("steps", [3, 200])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_a_loop_without_inputs_runs_all_its_steps(steps, has_lengths):
    def step(p, h, x, t):
        h = jnp.tanh(h @ p + 0.1)
        return h, h

    def gradient(backend):
        def loss(p, h):
            lengths = jnp.array([steps, 0, 2]) if has_lengths else None
            out = ost.recurrent_net(
                step, None, h, params=p, length=steps, seq_lengths=lengths,
                padding="zero", backend=backend,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out.outputs)), out

        return fast_jit(jax.grad(loss, (0, 1), has_aux=True))(draw(0, 8, 8), h)

    h = draw(1, 3, 8)
    assert_same(gradient("xla"), gradient("scan"))


def test_gradients_of_inputs_that_a_step_reads_and_multiplies():
    def step(p, h, x, t):
        h = jnp.tanh(x @ p["w"] + jnp.sin(x) + h @ p["u"])
        return h, x * h

    def gradient(backend):
        def loss(p, x, h):
            out = ost.recurrent_net(step, x, h, params=p, backend=backend)
            return jnp.sum(jnp.sin(out.outputs))

        p = {"w": draw(0, 8, 8), "u": draw(1, 8, 8)}
        return fast_jit(jax.grad(loss, (0, 1, 2)))(p, draw(2, 3, 5, 8), draw(3, 3, 8))

    assert_same(gradient("xla"), gradient("scan"))


def test_many_steps_of_which_nothing_is_read_or_written():
    """There are no arrays to divide into blocks."""
    p, h, steps = draw(0, 8, 8), draw(1, 2, 8), 1100
    p = p / jnp.linalg.norm(p, 2)

    def loss(h):
        step = lambda p, h, x, t: (h @ p, ())  # noqa: E731
        out = ost.recurrent_net(step, None, h, params=p, length=steps, backend="xla")
        return jnp.sum(out.states * 2.0)

    want = np.full((2, 8), 2.0)
    for _ in range(steps):
        want = want @ np.asarray(p).T
    np.testing.assert_allclose(fast_jit(jax.grad(loss))(h), want, rtol=1e-9)


@native
def test_random_bits_of_numbers_among_the_inputs_are_those_of_each_step():
    """JAX maps `rng_bit_generator` to bits that one after another has not."""

    def step(p, h, x, t):
        _, bits = jax.lax.rng_bit_generator(x[0], h.shape, jnp.uint32)
        h = jnp.tanh(h @ p + (bits % 1024).astype(h.dtype) / 1024)
        return h, h

    x = jnp.arange(2 * 6 * 4, dtype=jnp.uint32).reshape(2, 6, 4)
    p, h = draw(0, 4, 4), draw(1, 2, 4)
    got, want = (
        ost.recurrent_net(step, x, h, params=p, backend=backend).outputs
        for backend in ("cpu", "scan")
    )
    assert_same(got, want)
