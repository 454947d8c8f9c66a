"""Faults that were found by programs as users write them, on the native loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost
from ostinato import ragged
from ostinato._step import native
from ostinato._step.programs.builder import Builder
from ostinato._step.programs.values import Unsupported

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")

B, T = 3, 4


def draw(seed, *shape, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def both(function, *arguments):
    """Return the results of a function of the backend on the native loop and plain."""
    return [
        fast_jit(lambda *a, b=b: function(b, *a))(*arguments) for b in ("cpu", "scan")
    ]


def native_or_not(function, *arguments):
    """Return the results of `both`, of XLA's loop if the native one refuses."""
    try:
        return both(function, *arguments)
    except NotImplementedError:
        backends = None, "scan"
    return [fast_jit(lambda *a, b=b: function(b, *a))(*arguments) for b in backends]


def gradient_of(step):
    """Return a function of a backend, parameters, inputs and states to a gradient."""

    def gradient(backend, p, x, h):
        def loss(p):
            out = ost.recurrent_net(step, x, h, params=p, backend=backend)
            return jnp.sum(jnp.sin(out.outputs))

        return jax.grad(loss)(p)

    return gradient


def assert_same(got, want, tolerance=1e-9):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


WHOLE_NUMBERS = {
    "bool inputs": lambda p, h, x: (h, (x > 0.3) @ p["w"]),
    "spikes": lambda p, h, x: (h * (h <= 0.2), x @ p["w"] + (h > 0.2) @ p["u"]),
    "integers": lambda p, h, x: (h, x @ p["w"] + (8 * h).astype(jnp.int32) @ p["u"]),
    "one-hot": lambda p, h, x: (
        h, (x[:, :1].astype(jnp.int32) == jnp.arange(4)[None]) @ p["u"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_products_of_bools_and_integers_have_gradients(name):
    """Whole numbers have no derivative, but what they are multiplied by has."""

    def step(p, h, x, t):
        kept, more = WHOLE_NUMBERS[name](p, h, x)
        h = jnp.tanh(0.5 * kept + more)
        return h, h

    def along(backend, *arguments):
        run = lambda p: gradient_of(step)(backend, p, *arguments[1:])  # noqa: E731
        return jax.jvp(run, arguments[:1], arguments[:1])[1]

    p = {"w": draw(0, 3, 4), "u": draw(1, 4, 4)}
    arguments = p, draw(2, B, T, 3), draw(3, B, 4)
    with jax.numpy_dtype_promotion("standard"):
        assert_same(*native_or_not(gradient_of(step), *arguments))
        assert_same(*native_or_not(along, *arguments))


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


def test_an_infinite_state_times_one_minus_a_gate():
    """a (1 - b) is infinite for an infinite a, and a - a b is NaN."""

    def step(p, s, x, t):
        z = jax.nn.sigmoid(x)
        new = s * (1 - z) + z
        return new, new

    def run(backend, x, s):
        return ost.recurrent_net(step, x, s, backend=backend).outputs

    got, want = both(run, draw(0, B, T, 4), jnp.full((B, 4), jnp.inf))
    assert np.isinf(want).all() and (got == want).all()


# ------------------------------------------------------------------------- products


def test_a_product_over_one_element_of_parts_that_lie_apart():
    """Rows whose axes do not merge were read as if there were one axis."""

    def step(p, s, x, t):
        z = jnp.tanh(s[:, :, :3, None] @ p)
        s = jnp.tanh(s + z.sum((2, 3))[..., None] + x[:, None, None])
        return s, s

    def run(backend, p, x, s):
        return ost.recurrent_net(step, x, s, params=p, backend=backend)

    def value_and_grad(backend, *arguments):
        total = lambda *a: jnp.sum(jnp.sin(run(backend, *a).outputs))  # noqa: E731
        return jax.value_and_grad(total, argnums=(0, 1, 2))(*arguments)

    p, x, s = draw(0, 1, 16), draw(1, B, T), draw(2, B, 4, 6)
    got, want = both(run, p, x, s)
    assert_same(got, want)
    assert_same(*both(value_and_grad, p, x, s))
    session = ost.stream(step, p, B, inputs=x[:, 0], initial_states=s, backend="cpu")
    assert_same(session.chunk(np.asarray(x)), want.outputs)


@pytest.mark.parametrize("shape", [(6, 1), (6, 5)])
@pytest.mark.parametrize("name", ["number", "row", "column"])
def test_a_product_with_a_matrix_of_equal_elements(name, shape):
    """A matrix that is repeated in the step is read where its few elements lie."""

    def step(p, h, x, t):
        part = {"number": p[0, 0], "row": p[:1, : shape[1]], "column": p[:, :1]}[name]
        z = h @ jnp.broadcast_to(part, shape)
        h = jnp.tanh(h + z.sum(-1, keepdims=True) + x)
        return h, z

    def loss(backend, p, x, h):
        out = ost.recurrent_net(step, x, h, params=p, backend=backend)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states)

    given = draw(0, 6, 6), draw(1, B, T, 6), draw(2, B, 6)
    assert_same(*both(lambda b, *a: jax.value_and_grad(loss, 1)(b, *a), *given))


# ------------------------------------------------------------------------- integers


def at_times(p, h, x, t):
    second = jnp.broadcast_to(p["clock"][t] % 60, len(h))
    return jnp.tanh(h @ p["w"] + x), second


def at_random(p, h, x, t):
    key = jax.random.fold_in(jax.random.key(7), t)
    number = jax.random.bits(key, (), jnp.uint32) % 4
    return jnp.tanh(h @ p["w"] + x), jnp.broadcast_to(number, len(h))


@pytest.mark.parametrize("step", [at_times, at_random])
@pytest.mark.parametrize("maps", [False, True])
def test_numbers_that_are_not_those_of_steps(step, maps):
    """A float32 cannot stand for an integer because it is the same for all."""

    def run(backend, p, x, h):
        out = ost.recurrent_net(step, x, h, params=p, backend=backend)
        return out.states, out.outputs

    clock = 1_700_000_000 + 37 * jnp.arange(T, dtype=jnp.int32)
    p = {"w": draw(0, 6, 6, dtype=jnp.float32), "clock": clock}
    x, h = (draw(n, *s, dtype=jnp.float32) for n, s in ((1, (B, T, 6)), (2, (B, 6))))
    if maps:
        x, h = (jnp.stack([a, -a]) for a in (x, h))
        one = run
        run = lambda b, p, *a: jax.vmap(lambda *a: one(b, p, *a))(*a)  # noqa: E731
    assert_same(*both(run, p, x, h), tolerance=1e-5)


def test_numbers_that_all_examples_share():
    n, size = 40, 16

    def scanned(x, h, w):
        def step(h, at):
            x_t, k = at
            return jnp.tanh(x_t + h @ w), k % 7

        return jax.lax.scan(step, h, (x, 1000003 * jnp.arange(n_of(x))))

    n_of = lambda x: x.shape[0]  # noqa: E731
    x, w = draw(0, n, size, dtype=jnp.float32), draw(1, size, size, dtype=jnp.float32)
    given = ragged.RaggedArray(x, jnp.asarray([n], jnp.int32), dim="n", max_length=n)
    h = draw(2, 1, size, dtype=jnp.float32)
    run = fast_jit(lambda *a: ragged.vmap(scanned, (0, 0, None))(*a))
    assert "ostinato_step" in run.lower(given, h, w).as_text()
    last, got = run(given, h, w)
    want_last, want = scanned(x, h[0], w)
    assert_same((last[0], got.data), (want_last, want), tolerance=1e-5)


@pytest.mark.parametrize("way", ["alone", "mapped", "in examples"])
def test_the_number_of_a_step_needs_no_check(way):
    def step(w, h, x, t):
        h = jnp.tanh(h @ w + x * jnp.cos((t * 16).astype(x.dtype)))
        return h, jnp.broadcast_to(jax.lax.rem(t, np.int32(3)), len(h))

    def run(x, h, w):
        return ost.recurrent_net(step, x, h, params=w).outputs

    x, h, w = (draw(n, *s) for n, s in enumerate([(B, T, 16), (B, 16), (16, 16)]))
    if way == "alone":
        lowered = jax.jit(run).lower(x, h, w)
    elif way == "mapped":
        x, h = (jnp.stack([a, -a]) for a in (x, h))
        lowered = jax.jit(jax.vmap(run, (0, 0, None))).lower(x, h, w)
    else:
        one = lambda x, h, w: run(x[None], h[None], w)[0]  # noqa: E731
        lengths = jnp.full(B, T, jnp.int32)
        x = ragged.RaggedArray(x.reshape(B * T, 16), lengths, dim="n", max_length=T)
        lowered = jax.jit(ragged.vmap(one, (0, 0, None))).lower(x, h, w)
    text = lowered.as_text()
    assert text.count("custom_call @ostinato_step(") == 1
    assert "stablehlo.case" not in text


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "int32", "int64"])
def test_which_integers_run_natively(dtype):
    info = jnp.iinfo(dtype)
    cases = [0, 3, 2**22, 2**22 + 1, info.max, -3, -(2**22) - 1, info.min]
    for value in (v for v in cases if info.min <= v):
        small = native.are_exact(jnp.asarray([0, value], dtype))
        assert bool(small) == (abs(value) <= 2**22)


