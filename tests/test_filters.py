"""`lfilter` and `sosfilt` against scipy, and their derivatives against a loop."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from closures import fast_jit
from test_linear_recurrence import native
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import ragged
from ostinato._linear import filter_primitive

LENGTHS = np.array([[11, 0, 4], [1, 7, 3]])


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def coefficients(order, seed=0):
    """A stable filter: its poles lie inside of the unit circle."""
    rng = np.random.default_rng([seed, order])
    poles = rng.uniform(-0.8, 0.8, order)
    return rng.standard_normal(order + 1), np.atleast_1d(np.real(np.poly(poles))) * 1.3


@pytest.fixture(params=[pytest.param("native", marks=native), "xla"])
def way(request, monkeypatch):
    """Runs the kernels, or XLA where they are."""
    if request.param == "xla":
        monkeypatch.setattr(filter_primitive, "_MOST_ORDER", -1)
    return request.param


def compiled(run, *args):
    """Run a function that is compiled now, in the way of the fixture."""
    return fast_jit(lambda *args: run(*args))(*args)


@pytest.mark.parametrize("order", [0, 1, 2, 5, 8, 11])
@pytest.mark.parametrize("channels", [2, 37])
def test_lfilter_equals_scipy(order, channels, way):
    b, a = coefficients(order)
    x = draw(channels, 40)
    got = compiled(ft.partial(ost.lfilter, b, a), jnp.asarray(x))
    assert_close(got, scipy.signal.lfilter(b, a, x), terms=10_000)


@pytest.mark.parametrize(
    ("steps", "axis", "sizes"),
    [
        (0, 0, (3, 3)),
        (2, -1, (1, 4)),
        (40, 0, (4, 2)),
        (5, -1, (1, 1)),
        (5, 1, (1, 1)),
        (0, -1, (1, 1)),
    ],
)
def test_the_state_is_that_of_scipy(steps, axis, sizes, way):
    b, a = draw(sizes[0]), np.r_[1.5, draw(sizes[1] - 1, seed=1) * 0.3]
    order = max(sizes) - 1
    x, zi = draw(2, 3, steps), draw(2, 3, order, seed=2)
    x, zi = np.moveaxis(x, -1, axis), np.moveaxis(zi, -1, axis)
    want = scipy.signal.lfilter(b, a, x, axis, zi) if steps else (x, zi)
    run = lambda x, zi: ost.lfilter(b, a, x, axis=axis, zi=zi)  # noqa: E731
    got = compiled(run, jnp.asarray(x), jnp.asarray(zi))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert_close(one, other, terms=1000)


@pytest.mark.parametrize("order", [0, 3])
def test_two_parts_are_the_whole(order):
    b, a = coefficients(order)
    x = jnp.asarray(draw(4, 9))
    zi = jnp.zeros((4, order))
    first, state = ost.lfilter(b, a, x[:, :2], zi=zi)
    second, end = ost.lfilter(b, a, x[:, 2:], zi=state)
    whole, want = ost.lfilter(b, a, x, zi=zi)
    assert_close(jnp.concatenate([first, second], 1), whole, terms=1000)
    assert_close(end, want, terms=1000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(dtype):
    b, a = coefficients(3)
    x = jnp.asarray(draw(5, 30), dtype)
    got = ost.lfilter(jnp.asarray(b, dtype), jnp.asarray(a, dtype), x)
    rounded = [np.asarray(jnp.asarray(c, dtype), np.float64) for c in (b, a, x)]
    b, a, x = rounded
    scaled = [np.asarray(jnp.asarray(c / a[0], dtype), np.float64) for c in (b, a)]
    want = scipy.signal.lfilter(*scaled, x)
    assert_close(got, want, terms=10_000 if dtype == "float32" else 64)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("make", [list, np.array, np.int32, np.float64, np.float16])
def test_numbers_are_taken_to_the_dtype_of_the_signals(make, dtype):
    b, a, zi = (make([[2, 1], [0, 1]]), make([2, 1]), make([[1], [2]]))
    x = jnp.arange(6, dtype=dtype).reshape(2, 3)
    y, zf = ost.lfilter(b, a, x, zi=zi)
    assert y.dtype == zf.dtype == x.dtype
    for n in range(2):
        want = scipy.signal.lfilter(b[n], a, np.asarray(x[n], float), zi=zi[n])
        assert_close(y[n], want[0], terms=100)
        assert_close(zf[n], want[1], terms=100)


def test_designs_of_scipy_filter_float32():
    sos = scipy.signal.butter(4, 0.3, output="sos")
    x, zi = draw(2, 9).astype("float32"), np.zeros((2, 2, 2))
    got = ost.sosfilt(sos, jnp.asarray(x), zi=zi)
    assert_close(got[0], scipy.signal.sosfilt(sos, x), terms=1000)
    with pytest.raises(TypeError, match="`sos` must have the dtype of `x`"):
        ost.sosfilt(jnp.asarray(sos), jnp.asarray(x))


def test_lists_may_hold_traced_numbers():
    run = lambda c: ost.lfilter([c], [1, -c], jnp.ones(4))[-1]  # noqa: E731
    # y_4 = c + c^2 + c^3 + c^4
    assert_close(jax.jit(jax.grad(run))(0.5), 1 + 2 / 2 + 3 / 4 + 4 / 8, terms=100)


def test_numbers_that_a_float_cannot_hold():
    with pytest.raises(ValueError, match="`b` must hold numbers that a float can hold"):
        ost.lfilter([10**400], [1.0], jnp.ones(4))


def test_lengths(way):
    b, a = coefficients(4)
    x, zi = draw(2, 3, 11), draw(2, 3, 4, seed=1)
    want = np.zeros_like(x)
    ends = zi.copy()
    for index in np.ndindex(2, 3):
        n = LENGTHS[index]
        if n:
            want[index][:n], ends[index] = scipy.signal.lfilter(
                b, a, x[index][:n], zi=zi[index]
            )
    x[np.arange(11) >= LENGTHS[..., None]] = np.nan

    def loss(x, zi, lengths):
        y, zf = ost.lfilter(b, a, x, zi=zi, seq_lengths=lengths)
        return jnp.sum(y**2) + jnp.sum(zf), (y, zf)

    (_, got), grads = fast_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        jnp.asarray(x), jnp.asarray(zi), jnp.asarray(LENGTHS)
    )
    assert_close(got[0], want, terms=1000)
    assert_close(got[1], ends, terms=1000)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    assert not bool(grads[0][np.arange(11) >= LENGTHS[..., None]].any())


def test_what_grows_in_the_padding_is_in_no_derivative(way):
    """Outputs of a filter with a pole of 1.5 overflow after some 1,700 steps."""
    b, a, zi = jnp.array([1.0, 0.3]), jnp.array([1.0, -1.5]), jnp.ones((1, 1))
    x, lengths = jnp.asarray(draw(1, 2000)), jnp.array([9])
    some = x[:, :9]

    def loss(b, a, x, zi, lengths=None):
        y, zf = ost.lfilter(b, a, x, zi=zi, seq_lengths=lengths)
        sections = jnp.concatenate([b, b[:1] * 0, a, a[:1] * 0])[None]
        return (
            jnp.sum(y**2)
            + jnp.sum(zf)
            + jnp.sum(ost.sosfilt(sections, x, seq_lengths=lengths) ** 2)
        )

    def derivatives(b, a, x, *lengths):
        run = lambda b, a: loss(b, a, x, zi, *lengths)  # noqa: E731
        slope = lambda b, a: jax.grad(run, (0, 1))(b, a)  # noqa: E731
        return slope(b, a), jax.jvp(slope, (b, a), (b, a))[1]

    got = compiled(derivatives, b, a, x, lengths)
    want = compiled(derivatives, b, a, some)
    jax.tree.map(ft.partial(assert_close, terms=10_000), got, want)


def test_what_grows_in_the_padding_of_examples_is_in_no_derivative():
    x, b = jnp.asarray(draw(2000)), jnp.ones(1)
    a = jnp.array([[1.0, -0.5], [1.0, -1.5]])
    examples = ragged.RaggedArray.from_list([x, x[:9]])
    each = ragged.vmap(lambda a, x: jnp.sum(ost.lfilter(b, a, x) ** 2))
    got = compiled(jax.grad(lambda a: jnp.sum(each(a, examples))), a)
    one = jax.grad(lambda a, x: jnp.sum(ost.lfilter(b, a, x) ** 2))
    want = jnp.stack([one(a[0], x), one(a[1], x[:9])])
    assert_close(got, want, terms=10_000)


@pytest.mark.parametrize("axis", [0, 1])
def test_sosfilt_equals_scipy(axis, way):
    sos = scipy.signal.butter(5, 0.3, output="sos") * 1.1
    x, zi = draw(30, 30), draw(3, 2, 30, seed=1)
    zi = zi if axis == 0 else zi.transpose(0, 2, 1)
    run = ft.partial(ost.sosfilt, sos, axis=axis)
    want = scipy.signal.sosfilt(sos / sos[:, 3:4], x, axis)
    assert_close(compiled(run, jnp.asarray(x)), want, terms=1000)
    run = lambda x, zi: ost.sosfilt(sos, x, axis=axis, zi=zi)  # noqa: E731
    got = compiled(run, jnp.asarray(x), jnp.asarray(zi))
    want = scipy.signal.sosfilt(sos / sos[:, 3:4], x, axis, zi)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, terms=1000)


# ------------------------------------------------------------------------- derivatives


def plain(b, a, x):
    """The same in a loop that JAX differentiates."""
    order = a.shape[-1] - 1
    y = []
    for t in range(x.shape[-1]):
        total = sum(b[..., k] * x[:, t - k] for k in range(min(order, t) + 1))
        total -= sum(a[..., k] * y[t - k] for k in range(1, min(order, t) + 1))
        y.append(total / a[..., 0])
    return jnp.stack(y, 1)


@pytest.mark.parametrize("own", [False, True])
def test_derivatives_equal_those_of_a_loop(own, way):
    b, a = (jnp.asarray(c) for c in coefficients(2))
    x = jnp.asarray(draw(4, 4))
    if own:
        b, a = (
            jnp.asarray(draw(4, 3, seed=n)) * 0.3 + c[None] for n, c in ((5, b), (6, a))
        )
    args = b, a, x
    dots = tuple(jnp.asarray(draw(*v.shape, seed=9)) for v in args)

    def every(run):
        loss = lambda *args: jnp.sum(jnp.sin(run(*args)))  # noqa: E731
        grad = jax.grad(loss, (0, 1, 2))
        return (
            grad(*args),
            jax.jvp(run, args, dots),
            jax.jvp(grad, args, dots),
        )

    got, want = (fast_jit(ft.partial(every, run))() for run in (ost.lfilter, plain))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(one, other, terms=100_000)


@pytest.mark.parametrize("channels", [2, 37])
def test_gradients_of_many_steps_equal_scipy(channels, way):
    """They are filtered from the end, in blocks of which the last is not full."""
    b, a = coefficients(5)
    x, weights = draw(channels, 43), draw(channels, 43, seed=1)
    run = lambda x: jnp.sum(jnp.asarray(weights) * ost.lfilter(b, a, x))  # noqa: E731
    got = compiled(jax.grad(run), jnp.asarray(x))
    want = scipy.signal.lfilter(b, a, weights[:, ::-1])[:, ::-1]
    assert_close(got, want, terms=10_000)


def test_vmap():
    b, a = (jnp.asarray(c) for c in coefficients(2))
    x = jnp.asarray(draw(4, 3, 6))
    many = jnp.stack([b, 2 * b, -b, 0 * b])
    for axes, args in (
        ((None, None, 0), (b, a, x)),
        ((0, None, 0), (many, a, x)),
        ((1, None, None), (many.T, a, x[0])),
        ((0, None, None), (many, a, x[0, :1])),
    ):
        got = fast_jit(jax.vmap(ost.lfilter, axes))(*args)
        for n in range(4):
            one = [
                v if d is None else jnp.take(v, n, d)
                for v, d in zip(args, axes, strict=True)
            ]
            assert_close(got[n], fast_jit(ost.lfilter)(*one), terms=1000)


def test_export_and_sharding():
    b, a = (jnp.asarray(c) for c in coefficients(2))
    x = jnp.asarray(draw(4, 6))
    run = jax.jit(lambda x: ost.lfilter(b, a, x))
    exported = jax.export.export(run)(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert_close(exported.call(x), run(x), terms=1000)
    mesh = jax.make_mesh((4,), ("c",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("c"))
    assert_close(run(jax.device_put(x, spec)), run(x), terms=1000)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: ost.lfilter([1.0], [], x), ValueError, "`a` must have at least"),
        (lambda x: ost.lfilter([1.0], [0.0, 1.0], x), ValueError, "`a` must not begin"),
        (lambda x: ost.sosfilt(np.eye(6)[:1], x), ValueError, "must not begin with 0"),
        (lambda x: ost.lfilter([1.0], [1.0], x, axis=2), ValueError, "`axis`"),
        (lambda x: ost.lfilter([1.0], [1.0], x, axis=1.0), TypeError, "`axis` .* 1.0"),
        (lambda x: ost.lfilter([1.0], [1.0], x, axis=None), TypeError, "`axis` must"),
        (lambda x: ost.sosfilt(np.ones((1, 6)), x, axis=True), TypeError, "`axis` m"),
        (
            lambda x: ost.lfilter(None, [1.0], x),
            TypeError,
            "`b` must be an array, .* N",
        ),
        (
            lambda x: ost.sosfilt(None, x),
            TypeError,
            "`sos` must be an array, got NoneT",
        ),
        (
            lambda x: ost.lfilter("x", [1.0], x),
            TypeError,
            "`b` must be an array, got s",
        ),
        (
            lambda x: ost.lfilter([1j], [1.0], x),
            TypeError,
            "`b` must hold real numbers",
        ),
        (lambda x: ost.lfilter([1.0, None], [1.0], x), TypeError, "`b` must hold real"),
        (
            lambda x: ost.lfilter(np.ones(2, complex), [1.0], x),
            TypeError,
            "`b` must ho",
        ),
        (
            lambda x: ost.lfilter([[1], [2, 3]], [1.0], x),
            ValueError,
            "`b` must be .* row",
        ),
        (
            lambda x: ost.lfilter(0.5, [1.0], x),
            ValueError,
            r"`b` must have shape \[k\] or \[2, k\], got \[\]; put a single",
        ),
        (
            lambda x: ost.lfilter(np.ones((2, 2)), [1.0], x[0]),
            ValueError,
            r"`b` must have shape \[k\], got \[2, 2\]",
        ),
        (lambda x: ost.lfilter(jnp.ones(3, "float32"), [1.0], x), TypeError, "dtype"),
        (lambda x: ost.lfilter(jnp.ones((3, 2)), [1.0], x), ValueError, "`b` must"),
        (
            lambda x: ost.lfilter([1.0], [1.0], x, zi=jnp.ones((2, 3))),
            ValueError,
            "`zi`",
        ),
        (
            lambda x: ost.lfilter([1.0], [1.0], x, seq_lengths=[1]),
            ValueError,
            "lengths",
        ),
        (lambda x: ost.lfilter([1.0], [1.0], x, seq_lengths=9), ValueError, "0..T"),
        (
            lambda x: ost.lfilter([1.0], [1.0], x, seq_lengths=2**32 + 3),
            ValueError,
            "0..T",
        ),
        (lambda x: ost.sosfilt(jnp.ones((2, 5)), x), ValueError, "`sos` must have"),
        (
            lambda x: ost.sosfilt(jnp.ones((2, 6)), x, zi=jnp.ones((1, 2, 2))),
            ValueError,
            r"`zi` must have shape \[2, 2, 2\], 2 numbers .* section, got \[1, 2, 2\]",
        ),
        (
            lambda x: ost.sosfilt(jnp.ones((2, 6)), x, zi=jnp.ones((2, 4))),
            ValueError,
            r"`zi` must have shape \[2, 2, 2\], 2 numbers .* section, got \[2, 4\]",
        ),
        (lambda x: ost.lfilter([1.0], [1.0], x.astype(int)), TypeError, "`x`"),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    with pytest.raises(error, match=words):
        call(jnp.ones((2, 4)))


def test_no_sections_change_nothing():
    x, sos, zi = jnp.ones((2, 5)), np.zeros((0, 6)), np.zeros((0, 2, 2))
    y, zf = ost.sosfilt(sos, x, zi=zi)
    np.testing.assert_array_equal(y, x)
    assert zf.shape == zi.shape and zf.dtype == y.dtype
    padded = ost.sosfilt(sos, x, seq_lengths=[2, 5])
    np.testing.assert_array_equal(padded, [[1, 1, 0, 0, 0], [1] * 5])


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 17])
def test_number_of_threads_changes_no_bit(channels, isa, configure):
    """Which channels a thread has together depends on how many threads there are."""
    x = jax.random.normal(jax.random.key(0), (channels, 40_000), jnp.float32)
    b, a = (jnp.array(c, "float32") for c in ([0.2, 0.3, 0.1], [1.0, -0.5, 0.2]))
    found = []
    for threads in (1, 2, 5):
        configure(isa, threads)
        found.append(np.asarray(ost.lfilter(b, a, x)))
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("name", ["b", "zi", "sos"])
def test_masked_numbers_are_refused(name):
    masked, x = np.ma.array([1.0, 100.0], mask=[False, True]), jnp.ones(5)
    calls = {
        "b": lambda: ost.lfilter(masked, [1.0], x),
        "zi": lambda: ost.lfilter([1.0, 1.0, 1.0], [1.0], x, zi=masked),
        "sos": lambda: ost.sosfilt(np.ma.ones((1, 6)), x),
    }
    with pytest.raises(ValueError, match=f"`{name}`: numpy masked arrays"):
        calls[name]()


@pytest.mark.parametrize("channels", [2, 5])
def test_every_order_has_the_kernel_of_its_own(channels, way):
    filters = [coefficients(order) for order in (3, 4, 6, 7)]
    x = draw(channels, 40)
    run = lambda x: [ost.lfilter(b, a, x) for b, a in filters]  # noqa: E731
    for got, (b, a) in zip(compiled(run, jnp.asarray(x)), filters, strict=True):
        assert_close(got, scipy.signal.lfilter(b, a, x), terms=10_000)
