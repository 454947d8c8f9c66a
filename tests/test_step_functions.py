"""Steps with callbacks, with derivatives of their own, and without any float."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from numpy_loop import native_and_loop
from test_step_hunt import B, T, assert_same, draw

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


@pytest.mark.parametrize("backend", [None, "xla", "cpu"])
def test_functions_whose_derivatives_raise_run_forward(backend):
    @jax.custom_vjp
    def f(x):
        return jnp.tanh(x)

    def raises(residuals, g):
        raise NotImplementedError("f has no gradient")

    @jax.custom_jvp
    def g(x):
        return jnp.sin(x)

    @g.defjvp
    def _(primals, tangents):
        raise ValueError("g is not differentiable")

    f.defvjp(lambda x: (f(x), None), raises)
    x, h = draw(0, B, T, 64), draw(1, B, 64)
    for function in (f, g):

        def step(p, h, x, t, function=function):
            h = function(h + x)
            return h, h

        out = ost.recurrent_net(step, x, h, backend=backend)
        assert_same(out, ost.recurrent_net(step, x, h, backend="scan"))


@pytest.mark.parametrize("of", ["inputs", "numbers"])
def test_callbacks_take_one_step_at_a_time(of):
    shapes = set()

    def double(a):
        shapes.add(np.shape(a))
        return 2 * np.asarray(a)

    def step(p, h, x, t):
        given = x if of == "inputs" else jnp.full_like(x[0, 0], 1) * t.astype(x.dtype)
        made = jax.pure_callback(double, jax.typeof(given), given)
        h = jnp.tanh(h + made @ p if of == "inputs" else h + made)
        return h, h

    p, x, h = draw(2, 64, 64), draw(0, B, T, 64), draw(1, B, 64)
    out = ost.recurrent_net(step, x, h, params=p)
    assert shapes == {(B, 64) if of == "inputs" else ()}
    assert_same(out, ost.recurrent_net(step, x, h, params=p, backend="scan"))
    with pytest.raises(NotImplementedError, match="pure_callback"):
        ost.recurrent_net(step, x, h, params=p, backend="cpu")


def test_a_step_without_floats_says_so():
    def step(p, h, x, t):
        return h + x, h

    x, h = jnp.ones((B, T), jnp.int32), jnp.zeros(B, jnp.int32)
    with pytest.raises(NotImplementedError, match="it has no floats"):
        ost.recurrent_net(step, x, h, backend="cpu")


AXES_BEFORE_SEQUENCES = {
    "argmax": lambda h: h + jnp.argmax(jnp.sin(3 * h).T, 0).astype(h.dtype)[:, None],
    "argmin": lambda h: h - jnp.argmin(jnp.sin(3 * h).T, 0).astype(h.dtype)[:, None],
    "max": lambda h: h * jnp.max(jnp.sin(h).T, 0)[:, None],
    "sum": lambda h: h - jnp.sum(jnp.sin(h).T, 0)[:, None] / 4,
    "min of two": lambda h: h - jnp.min(
        jnp.sin(h).T.reshape(2, 2, -1) * jnp.array([1.0, 2.0])[:, None, None], (0, 1)
    )[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", AXES_BEFORE_SEQUENCES)
def test_reductions_over_axes_before_that_of_sequences(name):
    """Check them against a loop without the native library."""
    change = AXES_BEFORE_SEQUENCES[name]
    h = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)))
    step = lambda p, h, x, t: (0.5 * change(h),) * 2  # noqa: E731
    out = ost.recurrent_net(step, None, h, length=3, backend="cpu")
    for t in range(3):
        h = 0.5 * change(h)
        np.testing.assert_allclose(out.outputs[:, t], h, rtol=1e-10)


ALIKE = {
    "rows": lambda h, t: jnp.sum(
        jnp.zeros((2, 3, 4)).at[:, t % 3].add(h)
        * jnp.sin(jnp.zeros((2, 3, 4)).at[:, t % 3].add(h * h)),
        1,
    ),
    "set": lambda h, t: jnp.sum(
        jnp.ones((2, 3, 4)).at[:, t % 3].set(h)
        - jnp.ones((2, 3, 4)).at[:, t % 3].set(2 * h) ** 2,
        1,
    ),
    "sums": lambda h, t: (
        jnp.sum(h.reshape(2, 2, 2), 2).repeat(2, 1)
        * jnp.sum(h.reshape(2, 2, 2), (1, 2))[:, None]
    ),
    "one matrix twice": lambda h, t: h + jnp.tanh(h[:, ::-1]),
    "set and add": lambda h, t: jnp.sum(
        jnp.ones((2, 3, 4)).at[:, t % 3].set(h)
        * jnp.sin(jnp.ones((2, 3, 4)).at[:, t % 3].add(h)),
        1,
    ),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("backend", ["cpu", None])
def test_operations_that_differ_in_one_operand_are_two(name, backend):
    """Check what a program shares against a loop without the native library."""
    change, rng = ALIKE[name], np.random.default_rng(0)
    w, x, h_0 = rng.random((4, 4)), rng.random((2, 5, 4)), rng.random((2, 4)) - 0.5

    def step(w, h, x, t):
        h = jnp.tanh(x @ w + change(h, t) @ w)
        return h, h

    def net(w):
        out = ost.recurrent_net(step, x, h_0, params=w, backend=backend)
        return out.outputs

    def plain(w):
        h, found = h_0, []
        for t in range(5):
            h, _ = step(w, h, x[:, t], t)
            found.append(h)
        return jnp.stack(found, 1)

    np.testing.assert_allclose(net(w), plain(w), rtol=1e-9)
    slopes = [jax.grad(lambda w, f=f: jnp.sum(jnp.sin(f(w))))(w) for f in (net, plain)]
    np.testing.assert_allclose(*slopes, rtol=1e-8)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_a_short_inner_loop_runs_in_its_own_order(reverse, backend):
    """Check states and rows of a loop inside of a step against numpy."""
    rng = np.random.default_rng(0)
    w, x, h = rng.random((3, 4, 4)), rng.random((2, 5, 4)), rng.random((2, 4))

    def step(w, h, x, t):
        one = lambda h, w: (jnp.tanh(h @ w + x), h)  # noqa: E731
        h, rows = jax.lax.scan(one, h, w, reverse=reverse)
        return h, jnp.moveaxis(rows, 0, 1)

    out = ost.recurrent_net(step, x, h, params=w, backend=backend)
    for t in range(5):
        for k in reversed(range(3)) if reverse else range(3):
            np.testing.assert_allclose(out.outputs[:, t, k], h, rtol=1e-10)
            h = np.tanh(h @ w[k] + x[:, t])
    np.testing.assert_allclose(out.states, h, rtol=1e-10)


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_a_matrix_of_a_product_is_an_output_too(backend):
    """There are as many sequences as it has rows."""
    x, u = (
        np.random.default_rng(n).random(s) for n, s in enumerate([(3, 4, 3), (3, 3)])
    )

    def step(u, h, x, t):
        h = jnp.tanh(h @ u + x)
        return h, (h, u)

    def loss(u, x):
        out = ost.recurrent_net(step, x, jnp.zeros((3, 3)), params=u, backend=backend)
        return jnp.sum(out.outputs[0]) + jnp.sum(jnp.sin(out.outputs[1]))

    def plain(u, x):
        h, total = jnp.zeros((3, 3)), 4 * jnp.sum(jnp.sin(u))
        for t in range(4):
            h = jnp.tanh(h @ u + x[:, t])
            total += jnp.sum(h)
        return total

    both = fast_jit(lambda *a: [jax.grad(f, (0, 1))(*a) for f in (loss, plain)])
    for a, b in zip(*both(u, jnp.asarray(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


ISAS = ["portable", "avx2", "avx512"]


UNARY = {
    "log": (jnp.log, np.log),
    "log1p": (jnp.log1p, np.log1p),
    "exp": (jnp.exp, np.exp),
    "expm1": (jnp.expm1, np.expm1),
    "tanh": (jnp.tanh, np.tanh),
    "sigmoid": (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "sqrt": (jnp.sqrt, np.sqrt),
    "abs": (jnp.abs, np.abs),
    "sign": (jnp.sign, np.sign),
    "floor": (jnp.floor, np.floor),
    "round": (jnp.round, np.rint),
    "finite": (lambda x: jnp.isfinite(x).astype(x.dtype), np.isfinite),
    "not a number": (lambda x: jnp.isnan(x).astype(x.dtype), np.isnan),
}


EXACT = ("abs", "sign", "floor", "round", "finite", "not a number")


BINARY = {
    "max": (jnp.maximum, np.maximum),
    "min": (jnp.minimum, np.minimum),
    "less": (lambda a, b: (a < b).astype(a.dtype), np.less),
    "at most": (lambda a, b: (a <= b).astype(a.dtype), np.less_equal),
    "equal": (lambda a, b: (a == b).astype(a.dtype), np.equal),
    "other": (lambda a, b: (a != b).astype(a.dtype), np.not_equal),
    "select": (lambda a, b: jnp.where(a > b, a, b), lambda a, b: np.where(a > b, a, b)),
}


def values_of(dtype):
    largest = float(np.log(np.finfo(dtype).max))  # of which exp is finite
    numbers = [np.nan, -np.inf, np.inf, -90.0, -2.5, -1.5, -1.0, -0.4, 0.0, 1e-6, 0.5]
    numbers += [1.0, 2.0, 2.5, 7.0, 41.0, 60.0, largest - 0.2, largest + 1, 1e9]
    numbers += [1 / np.finfo(dtype).eps + 1]  # odd, and without a fraction
    return np.array(numbers, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_special_numbers_on_every_instruction_set(dtype, configure):
    def step(params, h, x, t):
        a, b = x
        made = {name: f(a) for name, (f, _) in UNARY.items()}
        return h + 1, made | {name: f(a, b) for name, (f, _) in BINARY.items()}

    values = values_of(dtype)
    a, b = (g.ravel() for g in np.meshgrid(values, values, indexing="ij"))
    x = [jnp.asarray(v[None, None]) for v in (a, b)]
    run = jax.jit(
        lambda x: ost.recurrent_net(step, x, jnp.ones((1, 1), dtype), backend="cpu")
    )
    wide = a.astype(np.float64), b.astype(np.float64)
    for isa in ISAS:
        configure(isa, 1)
        got = run(x).outputs
        for name, (_, f) in (UNARY | BINARY).items():
            want = f(*wide[: 1 if name in UNARY else 2]).astype(dtype)
            close = 0 if name in (*EXACT, *BINARY) else 20 * np.finfo(dtype).eps
            np.testing.assert_allclose(
                got[name][0, 0], want, close, np.finfo(dtype).tiny,
                err_msg=f"{name} {isa}",
            )  # fmt: skip


@pytest.mark.parametrize("width", [1, 5, 37])
def test_maxima_of_rows_and_columns_with_nan_and_infinity(width, configure):
    def step(params, h, x, t):
        row = jnp.max(x, -1, keepdims=True)
        return h + 1, (row, jnp.max(x, 1, keepdims=True))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((width + 2, 300, width))
    for n in range(width):
        x[n, n, n] = np.nan
    x[width], x[width + 1, 3:] = -np.inf, -np.inf
    run = jax.jit(
        lambda x: (
            ost.recurrent_net(
                step, x[:, None], jnp.ones((len(x), 1)), backend="cpu"
            ).outputs
        )
    )
    for isa in ISAS:
        configure(isa, 1)
        rows, columns = run(jnp.asarray(x))
        np.testing.assert_array_equal(rows[:, 0], x.max(-1, keepdims=True))
        np.testing.assert_array_equal(columns[:, 0], x.max(1, keepdims=True))


@pytest.mark.parametrize("backend", [None, "xla"])
def test_an_inner_loop_without_iterations_has_rows_of_none(backend):
    rng = np.random.default_rng(0)
    w, x, h = (rng.normal(size=s) for s in ((16, 16), (8, 3, 16), (8, 16)))

    def step(w, h, x, t):
        one = lambda h, w: (jnp.tanh(h * w[None]), h)  # noqa: E731
        h, rows = jax.lax.scan(one, h, jnp.zeros((0, 16)))
        h = jnp.tanh(h @ w + x + rows.sum(0))
        return h, h

    out = ost.recurrent_net(step, x, h, params=w, backend=backend).outputs
    for t in range(3):
        h = np.tanh(h @ w + x[:, t])
        np.testing.assert_allclose(out[:, t], h, rtol=1e-10)


def features(h, np):
    return np.tile(h[:, :4], (1, 2))


def squares(h, np):
    """Repeat along two axes, of which one is new."""
    return np.tile(h.reshape(-1, 2, 4), (1, 3, 2))[:, 1:5, 4:].reshape(-1, 16)[:, :8]


def parts(h, np):
    rows = h.reshape(-1, 2, 4)
    split = jnp.unstack(rows, axis=2) if np is jnp else rows.transpose(2, 0, 1)
    first, second, third, last = split
    return np.concatenate([last, first * second, third, first], -1)


def rows(h, np):
    """Repeat what all sequences share for each of them."""
    return h * np.tile(np.arange(8.0)[None], (h.shape[0], 1))


def products(h, np):
    return h - np.cumprod(h, -1)


def products_from_the_end(h, np):
    if np is jnp:
        return jax.lax.cumprod(h, 1, reverse=True)
    return np.cumprod(h[:, ::-1], -1)[:, ::-1]


def least_so_far(h, np):
    if np is jnp:
        return h * jax.lax.cummin(h, 1)
    return h * np.minimum.accumulate(h, 1)


def where_all_are(h, np):
    return h * np.where(np.all(h > -0.9, -1, keepdims=True), 2, 0.5)


def where_one_of_two_is(h, np):
    return np.where((h > 0) ^ (h[:, ::-1] > 0.2), h, 0.25)


def spread(h, np):
    """Put one number between two elements, and cut the ends."""
    if np is jnp:
        return jax.lax.pad(h, 0.5, ((0, 0, 0), (-3, -4, 1)))
    wide = np.full((h.shape[0], 15), 0.5)
    wide[:, ::2] = h
    return wide[:, 3:-4]


FUNCTIONS = [
    features, squares, parts, rows, products, products_from_the_end, least_so_far,
    where_all_are, where_one_of_two_is, spread,
]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients(function, batch):
    rng = np.random.default_rng(0)
    w, x, h_0 = (rng.normal(size=s) for s in [(8, 8), (5, batch, 8), (batch, 8)])

    def new(w, h, x, np):
        return np.tanh(function(np.tanh(h), np) @ w + x)

    native, loop = native_and_loop(new, x, h_0)

    def net(w):
        outputs = native(w)
        return jnp.sum(outputs), outputs

    slopes, saving = fast_jit(jax.grad(net, has_aux=True))(w)
    for got in (saving, fast_jit(net)(w)[1]):
        np.testing.assert_allclose(got, loop(w, np), rtol=1e-10)
    want = fast_jit(jax.grad(lambda w: jnp.sum(loop(w, jnp))))(w)
    np.testing.assert_allclose(slopes, want, rtol=1e-9, atol=1e-9)


native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


def by_jvp(value, slope):
    """Return a function with a slope of its own, which is one as well."""
    function = jax.custom_jvp(value)
    function.defjvp(lambda x, dx: (value(*x), slope(*x) * dx[0]))
    return function


def by_vjp(value, slope):
    function = jax.custom_vjp(value)
    function.defvjp(lambda x: (value(x), x), lambda x, dy: (slope(x) * dy,))
    return function


def of_value(value):
    """Return a function whose rule has another value."""
    function = jax.custom_jvp(value)
    function.defjvp(lambda x, dx: (jnp.sin(*x), jnp.cos(*x) * dx[0]))
    return function


TWO = {
    "slopes": [by_jvp(jnp.sin, f) for f in (jnp.cos, jnp.sin)],
    "slopes of slopes": [
        by_jvp(jnp.sin, by_jvp(jnp.cos, f)) for f in (jnp.cos, jnp.sin)
    ],
    "cotangents": [by_vjp(jnp.sin, f) for f in (jnp.cos, jnp.sin)],
    "values": [of_value(f) for f in (jnp.sin, jnp.tanh)],
    "numbers": [lambda h: h + 0.5, lambda h: h - 0.5],
}


def plain(step, p, x, h):
    """Return outputs without a loop of JAX, which drops rules inside of rules."""
    found = []
    for t in range(x.shape[1]):
        h, y = step(p, h, x[:, t], t)
        found.append(y)
    return jnp.stack(found, 1)


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "xla"])
def test_functions_that_differ_in_one_rule_are_two(name, backend):
    def net(step, p, x, h):
        return ost.recurrent_net(step, x, h, params=p, backend=backend).outputs

    def results(function, run):
        def step(p, h, x, t):
            h = jnp.tanh(x + h @ p)
            return h, function(h)

        def loss(p):
            outputs = run(step, p, x, h_0)
            return jnp.sum(outputs * x), outputs

        gradient = lambda p: jax.grad(loss, has_aux=True)(p)  # noqa: E731
        if name == "slopes of slopes":
            return fast_jit(lambda p: jax.jvp(gradient, (p,), (p,)))(p)
        return fast_jit(lambda p: (run(step, p, x, h_0), gradient(p)))(p)

    p, x, h_0 = 0.3 * draw(0, 8, 8), draw(1, B, T, 8), draw(2, B, 8)
    for function in TWO[name]:
        assert_same(results(function, net), results(function, plain))


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "xla"])
def test_outputs_in_another_order_are_others(backend):
    p, x, h_0 = 0.3 * draw(0, 8, 8), draw(1, B, T, 8), draw(2, B, 8)

    def both(order):
        def step(p, h, x, t):
            new = jnp.tanh(x + h @ p)
            return new, tuple([new, jnp.sin(h)][k] for k in order)

        out = ost.recurrent_net(step, x, h_0, params=p, backend=backend).outputs
        return [out[order.index(k)] for k in range(2)]

    assert_same(both([1, 0]), both([0, 1]))
