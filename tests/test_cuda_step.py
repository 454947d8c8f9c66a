"""Loops over steps as generated kernels of GPUs, run on the CPU, against numpy."""

import functools as ft
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    CASES,
    LENGTHS,
    STEPS,
    assert_gradients,
    assert_trees_close,
    compiled_net,
    make,
    net,
    oracle,
    put,
    weigh,
)
from cuda_driver import calls
from cuda_emulation import gpu_in_place, needs_emulator
from test_step_versions import LATER, operation
from tolerance import assert_close

import ostinato as ost
from ostinato import _native, ragged
from ostinato._cuda import check, device, kernels
from ostinato._recurrent import explanation
from ostinato._rnn import backends

CELLS = ("indrnn-relu", "indrnn-tanh", "para-gru", "para-lstm")


@pytest.fixture(scope="module")
def on_gpu():
    patch = pytest.MonkeyPatch()
    with gpu_in_place(patch):
        yield


def launches(before):
    return [c for c in calls()[before:] if "cuLaunchKernelEx step_loop" in c]


@needs_emulator
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("name", CELLS)
def test_sequence_equals_numpy(name, lengths, reverse, on_gpu):
    case, before = CASES[name], len(calls())
    params, x, states = make(case, lengths=lengths)
    got = compiled_net(
        case.cell, params, x, states, lengths, reverse=reverse, backend="cuda"
    )
    want = oracle(case, params, x, states, lengths=lengths, reverse=reverse)
    assert_trees_close(got[:2], want[:2])
    assert len(launches(before)) == 1


@needs_emulator
@pytest.mark.parametrize("name", CELLS)
def test_gradients_equal_finite_differences(name, on_gpu):
    case, rng = CASES[name], np.random.default_rng(7)
    params, x, states = make(case, lengths=LENGTHS)
    weighed = weigh(rng, oracle(case, params, x, states, lengths=LENGTHS))

    def loss(*args):
        return weighed(net(case.cell, *args, LENGTHS, backend="cuda"))

    def reference(*args):
        return weighed(oracle(case, *args, lengths=LENGTHS))

    before = len(calls())
    assert_gradients(loss, reference, (params, x, states), rng)
    assert len(launches(before)) == 2


@needs_emulator
def test_resets_and_all_states_equal_numpy(on_gpu):
    case = CASES["para-lstm"]
    params, x, states = make(case)
    resets = np.random.default_rng(3).random((BATCH, STEPS)) < 0.3
    want = oracle(case, params, x, states, resets=resets)
    got = compiled_net(
        case.cell, params, x, states, resets=jnp.asarray(resets),
        return_all_states=True, backend="cuda",
    )  # fmt: skip
    assert_trees_close(tuple(got), tuple(want))


def run(step, x, states, params=None, backend=None, **options):
    """Return values, and gradients of a weighted sum of them."""

    def weighed(params, x, states):
        out = ost.recurrent_net(step, x, states, params=params, backend=backend,
                                **options)  # fmt: skip
        leaves = jax.tree.leaves((out.outputs, out.states))
        floats = [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]
        total = sum(
            jnp.sum(
                jnp.cos(1.0 + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) * a
            )
            for a in floats
        )
        return total, (out.outputs, out.states)

    def both(*given):
        which = tuple(i for i, a in enumerate(given) if jax.tree.leaves(a))
        return jax.value_and_grad(weighed, which, has_aux=True, allow_int=True)(*given)

    return jax.block_until_ready(jax.jit(both)(params, x, states))


def compare(step, x, states, params=None, **options):
    """Compare the kernels of a step with `lax.scan`."""
    before = len(calls())
    got = run(step, x, states, params, "cuda", **options)
    assert len(launches(before)) == (2 if jax.tree.leaves(states)[0].size else 0)
    want = run(step, x, states, params, "scan", **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jnp.floating):
            assert_close(a, b, dtype=a.dtype, terms=100)
        else:
            np.testing.assert_array_equal(a, b)


