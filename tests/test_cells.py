"""Every cell against numpy, step by step and fused."""

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
    count,
    make,
    net,
    numpy_tree,
    oracle,
    weigh,
)
from harness import assert_says
from tolerance import assert_close

import ostinato as ost
from ostinato import cells

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
    got = jax.jit(case.cell)(params, states, x[:, 0], 0)
    p = numpy_tree(params)
    for b in range(BATCH):
        row = numpy_tree(jax.tree.map(lambda a, b=b: a[b], (states, x[:, 0])))
        want = case.oracle(p, *row)
        assert_trees_close(jax.tree.map(lambda a, b=b: a[b], got), want)


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, "hold") for name in CASES]
    + [(name, padding) for name in FUSED for padding in ("zero", "drop")],
)
def test_sequence_equals_numpy(name, padding):
    case = CASES[name]
    params, x, states = make(case, lengths=LENGTHS)
    got = net(case.cell, params, x, states, LENGTHS, padding=padding)
    want = oracle(case, params, x, states, lengths=LENGTHS, padding=padding)
    assert_trees_close(got[:2], want[:2])


@every_cell
@pytest.mark.parametrize(("batch", "steps"), [(BATCH, 0), (0, STEPS)])
def test_no_steps_and_no_rows_are_allowed(name, batch, steps):
    case = CASES[name]
    params, x, states = make(case)
    x, states = x[:batch, :steps], jax.tree.map(lambda a: a[:batch], states)
    got = net(case.cell, params, x, states)
    assert got.outputs.shape[:2] == (batch, steps)
    assert_trees_close(got.states, states)


@every_cell
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "ragged"])
def test_reversed_sequence_equals_numpy(name, lengths):
    case = CASES[name]
    params, x, states = make(case, lengths=lengths)
    got = net(case.cell, params, x, states, lengths, reverse=True)
    want = oracle(case, params, x, states, lengths=lengths, reverse=True)
    assert_trees_close(got[:2], want[:2])


@every_cell
def test_all_states_resets_and_time_major_equal_numpy(name):
    case = CASES[name]
    params, x, states = make(case)
    resets = np.random.default_rng(3).random((BATCH, STEPS)) < 0.3
    want = oracle(case, params, x, states, resets=resets)
    got = net(
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
    alone = net(case.cell, params, x, states, resets=jnp.asarray(resets))
    assert_trees_close(alone[:2], want[:2])


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

    def run(recompute, *args):
        out = net(case.cell, *args, LENGTHS, recompute=recompute)
        return jnp.sum(jnp.sin(out.outputs)), out

    results = []
    for recompute, calls, loops in (((), 1, 0), (("gates",), 0, 1)):
        fn = lambda *args, r=recompute: run(r, *args)  # noqa: E731
        jaxpr = jax.make_jaxpr(fn)(params, x, states).jaxpr
        assert count("ostinato_rnn", jaxpr) == calls
        assert count("scan", jaxpr) == loops
        results.append(jax.value_and_grad(fn, (0, 1, 2), True)(params, x, states))
    assert_trees_close(*results, terms=1000)


@fused_cells
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fused_and_steps_agree_in_narrow_dtypes(name, dtype):
    case = CASES[name]
    params, x, states = make(case, dtype)
    got = net(case.cell, params, x, states)
    steps = net(case.cell, params, x, states, recompute=("gates",))
    want = oracle(case, params, x, states)
    for result in (got, steps):
        assert result.outputs.dtype == dtype
        assert_trees_close(result[:2], want[:2], dtype=dtype, terms=STEPS * HIDDEN**2)


@fused_cells
def test_weights_are_those_of_the_operator(name):
    cell = CASES[name].cell
    params, x, states = make(CASES[name])
    if getattr(cell, "forget_bias", 0.0):
        return  # not a parameter: the operator has none
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
        return net(case.cell, params, x, states, recompute=("gates",)).outputs

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

    stored, again, every = (
        jax.jit(jax.grad(lambda p, r=r: loss(r, p)))(params)
        for r in ((), ("gates",), True)
    )
    assert_trees_close(again, stored, terms=1000)
    assert_trees_close(every, stored, terms=1000)
    with pytest.raises(ValueError) as info:
        net(case.cell, params, x, states, recompute=("energies",))
    assert_says(info, "`recompute` 'energies' 'gates'")


@pytest.mark.parametrize("name", ["lstm", "milstm", "norm-gru", "peephole"])
def test_holds_under_vmap_and_jvp(name):
    case = CASES[name]
    params, x, states = make(case)
    more, _, _ = make(case, seed=1)
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), params, more)
    run = lambda p: net(case.cell, p, x, states).outputs  # noqa: E731
    assert_trees_close(jax.vmap(run)(both), jnp.stack([run(params), run(more)]))
    out, tangent = jax.jvp(run, (params,), (more,))
    pulled = jax.vjp(run, params)[1](out)[0]
    left = jnp.sum(out * tangent)
    right = sum(
        jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), pulled, more))
    )
    np.testing.assert_allclose(left, right, rtol=1e-12)


