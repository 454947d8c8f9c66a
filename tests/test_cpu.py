"""The cpu backend: what every backend must pass, then what kernels can get wrong.

Sizes here do not fit vectors, and rows end at different steps, so that threads get
uneven work. What threads compute must not depend on how many there are.
"""

import functools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_ID, CASES, Case
from conformance import Conformance
from emulation import EMULATED, level, why_not
from harness import (
    arguments,
    assert_padding_is_exact,
    assert_same,
    call,
    expected,
    join,
    named,
    options_of,
    spec_of,
    value_and_pullback,
)
from oracles.loop64 import Spec
from tolerance import assert_close, assert_same_bits, tolerance

import ostinato as ost
from ostinato import _config, _native

library, reason = _native.status()
pytestmark = pytest.mark.skipif(library is None, reason=f"no native library: {reason}")
DTYPES = ("float64", "float32", "bfloat16")


class TestCpu(Conformance):
    backend = "cpu"
    dtypes = DTYPES
    refuses = frozenset(case.id for case in CASES if not case.spec.reset_after)


# ----------------------------------------------------- instruction sets and threads

ISAS = [isa for isa in _config.CPU_ISAS if why_not(isa) is None]
LEVELS = [
    *(level(isa, dtype) for isa in _config.CPU_ISAS for dtype in DTYPES),
    level(EMULATED, "bfloat16"),
]


def wide(id: str, mode: str, hidden: int, batch: int, ragged: bool, **fields) -> Case:
    own = {k: fields.pop(k) for k in tuple(fields) if k in Case.__dataclass_fields__}
    steps, lengths = 40, None
    if ragged:  # in no order, the longest and the empty row among them
        drawn = np.random.default_rng(batch).integers(1, steps, batch)
        drawn[batch // 2], drawn[batch // 3] = steps, 0
        lengths = tuple(map(int, drawn))
    spec = Spec(mode, fields.pop("input_size", 19), hidden, **fields)
    return Case(id, spec, steps, batch, lengths, **own)


DEEP = dict(num_layers=2, bidirectional=True)
WIDE = [
    wide("lstm-H17-B33", "lstm", 17, 33, True, **DEEP),
    wide("lstm-H33-B13", "lstm", 33, 13, True, resets=True, cell_clip=0.5),
    wide("lstm-H70-B5", "lstm", 70, 5, True, proj_size=33, bidirectional=True),
    wide("lstm-H130-B1", "lstm", 130, 1, False, num_layers=2),
    wide("gru-H33-B33", "gru", 33, 33, True, num_layers=2),
    wide("gru-H70-B13", "gru", 70, 13, True, dropout=0.3, time_major=True, **DEEP),
    wide("gru-H130-B2", "gru", 130, 2, False, bidirectional=True),
    wide("tanh-H33-B1", "rnn_tanh", 33, 1, False, num_layers=3),
    wide("tanh-H130-B5", "rnn_tanh", 130, 5, True, padding="hold", **DEEP),
    wide("lstm-heads-H70-B13", "lstm", 70, 13, True, num_heads=5, **DEEP),
    wide("gru-heads-H96-B2", "gru", 96, 2, False, num_heads=3, num_layers=2),
    wide("tanh-heads-H60-B5", "rnn_tanh", 60, 5, True, num_heads=20),
    wide("slstm-H33-B13", "slstm", 33, 13, True, resets=True, num_layers=2),
    wide("slstm-heads-H70-B5", "slstm", 70, 5, True, proj_size=35, num_heads=5),
    wide("slstm-H40-B2", "slstm", 40, 2, False, num_heads=40, bidirectional=True),
    wide("relu-H17-B13", "rnn_relu", 17, 13, True, input_size=17, input_mode="skip"),
]


@functools.cache
def compiled(case: Case, **options):
    return value_and_pullback(case, "cpu", **options)


@pytest.mark.alike
@pytest.mark.parametrize("isa, dtype", LEVELS)
@pytest.mark.parametrize("case", WIDE, ids=lambda c: c.id)
def test_every_instruction_set_and_any_number_of_threads(case, isa, dtype, configure):
    if case.spec.mode == "rnn_relu" and dtype == "bfloat16":
        pytest.skip("the slope jumps where 16 bits round a 0 to something above it")
    made, run = arguments(case, dtype), compiled(case)
    configure(isa, 1)
    alone = named(case, *run(made))
    assert_same(case, alone, expected(case, dtype), dtype=dtype)
    assert_padding_is_exact(case, alone)
    for threads in (2, 3):
        configure(isa, threads)
        for name, value in named(case, *run(made)).items():
            assert_same_bits(value, alone[name], f"{name}, {threads} threads")


@pytest.mark.parametrize("case", [WIDE[0], WIDE[5]], ids=lambda c: c.id)
def test_recomputed_gates_do_not_depend_on_threads(case, configure):
    made, run = arguments(case, "float32"), compiled(case, recompute=True)
    configure(ISAS[-1], 1)
    alone = named(case, *run(made))
    assert_same(case, alone, expected(case, "float32"), dtype="float32")
    configure(ISAS[-1], 2)
    for name, value in named(case, *run(made)).items():
        assert_same_bits(value, alone[name], name)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_clip_on_every_instruction_set(isa, dtype, configure):
    """Minimum and maximum of vectors treat a NaN each in their own way."""
    suite = TestCpu()
    suite.dtype = dtype
    configure(isa, 2)
    suite.test_clip_nan_stops_a_nan_in_the_cell()
    suite.test_without_clip_nan_a_nan_in_the_cell_shows()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_extreme_inputs_give_what_xla_gives(mode, dtype, configure):
    """NaN and infinities in some rows, large and tiny values in others."""
    spec = ost.RNNSpec(mode, 3, 21)
    weights = ost.init_weights(jax.random.key(0), spec, jnp.float64).astype(dtype)
    x = np.array(jax.random.normal(jax.random.key(1), (7, 6, 3)))
    x[0, 2, 1], x[1, 2, 1], x[2, 2, 1] = np.nan, np.inf, -np.inf
    x[3:7] *= np.array([1e30, 1e4, 1e-40, 1.0])[:, None, None]
    x, tol = jnp.asarray(x, dtype), tolerance(dtype, terms=1000)

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend):
        out, pull = jax.vjp(lambda x: ost.rnn(spec, weights, x, backend=backend), x)
        return jax.tree.leaves((out, pull(jax.tree.map(jnp.ones_like, out))))

    for isa in ISAS:
        configure(isa, 2)
        got = run("cpu")
        assert np.isnan(got[0][0, 2:]).all() and np.isfinite(got[0][4:]).all()
        for a, b in zip(got, run("xla"), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=isa)
            if mode != "rnn_relu":  # which has no bounds, so neither has the rounding
                np.testing.assert_allclose(a, b, rtol=tol, atol=tol, err_msg=isa)