@needs_emulator
@pytest.mark.parametrize("name", LATER)
def test_operations_of_later_versions_of_jax(name, on_gpu):
    of_name, more = operation(name), name == "polynomial"

    def step(p, s, x, t):
        coefficients = [jnp.full_like(x, c) for c in (0.5, -1.0, 2.0)] * more
        s = 0.5 * s + of_name(jnp.square(x) + 1, *coefficients)
        return s, s

    def last(backend):
        x, s = normal(BATCH, STEPS, 3), normal(BATCH, 3, seed=1)
        return jax.jit(lambda: ost.recurrent_net(step, x, s, backend=backend).states)()

    before = len(calls())
    assert_close(last("cuda"), last("scan"), terms=100)
    assert len(launches(before)) == 1


def normal(*shape, dtype="float64", seed=0):
    return put(np.random.default_rng(seed).standard_normal(shape), dtype)


def leaky(p, s, x, t):
    s = jax.nn.sigmoid(p)[None] * s + x
    return s, s


def with_shapes(p, s, x, t):
    """Read elements of inputs and parameters in many places."""
    a, b = s  # [B, 2, 3]
    first, second = jnp.split(x["wide"], 2, axis=-1)  # [B, 12]
    first = first.reshape(a.shape)
    turned = jnp.flip(second.reshape(-1, 3, 2), axis=1)
    turned = jnp.swapaxes(turned, 1, 2)
    many = x["many"]  # [B, 4, 2, 3]
    total = many.sum(1) + many[:, ::2].max(1) * p["scale"][None, :, None]
    number = t.astype(a.dtype) + jax.lax.broadcasted_iota(a.dtype, a.shape, 2)
    row = x["row"][:, None, None] * p.get("one", 2.0)
    new_a = jnp.tanh(0.5 * a + first * b + total) + 0.1 * number
    new_b = jnp.where(x["mask"], turned + b, b * row)
    joined = jnp.concatenate([new_a, new_b * p["each"][None]], axis=1)
    padded = jnp.pad(new_a, ((0, 0), (2, 2), (0, 0)))
    flags = (new_b > 0, x["row"] * 2.0)
    return (new_a, new_b), (joined.reshape(-1, 12), padded, flags, x["mask"])


def shapes_case(dtype="float64", batch=5, steps=7):
    rng = np.random.default_rng(1)
    x = {
        "wide": normal(batch, steps, 12, dtype=dtype),
        "many": normal(batch, steps, 4, 2, 3, dtype=dtype, seed=2),
        "row": normal(batch, steps, dtype=dtype, seed=3),
        "mask": jnp.asarray(rng.random((batch, steps, 2, 3)) < 0.5),
    }
    p = {
        "scale": normal(2, dtype=dtype, seed=4),
        "each": normal(2, 3, dtype=dtype, seed=6),
    }
    states = tuple(normal(batch, 2, 3, dtype=dtype, seed=s) for s in (7, 8))
    return x, states, p


@needs_emulator
@pytest.mark.parametrize("lengths", [None, [7, 0, 3, 5, 1]])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_elements_are_read_and_written_anywhere(dtype, lengths, on_gpu):
    x, states, p = shapes_case(dtype)
    options = {} if lengths is None else {"seq_lengths": jnp.asarray(lengths)}
    if lengths is None:  # XLA finds its gradient after the loop, of all steps
        p["one"] = normal(1, 1, 1, dtype=dtype, seed=5)
    compare(with_shapes, x, states, p, **options)
    compare(with_shapes, x, states, p, reverse=True, **options)