@pytest.mark.parametrize("name", ["milstm", "norm-gru", "conv-lstm-1d"])
@pytest.mark.parametrize("options", [{}, {"recompute": ("gates",)}], ids=str)
def test_second_derivative_equals_differences_of_the_first(name, options):
    case = CASES[name]
    params, x, states = make(case, lengths=LENGTHS)
    direction, _, _ = make(case, seed=1)

    @jax.jit
    def gradient(params):
        loss = lambda p: jnp.sum(  # noqa: E731
            net(case.cell, p, x, states, LENGTHS, **options).outputs ** 2
        )
        return jax.grad(loss)(params)

    h = 1e-5
    got = jax.jvp(gradient, (params,), (direction,))[1]
    ends = [
        gradient(jax.tree.map(lambda p, d, s=s: p + s * h * d, params, direction))
        for s in (1, -1)
    ]
    want = jax.tree.map(lambda a, b: (a - b) / (2 * h), *ends)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@other_cells
def test_float32_is_kept(name):
    case = CASES[name]
    params, x, states = make(case, "float32")
    got = net(case.cell, params, x, states)
    want = oracle(case, params, x, states)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype("float32")}
    assert_trees_close(got[:2], want[:2], dtype="float32", terms=STEPS * HIDDEN**2)


@other_cells
def test_bfloat16_is_kept_and_has_gradients(name):
    case = CASES[name]
    params, x, states = make(case, "bfloat16")
    loss = lambda *args: jnp.sum(net(case.cell, *args).outputs)  # noqa: E731
    grads = jax.grad(loss, (0, 1, 2))(params, x, states)
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jnp.bfloat16 and bool(jnp.isfinite(leaf).all())


# -------------------------------------------------------------------------- parameters


@every_cell
def test_init_draws_what_the_cell_takes(name):
    cell = CASES[name].cell
    params = cell.init(jax.random.key(1))
    again = cell.init(jax.random.key(1))
    other = cell.init(jax.random.key(2))
    assert_trees_close(params, again, dtype=np.float32)
    assert not bool((params.w_ih == other.w_ih).all())
    for leaf in jax.tree.leaves((params, cell.initial_state(2))):
        assert leaf.dtype == jnp.float32
    assert all(not bool(a.any()) for a in jax.tree.leaves(cell.initial_state(2)))
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
    got = jax.grad(lambda s: loss(cells.repeat_state(s, BATCH)))(one)
    rows = jax.grad(loss)(cells.repeat_state(one, BATCH))
    assert_trees_close(got, jax.tree.map(lambda a: jnp.sum(a, axis=0), rows))


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
        (dict(recompute=("gates",)), "`recompute`"),
        (dict(segment_length=3), "`segment_length`"),
        (dict(return_all_states=True), "states"),
        (dict(window=2), "`window`"),
        (dict(reverse=True, seq_lengths=[1, 2]), "reversed"),
    ):
        said = cells.explain(cell, x, **options)
        assert said.backend == "xla" and words in said.rejected["cpu"]
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


@pytest.mark.parametrize("recompute", [(), ("gates",)], ids=["fused", "steps"])
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
def test_bad_arguments_are_refused(change, error, words, recompute):
    case = CASES["lstm"]
    with pytest.raises(error) as info:
        net(case.cell, *change(*make(case)), recompute=recompute)
    assert_says(info, words)


def test_wrong_grid_is_refused():
    case = CASES["conv-lstm-2d"]
    params, x, states = make(case)
    with pytest.raises(ValueError, match=r"`inputs` must .* grid=\(3, 4\)"):
        net(case.cell, params, x[:, :, :2], states)
    with pytest.raises(ValueError, match=r"`h` must have shape"):
        net(case.cell, params, x, (states[0][:, :2], states[1]))
