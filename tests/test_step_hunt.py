"""Faults that were found by programs as users write them, on the native loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")

B, T = 3, 4


def draw(seed, *shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def both(function, *arguments):
    """Return the results of a function of the backend on the native loop and plain."""
    return [
        fast_jit(lambda *a, b=b: function(b, *a))(*arguments) for b in ("cpu", "scan")
    ]


def assert_same(got, want, tolerance=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_a_stored_product_of_heads_that_the_step_also_reads():
    """The product may not wait for the end of a chunk because it is stored."""

    def step(p, s, x, t):
        a = jnp.concatenate([s, x[:, :4]], -1).reshape(-1, 2, 5)
        c = jnp.einsum("bhn,nhd->bhd", a, p["v"]).reshape(-1, 8)
        return jnp.tanh(c @ p["o"] + x), a

    def loss(backend, p, x, s):
        out = ost.recurrent_net(step, x, s, params=p, backend=backend)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states), out

    def value_and_grad(backend, *arguments):
        of_params = jax.value_and_grad(lambda *a: loss(backend, *a), has_aux=True)
        return of_params(*arguments)

    p = {"v": draw(0, 5, 2, 4), "o": draw(1, 8, 6)}
    assert_same(*both(value_and_grad, p, draw(2, B, T, 6), draw(3, B, 6)))


def test_attention_of_several_heads_over_a_shared_memory():
    memory = draw(0, 5, 8)

    def step(p, s, x, t):
        q = (s @ p["q"]).reshape(-1, 2, 4)
        k, v = ((memory @ p[name]).reshape(5, 2, 4) for name in "kv")
        a = jax.nn.softmax(jnp.einsum("bhd,nhd->bhn", q, k) / 2, -1)
        c = jnp.einsum("bhn,nhd->bhd", a, v).reshape(-1, 8)
        return jnp.tanh(c @ p["o"] + x), a

    def loss(backend, p, x, s):
        out = ost.recurrent_net(step, x, s, params=p, backend=backend)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states)

    p = {"q": draw(1, 6, 8), "k": draw(2, 8, 8), "v": draw(3, 8, 8), "o": draw(4, 8, 6)}
    given = p, draw(5, B, T, 6), draw(6, B, 6)
    assert_same(*both(lambda b, *a: jax.value_and_grad(loss, 1)(b, *a), *given))


def rounded_copy(w, states, x, t):
    c = jnp.tanh(states[0].astype(jnp.float32) @ w + x)
    return (c.astype(jnp.bfloat16), c), c


def as_number(w, states, x, t):
    h = jnp.tanh(states[0] @ w + x)
    positive = h > 0
    return (h, positive), (positive, positive.astype(jnp.float32), positive.astype(int))


@pytest.mark.parametrize("step", [rounded_copy, as_number])
def test_one_value_in_two_types(step):
    """States and outputs with the same numbers in different types are two results."""
    states = draw(0, B, 4, dtype=jnp.float32), draw(1, B, 4, dtype=jnp.float32)
    if step is rounded_copy:
        states = states[0].astype(jnp.bfloat16), states[1]
    else:
        states = states[0], states[1] > 0

    def run(backend, w, x):
        return ost.recurrent_net(
            step, x, states, params=w, return_all_states=True, backend=backend
        )

    with jax.numpy_dtype_promotion("standard"):
        w, x = (
            draw(n, *s, dtype=jnp.float32) for n, s in ((2, (4, 4)), (3, (B, T, 4)))
        )
        assert_same(*both(run, w, x), tolerance=0.02)


def test_inputs_as_outputs_in_another_type():
    def step(w, h, x, t):
        half, flag, number = x
        h = jnp.tanh(h @ w + half.astype(jnp.float32))
        kinds = jnp.float32, jnp.int32
        return h, (x, half.astype(jnp.float32), [flag.astype(k) for k in kinds], number)

    def run(backend, w, *x):
        return ost.recurrent_net(
            step, x, jnp.zeros((B, 4), jnp.float32), params=w, backend=backend
        )

    half, number = draw(0, B, T, 4, dtype=jnp.bfloat16), draw(1, B, T, 4) * 3
    with jax.numpy_dtype_promotion("standard"):
        w = draw(2, 4, 4, dtype=jnp.float32)
        given = w, half, half > 0, number.astype(jnp.int32)
        assert_same(*both(run, *given), tolerance=1e-5)


@pytest.mark.parametrize("backend", ["cpu", None])
def test_the_reason_names_what_the_native_loop_lacks(backend):
    """A step without products is no exception."""

    def step(_, h, x, t):
        h = jnp.sort(h + x, -1) * jnp.tanh(x)
        return h, h

    given = draw(0, B, T, 100), draw(1, B, 100)
    if backend is None:
        assert "`sort` at" in str(ost.explain(step, *given))
    else:
        with pytest.raises(NotImplementedError, match="`sort` at"):
            ost.recurrent_net(step, *given, backend=backend)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"segment_length": "long"}, ValueError, "`segment_length` .*'auto'"),
        (
            {"initial_states": jax.random.split(jax.random.key(0), B)},
            TypeError,
            "key_data",
        ),
    ],
)
def test_errors_say_what_to_do(options, error, message):
    given = {"initial_states": jnp.zeros((B, 4)), "inputs": draw(0, B, T, 4)} | options
    with pytest.raises(error, match=message):
        ost.recurrent_net(lambda _, h, x, t: (h, x), **given)


def test_parts_without_elements():
    """Neighbours of a part of width 0 were looked for without end."""

    def step(p, s, x, t):
        gates = jnp.tanh(x @ p)
        empty = jnp.exp(gates[:, :0])
        s = jnp.concatenate([jnp.sin(gates[:, :4]), jnp.exp(gates[:, 4:4]), empty], 1)
        return s, (s, empty)

    def loss(backend, p, x):
        out = ost.recurrent_net(step, x, draw(0, B, 4), params=p, backend=backend)
        return jnp.sum(jnp.sin(out.outputs[0])), out.outputs

    def value_and_grad(backend, *arguments):
        return jax.value_and_grad(lambda *a: loss(backend, *a), has_aux=True)(
            *arguments
        )

    assert_same(*both(value_and_grad, draw(1, 5, 8), draw(2, B, T, 5)))