FUNCTIONS = {
    "abs": jnp.abs, "acos": jnp.arccos, "acosh": lambda x: jnp.arccosh(2 + x),
    "asin": jnp.arcsin, "asinh": jnp.arcsinh, "atan": jnp.arctan,
    "atan2": lambda x: jnp.arctan2(x, 0.3), "atanh": jnp.arctanh, "cbrt": jnp.cbrt,
    "ceil": jnp.ceil, "clamp": lambda x: jnp.clip(x, -0.2, 0.3), "cos": jnp.cos,
    "cosh": jnp.cosh, "erf": jax.scipy.special.erf, "erfc": jax.scipy.special.erfc,
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "floor": jnp.floor,
    "is_finite": lambda x: jnp.isfinite(1 / jnp.round(x)),
    "log": lambda x: jnp.log(x + 2), "log1p": jnp.log1p, "logistic": jax.nn.sigmoid,
    "max": lambda x: jnp.maximum(x, 0.1), "min": lambda x: jnp.minimum(x, 0.1),
    "pow": lambda x: (x + 2) ** 1.7, "rem": lambda x: jnp.fmod(x, 0.3),
    "integer_pow": lambda x: x**3 + (x + 2) ** -2 + x**11,
    "round": lambda x: jax.lax.round(5 * x, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_even": lambda x: jnp.round(5 * x), "rsqrt": lambda x: jax.lax.rsqrt(x + 2),
    "sign": jnp.sign, "sin": jnp.sin, "sinh": jnp.sinh, "square": jnp.square,
    "sqrt": lambda x: jnp.sqrt(x + 2), "tan": jnp.tan, "tanh": jnp.tanh,
    "neg": lambda x: -x, "div": lambda x: (x + 1) / (x - 2), "relu": jax.nn.relu,
    "gelu": jax.nn.gelu, "softplus": jax.nn.softplus,
    "select": lambda x: jnp.where(x > 0, x, 2 * x),
    "bools": lambda x: ((x > 0) & (x < 0.5)) | ~(x != 0.1) ^ (x <= -0.3),
    "integers": lambda x: jnp.int32(9 * x) * 2 - jnp.maximum(jnp.int32(x * 5), 1),
    "wrapped": lambda x: jnp.square(jnp.int32(9 * x) + 70_000),
    "sums": lambda x: jnp.sum(
        jnp.stack([jnp.int32(9 * x) + 2**30, jnp.int32(5 * x) + 2**30]), 0),
    "unsigned": lambda x: (jnp.uint32(9 + 9 * x) | jnp.uint32(4)).astype(x.dtype),
    "cases": lambda x: jax.lax.select_n(
        jnp.int32(x > 0) + jnp.int32(x > 0.4), x, 2 * x, 3 * x),
    "nan": lambda x: jnp.isnan(jnp.maximum(jnp.nan, x)) & (jnp.minimum(x, jnp.inf) < 1),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "precision": lambda x: x + jax.lax.reduce_precision(jnp.float32(x), 8, 7).astype(
        x.dtype),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_operation_equals_xla(dtype, on_gpu):
    rng = np.random.default_rng(3)
    x = put(rng.uniform(-0.9, 0.9, (3, 4, 5)), dtype)

    def step(p, s, x, t):
        return 0.5 * s + x, {name: f(x) for name, f in FUNCTIONS.items()}

    run_by = lambda backend: jax.jit(  # noqa: E731
        lambda x: ost.recurrent_net(step, x, x[:, 0], backend=backend).outputs
    )(x)
    before = len(calls())
    got, want = jax.block_until_ready((run_by("cuda"), run_by("scan")))
    assert len(launches(before)) == 1
    for name in FUNCTIONS:
        assert got[name].dtype == want[name].dtype
        assert_close(got[name], want[name], dtype=dtype, terms=100)


@needs_emulator
@pytest.mark.parametrize(
    ("batch", "steps", "units"),
    [(1, 1, 1), (3, 9, 50), (1, 33, 7), (2, 0, 3), (0, 4, 3), (2, 4, 0)],
)
def test_sizes(batch, steps, units, on_gpu):
    x, p = normal(batch, steps, units), normal(units, seed=1)
    compare(leaky, x, normal(batch, units, seed=2), p)


@needs_emulator
def test_bfloat16_is_near_float32(on_gpu):
    case = CASES["para-gru"]
    params, x, states = make(case, "bfloat16")
    got = compiled_net(case.cell, params, x, states, LENGTHS, backend="cuda")
    wide = jax.tree.map(lambda a: put(a, "float32"), (params, x, states))
    want = compiled_net(case.cell, *wide, LENGTHS, backend="scan")
    assert got.outputs.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.float32(got.outputs), np.float32(want.outputs), rtol=0.02, atol=0.02
    )


@needs_emulator
def test_members_of_an_ensemble_are_one_launch(on_gpu):
    x, p = normal(3, 6, 4), normal(5, 4, seed=1)
    states = normal(3, 4, seed=2)

    def loss(p, backend):
        out = ost.recurrent_net(leaky, x, states, params=p, backend=backend)
        return (out.outputs**2).sum()

    run = lambda backend: jax.jit(  # noqa: E731
        jax.vmap(jax.value_and_grad(lambda p: loss(p, backend)))
    )(p)
    before = len(calls())
    got = jax.block_until_ready(run("cuda"))
    assert len(launches(before)) == 2
    assert_trees_close(got, run("scan"))


@needs_emulator
def test_second_derivatives_and_tangents_equal_xla(on_gpu):
    x, p, states = normal(2, 4, 3), normal(3, seed=1), normal(2, 3, seed=2)

    def loss(p, backend):
        out = ost.recurrent_net(leaky, x, states, params=p, backend=backend)
        return (out.outputs**2).sum()

    def run(backend):
        f = lambda p: loss(p, backend)  # noqa: E731
        both = jax.jit(lambda p: (jax.hessian(f)(p), jax.jvp(f, (p,), (x[0, 0],))))
        return jax.block_until_ready(both(p))

    before = len(calls())
    assert_trees_close(run("cuda"), run("scan"))
    assert launches(before)


@needs_emulator
def test_nothing_of_the_padding_reaches_a_result(on_gpu):
    x, p, states = normal(3, 5, 4), normal(4, seed=1), normal(3, 4, seed=2)
    lengths = np.array([5, 0, 2])
    past = (np.arange(5)[None] >= lengths[:, None])[..., None]
    clean, dirty = (
        run(leaky, np.where(past, fill, x), states, p, "cuda", seq_lengths=lengths)
        for fill in (0, np.nan)
    )
    assert_trees_close(dirty, clean)


# --------------------------------------------------- what a review of these loops found


def with_state(change):
    """Return a step whose second state changes so, from itself, the input and step."""

    def step(p, s, x, t):
        s, n = s
        s = jnp.tanh(p[None] * s + x)
        return (s, change(n, x, t)), s

    return step


SECOND_STATES = {
    "counts": lambda n, x, t: n + 1.0,
    "sums": lambda n, x, t: n + x.sum(-1),
    "sums of integers": lambda n, x, t: n
    + (x * 3).astype(jnp.int8).sum(-1).astype(n.dtype),
    "counts truths": lambda n, x, t: n + (x > 0).sum(-1).astype(n.dtype),
    "sums of less": lambda n, x, t: n
    + x.astype(jnp.float32).sum(-1).astype(n.dtype),
}  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("lengths", [None, [2, 6, 0]])
@pytest.mark.parametrize("name", SECOND_STATES)
def test_a_state_that_is_a_total_equals_xla(name, lengths, on_gpu):
    x, p = normal(3, 6, 5), normal(5, seed=2)
    states = normal(3, 5, seed=1), np.zeros(3)
    options = {} if lengths is None else {"seq_lengths": jnp.asarray(lengths)}
    same_or_refused(with_state(SECOND_STATES[name]), x, states, p, **options)


def same_or_refused(step, x, states, p, **options):
    """Compare with `lax.scan`, unless kernels are refused with a reason."""
    try:
        got = run(step, x, states, p, "cuda", **options)
    except NotImplementedError as error:
        assert "the cuda loop cannot run this step" in str(error)
        return
    want = run(step, x, states, p, "scan", **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def total_that_is_read(p, s, x, t):
    s, n = s
    n = n + 1.0
    return (jnp.tanh(p[None] * s + x), n), (s, n)


def of_no_sequence(p, s, x, t):
    s = jnp.tanh(p[None] * s + x)
    return s, jnp.broadcast_to(1.0 + t.astype(s.dtype), (len(s), 3 * len(s)))


def product_of_t(p, s, x, t):
    s = jnp.tanh(p[None] * s + x)
    at_t = jnp.sin(t.astype(s.dtype) * p) @ jnp.outer(p, p)
    return s, s + at_t[None]


def turned_product(p, s, x, t):
    s = jnp.tanh(p[None] * s + x)
    return s, s * jnp.tanh(jnp.outer(p, p) @ x.T).T


def with_argmax(p, s, x, t):
    return jnp.tanh(p[None] * s + x), jnp.argmax(s + p[None], -1)


def with_logsumexp(p, s, x, t):
    every = jnp.stack([s, x, p[None] + 0 * x])
    return jnp.logaddexp(s, p[None] * x), jax.nn.logsumexp(every, 0)


def of_many_operations(p, s, x, t):
    for _ in range(300):
        s = jnp.sin(s) + x
    return s, s


def with_integers(p, s, x, t):
    i = (3 * x).astype(jnp.int32)
    wide = (1e10 * x).astype(jnp.int32) + (-x).astype(jnp.uint32).astype(jnp.int32)
    powers = i**11 + jax.lax.rem(i, jnp.int32(2)) - (i + 2**30) * 4
    nothing = (x / jnp.zeros_like(x) * 0).astype(jnp.int32)
    return 0.5 * s + powers.astype(s.dtype), (wide, nothing, s[..., :1][..., 0])


STEPS_OF_A_REVIEW = [
    total_that_is_read, of_no_sequence, product_of_t, turned_product, with_argmax,
    with_logsumexp, of_many_operations, with_integers,
]  # fmt: skip


@needs_emulator
@pytest.mark.parametrize("units", [3, 5])  # as many as sequences, and more
@pytest.mark.parametrize("step", STEPS_OF_A_REVIEW, ids=lambda s: s.__name__)
def test_unusual_steps_equal_xla(step, units, on_gpu):
    x, p, states = normal(3, 6, units), normal(units, seed=2), normal(3, units, seed=1)
    if step is total_that_is_read:
        states = states, np.zeros(3)
    same_or_refused(step, x, states, p, seq_lengths=jnp.array([2, 6, 1]))
    if units == 5:
        same_or_refused(step, x, states, p)


@needs_emulator
def test_gradients_of_each_example_have_no_pole_past_the_end(on_gpu):
    x, states, p = (1 + abs(np.array(normal(*s))) for s in ((3, 6, 5), (3, 5), (5,)))
    lengths = jnp.array([2, 6, 0])

    def step(p, s, x, t):
        return jnp.tanh(p[None] * s + x), p[None] / s

    def loss(p, scale, backend):
        run = ft.partial(ost.recurrent_net, step, x, states, params=p)
        out = run(seq_lengths=lengths, backend=backend)
        return (scale * out.outputs).sum()

    both = lambda backend: jax.jit(  # noqa: E731
        lambda scales: (
            jax.vmap(jax.grad(loss), (None, 0, None))(p, scales, backend),
            jax.hessian(loss)(p, 1.0, backend),
        )
    )(jnp.arange(1.0, 3.0))
    assert_trees_close(both("cuda"), both("scan"))


# ------------------------------------------------------------------------ what has none

HALF = lambda p, s, x, t: (s + x.astype(jnp.float16).astype(s.dtype), s)  # noqa: E731
ROLL = lambda p, s, x, t: (jnp.roll(s, 1, -1) + x, s)  # noqa: E731
NORM = lambda p, s, x, t: (s / jnp.sqrt((s * s).sum(-1, keepdims=True)) + x, s)  # noqa: E731


@needs_emulator
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda p, s, x, t: (s @ p + x, s), "`dot_general` at .*test_cuda_step"),
        (ROLL, "each have a part of the units"),
        (NORM, "elements of a long axis|states of others"),
        (lambda p, s, x, t: (jnp.sort(s) + x, s), "`sort` at"),
        (HALF, "values of float16"),
    ],
    ids=["product", "roll", "norm", "sort", "float16"],
)  # fmt: skip
def test_other_steps_are_refused_by_name_and_run_without(step, reason, on_gpu):
    x, states = normal(2, 3, 20, dtype="float32"), jnp.ones((2, 20), jnp.float32)
    p = jnp.eye(20, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=f"the cuda loop cannot.*({reason})"):
        ost.recurrent_net(step, x, states, params=p, backend="cuda")
    got = ost.recurrent_net(step, x, states, params=p)
    want = ost.recurrent_net(step, x, states, params=p, backend="scan")
    assert_trees_close(got.outputs, want.outputs, dtype=np.float32)


