"""Linear cells: LRU and S5 against numpy, and whole sequences against steps."""

import dataclasses
import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from oracles import cells64, net64
from test_linear_transforms import assert_trees_close

import ostinato as ost
from ostinato import cells

BATCH, STEPS, INPUTS, HIDDEN = 3, 5, 3, 4
KEY = jax.random.key(0)
LENGTHS = (3, 0, 5)
COMPLEX = {
    "lru": (cells.LRU(INPUTS, HIDDEN), cells64.lru),
    "s5-zoh": (cells.S5(INPUTS, HIDDEN), cells64.s5),
    "s5-bilinear": (
        cells.S5(INPUTS, HIDDEN, "bilinear"),
        ft.partial(cells64.s5, discretization="bilinear"),
    ),
}
EVERY = {name: cell for name, (cell, _) in COMPLEX.items()} | {
    "min-gru": cells.MinGRU(INPUTS, HIDDEN),
    "min-lstm": cells.MinLSTM(INPUTS, HIDDEN),
    "rg-lru": cells.RGLRU(INPUTS),
}
every_cell = pytest.mark.parametrize("name", EVERY)


@pytest.mark.parametrize(
    "gates", [(-300, -200), (-200, -300), (300, 200), (-120, -120)]
)
def test_gates_of_min_lstm_that_are_0_in_float32(gates):
    """The share of a gate is that of two numbers, either of which may be nothing."""
    cell = cells.MinLSTM(1, 1)
    i, f = gates
    params = cell.init(KEY)
    params = params._replace(
        w_ih=jnp.zeros_like(params.w_ih),
        b_ih=jnp.array([i, f, 0.75], params.b_ih.dtype).reshape(params.b_ih.shape),
    )

    def run(params, h):
        x = jnp.ones((1, 1, 1), jnp.float32)
        return ost.recurrent_net(cell, x, h, params=params).outputs.sum()

    h = jnp.full((1, 1), 2.0, jnp.float32)
    got, grads = jax.value_and_grad(run, (0, 1))(params, h)
    # exp(i) and exp(f), or 1 and 1: the gates are that far from 0.
    share = 0.5 if min(gates) > 0 else float(np.exp(-np.logaddexp(0, f - i)))
    np.testing.assert_allclose(got, share * 0.75 + (1 - share) * 2.0, rtol=1e-6)
    np.testing.assert_allclose(grads[1], [[1 - share]], rtol=1e-6)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(grads))


@dataclasses.dataclass(frozen=True)
class Stepping:
    """A cell that only steps."""

    cell: object

    def __call__(self, params, states, x, t):
        return self.cell(params, states, x, t)


def make(cell, lengths=None, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    params = fast_jit(lambda key: cell.init(key, jnp.dtype(dtype)))(
        jax.random.key(seed)
    )
    x = rng.standard_normal((BATCH, STEPS, INPUTS))
    for b, n in enumerate(lengths or ()):
        x[b, n:] = np.nan
    start = cell.initial_state(BATCH, jnp.dtype(dtype))
    h = rng.standard_normal(start.shape)
    if jnp.iscomplexobj(start):
        h = h + 1j * rng.standard_normal(start.shape)
    return params, jnp.asarray(x, dtype), jnp.asarray(h, start.dtype)


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("reverse", [False, True])
def test_complex_cells_equal_numpy(name, reverse):
    cell, oracle = COMPLEX[name]
    params, x, h = make(cell, LENGTHS)
    options = dict(lengths=LENGTHS, reverse=reverse)
    p = jax.tree.map(np.asarray, params)
    want = net64.run(lambda p, s, x, t: oracle(p, s, x), np.asarray(x), np.asarray(h),
                     params=p, **options)  # fmt: skip
    run = lambda p, x, h: ost.recurrent_net(  # noqa: E731
        cell, x, h, params=p, seq_lengths=jnp.array(LENGTHS), reverse=reverse,
        return_all_states=True,
    )  # fmt: skip
    assert_trees_close(tuple(fast_jit(run)(params, x, h)), tuple(want))


OPTIONS = {
    "whole": {},
    "hold": dict(lengths=True),
    "zero": dict(lengths=True, padding="zero"),
    "drop-reverse": dict(lengths=True, padding="drop", reverse=True),
    "resets": dict(resets=True, time_major=True, lengths=True),
    "recompute": dict(recompute=True, lengths=True),
    "names": dict(recompute=("gates",)),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, "hold") for name in EVERY]
    + [
        (name, case)
        for name in ("lru", "min-gru")
        for case in OPTIONS
        if case != "hold"
    ],
)
def test_whole_sequence_equals_steps(name, case):
    cell, options = EVERY[name], dict(OPTIONS[case])
    lengths = LENGTHS if options.pop("lengths", False) else None
    params, x, h = make(cell, lengths)
    if lengths is not None:
        options["seq_lengths"] = jnp.array(lengths)
    if options.pop("resets", False):
        drawn = np.random.default_rng(1).random((BATCH, STEPS)) < 0.4
        options["resets"] = jnp.asarray(drawn.T)
        x = jnp.swapaxes(x, 0, 1)

    def both(step):
        def run(params, x, h):
            return ost.recurrent_net(
                step, x, h, params=params, return_all_states=True, **options
            )

        def loss(*args):
            out = run(*args)
            terms = [jnp.sum(jnp.sin(a)).real for a in jax.tree.leaves(out)]
            return sum(terms[1:], terms[0])

        return fast_jit(lambda *args: (run(*args), jax.grad(loss, (0, 1, 2))(*args)))(
            params, x, h
        )

    if isinstance(options.get("recompute"), tuple):
        options.pop("recompute")
        want = both(Stepping(cell))
        options["recompute"] = ("gates",)
    else:
        want = both(Stepping(cell))
    got = both(cell)
    assert_trees_close(got[0], want[0])
    assert_trees_close(got[1], want[1])


