"""`linear_recurrence` against numpy: results and gradients, of every backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from compile_options import usual_jit
from linear_cases import CASES, SIZES, Case, check, draw, given_arrays
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import _native
from ostinato._linear import lowering
from ostinato._linear.call import Recurrence
from ostinato._linear.xla import forward

native = pytest.mark.skipif(
    _native.status().library is None, reason="needs the native library"
)
BACKENDS = [pytest.param("cpu", marks=native), "xla"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_results_and_gradients_equal_numpy(case, backend):
    check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SIZES, ids=lambda c: c.id)
def test_every_size_is_allowed(case, backend):
    check(case, backend)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda c: c.id)
def test_associative_scan_equals_numpy(case, monkeypatch):
    monkeypatch.setattr(lowering, "_is_parallel", lambda *_: True)
    jax.clear_caches()
    check(case, "xla")


def loop(a, b, h_0, lengths, resets, reverse, after):
    """Run sequences step by step; at a reset, nothing of the state before is read."""
    h, h_n = np.zeros_like(b), h_0.copy()
    for n in range(len(b)):
        steps = range(lengths[n])
        for t in reversed(steps) if reverse else steps:
            state = h_n[n]
            if after:
                h[n, t] = b[n, t] + state
                moved = np.einsum("ij,j->i", a[n, t], h[n, t])
                h_n[n] = 0.0 if resets[n, t] else moved
            else:
                moved = np.einsum("ij,j->i", a[n, t], state)
                h[n, t] = b[n, t] if resets[n, t] else moved + b[n, t]
                h_n[n] = h[n, t]
    return h, h_n


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nothing_passes_a_reset_in_xla(parallel, blocks, after, reverse):
    """Check NaN and inf in factors, inputs and states, before and at resets."""
    random = np.random.default_rng([parallel, blocks, after, reverse])
    units = 2 if blocks else 1  # a number is a matrix of one
    call = Recurrence(reverse, after, False, blocks, True, True)
    run = jax.jit(
        lambda *given: forward(call, parallel, *given)  # compiled once
    )
    for _ in range(30):
        a, b, h_0 = (
            random.uniform(0.2, 0.4, shape)
            for shape in ((3, 9, units, units), (3, 9, units), (3, units))
        )
        resets = random.random((3, 9)) < 0.25
        lengths = random.integers(0, 10, 3).astype(np.int32)
        for x in (a, b, h_0):
            holes = random.random(x.shape[: 1 if x is h_0 else 2]) < 0.1
            x[holes] = random.choice([np.nan, np.inf])  # all of a block
        want = loop(a, b, h_0, lengths, resets, reverse, after)
        factors = a if blocks else a[..., 0]
        got = jax.device_get(run(factors, b, h_0, lengths, resets))
        for x, y in zip(got, want, strict=True):
            assert (np.isfinite(x) == np.isfinite(y)).all()
            sees = np.isfinite(y)
            np.testing.assert_allclose(x[sees], y[sees], rtol=1e-12)


@functools.cache
def jit_once(case):
    """Return a `jit` that compiles `case` once: its kernels are chosen when it runs."""
    compiled = []

    def jit(function):
        compiled.append(fast_jit(function))
        return compiled[0]

    return jit


@native
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize(
    "case",
    [c for c in SIZES if c.dtype != "float64"]
    + [c for c in CASES if c.dtype in ("bfloat16", "complex64")],
    ids=lambda c: c.id,
)
def test_every_level_computes_the_same(case, isa, configure):
    configure(isa, 1)
    check(case, "cpu", jit_once(case))


@native
@pytest.mark.parametrize(
    "case",
    [
        Case("each", steps=90, shapes=((300,), (300,)), batch=3),
        Case("shared", steps=90, shapes=((5, 1), (5, 70)), batch=2),
        Case("each", True, steps=700, shapes=((300,), (300,)), batch=1),
        Case("each", steps=90, shapes=((5,), (5,)), batch=301),
    ],
    ids=lambda c: c.id,
)
def test_threads_change_no_bits(case, configure):
    arrays = draw(case)
    given = given_arrays(case, arrays)

    def both(a, b, h_0, dh, dh_n):
        out, pull_back = jax.vjp(ost.linear_recurrence, a, b, h_0)
        return out, pull_back(ost.LinearOutput(dh, dh_n))

    run = jax.jit(both)
    configure("avx512", 1)
    want = run(*given)
    for threads in (2, 3, 5):
        configure("avx512", threads)
        jax.tree.map(assert_same_bits, run(*given), want)


@native
@pytest.mark.parametrize(
    ("shape", "backend", "is_native"),
    [
        ((256, 1, 90), None, False),
        ((256, 9, 7), None, False),
        ((256, 8, 8), None, True),
        ((255, 1, 90), None, True),
        ((256, 1, 90), "cpu", True),
    ],
)
def test_many_sequences_of_few_numbers_run_by_xla(shape, backend, is_native):
    b = jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(a, b):
        return jnp.sum(ost.linear_recurrence(a, b, backend=backend).h)

    text = jax.jit(jax.value_and_grad(loss)).lower(b, b).as_text()
    called = [f"ostinato_linear_{way}" in text for way in ("fwd", "bwd")]
    assert called == [is_native] * 2


def test_many_steps():
    steps = 200_000
    a, b = jax.device_put((np.array([0.9]), np.ones((1, steps, 1))))
    h, h_n = jax.jit(ost.linear_recurrence)(a, b)
    assert h.shape == (1, steps, 1)
    assert_close(h_n, np.full((1, 1), 10.0), terms=steps)
    assert_close(np.asarray(h)[0, :3, 0], np.array([1, 1.9, 2.71]))
    # The gradient of the last state: a sum over k of k 0.9^(k - 1).
    last = lambda a: jnp.sum(ost.linear_recurrence(a, b).h_n)  # noqa: E731
    assert_close(jax.jit(jax.grad(last))(a), np.array([100.0]), terms=steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reset_forgets_what_is_not_finite(backend):
    b, resets = np.ones((1, 3, 2)), np.array([[False, False, True]])
    b[0, 0, 0] = np.inf
    a, b, resets = jax.device_put((np.ones(2), b, resets))
    h, _ = ost.linear_recurrence(a, b, resets=resets, backend=backend)
    assert np.asarray(h)[0, 2].tolist() == [1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("units", [1, 3, 11])
def test_the_gradient_of_a_factor_of_all_units_sums_these_alone(units, backend):
    """Vectors have more lanes than units, whose zeros an infinite factor makes NaN."""
    a, b = np.ones((1, 5, 1)), np.ones((1, 5, units))
    a[0, 3] = np.inf
    loss = lambda a: jnp.sum(ost.linear_recurrence(a, b, backend=backend).h)  # noqa: E731
    assert np.isposinf(fast_jit(jax.grad(loss))(a)[0, 1:3]).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_resets_at_every_place(backend, reverse):
    """One sequence for each set of places: the parts between are runs of their own."""
    steps = 4
    places = (np.arange(2**steps)[:, None] >> np.arange(steps)) % 2 == 1
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((*places.shape, 3))) for _ in "ab")
    start = jnp.asarray(rng.standard_normal((len(places), 3)))
    options = dict(resets=jnp.asarray(places), reverse=reverse, backend=backend)
    h, h_n = jax.device_get(ost.linear_recurrence(a, b, start, **options))
    a, b, start = jax.device_get((a, b, start))
    for n, resets in enumerate(places):
        state = start[n]
        for t in range(steps)[:: -1 if reverse else 1]:
            state = b[n, t] + (0 if resets[t] else a[n, t] * state)
            assert_close(h[n, t], state)
        assert_close(h_n[n], state)


def test_nothing_is_stored_but_the_states():
    if _native.status().library is None:
        pytest.skip("needs the native library")
    x = jnp.ones((2, 1000, 64), jnp.float32)
    one = x.nbytes
    run = lambda a, b: ost.linear_recurrence(a, b).h  # noqa: E731
    forward = usual_jit(run).lower(x, x).compile().memory_analysis()
    assert forward.temp_size_in_bytes < one / 50

    def train(a, b, dh):
        h, pull_back = jax.vjp(run, a, b)
        return h, pull_back(dh)

    training = usual_jit(train).lower(x, x, x).compile().memory_analysis()
    assert training.temp_size_in_bytes < one / 50


def test_native_library_runs_what_it_can():
    x = jax.device_put(np.ones((1, 2, 3), np.float32))
    exported = jax.export.export(jax.jit(ost.linear_recurrence))(x, x)
    assert "ostinato_linear_fwd" not in str(exported.mlir_module())
    compiled = jax.jit(ost.linear_recurrence).lower(x, x).compile().as_text()
    native = _native.status().library is not None
    assert ("ostinato_linear_fwd" in compiled) == native
    out = exported.call(x, x)
    assert np.asarray(out[0])[0, :, 0].tolist() == [1, 2]


# ------------------------------------------------------------------------------- errors


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "words"),
    [
        (zeros(3), zeros(3), {}, ValueError, "`b` must have shape"),
        (zeros(2, 3), zeros(2, 4), {}, ValueError, "`a` must have the shape"),
        (zeros(2, 4, 2), zeros(2, 4, 3), {}, ValueError, "`a` must have the shape"),
        (zeros(2, 4, 3, 2, 3), zeros(2, 4, 3), {}, ValueError, "`a` must have"),
        (zeros(3, 3, 2), zeros(2, 4, 3), {}, ValueError, "`a` must have"),
        (zeros(3), zeros(2, 4, 3, dtype="float64"), {}, TypeError, "dtype of `b`"),
        (zeros(3), zeros(2, 4, 3, dtype="int32"), {}, TypeError, "`b` must have one"),
        (zeros(3), zeros(2, 4, 3), dict(h_0=zeros(2, 4)), ValueError, "`h_0`"),
        (zeros(3), zeros(2, 4, 3), dict(seq_lengths=[5, 1]), ValueError, "0..T"),
        (zeros(3), zeros(2, 4, 3), dict(resets=zeros(2, 4)), TypeError, "`resets`"),
        (zeros(3), zeros(2, 4, 3), dict(backend="gpu"), ValueError, "`backend`"),
        (
            zeros(3, dtype="float16"), zeros(2, 4, 3, dtype="float16"),
            dict(backend="cuda"), ost.BackendError, "backend 'cuda' cannot run this",
        ),
        (
            zeros(3, 3), zeros(2, 4, 3), dict(backend="cpu"), ost.BackendError, "blocks"
        ),
        ([1.0], zeros(2, 4, 3), {}, TypeError, "`a` must be an array"),
        (0.5, zeros(2, 4, 3), {}, TypeError, "float 0.5; jnp.array makes one of it"),
        (zeros(), zeros(2, 4, 3), {}, ValueError, r"\[\]; jnp.full\(\(3,\), a\) makes"),
        (zeros(2, 4), zeros(2, 4, 3), {}, ValueError, r"a\[..., None\] is one factor"),
        (
            zeros(3), zeros(2, 4, 3), dict(seq_lengths=[[1], [2, 3]]), ValueError,
            "`seq_lengths` must be an array, or a list whose rows have the same length",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(a, b, options, error, words):
    with pytest.raises(error, match=words):
        ost.linear_recurrence(a, b, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 3, 40, 1), (40, 1)])
def test_the_gradient_of_a_shared_factor_of_nothing_is_0(shape, backend):
    def loss(a):
        b = jnp.zeros((2, 3, 40, 0))
        return ost.linear_recurrence(a, b, backend=backend).h.sum()

    for _ in range(5):
        jax.block_until_ready([jnp.full(shape, 7.0) + 1 for _ in range(9)])
        assert not jax.grad(loss)(jnp.ones(shape)).any()


WIDE = [  # rows wider than the registers of a kernel, with one factor for all of a row
    Case("shared", dtype="complex64", shapes=((2, 1), (2, 197)), steps=3, resets=True),
    Case(
        "shared", True, "complex128", shapes=((1,), (151,)), steps=4, batch=2,
        reverse=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", WIDE, ids=lambda c: c.id)
def test_wide_rows_of_complex_numbers_share_a_factor(case, backend):
    check(case, backend)


@native
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [104, 105])
def test_results_that_no_cache_holds(width, reverse):
    """Results of 16 MB go past the caches where each part of a row begins at a line."""
    shapes = ((8, 1), (8, width))
    check(Case("shared", reverse=reverse, steps=2600, batch=1, shapes=shapes), "cpu")
