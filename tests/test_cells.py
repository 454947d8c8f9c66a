"""Tests of every cell against numpy, step by step and fused."""

import functools as ft

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    CASES,
    FUSED,
    HIDDEN,
    LENGTHS,
    STEPS,
    assert_gradients,
    compiled_net,
    count,
    make,
    net,
    numpy_tree,
    oracle,
    weigh,
)
from closures import fast_jit
from harness import assert_says
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import cells
from ostinato.cells import fused

POLICIES = ("zero", "drop")  # "hold" is run for every cell
every_cell = pytest.mark.parametrize("name", CASES)
fused_cells = pytest.mark.parametrize("name", FUSED)
other_cells = pytest.mark.parametrize("name", [n for n in CASES if n not in FUSED])


def assert_trees_close(got, want, *, dtype=np.float64, terms=100):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype=dtype, terms=terms)


@every_cell
def test_step_equals_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    x = np.asarray(x)[:, 0]
    got = numpy_tree(fast_jit(case.cell)(params, states, x, 0))
    p, given = numpy_tree((params, (states, x)))
    for b in range(BATCH):
        row = lambda tree, b=b: jax.tree.map(lambda a: a[b], tree)  # noqa: E731
        assert_trees_close(row(got), case.oracle(p, *row(given)))


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, "hold") for name in CASES]
    + [(name, padding) for name in ("lstm", "gru-after") for padding in POLICIES],
)
def test_sequence_equals_numpy(name, padding):
    case = CASES[name]
    params, x, states = make(case, lengths=LENGTHS)
    got = compiled_net(case.cell, params, x, states, LENGTHS, padding=padding)
    want = oracle(case, params, x, states, lengths=LENGTHS, padding=padding)
    assert_trees_close(got[:2], want[:2])


@every_cell
@pytest.mark.parametrize(("batch", "steps"), [(BATCH, 0), (0, STEPS)])
def test_no_steps_and_no_rows_are_allowed(name, batch, steps):
    case = CASES[name]
    params, x, states = make(case)
    x, states = x[:batch, :steps], jax.tree.map(lambda a: a[:batch], states)
    got = compiled_net(case.cell, params, x, states)
    assert got.outputs.shape[:2] == (batch, steps)
    assert_trees_close(got.states, states)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [(name, LENGTHS) for name in CASES] + [(name, None) for name in FUSED],
)
def test_reversed_sequence_equals_numpy(name, lengths):
    case = CASES[name]
    params, x, states = make(case, lengths=lengths)
    got = compiled_net(case.cell, params, x, states, lengths, reverse=True)
    want = oracle(case, params, x, states, lengths=lengths, reverse=True)
    assert_trees_close(got[:2], want[:2])


@every_cell
def test_all_states_resets_and_time_major_equal_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    resets = np.random.default_rng(3).random((BATCH, STEPS)) < 0.3
    want = oracle(case, params, x, states, resets=resets)
    got = compiled_net(
        case.cell,
        params,
        jnp.swapaxes(x, 0, 1),
        states,
        resets=jnp.asarray(resets.T),
        time_major=True,
        return_all_states=True,
    )
    swap = lambda tree: jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)  # noqa: E731
    assert_trees_close(
        (swap(got.outputs), got.states, swap(got.all_states)), tuple(want)
    )


@fused_cells
def test_resets_equal_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    resets = np.random.default_rng(3).random((BATCH, STEPS)) < 0.3
    want = oracle(case, params, x, states, resets=resets)
    got = compiled_net(case.cell, params, x, states, resets=jnp.asarray(resets))
    assert_trees_close(got[:2], want[:2])


@every_cell
def test_gradients_equal_finite_differences(name):
    case = CASES[name]
    rng = np.random.default_rng(7)
    params, x, states = make(case, lengths=LENGTHS)
    loss = weigh(rng, oracle(case, params, x, states, lengths=LENGTHS))
    assert_gradients(
        lambda *args: loss(net(case.cell, *args, LENGTHS)),
        lambda *args: loss(oracle(case, *args, lengths=LENGTHS)),
        (params, x, states),
        rng,
    )