@every_cell
def test_whole_sequence_has_no_loop(name):
    cell = EVERY[name]
    params, x, h = make(cell)
    run = lambda p: ost.recurrent_net(cell, x, h, params=p).outputs  # noqa: E731
    text = str(jax.make_jaxpr(run)(params))
    assert "ostinato_linear" in text and "scan[" not in text


def test_a_window_and_segments_run_step_by_step():
    cell = EVERY["min-gru"]
    params, x, h = make(cell)
    whole = ost.recurrent_net(cell, x, h, params=params)
    parts = ost.recurrent_net(cell, x, h, params=params, segment_length=2)
    assert_trees_close(tuple(parts), tuple(whole))
    with pytest.raises(ValueError, match="recompute"):
        ost.recurrent_net(cell, x, h, params=params, recompute=("other",))


@every_cell
@pytest.mark.parametrize("options", [{"segment_length": 2}, {"backend": "scan"}])
def test_every_cell_tags_its_gates(name, options):
    cell = EVERY[name]
    assert cell.recompute_names == ("gates",)
    params, x, h = make(cell)

    def loss(params, **options):
        found = ost.recurrent_net(cell, x, h, params=params, **options)
        return jnp.sum(found.outputs**2)

    got = fast_jit(jax.grad(ft.partial(loss, recompute=("gates",), **options)))(params)
    assert_trees_close(got, fast_jit(jax.grad(loss))(params))


@pytest.mark.parametrize("name", COMPLEX)
def test_policies_of_jax_can_store_the_gates(name):
    cell = EVERY[name]
    params, x, h = make(cell)

    def loss(params):
        return jnp.sum(ost.recurrent_net(cell, x, h, params=params).outputs ** 2)

    policy = jax.checkpoint_policies.save_only_these_names("gates")
    got = fast_jit(jax.grad(jax.checkpoint(loss, policy=policy)))(params)
    assert_trees_close(got, fast_jit(jax.grad(loss))(params))


def test_recompute_stores_only_the_states():
    cell = cells.MinGRU(64, 64)
    params = cell.init(jax.random.key(0))
    x, h = jnp.ones((2, 100, 64), jnp.float32), cell.initial_state(2)

    def stored(**options):
        def loss(p):
            return ost.recurrent_net(cell, x, h, params=p, **options).outputs.sum()

        _, pull_back = jax.vjp(loss, params)
        return sum(a.size for a in jax.tree.leaves(pull_back))

    assert stored(recompute=True) < 0.7 * stored()