def test_without_a_gpu_the_backend_is_refused(monkeypatch):
    monkeypatch.setattr(device, "status", lambda: device.GpuStatus(None, "none here"))
    x, states = normal(2, 3, 4), normal(2, 4, seed=1)
    with pytest.raises(NotImplementedError, match="cannot run this step: none here"):
        ost.recurrent_net(leaky, x, states, params=states[0], backend="cuda")


# Each is a mistake that a generated text could have.
BUGS = {
    "no mask of lengths": ("given < loop.steps ? given : loop.steps;", "loop.steps;"),
    "the length of another sequence": ("Load(lengths + p0)", "Load(lengths)"),
    "padding is not zeroed": ("t < loop.steps; ++t", "t < length; ++t"),
    "wrong direction": ("? length - 1 - (k + i) : k + i", "? k + i : k + i"),
    "reverse from the padded end": ("length - 1 - (k + i)", "loop.steps - 1 - (k + i)"),
    "a state stands still": (" s0 = n0;", ""),
    "past the end": ("if (k + i < length) {", "{"),
    "too many threads": ("if (place >= loop.batch * 5) return;", ""),
    "the units of another sequence": ("p0 * 5 + p1", "p1"),
    "a sum of the last step": ("sum0_0 += ", "sum0_0 = "),
    "another function": ("(Tanh, tanhf, tanh)", "(Tanh, sinf, sin)"),
}