# ------------------------------------------------------------------- how it is computed


@fused_cells
def test_standard_cells_run_fused_and_equal_their_steps(name):
    case = CASES[name]
    params, x, states = make(case, lengths=LENGTHS)

    def run(options, *args):
        out = net(case.cell, *args, LENGTHS, **options)._replace(all_states=None)
        return jnp.sum(jnp.sin(out.outputs)), out

    results = []
    for options, calls, loops in (
        ({"return_all_states": True}, 0, 1),
        ({}, 1, 0),
        ({"recompute": ("gates",)}, 1, 0),
        ({"recompute": True, "segment_length": 2}, 2, 1),  # the first is shorter
    ):
        fn = ft.partial(run, options)
        jaxpr = jax.make_jaxpr(fn)(params, x, states).jaxpr
        assert count("ostinato_rnn", jaxpr) == calls
        assert count("scan", jaxpr) == loops
        both = fast_jit(jax.value_and_grad(fn, (0, 1, 2), True))
        results.append(both(params, x, states))
    for result in results[1:]:
        assert_trees_close(result, results[0], terms=1000)


@pytest.mark.parametrize("name", ["lstm", "gru-before"])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"reverse": True},
        {"padding": "hold", "lengths": LENGTHS},
        {"padding": "zero", "lengths": (1, 2, 4)},
        {"padding": "drop", "lengths": LENGTHS},
        {"resets": np.random.default_rng(3).random((BATCH, STEPS)) < 0.3},
    ],
    ids=lambda options: "-".join(options),
)
def test_segments_of_the_fused_operator_equal_numpy(name, time_major, options):
    case = CASES[name]
    params, x, states = make(case, lengths=options.get("lengths"))
    want = oracle(case, params, x, states, **options)
    if time_major:
        x = np.swapaxes(x, 0, 1)
        options = options | {k: v.T for k, v in options.items() if k == "resets"}
    got = compiled_net(
        case.cell, params, x, states, segment_length=2, time_major=time_major, **options
    )
    outputs = np.swapaxes(got.outputs, 0, 1) if time_major else got.outputs
    assert_trees_close((outputs, got.states), want[:2])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in FUSED for dtype in ("float32", "bfloat16")]
    + [(name, "float16") for name in ("lstm", "gru-after")],
)
def test_fused_and_steps_agree_in_narrow_dtypes(name, dtype):
    case = CASES[name]
    params, x, states = make(case, dtype)
    got = compiled_net(case.cell, params, x, states)
    steps = compiled_net(case.cell, params, x, states, return_all_states=True)
    want = oracle(case, params, x, states)
    for result in (got, steps):
        assert result.outputs.dtype == dtype
        assert_trees_close(result[:2], want[:2], dtype=dtype, terms=STEPS * HIDDEN**2)


@fused_cells
def test_weights_are_those_of_the_operator(name):
    cell = CASES[name].cell
    params, x, states = make(CASES[name])
    if getattr(cell, "forget_bias", 0.0):
        return  # not a parameter of the operator
    weights = ost.pack_weights([params], cell.spec)
    y, _ = ost.rnn(cell.spec, weights, x, jax.tree.map(lambda a: a[None], states))
    assert_trees_close(net(cell, params, x, states).outputs, y)
    for a, b in zip(ost.unpack_weights(weights, cell.spec)[0], params, strict=True):
        assert (a is None) == (b is None)
        assert a is None or bool((a == b).all())


@every_cell
def test_input_products_leave_the_loop(name):
    case = CASES[name]
    params, x, states = make(case)
    product = "conv_general_dilated" if name.startswith("conv") else "dot_general"

    def run(params, x):
        return net(case.cell, params, x, states, return_all_states=True).outputs

    jaxpr = jax.make_jaxpr(run)(params, x).jaxpr
    recurrent = count(product, jaxpr, inside="scan")
    expected = {"lstmp": 2, "gru-before": 2, "indrnn-relu": 0, "indrnn-tanh": 0}
    assert recurrent == expected.get(name, 1)
    assert count(product, jaxpr) == recurrent + 1