@every_cell
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_a_stream_are_the_whole(name, dtype):
    cell = EVERY[name]
    params, x, h = make(cell, dtype=dtype)
    run = fast_jit(lambda x, h: ost.recurrent_net(cell, x, h, params=params))
    whole, first = run(x, h), run(x[:, :2], h)
    second = run(x[:, 2:], first.states)
    assert whole.outputs.dtype == x.dtype and whole.states.dtype == h.dtype
    joined = jnp.concatenate([first.outputs, second.outputs], 1)
    tol = 1e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(
        np.asarray(joined, float), np.asarray(whole.outputs, float), rtol=tol, atol=tol
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_held_input_is_exact_for_small_rates_and_steps(dtype):
    sizes = [0, 1e-9, 1e-6, 9e-5, 1.1e-4, 1e-3, 0.01, 0.1, 0.499, 0.501, 1, 3]
    angles = np.exp(1j * np.array([np.pi, 3, 2.2, np.pi / 2]))
    rate = np.outer(sizes, angles).ravel()
    re, im = (jnp.asarray(part, dtype) for part in (rate.real, rate.imag))
    cell, zero, one = cells.S5(1, len(rate)), jnp.zeros_like(re), jnp.ones_like(re)

    def scale(re):
        params = cells.S5Params(re, im, zero, *[None] * 5)
        return cell.terms(params, (one, zero, None))[1]

    def with_slope(function):
        return lambda re: jax.jvp(function, (re,), (one,))

    # (e^z - 1) / z = sum of z^k / (k + 1)!, and its two derivatives, in 80 bits.
    z = np.asarray(re, np.longdouble) + 1j * np.asarray(im, np.longdouble)
    want = [np.zeros_like(z) for _ in range(3)]
    factorial = np.longdouble(1)
    for k in range(60):
        factorial *= k + 1
        for n, total in enumerate(want[: k + 1]):
            total += math.perm(k, n) * z ** (k - n) / factorial
    (value, slope), (_, bend) = fast_jit(with_slope(with_slope(scale)))(re)
    for got, exact in zip((value, slope, bend), want, strict=True):
        assert np.abs(np.asarray(got) - exact).max() < 30 * jnp.finfo(dtype).eps


def test_factors_begin_where_the_papers_say():
    lru = cells.LRU(3, 500, r_min=0.4, r_max=0.9, max_phase=1.0)
    init = lambda cell: fast_jit(cell.init)(jax.random.key(0))  # noqa: E731
    params = init(lru)
    factor, _ = fast_jit(lambda p, x: lru.terms(p, lru.precompute(p, x)))(
        params, jnp.ones((1, 3), jnp.float32)
    )
    size, angle = np.abs(factor), np.angle(factor)
    assert 0.39 < size.min() < 0.5 and 0.85 < size.max() < 0.91
    assert 0 <= angle.min() and 0.9 < angle.max() <= 1.001
    assert abs(np.median(size**2) - (0.4**2 + 0.9**2) / 2) < 0.05
    np.testing.assert_allclose(np.exp(params.gamma), np.sqrt(1 - size**2), rtol=1e-4)
    s5 = init(cells.S5(3, 4))
    np.testing.assert_allclose(s5.lambda_re, -0.5, rtol=1e-6)
    assert bool((s5.lambda_im > 0).all())
    step = np.exp(s5.log_step)
    assert 0.001 <= step.min() and step.max() <= 0.1
    decay = init(cells.RGLRU(200)).decay
    power = np.asarray(jax.nn.sigmoid(decay)) ** 8
    assert 0.899 < power.min() < 0.92 and 0.98 < power.max() < 1


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: cells.LRU(3, 0), ValueError, "`hidden_size`"),
        (lambda: cells.LRU(3, 4, r_min=0.9, r_max=0.5), ValueError, "r_min < r_max"),
        (lambda: cells.LRU(3, 4, max_phase=0), ValueError, "`max_phase`"),
        (lambda: cells.S5(3, 4, "euler"), ValueError, "`discretization`"),
        (lambda: cells.S5(3, 4, step_min=0), ValueError, "step_min <= step_max"),
        (lambda: cells.RGLRU(6, num_heads=4), ValueError, "`num_heads` must divide"),
    ],
)
def test_errors_of_constructors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_errors_of_states_and_params():
    cell = EVERY["lru"]
    params, x, h = make(cell)
    with pytest.raises(TypeError, match="`h` must be complex128"):
        ost.recurrent_net(cell, x, h.real, params=params)
    with pytest.raises(ValueError, match="`params.nu`"):
        ost.recurrent_net(cell, x, h, params=params._replace(nu=jnp.ones(2)))
    gru = EVERY["min-gru"]
    params, x, h = make(gru)
    with pytest.raises(ValueError, match="input_size=3"):
        ost.recurrent_net(gru, x[..., :2], h, params=params)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("params", [None, {"w": 1.0}, ()])
