"""Step functions in shorter types, with NaN in padding, and on several threads."""

import emulation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_steps
from closures import fast_jit
from step_programs import PROGRAMS, B, T
from test_step import floats, scan_of, values_and_gradients
from test_step_hunt import assert_same, draw
from tolerance import assert_same_bits

import ostinato as ost

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")

NAMES = [
    "leaky", "lstm", "multiplicative_integration", "layer_norm", "gru_reset_before",
    "attention_over_a_memory", "mogrifier", "read_write_memory", "coverage_attention",
    "block_diagonal_heads", "fast_weights", "normalised_gates", "quasi_recurrent",
]  # fmt: skip
EPSILON = {"float64": 1e-12, "float32": 1e-7, "bfloat16": 8e-3}


def in_type(name, dtype):
    """Return a program's step in a type of its own, and its arguments."""
    program = PROGRAMS[name]

    def cast(a):
        return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

    def cast_array(a):  # by numpy, for which nothing is compiled
        return jax.device_put(cast(np.asarray(a)))

    def step(p, states, x, t):
        result = program.step(p, states, x, t)
        return jax.tree.map(cast, result)  # what it closes over is float64

    return step, jax.tree.map(cast_array, program[1:])


@pytest.mark.alike
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_shorter_types(name, dtype):
    step, arguments = in_type(name, dtype)
    with jax.numpy_dtype_promotion("standard"):
        got, rounded = (
            values_and_gradients(step, arguments, backend)(floats(arguments))
            for backend in (None, "scan")
        )
    exact = jax.tree.map(lambda a: np.asarray(a).astype("float64"), floats(arguments))
    want = scan_of(name)(exact)
    for a, r, w in zip(*map(jax.tree.leaves, (got, rounded, want)), strict=True):
        assert a.dtype == r.dtype
        scale = float(np.max(np.abs(w), initial=1))
        wide = (np.asarray(v, np.float64) for v in (a, r))
        error, usual = (np.max(np.abs(v - np.asarray(w))) / scale for v in wide)
        assert error <= 2 * usual + 20 * EPSILON[dtype]


def half(x):
    return x.astype(jnp.bfloat16)


ROUNDED = {
    "rest": lambda x: (x - half(x).astype(jnp.float32)) * 1000,
    "scaled": lambda x: half(x) * jnp.float32(1000),
    "a part": lambda x: half(x)[:, ::-1].astype(jnp.float32),
    "turned": lambda x: half(x.reshape(-1, 4, 5)).swapaxes(1, 2).astype(jnp.float32),
    "chosen": lambda x: jnp.where(x > 0, half(x), half(-x)).astype(jnp.float32),
    "joined": lambda x: jnp.concatenate([-half(x), half(x)], 1).astype(jnp.float32),
    "largest": lambda x: half(x).max(1).astype(jnp.float32)[:, None],
    "floor": lambda x: jnp.floor(half(100 * x)).astype(jnp.float32),
    "numbers": None,
    "straight through": lambda x: (
        x + jax.lax.stop_gradient(half(x).astype(jnp.float32) - x)
    ),
}


MATRIX = np.random.default_rng(2).standard_normal((20, 20)) > 0.3


def bits(h):
    return jnp.where(h > 0.3, jnp.array([1, 2, 4, 8] * 5, "int32"), 0)


def numbers(count):
    return jnp.arange(count, dtype="float32")