@other_cells
def test_gradient_of_input_weights_is_one_product(name):
    case = CASES[name]
    params, x, states = make(case)
    product = "conv_general_dilated" if name.startswith("conv") else "dot_general"

    def loss(w_ih):
        given = params._replace(w_ih=w_ih)
        return jnp.sum(net(case.cell, given, x, states).outputs)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params.w_ih).jaxpr
    outside = count(product, jaxpr) - count(product, jaxpr, inside="scan")
    assert outside == 2  # forward, and back to the weights


@every_cell
def test_recomputed_gates_keep_the_gradients(name):
    case = CASES[name]
    assert case.cell.recompute_names == ("gates",)
    params, x, states = make(case)

    def loss(recompute, params):
        return jnp.sum(
            net(case.cell, params, x, states, recompute=recompute).outputs ** 2
        )

    stored, again = (
        fast_jit(jax.grad(lambda p, r=r: loss(r, p)))(params) for r in ((), ("gates",))
    )
    assert_trees_close(again, stored, terms=1000)
    with pytest.raises(ValueError) as info:
        net(case.cell, params, x, states, recompute=("energies",))
    assert_says(info, "`recompute` 'energies' 'gates'")


@pytest.mark.parametrize("name", ["lstm", "milstm", "norm-gru", "peephole"])
def test_holds_under_vmap_and_jvp(name):
    case = CASES[name]
    params, x, states = make(case)
    more, _, _ = make(case, seed=1)
    both = jax.tree.map(lambda a, b: np.stack([a, b]), params, more)
    run = lambda p: net(case.cell, p, x, states).outputs  # noqa: E731

    @fast_jit
    def transformed(params, more):
        out, tangent = jax.jvp(run, (params,), (more,))
        pulled = jax.vjp(run, params)[1](out)[0]
        return jax.vmap(run)(both), jnp.stack([out, run(more)]), tangent, pulled

    mapped, looped, tangent, pulled = transformed(params, more)
    assert_trees_close(mapped, looped)
    left = np.vdot(looped[0], tangent)
    right = sum(jax.tree.leaves(jax.tree.map(np.vdot, pulled, more)))
    np.testing.assert_allclose(left, right, rtol=1e-12)


@pytest.mark.parametrize("name", ["milstm", "norm-gru", "conv-lstm-1d"])
@pytest.mark.parametrize("options", [{}, {"recompute": ("gates",)}], ids=str)
def test_second_derivative_equals_differences_of_the_first(name, options):
    case = CASES[name]
    params, x, states = make(case, lengths=LENGTHS)
    direction, _, _ = make(case, seed=1)

    def of(params):
        loss = lambda p: jnp.sum(  # noqa: E731
            net(case.cell, p, x, states, LENGTHS, **options).outputs ** 2
        )
        return jax.grad(loss)(params)

    second = lambda p, d: jax.jvp(of, (p,), (d,))[1]  # noqa: E731
    got = fast_jit(second)(params, direction)
    gradient, h = fast_jit(of), 1e-5
    p, d = numpy_tree((params, direction))
    ends = [
        numpy_tree(gradient(jax.tree.map(lambda p, d, s=s: p + s * h * d, p, d)))
        for s in (1, -1)
    ]
    want = jax.tree.map(lambda a, b: (a - b) / (2 * h), *ends)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@other_cells
def test_float32_is_kept(name):
    case = CASES[name]
    params, x, states = make(case, "float32")
    got = compiled_net(case.cell, params, x, states)
    want = oracle(case, params, x, states)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_trees_close(got[:2], want[:2], dtype="float32", terms=STEPS * HIDDEN**2)


@other_cells
def test_bfloat16_is_kept_and_has_gradients(name):
    case = CASES[name]
    params, x, states = make(case, "bfloat16")
    loss = lambda *args: jnp.sum(net(case.cell, *args).outputs)  # noqa: E731
    grads = fast_jit(jax.grad(loss, (0, 1, 2)))(params, x, states)
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