def with_product(p, s, x, t):
    s = jnp.tanh(p[0][None] * s + x @ p[1])
    return s, s


def run_with_product(backend):
    """Return results and gradients, in numpy."""
    x, states = normal(3, 9, 2), normal(3, 5, seed=2)
    p = normal(5, seed=1), normal(2, 5, seed=4)
    options = dict(reverse=True, seq_lengths=jnp.array([9, 0, 4]))
    return jax.tree.map(np.asarray, run(with_product, x, states, p, backend, **options))


scan_with_product = ft.cache(ft.partial(run_with_product, "scan"))


def compare_with_product():
    before = len(calls())
    got, want = run_with_product("cuda"), scan_with_product()
    assert len(launches(before)) == 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype=a.dtype, terms=100)


@needs_emulator
def test_where_no_bug_is_planted_nothing_is_caught(on_gpu):
    compare_with_product()


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    old, new = BUGS[bug]
    source, found = kernels.Text.source, []

    def changed(text):
        found.append(old in source(text))
        return source(text).replace(old, new)

    with gpu_in_place(monkeypatch):
        monkeypatch.setattr(kernels.Text, "source", changed)
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
            compare_with_product()
    assert any(found)


# ------------------------------------------------------------------- ways to get there


@needs_emulator
def test_ragged_vmap_takes_it(on_gpu):
    lengths = [4, 1, 6]
    rows = [normal(n, 4, seed=n) for n in lengths]
    p = normal(4, seed=9)

    def one(p, x, backend):
        start = jnp.zeros((1, 4))
        out = ost.recurrent_net(leaky, x[None], start, params=p, backend=backend)
        return out.states[0]

    def loss(p, batch, backend):
        run = ragged.vmap(ft.partial(one, backend=backend), in_axes=(None, 0))
        return (run(p, batch) ** 2).sum()

    batch = ragged.stack(rows)
    before = len(calls())
    grad = lambda backend: jax.jit(  # noqa: E731
        jax.value_and_grad(ft.partial(loss, backend=backend))
    )(p, batch)
    got = jax.block_until_ready(grad("cuda"))
    assert len(launches(before)) == 2
    assert_trees_close(got, grad("scan"))