# ------------------------------------------------------------ what other backends read


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "id", ["lstm-proj-L2-bi-ragged", "lstm-resets", "gru-L2-bi-ragged", "tanh-resets"]
)
def test_what_is_saved_is_what_xla_saves(id, recompute):
    """Tangents and second derivatives, which run on xla, read it."""
    case = BY_ID[id]
    made, spec = arguments(case), spec_of(case)

    def saved(backend):
        out = ost.rnn_forward(
            spec,
            made.weights,
            made.x,
            join(made.h_0, made.c_0),
            recompute=recompute,
            **options_of(case, made, backend),
        )
        return out[1].residuals.saved

    got, want = saved("cpu"), saved("xla")
    assert jax.tree.structure(got) == jax.tree.structure(want)
    valid = np.arange(case.steps)[:, None] < np.asarray(case.lengths)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.isfinite(a).all()  # a NaN past the end would survive a product with 0
        assert_close(np.asarray(a)[valid], np.asarray(b)[valid], terms=case.terms)


@pytest.mark.parametrize("time_major", [False, True])
def test_neither_layout_is_copied(time_major):
    spec = ost.RNNSpec("lstm", 3, 5, 2, bidirectional=True)

    def loss(weights, x, lengths):
        out = ost.rnn(
            spec, weights, x, seq_lengths=lengths, time_major=time_major, backend="cpu"
        )
        return jnp.sum(out.y)

    args = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((spec.num_params,), jnp.float32),
            ((7, 7, 3), jnp.float32),
            ((7,), jnp.int32),
        )
    ]
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().as_text()
    operations = set(re.findall(r"= \S+ ([\w-]+)\(", text))
    assert "custom-call" in text and not operations & {"copy", "transpose"}


