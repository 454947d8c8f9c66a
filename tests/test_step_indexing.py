"""Steps that index with computed numbers, against loops in numpy and `lax.scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from test_transforms import assert_trees_close

import ostinato as ost

T, B, K, H, V = 7, 3, 4, 5, 6


def ring_buffer(p, buffer, x, t):
    old = lax.dynamic_index_in_dim(buffer, (t + 1) % K, 1, keepdims=False)
    h = jnp.tanh(x + old @ p["u"])
    return lax.dynamic_update_slice_in_dim(buffer, h[:, None], t % K, 1), h


def ring_of_scatter(p, buffer, x, t):
    h = jnp.tanh(x + buffer[:, (t + 1) % K] @ p["u"])
    return buffer.at[:, t % K].set(h), h


def added_to(p, buffer, x, t):
    """Indices that count from the end, and some that are out of bounds."""
    h = jnp.tanh(x + buffer[:, -1] @ p["u"])
    return buffer.at[:, t - 2].add(h, mode="drop"), h


def most_likely_word(p, buffer, x, t):
    word = jnp.argmax(buffer[:, 0] @ p["table"].T, -1)
    h = jnp.tanh(x + p["table"][word] @ p["u"])
    return jnp.stack([h] * K, 1), h


STEPS = [ring_buffer, ring_of_scatter, added_to, most_likely_word]


def in_numpy(step, p, buffer, x):
    """Return all outputs and the last state."""
    buffer, outputs = np.array(buffer), []
    for t in range(T):
        if step is most_likely_word:
            read = p["table"][np.argmax(buffer[:, 0] @ p["table"].T, -1)]
        else:
            read = buffer[:, -1] if step is added_to else buffer[:, (t + 1) % K]
        h = np.tanh(x[t] + read @ p["u"])
        if step is most_likely_word:
            buffer[:] = h[:, None]
        elif step is not added_to:
            buffer[:, t % K] = h
        elif t - 2 < K:
            buffer[:, t - 2] += h
        outputs.append(h)
    return np.stack(outputs), buffer


def arguments():
    rng = np.random.default_rng(5)
    p = {"u": rng.standard_normal((H, H)), "table": rng.standard_normal((V, H))}
    return p, rng.standard_normal((B, K, H)), rng.standard_normal((T, B, H))


def run(step, backend, p, buffer, x):
    out = ost.recurrent_net(step, x, buffer, params=p, time_major=True, backend=backend)
    return out.outputs, out.states


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_values_and_gradients(step):
    given = jax.tree.map(jnp.asarray, arguments())

    def loss(backend, *given):
        y, last = run(step, backend, *given)
        weights = jnp.cos(jnp.arange(y.size, dtype=float)).reshape(y.shape)
        return jnp.vdot(weights, y) + jnp.sum(jnp.sin(last)), (y, last)

    def both(backend):
        gradient = jax.grad(loss, argnums=(1, 2, 3), has_aux=True)
        return fast_jit(lambda *given: gradient(backend, *given))(*given)

    gradients, values = both("cpu")
    for got, want in zip(values, in_numpy(step, *arguments()), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)
    assert_trees_close(gradients, both("scan")[0])
    compiled = jax.jit(jax.grad(lambda *g: loss("cpu", *g)[0], argnums=(0, 1, 2)))
    text = compiled.lower(*given).as_text()
    assert text.count("custom_call @ostinato_step(") == 2


MODES = ["promise_in_bounds", "clip", "drop", None]


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", ["add", "set"])
def test_indices_out_of_bounds(mode, write):
    """What JAX does: a read is clamped, and its gradient, like a write, is dropped."""

    def step(p, state, x, t):
        buffer, word = state
        options = {"fill_value": 0} if mode == "drop" else {}
        read = "fill" if mode == "drop" else mode
        row = p["table"].at[word].get(mode=read, **options)
        h = jnp.tanh(x + row + buffer[:, 0])
        place = getattr(buffer.at[:, t - 6], write)  # from -6 on, of K
        return (place(h, mode=mode), word + 1), h

    given = p, buffer, x = jax.tree.map(jnp.asarray, arguments())
    words = jnp.asarray([-9, 0, V - 2], jnp.int32)

    def loss(backend, p, buffer, x):
        y, (last, _) = run(step, backend, p, (buffer, words), x)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last)), (y, last)

    def both(backend):
        gradient = jax.grad(loss, argnums=(1, 2, 3), has_aux=True)
        return fast_jit(lambda *given: gradient(backend, *given))(*given)

    assert_trees_close(both("cpu"), both("scan"))


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_indices_in_another_order_than_the_axes(mode, backend):
    """Read one element by numbers that are given for the last axis first."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0,), collapsed_slice_dims=(1, 2), start_index_map=(2, 1)
    )

    def step(p, buffer, x, t):
        at = jnp.stack([t % H, t % K])  # the number in H, then that in K
        sizes = (buffer.shape[0], 1, 1)
        read = lax.gather(buffer, at, numbers, sizes, mode=mode)
        h = jnp.tanh(x + read[:, None] @ p["row"])
        return buffer + h[:, None], h

    p, buffer, x = arguments()
    p["row"] = p["table"][:1]
    outputs, last = run(step, backend, p, jnp.asarray(buffer), x)
    buffer = np.array(buffer)
    for t in range(T):
        h = np.tanh(x[t] + buffer[:, t % K, t % H, None] @ p["row"])
        buffer += h[:, None]
        np.testing.assert_allclose(outputs[t], h, rtol=1e-12)
    np.testing.assert_allclose(last, buffer, rtol=1e-12)


@pytest.mark.parametrize("back", [0, 1])
def test_rows_that_belong_to_the_sequence_before(back):
    """Numbers of sequences that are known, but not those from 0 on."""

    def step(p, buffer, x, t):
        own = jnp.arange(B, dtype=t.dtype)
        read = buffer[own + -back, (own + t) % K]
        h = jnp.tanh(x + read @ p["u"])
        return buffer.at[:, t % K].set(h), h

    p, buffer, x = arguments()
    outputs, last = run(step, None, p, jnp.asarray(buffer), x)
    buffer, number = np.array(buffer), np.arange(B)
    for t in range(T):
        h = np.tanh(x[t] + buffer[number - back, (number + t) % K] @ p["u"])
        buffer[:, t % K] = h
        np.testing.assert_allclose(outputs[t], h, rtol=1e-10)
    np.testing.assert_allclose(last, buffer, rtol=1e-10)