@needs_emulator
def test_named_kernels_are_exported_and_others_are_not(on_gpu):
    x, states, p = normal(2, 4, 3), normal(2, 3, seed=1), normal(3, seed=2)

    def run(x, backend):
        return ost.recurrent_net(leaky, x, states, params=p, backend=backend).outputs

    checks = [jax.export.DisabledSafetyCheck.custom_call(_native.CUDA_TARGET)]
    for backend in ("cuda", None):
        exported = jax.export.export(
            jax.jit(ft.partial(run, backend=backend)), disabled_checks=checks
        )(x)
        named = "ostinato_cuda_launch" in exported.mlir_module()
        assert named == (backend == "cuda")
        assert_close(exported.call(x), run(x, "scan"))


@needs_emulator
def test_kernels_that_are_unmeasured_run_only_when_asked_for(on_gpu, monkeypatch):
    x, states, p = normal(2, 4, 300), normal(2, 300, seed=1), normal(300, seed=2)
    take = lambda: jax.jit(  # noqa: E731
        lambda x: ost.recurrent_net(leaky, x, states, params=p).outputs
    )(x)
    before = len(calls())
    jax.block_until_ready(take())
    assert not launches(before)
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    jax.block_until_ready(take())
    assert len(launches(before)) == 1
    jax.clear_caches()