# -------------------------------------------------------------------------------- vmap


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id", ["lstm-H33-B13", "gru-H130-B2", "tanh-H33-B1"])
def test_an_ensemble_has_the_bits_of_its_members(id, dtype):
    """vmap over weights is one call, with x shared or not."""
    case = next(case for case in WIDE if case.id == id)
    made = arguments(case, dtype)
    scales = jnp.asarray([1.0, 0.5, -1.0], dtype)
    weights = scales[:, None] * made.weights[None]
    xs = scales[:, None, None, None] * made.x[None]

    def one(weights, x):
        def run(weights, x):
            return call(case, made._replace(weights=weights, x=x), "cpu")

        out, pull = jax.vjp(run, weights, x)
        return out, pull(ost.RNNOutput(made.dy, join(made.dh_n, made.dc_n)))

    alone = jax.jit(one)
    for x, axis in ((made.x, None), (xs, 0)):
        many = jax.jit(jax.vmap(one, in_axes=(0, axis)))
        text = many.lower(weights, x).as_text()
        assert text.count("@ostinato_rnn_fwd") == text.count("@ostinato_rnn_bwd") == 1
        got = many(weights, x)
        for member in range(3):
            want = alone(weights[member], x if axis is None else x[member])
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert_same_bits(a[member], b)


# ------------------------------------------------------------------------- concurrency


def test_calls_from_many_threads_do_not_disturb_each_other():
    """Eight threads, a network each, 200 calls: the first result, again and again."""

    def repeat(case: Case) -> None:
        made, run = arguments(case, "float32"), compiled(case)
        first = jax.tree.leaves(run(made))
        for _ in range(200):
            for a, b in zip(jax.tree.leaves(run(made)), first, strict=True):
                assert_same_bits(a, b, case.id)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, WIDE[:8]))


def test_independent_calls_of_one_program_do_not_wait_for_each_other():
    """XLA may run them at once, on threads of its own."""
    spec = ost.RNNSpec("lstm", 19, 70)
    weights = ost.init_weights(jax.random.key(0), spec)
    xs = jax.random.normal(jax.random.key(1), (6, 13, 40, 19), jnp.float32)

    def run(xs):
        return [ost.rnn(spec, weights, x, backend="cpu").y for x in xs]

    together = jax.jit(run)
    want = [jax.jit(run)(x[None])[0] for x in xs]
    for _ in range(50):
        for a, b in zip(together(xs), want, strict=True):
            assert_same_bits(a, b)


FEW = [  # so few tokens that weights are read as they lie, in several blocks
    Case("lstm-proj", Spec("lstm", 3, 80, proj_size=70), 2, 2),
    Case("tanh-heads", Spec("rnn_tanh", 3, 36, num_heads=3), 2, 2),
    Case("gru-heads-odd", Spec("gru", 5, 35, num_heads=5), 4, 1),
    Case("slstm-heads-proj", Spec("slstm", 3, 42, proj_size=21, num_heads=7), 1, 4),
]


MORE = [  # of plain RNNs, a block of units has several vectors
    Case("tanh-heads-of-1", Spec("rnn_tanh", 3, 40, num_heads=40), 5, 3),
    Case("lstm-heads-of-1", Spec("lstm", 3, 40, num_heads=40), 5, 3),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FEW + MORE, ids=lambda c: c.id)
def test_few_tokens_and_many_heads(case, dtype):
    TestCpu().check(case, dtype)


@pytest.mark.parametrize("mode", ["lstm", "gru", "slstm"])
def test_recomputed_gates_of_inputs_that_are_added(mode):
    """Blocks of units after the first have their own elements of the input."""
    case = Case(f"{mode}-skip", Spec(mode, 37, 37, input_mode="skip"), 4, 3)
    TestCpu().check(case, recompute=True)


@pytest.mark.parametrize("mode", ["slstm", "gru"])
def test_threads_that_share_the_heads_of_both_directions(mode, configure):
    fields = dict(num_heads=4, bidirectional=True)
    case = wide(f"{mode}-both", mode, 64, 2, True, **fields)
    made, run = arguments(case, "float32"), compiled(case)
    configure("avx512", 1)
    alone = named(case, *run(made))
    assert_same(case, alone, expected(case, "float32"), dtype="float32")
    configure("avx512", 4)
    for name, value in named(case, *run(made)).items():
        assert_same_bits(value, alone[name], name)


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_without_a_bound_nan_becomes_infinity(backend):
    spec = ost.RNNSpec("lstm", 2, 19, cell_clip=float("inf"), clip_nan=True)
    weights = ost.init_weights(jax.random.key(0), spec)
    h_0, x = jnp.zeros((1, 3, 19)), jnp.ones((3, 4, 2))
    state = h_0, jnp.full_like(h_0, jnp.nan)
    y, (_, c_n) = ost.rnn(spec, weights.astype(x.dtype), x, state, backend=backend)
    assert np.isfinite(y).all() and np.isposinf(c_n).all()