@pytest.mark.parametrize("size", [5, np.int32(5), -5])
def test_places_in_a_ring(size):
    """A remainder by a number that the step writes down is below it."""

    def step(w, states, x, t):
        h, k = states
        half = (k // 2).astype(h.dtype)
        h = jnp.tanh(h @ w + x + 0.1 * half[:, None])
        place = (k % size).astype(h.dtype)
        return (h, (k + 1) % size), h * place[:, None]

    states = draw(0, B, 8), jnp.asarray([0, 2, -7, 4, 9], jnp.int32)[:B]
    w, x = draw(1, 8, 8), draw(2, B, 7, 8)

    def run(backend, w, x):
        return ost.recurrent_net(step, x, states, params=w, backend=backend)

    assert_same(*both(run, w, x))


@pytest.mark.parametrize("more, fits", [(28, True), (29, False)])
def test_how_large_a_remainder_may_be(more, fits):
    """At most 99 by 100, and int8 ends at 127."""

    def step(w, h, n, t):
        h = jnp.tanh(h @ w)
        return h, jax.lax.rem(n, jnp.int8(100)) + jnp.int8(more)

    w, h, n = draw(0, 8, 8), draw(1, B, 8), jnp.zeros((B, T), jnp.int8)
    run = lambda: ost.recurrent_net(step, n, h, params=w, backend="cpu")  # noqa: E731
    if fits:
        run()
    else:
        with pytest.raises(NotImplementedError, match="larger than 127"):
            run()


def test_a_key_that_a_constant_chooses():
    """What is computed at once of constants are numbers alone."""
    keys = jax.random.key(0), jax.random.key(1)

    def step(w, h, x, t):
        key = jax.lax.select(jnp.bool_(True), *keys)
        h = jnp.tanh(h @ w + x * jax.random.uniform(jax.random.fold_in(key, t), ()))
        return h, h

    w, x, h = draw(0, 8, 8), draw(1, B, T, 8), draw(2, B, 8)

    def run(backend, w, x):
        return ost.recurrent_net(step, x, h, params=w, backend=backend)

    assert_same(*native_or_not(run, w, x))


def to_unsigned(w, states, x, t):
    h, n = states
    h = jnp.tanh(h @ w + x)
    sign = jnp.where(h > 0, 1, -1)
    return (h, n), (n.astype(jnp.uint32) > 100, sign.astype(jnp.uint8))


def test_negative_numbers_as_unsigned_ones():
    """They count from the other end; the native loop does not run such steps."""
    states = draw(0, B, 8), jnp.full(B, -1, jnp.int32)
    w, x = draw(1, 8, 8), draw(2, B, T, 8)

    def run(backend, w, x):
        backend = None if backend == "cpu" else backend
        return ost.recurrent_net(to_unsigned, x, states, params=w, backend=backend)

    got, want = both(run, w, x)
    assert_same(got, want)
    assert want.outputs[0].all()
    told = str(ost.explain(to_unsigned, x, states, params=w))
    assert "signed integers to unsigned" in told


def test_unsigned_numbers_of_what_is_not_negative():
    def step(w, h, x, t):
        h = jnp.tanh(h @ w + x)
        count = (h > 0).astype(jnp.uint8).sum(-1, dtype=jnp.uint32)
        return h, (count, jnp.where(h > 0, jnp.uint8(3), np.int32(7).astype(jnp.uint8)))

    def run(backend, w, x):
        return ost.recurrent_net(step, x, draw(0, B, 8), params=w, backend=backend)

    assert_same(*both(run, draw(1, 8, 8), draw(2, B, T, 8)))


def test_quotients_by_zero():
    """XLA's quotient by 0 has all bits, and its remainder is the dividend."""

    def step(w, states, at, t):
        h, n = states
        x, m = at
        h = jnp.tanh(h @ w + x)
        shared, three = jnp.broadcast_to(t % 2, n.shape), jnp.full_like(n, 3)
        pairs = (n, m), (n, shared), (shared, m), (n, three)
        short = [a.astype(jnp.bool_).astype(jnp.uint8) for a in (n, m)]
        pairs = (*pairs, short)
        of_xla = [(jax.lax.div(a, b), jax.lax.rem(a, b)) for a, b in pairs]
        return (h, m), (n // m, n % m, n // three, n % three, of_xla)

    def run(backend, w, *at):
        n = jnp.asarray([-7, 0, 5], jnp.int32)
        states = draw(0, B, 8), n
        return ost.recurrent_net(step, at, states, params=w, backend=backend)

    m = jnp.asarray([[0, 2, -3, 0], [0, 0, 4, 1], [-2, 0, 0, 5]], jnp.int32)
    assert_same(*both(run, draw(1, 8, 8), draw(2, B, T, 8), m))


# --------------------------------------------------------- infinity, zeros and types


@pytest.mark.parametrize("value", [-jnp.inf, jnp.nan, 1e9])
def test_a_state_that_becomes_a_constant(value):
    def step(p, states, x, t):
        h, m = states
        return (jnp.tanh(h @ p + x), jnp.full_like(m, value)), m

    def run(backend, p, x, *states):
        return ost.recurrent_net(step, x, states, params=p, backend=backend)

    given = draw(0, 6, 6), draw(1, B, T, 6), draw(2, B, 6), draw(3, B, 6)
    assert_same(*both(run, *given))


def test_zero_keeps_its_sign():
    def step(p, h, x, t):
        h = jnp.tanh(h @ p + x)
        angle = jnp.arctan2(jnp.where(h > 0, 0.0, -0.0), -1.0)
        return h, angle.astype(h.dtype)

    def run(backend, p, x):
        return ost.recurrent_net(step, x, draw(0, B, 6), params=p, backend=backend)

    got, want = both(run, draw(1, 6, 6), draw(2, B, T, 6))
    assert len(np.unique(want.outputs)) == 2
    assert_same(got, want)


def test_steps_that_differ_in_the_sign_of_a_zero_are_two():
    def run(fill):
        def step(p, h, x, t):
            h = jnp.tanh(h @ p + x)
            return h, h.at[:, 9].get(mode="fill", fill_value=fill)

        return ost.recurrent_net(
            step, draw(0, B, T, 6), draw(1, B, 6), params=draw(2, 6, 6), backend="xla"
        ).outputs

    signs = [np.signbit(run(fill)) for fill in (0.0, -0.0)]
    assert not signs[0].any() and signs[1].all()


def test_the_power_of_0_is_1():
    def step(p, h, x, t):
        return jnp.tanh(h @ p + 1), (jax.lax.integer_pow(x, 0), x**0)

    def run(backend, p, x):
        return ost.recurrent_net(step, x, draw(0, B, 6), params=p, backend=backend)

    x = draw(1, B, T, 6).at[0, 0, 0].set(jnp.inf).at[1].set(jnp.nan)
    got, want = both(run, draw(2, 6, 6), x)
    assert all((a == 1).all() for a in want.outputs)
    assert_same(got, want)


def test_inputs_of_a_weak_type():
    """A number from `jnp.where` takes the type of what it is multiplied with."""

    def step(p, h, x, t):
        return h * x, h

    def run(backend, mask, h):
        x = jnp.where(mask, 1.0, 0.0)
        return ost.recurrent_net(step, x, h, backend=backend)

    h, mask = draw(0, B, 6, dtype=jnp.bfloat16), draw(1, B, T, 6) > 0
    with jax.enable_x64(False):
        got, want = both(run, mask, h)
        assert want.outputs.dtype == jnp.bfloat16
        assert_same(got, want)


@pytest.mark.parametrize("maps", [False, True])
def test_gradients_of_short_floats_that_sequences_share(maps):
    """They are added up over sequences in float32."""

    def step(p, h, x, t):
        h = jnp.tanh(h @ p["w"] + x * h + p["pos"][t][None])
        return h, h

    def loss(backend, p, x, h):
        def run(h):
            return ost.recurrent_net(step, x, h, params=p, backend=backend).outputs

        outputs = jax.vmap(run)(jnp.stack([h, -h])) if maps else run(h)
        return jnp.sum(jnp.sin(outputs.astype(jnp.float32)))

    shapes = {"w": (6, 6), "pos": (T, 6), "x": (B, T, 6), "h": (B, 6)}
    a = {k: draw(i, *s, dtype=jnp.bfloat16) for i, (k, s) in enumerate(shapes.items())}
    p = {"w": a["w"], "pos": a["pos"]}
    grad = lambda b, *given: jax.grad(loss, (1, 2, 3))(b, *given)  # noqa: E731
    assert_same(*both(grad, p, a["x"], a["h"]), tolerance=0.1)


def test_large_integers_of_each_sequence():
    """They are no numbers of steps, and floats cannot stand for them."""

    def step(p, h, at, t):
        x, clock = at
        h = jnp.tanh(x @ p + h) * (1 + clock % 60).astype(h.dtype)[:, None]
        return h, h

    def run(backend, p, x, clock, h):
        return ost.recurrent_net(step, (x, clock), h, params=p, backend=backend).outputs

    clock = 1_700_000_000 + 37 * jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    p, x, h = (
        draw(n, *shape, dtype=jnp.float32)
        for n, shape in enumerate([(4, 4), (B, T, 4), (B, 4)])
    )
    assert_same(*both(run, p, x, clock, h), tolerance=1e-4)


NUMBERS = {
    "sum": lambda h, t: h.sum(axis=1),
    "max": lambda h, t: h.max(axis=1),
    "min": lambda h, t: h.min(axis=1),
    "dot": lambda h, t: jnp.einsum("bi,bi->b", h, h[:, ::-1]),
    "element": lambda h, t: jax.lax.dynamic_index_in_dim(h, t, 1, keepdims=False),
}
SPREADS = {
    "added": lambda h, product, number: product + number,
    "multiplied": lambda h, product, number: product * number,
    "alone": lambda h, product, number: jnp.broadcast_to(number, h.shape),
    "joined": lambda h, product, number: jnp.concatenate(
        [product[:, :2], jnp.broadcast_to(number, h.shape)], axis=1
    )[:, 1:-1],
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_each_sequence_spread_over_as_many_features(number, spread):
    """A sum has the width of what it adds up, yet one element as its result."""

    def step(p, states, x, t):
        h, g = states
        s = SPREADS[spread](h, h @ p, NUMBERS[number](h, t)[:, None])
        return (jnp.tanh(s + x), s), (s, g)

    def loss(backend, p, x, states):
        out = ost.recurrent_net(step, x, states, params=p, backend=backend)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out)), out

    def value_and_grad(backend, *arguments):
        of_all = jax.value_and_grad(lambda *a: loss(backend, *a), (0, 1, 2), True)
        return of_all(*arguments)

    states = draw(2, B, 6), draw(3, B, 6)
    assert_same(*both(value_and_grad, draw(0, 6, 6) / 3, draw(1, B, T, 6), states))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
def test_short_integers_as_inputs_and_states(dtype):
    """They run there while no result may overflow, and their least value is moved."""
    info = jnp.iinfo(dtype)

    def step(p, states, x, t):
        h, last = states
        seen = jnp.concatenate([x, last], axis=1).astype(h.dtype) / info.max
        largest = jnp.maximum(x, last), jnp.where(x > last, last, x)
        chosen = jax.vmap(lambda x, h: x[jnp.argmax(h) % 3])(x, h)
        return (jnp.tanh(h @ p + seen), x), (h, last, *largest, chosen)

    def counting(p, states, x, t):
        h, count = states
        return (
            jnp.tanh(h @ p + x.astype(h.dtype) @ jnp.ones((3, 6))),
            count + 1,
        ), count

    def run(backend, step, x, states):
        return ost.recurrent_net(step, x, states, params=p, backend=backend)

    p, h = draw(0, 6, 6), draw(1, B, 6)
    values = np.random.default_rng(2).choice([info.min, info.max, 1], (B, T, 3))
    x, last = jnp.asarray(values, dtype), jnp.full((B, 3), info.min, dtype)
    assert_same(*both(lambda b, *a: run(b, step, *a), x, (h, last)))
    with pytest.raises(NotImplementedError, match=f"{dtype}.*larger than {info.max}"):
        run("cpu", counting, x, (h, last))
    assert_same(run(None, counting, x, (h, last)), run("scan", counting, x, (h, last)))


@pytest.mark.parametrize("part", [np.s_[::2], np.s_[1::2], np.s_[::-2]])
def test_gradient_of_every_other_element_of_a_shared_value(part):
    """It adds up all sequences, with zeros between its elements."""

    def step(p, h, x, t):
        wave = jnp.sin(t.astype(h.dtype) * p["f"])[part]
        h = jnp.tanh(h @ p["w"] + x + wave[None])
        return h, h

    p = {"f": draw(0, 12), "w": draw(1, 6, 6)}
    assert_same(*both(gradient_of(step), p, draw(2, B, T, 6), draw(3, B, 6)))


def test_cotangents_of_more_elements_than_a_sum_over_sequences_has():
    @jax.custom_vjp
    def total(u):
        return u.sum(0, keepdims=True)

    total.defvjp(
        lambda u: (total(u), None),
        lambda _, bar: (jnp.broadcast_to(bar, (3, bar.shape[1])),),
    )

    def step(p, h, x, t):
        h = jnp.tanh(h + x + total(jnp.sin(t.astype(h.dtype) * p)))
        return h, h

    given = draw(0, 3, 4), draw(1, 2, T, 4), draw(2, 2, 4)
    assert_same(*native_or_not(gradient_of(step), *given))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("uses", ["features", "sequences", "both"])
def test_shared_values_with_as_many_elements_as_there_are_sequences(uses, reverse):
    """What depends on the step alone has an axis of features, unless it is used so."""

    def step(p, h, x, t):
        shared = jnp.sort(jnp.cos(t.astype(h.dtype) * p))
        h = jnp.tanh(h @ jnp.eye(B) + x)
        by_feature = jnp.broadcast_to(shared, (B, B))
        by_sequence = h * shared[:, None]
        out = {"features": (by_feature,), "sequences": (by_sequence,)}
        return h, out.get(uses, (by_feature, by_sequence))

    def value_and_grad(backend, p, x, h):
        def loss(p, x):
            out = ost.recurrent_net(
                step,
                x,
                h,
                params=p,
                seq_lengths=jnp.array([T, 1, 2]),
                reverse=reverse,
                backend=backend,
            ).outputs
            return sum(jnp.sum(jnp.sin(a)) for a in out), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)

    given = draw(0, B), draw(1, B, T, B), draw(2, B, B)
    assert_same(*native_or_not(value_and_grad, *given))