@needs_emulator
def test_explain_tells_what_the_kernel_is(on_gpu, monkeypatch):
    on_cuda = backends.Place("cuda", "`x` is on the cuda")
    monkeypatch.setattr(explanation, "place_of", lambda x: on_cuda)
    x, states, p = normal(2, 4, 3), normal(2, 3, seed=1), normal(3, seed=2)
    told = ost.explain(leaky, x, states, params=p, backend="cuda")
    assert told.backend == "cuda" and "one kernel of 2 x 3 threads" in told.why
    assert str(told).startswith("cuda loop: Emulated GPU")
    x, states, p = normal(2, 4, 300), normal(2, 300, seed=1), normal(300, seed=2)
    told = ost.explain(leaky, x, states, params=p)
    assert told.backend == "xla" and "not been measured" in told.rejected["cuda"]
    told = ost.explain(
        lambda p, s, x, t: (s @ p + x, s), x, states, params=jnp.eye(300)
    )
    assert told.backend == "xla" and "`dot_general` at" in told.rejected["cuda"]


@needs_emulator
def test_small_steps_are_taken_where_kernels_are_asked_for(on_gpu, monkeypatch):
    x, states, p = normal(2, 4, 3), normal(2, 3, seed=1), normal(3, seed=2)
    run = lambda x: ost.recurrent_net(leaky, x, states, params=p).outputs  # noqa: E731
    want = run(x)
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    before = len(calls())
    assert_close(jax.jit(run)(x), want)
    assert len(launches(before)) == 1
    jax.clear_caches()


def test_a_gpu_is_called_as_programs_call_it():
    def on(platform, version):
        client = types.SimpleNamespace(platform_version=version)
        device = types.SimpleNamespace(platform=platform, client=client)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "local_devices", lambda: [device])
            return backends.place_of(jax.ShapeDtypeStruct((), "float32")).platform

    assert on("gpu", "PJRT C API\ncuda 12090") == "cuda"
    assert on("gpu", "PJRT C API\nrocm 60300") == "rocm"
    assert on("cpu", "cpu") == "cpu"


@needs_emulator
def test_a_kernel_that_failed_its_trial_is_not_taken(on_gpu, monkeypatch):
    x, states, p = normal(2, 4, 3), normal(2, 3, seed=1), normal(3, seed=2)
    monkeypatch.setattr(check, "failure", lambda *_: "it is wrong")
    with pytest.raises(NotImplementedError, match="cannot run this step: it is wrong"):
        ost.recurrent_net(leaky, x, states, params=p, backend="cuda")


@needs_emulator
def test_arrays_that_are_split_over_devices_are_refused(on_gpu):
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("b"))
    x, states = normal(2, 4, 3), normal(2, 3, seed=1)
    p = normal(3, seed=2)

    def run(x, states, backend="cuda"):
        return ost.recurrent_net(leaky, x, states, params=p, backend=backend).outputs

    given = jax.device_put((x, states), split)
    with pytest.raises(NotImplementedError, match="split over devices; use jax.shard"):
        jax.jit(run)(*given)
    spec = jax.P("b")
    local = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    assert_close(jax.jit(local)(*given), run(x, states, "scan"))