# -------------------------------------------------------------------------- parameters


@every_cell
def test_init_draws_what_the_cell_takes(name):
    cell = CASES[name].cell
    init = fast_jit(cell.init)
    params, again, other = (init(jax.random.key(n)) for n in (1, 1, 2))
    jax.tree.map(assert_same_bits, params, again)
    assert not (np.asarray(params.w_ih) == np.asarray(other.w_ih)).all()
    states = cell.initial_state(2)
    for leaf in jax.tree.leaves((params, states)):
        assert leaf.dtype == jnp.float32
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(states))
    cell.prepare(params)


def test_multiplicative_and_norm_parameters_begin_neutral():
    params = cells.LayerNormMILSTM(2, 3).init(jax.random.key(0))
    for field in ("alpha", "beta1", "beta2", "scale"):
        assert bool((getattr(params, field) == 1).all())
    for field in ("b", "offset"):
        assert not bool(getattr(params, field).any())
    w_hh = cells.IndRNN(2, 50).init(jax.random.key(0)).w_hh
    assert 0 <= float(w_hh.min()) < 0.2 and 0.8 < float(w_hh.max()) <= 1


@pytest.mark.parametrize("name", ["gru-after", "lstm", "conv-lstm-2d"])
def test_trainable_state_gathers_the_gradient_of_all_rows(name):
    case = CASES[name]
    params, x, states = make(case)
    state = cells.trainable_state(case.cell, jnp.float64)
    for leaf, batched in zip(
        jax.tree.leaves(state), jax.tree.leaves(states), strict=True
    ):
        assert leaf.shape == batched.shape[1:] and not bool(leaf.any())
    one = jax.tree.map(lambda a: a[0], states)
    loss = lambda s: jnp.sum(jnp.sin(net(case.cell, params, x, s).outputs))  # noqa: E731
    got = fast_jit(jax.grad(lambda s: loss(cells.repeat_state(s, BATCH))))(one)
    rows = fast_jit(jax.grad(loss))(cells.repeat_state(one, BATCH))
    assert_trees_close(got, jax.tree.map(lambda a: np.sum(a, axis=0), rows))


# --------------------------------------------------------------------------- explained