@pytest.mark.parametrize("width", [1, 6])
def test_a_row_of_parameters_read_as_a_column_for_each_sequence(width):
    def step(p, h, x, t):
        scale, w = p
        h = jnp.tanh(h @ w + x * scale.T)
        return h, (h, scale[0] * t.astype(h.dtype))

    def value_and_grad(backend, p, x, h):
        def loss(p):
            out = ost.recurrent_net(
                step, x, h, params=p, seq_lengths=jnp.array([T, 0, 2]), backend=backend
            ).outputs
            return sum(jnp.sum(jnp.sin(a)) for a in out), out

        return jax.value_and_grad(loss, has_aux=True)(p)

    p = draw(0, 1, B), draw(1, width, width)
    assert_same(
        *native_or_not(value_and_grad, p, draw(2, B, T, width), draw(3, B, width))
    )


def test_instructions_refuse_sums_over_sequences():
    """Those see one sequence; a rule that forgets it must not count one alone."""
    builder = Builder(B, T)
    one = builder.local((4,), 0)
    builder.write("copy", builder.local((4,), 0), one)
    total = one._replace(axis=None, summed=True)
    with pytest.raises(Unsupported, match="different sequences"):
        builder.write("copy", builder.local((4,), None), total)
    assert len(builder.instructions) == 1


@pytest.mark.parametrize(
    "axes", [(0, None), (0, 0), (None, 0)], ids=["states", "both", "lengths"]
)
def test_a_mapped_loop_needs_no_check_of_its_numbers_of_steps(axes):
    """As `t` is less than the number of steps, floats can stand for it."""

    def step(p, h, x, t):
        h = jnp.tanh(h @ p + x + (t % 3).astype(h.dtype))
        return h, h

    x, u = np.ones((3, 5, 4)), np.eye(4)

    def run(h, lengths):
        options = {"params": u, "seq_lengths": lengths, "backend": "cpu"}
        return ost.recurrent_net(step, x, h, **options).states

    shapes = [
        jax.ShapeDtypeStruct(shape if axis is None else (2, *shape), dtype)
        for shape, dtype, axis in zip([(3, 4), (3,)], [float, int], axes, strict=True)
    ]
    text = jax.jit(jax.vmap(run, axes)).lower(*shapes).as_text()
    assert "ostinato_step" in text and "stablehlo.case" not in text