def test_errors_of_params_name_their_type(name, params):
    cell = EVERY[name]
    made, x, h = make(cell)
    message = f"must be {type(made).__name__}, as `init`"
    if params is None:
        message += r" makes them, got NoneType None; give params=cell.init\(key\)"
    with pytest.raises(TypeError, match=message):
        ost.recurrent_net(cell, x, h, params=params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["MinGRU", "MinLSTM", "RGLRU"])
def test_small_steps_add_up_in_a_stream_of_16_bits(name, dtype):
    """The state is float32, whichever way the cell runs; a rounded one would stand."""
    cell = getattr(cells, name)(*([1] if name == "RGLRU" else [1, 1]))
    params = jax.tree.map(jnp.zeros_like, cell.init(KEY, dtype))
    if name == "RGLRU":
        params = params._replace(decay=jnp.full_like(params.decay, 8.0))
    else:  # z = i = sigmoid(-6), n = g = 1; f = sigmoid(0)
        small = {"MinGRU": [-6, 1], "MinLSTM": [-6, 0, 1]}[name]
        params = params._replace(b_ih=jnp.asarray(small, dtype))
    x = jnp.full((1, 3000, 1), 0.5, dtype)
    h = cell.initial_state(1, dtype)
    assert h.dtype == jnp.float32

    def run(x, h, **options):
        return ost.recurrent_net(cell, x, h, params=params, **options)

    whole, steps = fast_jit(run)(x, h), fast_jit(ft.partial(run, backend="scan"))(x, h)
    first = fast_jit(run)(x[:, :1000], h)
    parts = fast_jit(run)(x[:, 1000:], first.states)
    assert whole.outputs.dtype == steps.outputs.dtype == dtype
    for other in (steps, parts):
        assert other.states.dtype == jnp.float32
        np.testing.assert_allclose(other.states, whole.states, rtol=1e-4)
    rounded = run(x[:, :5], h.astype(dtype)).states
    assert rounded.dtype == dtype, "a state in the dtype of the inputs is taken, too"


def test_rglru_is_its_equation_near_a_factor_of_one():
    cell = cells.RGLRU(3)
    params = jax.tree.map(jnp.zeros_like, cell.init(KEY, jnp.float64))
    for decay, gate in ((3.0, -16.0), (3.0, -20.0), (30.0, 0.0), (3.0, 0.0)):
        given = params._replace(
            decay=jnp.full(3, decay), b_ih=jnp.r_[jnp.full(3, gate), jnp.full(3, 40.0)]
        )

        def first(given):
            x, h = jnp.ones((1, 1, 3)), cell.initial_state(1, jnp.float64)
            return ost.recurrent_net(cell, x, h, params=given).outputs[0, 0, 0]

        r = 1 / (1 + math.exp(-gate))
        log_a = -8 * math.log1p(math.exp(-decay)) * r
        want = math.sqrt(-math.expm1(2 * log_a))
        value, slope = fast_jit(jax.value_and_grad(first))(given)
        np.testing.assert_allclose(value, want, rtol=1e-9)
        # d sqrt(1 - a^2) / d decay = -a^2 / sqrt(1 - a^2) * d log a / d decay
        of_log = 8 * r / (1 + math.exp(decay))
        exact = -math.exp(2 * log_a) / want * of_log
        np.testing.assert_allclose(slope.decay[0], exact, rtol=1e-7)


def test_rglru_without_any_forgetting_has_finite_gradients():
    cell = cells.RGLRU(3)
    params = cell.init(KEY, jnp.float64)._replace(decay=jnp.full(3, 900.0))
    x, h = jnp.ones((1, 4, 3)), cell.initial_state(1, jnp.float64)
    loss = lambda p: ost.recurrent_net(cell, x, h, params=p).outputs.sum()  # noqa: E731
    gradients = jax.tree.leaves(fast_jit(jax.grad(loss))(params))
    assert all(jnp.isfinite(g).all() for g in gradients)