def test_explain_says_what_runs():
    x = jnp.zeros((2, 3, 4), jnp.float32)
    cell = cells.LSTM(4, 5)
    assert cells.explain(cell, x) == ost.explain(cell.spec, x)
    assert cells.explain(cells.Dropout(cell, outputs=0.5), x).backend == (
        cells.explain(cell, x).backend
    )
    two = cells.explain(cells.Bidirectional(cell), x)
    assert two.backend == cells.explain(cell, x).backend
    for options, words in (
        (dict(recompute=("energies",)), "`gates`"),
        (dict(return_all_states=True), "states"),
        (dict(window=2), "`window`"),
        (dict(reverse=True, seq_lengths=[1, 2]), "reverse"),
    ):
        said = cells.explain(cell, x, **options)
        assert said.backend == "xla" and words in said.rejected["cpu"]
    for options in (dict(recompute=("gates",)), dict(segment_length=3)):
        assert cells.explain(cell, x, **options) == cells.explain(cell, x)
    usual = dict(seq_lengths=None, reverse=False, recompute=(), window=1)
    usual["return_all_states"] = False
    assert fused.unsupported_reason(**usual) is None
    assert "`stride`" in fused.unsupported_reason(**usual, stride=2)
    said = cells.explain(cells.MILSTM(4, 5), x)
    assert "MILSTM" in said.rejected["cpu"]
    with pytest.raises(TypeError, match="one layer"):
        cells.explain(cells.Stack((cell,)), x)
    with pytest.raises(TypeError, match="`cell` must be a cell"):
        cells.explain(len, x)


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make_cell", "error", "words"),
    [
        (lambda: cells.LSTM(0, 3), ValueError, "`input_size` at least 1 0"),
        (lambda: cells.GRU(2, 1.5), TypeError, "`hidden_size` integer 1.5"),
        (lambda: cells.RNN(2, 3, "gelu"), ValueError, "`activation` 'tanh' 'gelu'"),
        (lambda: cells.IndRNN(2, 3, "gelu"), ValueError, "`activation` 'relu' 'gelu'"),
        (lambda: cells.LSTM(2, 3, "1"), TypeError, "`forget_bias` number"),
        (lambda: cells.LSTM(2, 3, float("nan")), ValueError, "`forget_bias` finite"),
        (lambda: cells.LSTMP(2, 3, proj_size=3), ValueError, "`proj_size` 3"),
        (lambda: cells.LSTMP(2, 3, proj_size=0), ValueError, "`proj_size` 0"),
        (lambda: cells.GRU(2, 3, 1), TypeError, "`reset_after`"),
        (lambda: cells.LayerNormGRU(2, 3, 0.0), ValueError, "`epsilon` above 0"),
        (lambda: cells.ConvLSTM(1, 1, 3, (3,)), TypeError, "`grid` tuple"),
        (lambda: cells.ConvLSTM(1, 1, (3, 3), (3,)), ValueError, "`grid` `kernel`"),
        (lambda: cells.ConvLSTM(1, 1, (3, 0), (3, 3)), ValueError, "`grid` at least 1"),
        (
            lambda: cells.LSTM(2, 3).init(jax.random.key(0), jnp.int32),
            TypeError,
            "`dtype` floating int32",
        ),
        (lambda: cells.LSTM(2, 3).init(0), TypeError, "`key` PRNG"),
        (lambda: cells.trainable_state(len), TypeError, "`cell`"),
        (lambda: cells.repeat_state(jnp.zeros(2), 1.5), TypeError, "`batch`"),
    ],
)
def test_bad_cell_is_refused(make_cell, error, words):
    with pytest.raises(error) as info:
        make_cell()
    assert_says(info, words)


def _change(params, x, states, **changes):
    given = {"params": params, "x": x, "states": states} | changes
    return given["params"], given["x"], given["states"]


@pytest.mark.parametrize("steps", [False, True], ids=["fused", "steps"])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p, x, s: _change(p, x[..., :2], s), ValueError, "input 3 2"),
        (lambda p, x, s: _change(p, x.astype("float32"), s), TypeError, "float32"),
        (lambda p, x, s: _change(p, x, s[0]), TypeError, "(h, c)"),
        (
            lambda p, x, s: _change(p, x, (s[0][:, :2], s[1])),
            ValueError,
            "shape (3, 2)",
        ),
        (
            lambda p, x, s: _change(p, x, (s[0].astype("float32"), s[1])),
            TypeError,
            "float32",
        ),
        (
            lambda p, x, s: _change(p._replace(w_hh=p.w_hh.T), x, s),
            ValueError,
            "`params.w_hh` (20, 5) (5, 20)",
        ),
        (
            lambda p, x, s: _change(p._replace(b_ih=None), x, s),
            ValueError,
            "`params.b_ih` (20,) None",
        ),
        (lambda p, x, s: _change(None, x, s), TypeError, "`params` LayerWeights"),
        (
            lambda p, x, s: _change(p._replace(b_ih=p.b_ih.astype("float32")), x, s),
            TypeError,
            "`params.b_ih` float32",
        ),
    ],
)
def test_bad_arguments_are_refused(change, error, words, steps):
    case = CASES["lstm"]
    with pytest.raises(error) as info:
        net(case.cell, *change(*make(case)), return_all_states=steps)
    assert_says(info, words)


def test_wrong_grid_is_refused():
    case = CASES["conv-lstm-2d"]
    params, x, states = make(case)
    with pytest.raises(ValueError, match=r"`inputs` must .* grid=\(3, 4\)"):
        net(case.cell, params, x[:, :, :2], states)
    with pytest.raises(ValueError, match=r"`h` must have shape"):
        net(case.cell, params, x, (states[0][:, :2], states[1]))