OTHER_TYPES = {
    "products of truth": lambda h: (h > 0) @ MATRIX,
    "no product of truth": lambda h: ~((h > 0.5) @ MATRIX),
    "sums of truth": lambda h: jnp.einsum("bi,bi->b", h > 0, h > 0.4),
    "one of bits": lambda h: jnp.bitwise_or.reduce(bits(h), axis=1),
    "all bits": lambda h: jnp.bitwise_and.reduce(bits(h), axis=1),
    "a negative zero": lambda h: 1 / (-(bits(h) % 3)).astype(h.dtype),
    "a number": lambda h: jnp.take(numbers(20), jnp.argmax(h, 1)),
    "no number": lambda h: numbers(5).at[jnp.argmax(h, 1)].get(mode="fill"),
    "an infinite number": jax.vmap(
        lambda h: 1 / numbers(20).at[jnp.argmax(h)].set(jnp.inf)
    ),
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_truth_and_integers(name):
    runs = "bits" not in name

    def step(p, h, x, t):
        with jax.numpy_rank_promotion("allow"):
            h = jnp.tanh(h + x)
            return h, OTHER_TYPES[name](h).astype(h.dtype)

    def run(backend):
        given = jnp.zeros((4, 20), "float32")
        return ost.recurrent_net(step, x, given, backend=backend).outputs

    x = jax.random.normal(jax.random.key(0), (4, 7, 20), "float32")
    np.testing.assert_allclose(run("cpu" if runs else None), run("scan"), rtol=1e-6)
    if not runs:
        with pytest.raises(NotImplementedError, match=r"`reduce_(or|and)` of integers"):
            run("cpu")


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_to_bfloat16_on_purpose_is(name):
    def step(p, h, x, t):
        with jax.numpy_dtype_promotion("standard"):
            h = jnp.tanh(h + x)
            y = ROUNDED[name](h)
        return h, y.reshape(len(h), -1)

    def counting(p, h, x, t):
        with jax.numpy_dtype_promotion("standard"):
            h = h / 2 + half(t * 257).astype(jnp.float32)
        return h, h

    if name == "numbers":
        step = counting

    def run(backend):
        given = jnp.zeros((4, 20), "float32")
        return ost.recurrent_net(step, x, given, backend=backend).outputs

    x = jax.random.normal(jax.random.key(0), (4, 7, 20), "float32")
    np.testing.assert_allclose(run(None), run("scan"), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"goes on in float32|`floor` of"):
        run("cpu")


@pytest.mark.parametrize("columns", [33, 64])
@pytest.mark.parametrize("depth", [31, 32])
def test_products_of_bfloat16_add_up_in_float32(depth, columns):
    """Only products of two values of bfloat16 may round a factor."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((depth, columns)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((7, 3, depth)), jnp.float32)

    def run(x, w, of):
        def step(w, h, x, t):
            return h, of(x, w)

        options = {"params": w, "time_major": True, "backend": "cpu"}
        return ost.recurrent_net(step, x, jnp.zeros((3, 1), x.dtype), **options).outputs

    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    wide = fast_jit(lambda x, w: run(x, w, lambda x, w: x @ w.astype(x.dtype)))(x, w)
    np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-5)
    half = x.astype(jnp.bfloat16)
    exact = np.asarray(half, np.float64) @ np.asarray(w, np.float64)
    summed = fast_jit(
        lambda x, w: run(
            x, w, lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32)
        )
    )(half, w)
    assert summed.dtype == jnp.float32
    np.testing.assert_allclose(summed, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES[::2])
def test_padding_reaches_nothing(name):
    program, lengths = PROGRAMS[name], np.array([3, 0, 5])
    padding = np.arange(T)[:, None] >= lengths

    def pad(a, value):
        mask = padding.reshape(T, B, *[1] * (a.ndim - 2))
        return np.where(mask, value, a)

    run = values_and_gradients(program.step, program[1:], None, seq_lengths=lengths)
    results = []
    for value in (np.nan, 0.0, np.inf):
        inputs = jax.tree.map(lambda a, v=value: pad(a, v), program.inputs)
        results.append(run(floats((program.params, program.states, inputs))))
    first, *others = (list(map(np.asarray, jax.tree.leaves(r))) for r in results)
    assert all(np.isfinite(a).all() for a in first)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_number_of_threads_changes_no_bit(configure):
    """Gradients alone: XLA adds up the loss."""
    operations = [("norm", 0, 0, 0), ("tied", 0, 3, 0), ("attend", 0, 0, 0)]
    operations += [("transposed", 1, 4, 0), ("gate", 0, 2, 0), ("by_head", 0, 2, 0)]
    for batch, steps in ((1, 300), (3, 11), (33, 11), (700, 5)):
        spec = random_steps.Spec(operations, [40, 7], 19, batch)
        step, params, states = random_steps.make(spec)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((steps, batch, 19)))

        def loss(params, states, x, step=step):
            out = ost.recurrent_net(
                step, x, states, params=params, time_major=True, backend="cpu"
            )
            results = jax.tree.leaves((out.outputs, out.states))
            return sum(jnp.vdot(a, a) for a in results)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        for dtype in ("float32", "float64"):
            given = jax.tree.map(
                lambda a, dtype=dtype: jax.device_put(np.asarray(a, dtype)),
                (params, states, x),
            )
            found = []
            for threads in (1, 2, 3):
                configure(emulation.level_of_machine(), threads)
                found.append(jax.tree.leaves(jax.block_until_ready(gradient(*given))))
            for a, *others in zip(*found, strict=True):
                for b in others:
                    assert_same_bits(a, b)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_tiles_of_many_narrow_sequences(has_lengths, threads, configure):
    configure(emulation.level_of_machine(), threads)
    batch, steps, width = 1037, 9, 3
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, steps, width))
    lengths = None
    if has_lengths:
        lengths = rng.integers(0, steps + 1, batch)
        x[np.arange(steps) >= lengths[:, None]] = np.nan
    w, h = jax.device_put(rng.standard_normal((2, width, width)))

    def step(w, h, x, t):
        h = jnp.tanh(x @ w[0] + h @ w[1]) - h / 2
        return h, h * h

    def both(backend):
        run = lambda *a: ost.recurrent_net(  # noqa: E731
            step, a[2], a[1], params=a[0], seq_lengths=lengths, backend=backend
        )
        out, pull = jax.vjp(run, jnp.stack([w, h]), jnp.zeros((batch, width)), x)
        return out, pull(jax.tree.map(jnp.cos, out))

    got, want = (fast_jit(lambda b=b: both(b))() for b in ("cpu", "scan"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, want
    )


def test_numbers_of_steps_above_what_floats_hold_run_by_xla():
    """Only where a step reads them: 2^24 + 1 is no float32."""
    x = jax.ShapeDtypeStruct((1, 2**24 + 64, 1), jnp.float32)
    w, h = jnp.eye(8, dtype=jnp.float32), jnp.zeros((1, 8), jnp.float32)

    def reads(p, h, x, t):
        h = jnp.tanh(h @ p + x) + (t % 8).astype(jnp.float32)
        return h, h

    def ignores(p, h, x, t):
        h = jnp.tanh(h @ p + x)
        return h, h

    assert ost.explain(ignores, x, h, params=w).backend == "cpu"
    said = ost.explain(reads, x, h, params=w)
    assert said.backend == "xla" and "above 2^24" in said.rejected["cpu"]


BEYOND = {
    "sum": lambda n, at: jnp.sum(n, 1),
    "product": lambda n, at: (n[:, 0] // 512) * (n[:, 1] // 512 + 2),
    "of two": lambda n, at: jnp.where(at > 1, n[:, 0] * 3, 1) * 3,
    "clamped": lambda n, at: (
        9 * jax.lax.clamp(np.int32(-(2**23)), -n[:, 0], np.int32(1))
    ),
    "row": lambda n, at: (3 * n).at[:, at % 7].add(2 * n[:, 0])[:, at % 7],
    "quotient by 0": lambda n, at: jax.lax.div(n[:, 0], n[:, 1] % 1),
    "square": lambda n, at: (n[:, 0] // 512) ** 2,
    "added": lambda n, at: 3 * n[:, 0] + 2 * n[:, 1],
}


@pytest.mark.parametrize("name", BEYOND)
def test_integers_that_no_float32_holds_are_exact_or_refused(name):
    """Odd numbers above 2^24, of operands that are small enough by themselves."""
    dtype = np.uint32 if name == "quotient by 0" else np.int32
    n = np.full((3, 4, 7), 2**22 - 1, dtype)
    h = jnp.zeros((3, 2), jnp.float32)

    def step(p, h, n, t):
        found = BEYOND[name](n, t)
        return jnp.tanh(h + 1), (h, found)

    def run(backend):
        out = ost.recurrent_net(step, n, h, params=None, backend=backend)
        return np.asarray(out.outputs[1])

    want = np.stack([BEYOND[name](jnp.asarray(n[:, t]), t) for t in range(4)], 1)
    assert (np.abs(want.astype(np.int64)) > 2**24).any()
    for backend in (None, "cpu"):
        try:
            got = run(backend)
        except NotImplementedError:
            assert backend == "cpu"
        else:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("lengths", [None, (3, 1)], ids=["whole", "mixed"])
def test_halves_between_two_numbers_of_bfloat16_become_the_even_one(lengths):
    def step(params, h, x, t):
        a, b = x
        return h + (a + b), (a + b, -(a + b))

    rng = np.random.default_rng(0)
    a = rng.integers(128, 256, (2, 3, 37)) / 128  # neighbours are 1/128 apart
    b = np.full_like(a, 2.0**-8) * np.array([1, -1, 1])[:, None]
    x = [jnp.asarray(v, jnp.bfloat16) for v in (a, b)]
    given = {} if lengths is None else {"seq_lengths": jnp.asarray(lengths)}
    run = lambda x: ost.recurrent_net(  # noqa: E731
        step,
        x,
        jnp.zeros((2, 37), jnp.bfloat16),
        backend="cpu",
        padding="zero",
        **given,
    )
    out = fast_jit(run)(x).outputs
    want = np.float32(a + b).astype(jnp.bfloat16)
    if lengths is not None:
        want[1, 1:] = 0
    np.testing.assert_array_equal(np.asarray(out[0]), want)
    np.testing.assert_array_equal(np.asarray(out[1]), -want)


@pytest.mark.parametrize("columns", [5, 40])
def test_a_matrix_of_bfloat16_that_multiplies_float32_keeps_its_digits(columns):
    """The matrix alone is short: nothing may round the states that it multiplies."""

    def step(w, h, x, t):
        h = x - h * 0.5
        return h, h @ w.astype(jnp.float32)

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((20, columns)), jnp.bfloat16)
    x = rng.standard_normal((9, 4, 20)).astype(np.float32)
    run = lambda w, x: ost.recurrent_net(  # noqa: E731
        step, x, jnp.zeros((9, 20), jnp.float32), params=w, backend="cpu"
    )
    got = fast_jit(run)(w, jnp.asarray(x)).outputs
    h = np.zeros((9, 20))
    for t in range(4):
        h = x[:, t].astype(np.float64) - h * 0.5
        np.testing.assert_allclose(
            got[:, t], h @ np.asarray(w, np.float64), rtol=1e-5, atol=1e-5
        )


def test_steps_that_differ_in_the_type_of_an_input_are_two():
    """What floats hold for the squares of one type, they do not for the other."""

    def step(p, h, x, t):
        n = x.astype(jnp.int32)
        h = jnp.tanh(h @ p + ((n * n + 1) - n * n).astype(h.dtype))
        return h, h

    p, h_0 = draw(0, 16, 16, dtype=jnp.float32), draw(1, 8, 16, dtype=jnp.float32)
    want, h = [], np.asarray(h_0, np.float64)
    for _ in range(4):
        h = np.tanh(h @ np.asarray(p, np.float64) + 1)
        want.append(h)
    for dtype in (np.int8, np.int16):
        x = np.full((8, 4, 16), np.iinfo(dtype).max, dtype)
        got = ost.recurrent_net(step, x, h_0, params=p).outputs
        np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-4, atol=1e-4)


def test_one_of_two_large_integers_is_enough_for_another_loop():
    def step(p, h, at, t):
        x, first, other = at
        h = jnp.tanh(h @ p + x)
        return h, (first % 10, other % 10)

    rng = np.random.default_rng(0)
    small = rng.integers(0, 100, (8, 4))
    large = 2**30 + rng.integers(0, 100, (8, 4))
    p, x, h = (rng.normal(size=s) for s in ((16, 16), (8, 4, 16), (8, 16)))
    for first, other in ((small, large), (large, small)):
        given = (*np.float32((x,)), np.int32(first), np.int32(other))
        out = ost.recurrent_net(step, given, np.float32(h), params=np.float32(p))
        np.testing.assert_array_equal(out.outputs[0], first % 10)
        np.testing.assert_array_equal(out.outputs[1], other % 10)


def test_the_least_short_integer_has_no_counterpart():
    x, p = np.full((8, 4, 16), -128, np.int8), draw(0, 16, 16, dtype=jnp.float32)

    def step(p, h, x, t):
        h = jnp.tanh(h @ p + (-x).astype(h.dtype) / 128)
        return h, (h, -x, abs(x))

    h = np.ones((8, 16), np.float32)
    out = ost.recurrent_net(step, x, h, params=p).outputs
    np.testing.assert_array_equal(out[1], x)  # -128 again, as in numpy
    np.testing.assert_array_equal(out[2], x)
    for t in range(4):
        h = np.tanh(h @ np.asarray(p) - 1)
        np.testing.assert_allclose(out[0][:, t], h, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_nan_of_any_bits_stays_nan(bits):
    x = np.full((2, 3, 5), bits, np.uint32).view(np.float32)

    def step(p, h, x, t):
        return 0.5 * h, (x + h).astype(jnp.bfloat16)

    def copy(p, h, x, t):
        return 0.5 * h, x.astype(jnp.bfloat16)

    for run in (step, copy):
        h = jnp.zeros((3, 5), jnp.float32)
        out = ost.recurrent_net(run, x, h, params=(), time_major=True, backend="cpu")
        assert out.outputs.dtype == jnp.bfloat16
        assert np.isnan(np.asarray(out.outputs, np.float32)).all()


def unchanged(p, states, x, t):
    """A float32 that nothing computes with."""
    h, kept = states
    h = jnp.tanh(x + h @ p)
    return (h, kept), h


def rounded(p, states, x, t):
    h, kept = states
    short = (x + h @ p).astype(jnp.bfloat16)
    h = jnp.tanh(short.astype(h.dtype))
    return (h, kept), h


@pytest.mark.parametrize(
    "step, dtype",
    [(unchanged, "float32"), (unchanged, "bfloat16"), (rounded, "float64")],
)
def test_a_float64_step_keeps_shorter_floats(step, dtype):
    x, h, p = draw(0, 3, 4, 8), draw(1, 3, 8), draw(2, 8, 8)
    kept = draw(3, 3, 4).astype(dtype)

    def gradient(backend):
        def loss(p, x, h):
            out = ost.recurrent_net(step, x, (h, kept), params=p, backend=backend)
            return jnp.sum(jnp.sin(out.outputs)), out

        return fast_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(p, x, h)

    assert_same(gradient(None), gradient("scan"))


def outer(h):
    """Return a matrix for each sequence, rounded to bfloat16."""
    return (h[:, :4, None] * h[:, None, 4:]).astype(jnp.bfloat16)


def place(h):
    return jnp.argmax(h[:, :4], -1)


MOVED = {
    "turned": lambda h: jnp.maximum(outer(h).swapaxes(1, 2), jnp.bfloat16(0.01)),
    "read": lambda h: jax.vmap(lambda a, i: a[i])(outer(h), place(h)),
    "written": lambda h: jax.vmap(lambda i, row: jnp.zeros_like(row).at[i].set(row[0]))(
        place(h), h[:, 4:].astype(jnp.bfloat16)
    ),
    "added": lambda h: jax.vmap(lambda m, i, row: m.at[i].set(row))(
        outer(h), place(h), (0.3 * h[:, 4:]).astype(jnp.bfloat16)
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_rounded_to_bfloat16_stays_so_where_it_is_moved(name):
    def step(p, h, x, t):
        h = jnp.tanh(h + x)
        return h, jnp.exp(MOVED[name](h).astype(jnp.float32))

    def run(backend):
        x, h = draw(0, 32, 5, 8, dtype="float32"), draw(1, 32, 8, dtype="float32")
        return ost.recurrent_net(step, x, h, backend=backend).outputs

    np.testing.assert_allclose(run(None), run("scan"), rtol=1e-5)
    with pytest.raises(NotImplementedError, match="goes on in float32"):
        run("cpu")


@pytest.mark.parametrize("segment_length", [None, 16])
def test_numbers_of_steps_of_all_segments_are_counted(segment_length):
    """Times 2^15 + 1, those of the last ones are above 2^24, and odd."""

    def step(p, h, x, t):
        h = jnp.tanh(x + h @ p)
        return h, jnp.where(h[:, 0] > 2, 0, t * (2**15 + 1))

    steps = 1024
    sizes = (2, steps, 8), (2, 8), (8, 8)
    x, h, p = (draw(i, *s, dtype="float32") for i, s in enumerate(sizes))
    out = ost.recurrent_net(step, x, h, params=p, segment_length=segment_length)
    np.testing.assert_array_equal(out.outputs[0], np.arange(steps) * (2**15 + 1))