@every_cell
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_explain_says_what_a_short_dtype_runs_on(name, dtype):
    cell = EVERY[name]
    params, x, h = make(cell, dtype=dtype)
    run = lambda x, h: ost.recurrent_net(cell, x, h, params=params)  # noqa: E731
    text = jax.jit(run).lower(x, h).as_text()
    native = "ostinato_linear" in text
    assert (ost.explain(cell, x).backend == "cpu") == native


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
def test_explain_says_that_xla_runs_many_sequences_of_few_numbers():
    cell = cells.MinGRU(3, 4)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    told = ost.explain(cell, shape(300, 9, 3))
    assert told.backend == "xla" and "few numbers" in told.rejected["cpu"]
    assert ost.explain(cell, shape(300, 16, 3)).backend == "cpu"
    major = ost.explain(cell, shape(9, 300, 3), time_major=True)
    assert major.backend == "xla"
    assert ost.explain(cell, shape(300, 9, 3), backend="cpu").backend == "cpu"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"segment_length": 2}, {"backend": "scan"}])
def test_outputs_of_wrapped_cells_keep_a_short_dtype(options, dtype):
    inner = cells.MinGRU(INPUTS, INPUTS)
    for cell in (
        cells.Residual(inner),
        cells.Dropout(inner, inputs=0.2, outputs=0.1).sample(KEY, BATCH),
        cells.Zoneout(inner, h_rate=0.2).sample(KEY),
        cells.Stack((inner, cells.GRU(INPUTS, INPUTS), cells.RGLRU(INPUTS))),
        cells.Bidirectional(inner, inner),
    ):
        x, given = (
            jnp.ones((BATCH, STEPS, INPUTS), dtype),
            cell.initial_state(BATCH, dtype),
        )
        params = jax.eval_shape(lambda key, c=cell: c.init(key, dtype), KEY)
        out = jax.eval_shape(
            lambda x, s, p, c=cell: ost.recurrent_net(c, x, s, params=p, **options),
            x,
            given,
            params,
        )
        assert out.outputs.dtype == dtype
        shapes = jax.tree.map(lambda a: (a.shape, a.dtype), (given, out.states))
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [BATCH, STEPS])
def test_held_states_of_time_major_sequences_equal_numpy(reverse, steps):
    """All states past the end of a sequence are its final or its initial ones."""
    cell, lengths = cells.MinGRU(INPUTS, HIDDEN), (2, 0, 3)
    params, x, h = make(cell)
    x, h = x[:, :steps], h + jnp.arange(1.0, BATCH + 1)[:, None]
    p = jax.tree.map(np.asarray, params)
    want = net64.run(
        lambda p, s, x, t: cells64.min_gru(p, s, x),
        *map(np.asarray, (x, h)),
        params=p,
        lengths=lengths,
        reverse=reverse,
    )
    got = ost.recurrent_net(
        cell, jnp.swapaxes(x, 0, 1), h, params=params, time_major=True,
        seq_lengths=jnp.array(lengths), reverse=reverse, return_all_states=True,
    )  # fmt: skip
    for name in ("outputs", "all_states"):
        sequences = jnp.swapaxes(getattr(got, name), 0, 1)
        assert_trees_close(sequences, getattr(want, name))
    assert_trees_close(got.states, want.states)


@every_cell
def test_no_two_parameters_are_drawn_alike(name):
    """Real and imaginary parts, and matrices of one shape, are independent."""
    drawn = [np.ravel(a) for a in jax.tree.leaves(EVERY[name].init(KEY))]
    drawn = [a for a in drawn if a.size > 1 and np.ptp(a) > 0]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            if a.size == b.size:
                assert abs(np.corrcoef(a, b)[0, 1]) < 0.999


def test_s5_begins_as_the_real_system_of_hippo():
    """Responses of half of the eigenvectors are those of the whole real matrix."""
    size, features = 8, 3
    p = cells.S5(features, size // 2).init(KEY, jnp.float64)
    root = np.sqrt(2 * np.arange(size) + 1.0)
    lower = np.tril(np.outer(root, root), -1)
    matrix = -(np.eye(size) + lower - lower.T) / 2  # HiPPO-N
    keys, narrow = jax.random.split(KEY, 4), jnp.float32
    b = np.float64(jax.random.normal(keys[0], (size, features), narrow))
    c = np.float64(jax.random.normal(keys[1], (features, size), narrow))
    factor = np.asarray(p.lambda_re) + 1j * np.asarray(p.lambda_im)
    into = np.asarray(p.b_re) + 1j * np.asarray(p.b_im)
    out_of = np.asarray(p.c_re) + 1j * np.asarray(p.c_im)
    for power in range(3):
        want = c @ np.linalg.matrix_power(matrix, power) @ b
        want *= (features * size) ** -0.5
        got = 2 * (out_of * factor**power @ into).real
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
