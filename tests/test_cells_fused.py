"""How cells are computed: fused, in steps, under transformations."""

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
    assert_trees_close,
    compiled_net,
    count,
    make,
    net,
    numpy_tree,
    oracle,
)
from closures import fast_jit
from harness import assert_says
from tolerance import assert_close

import ostinato as ost
from ostinato import cells

every_cell = pytest.mark.parametrize("name", CASES)


fused_cells = pytest.mark.parametrize("name", FUSED)


other_cells = pytest.mark.parametrize("name", [n for n in CASES if n not in FUSED])


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_digits_of_a_forget_bias_are_not_lost(dtype):
    """0.015 and a constant of 64 have no sum in 16 bits."""
    cell = ost.cells.LSTM(1, 1, forget_bias=64.0)
    x, states = jnp.zeros((1, 3, 1), dtype), cell.initial_state(1, dtype)
    zeros = jax.tree.map(jnp.zeros_like, cell.init(jax.random.key(0), dtype))

    def run(b_f, b_h):
        params = zeros._replace(
            b_ih=jnp.array([0, b_f, 1, 4], dtype), b_hh=jnp.array([0, b_h, 0, 0], dtype)
        )
        c = ost.recurrent_net(cell, x, states, params=params).states[1]
        return c[0, 0].astype(jnp.float32)

    def exact(total):
        c = 0.0
        for _ in range(3):
            c = c / (1 + np.exp(-total)) + np.tanh(1.0) / 2
        return c

    # The gate is nearly open at 64.
    for b_f, b_h in ((-63.9, -0.1), (-64, 0.015), (0.015, -64)):
        added = float(jnp.asarray(b_f, dtype)) + float(jnp.asarray(b_h, dtype))
        got = run(b_f, b_h)
        np.testing.assert_allclose(got, exact(64 + added), rtol=2e-3)
    slopes = jax.grad(run, (0, 1))(-64.0, 0.015)
    step = 1e-4
    want = (exact(0.015 + step) - exact(0.015 - step)) / (2 * step)
    np.testing.assert_allclose(slopes, [want, want], rtol=1e-2)


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

    # Without gradients, XLA's loop multiplies several inputs with the steps.
    jaxpr = jax.make_jaxpr(lambda p, x: jax.vjp(run, p, x)[0])(params, x).jaxpr
    recurrent = count(product, jaxpr, inside="scan")
    expected = {"lstmp": 2, "gru-before": 2}
    without = ("indrnn", "para", "min-", "rg-")
    assert recurrent == (0 if name.startswith(without) else expected.get(name, 1))
    assert count(product, jaxpr) == recurrent + 1


@other_cells
def test_gradient_of_input_weights_is_one_product_of_all_steps(name):
    case = CASES[name]
    params, x, states = make(case)
    product = "conv_general_dilated" if name.startswith("conv") else "dot_general"

    def loss(w_ih):
        given = params._replace(w_ih=w_ih)
        return jnp.sum(net(case.cell, given, x, states).outputs)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params.w_ih).jaxpr
    outside = count(product, jaxpr) - count(product, jaxpr, inside="scan")
    # Forward, and back to the weights; our loop makes the same product of inputs once
    # more for the backward pass.
    assert outside in (2, 3)


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


OF_USERS = {
    "step": lambda self, p, s, x, t: jax.tree.map(
        lambda a: a / 2, type(self).__mro__[1].step(self, p, s, x, t)
    ),
    "precompute": lambda self, p, x: type(self).__mro__[1].precompute(self, p, x / 2),
    "prepare": lambda self, p: jax.tree.map(jnp.sin, p),
    "input_product": lambda self, p, x, first=0: jax.tree.map(
        lambda a: a / 2, type(self).__mro__[1].input_product(self, p, x, first)
    ),
}


@pytest.mark.parametrize("method", OF_USERS)
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU", "MinGRU"])
def test_methods_of_a_subclass_are_used(kind, method):
    if not hasattr(getattr(cells, kind), method):
        pytest.skip(f"{kind} has no {method}")
    plain = getattr(cells, kind)(4, 4)
    changed = type("Changed", (type(plain),), {method: OF_USERS[method]})(4, 4)
    params = plain.init(jax.random.key(0), jnp.float64)
    x = jax.random.normal(jax.random.key(1), (3, 5, 4), jnp.float64)

    def run(cell, params, backend=None):
        states = cell.initial_state(3, jnp.float64)
        return ost.recurrent_net(
            cell, x, states, params=params, backend=backend
        ).outputs

    state, want = changed.initial_state(3, jnp.float64), []
    for t in range(5):
        state, y = changed(params, state, x[:, t], jnp.int32(t))
        want.append(y)
    want = jnp.stack(want, 1)
    assert float(jnp.abs(run(plain, params) - want).max()) > 1e-3
    assert_close(run(changed, params), want, dtype=np.float64, terms=50)
    dropped = cells.Dropout(changed)
    assert_close(run(dropped, params), want, dtype=np.float64, terms=50)
    added = run(cells.Residual(changed), params)
    assert_close(added, want + x, dtype=np.float64, terms=50)
    stacked = run(cells.Stack((changed,)), (params,))
    assert_close(stacked, want, dtype=np.float64, terms=50)
    both = run(cells.Bidirectional(changed), cells.BothDirections(params, params))
    assert_close(both[..., :4], want, dtype=np.float64, terms=50)
    if kind in ("RNN", "LSTM", "GRU"):
        for cell in (changed, dropped):
            told = cells.explain(cell, x)
            assert "a step of its own" in told.rejected["cpu"]


@pytest.mark.parametrize("make", [cells.LSTM, ft.partial(cells.LSTMP, proj_size=2)])
def test_a_forget_gate_that_is_always_open(make):
    """An infinite bias beside a constant was inf - inf in the second bias."""
    cell = make(3, 4, forget_bias=1.0)
    params = cell.init(jax.random.key(0))
    params = params._replace(b_ih=params.b_ih.at[4:8].set(jnp.inf))
    x, states = jnp.ones((2, 3, 3), "f4"), cell.initial_state(2)

    def run(backend=None):
        net = ost.recurrent_net(cell, x, states, params=params, backend=backend)
        return net.outputs

    assert bool(jnp.all(jnp.isfinite(run())))
    np.testing.assert_allclose(run(), run("scan"), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "b_f", "rtol"), [("bfloat16", 2**-6, 4e-3), ("float16", 2**-9, 1e-3)]
)
def test_a_forget_bias_that_16_bits_do_not_hold_decays_as_it_says(dtype, b_f, rtol):
    """After many steps, the state shows what a rounded sum of biases would change."""
    cell, steps = ost.cells.LSTM(1, 1, forget_bias=4.0), 400
    assert float(jnp.asarray(4 + b_f, dtype)) == 4.0
    params = jax.tree.map(jnp.zeros_like, cell.init(jax.random.key(0), dtype))
    params = params._replace(b_ih=jnp.array([0, b_f, 1, 0], dtype))
    x, states = jnp.zeros((1, steps, 1), dtype), cell.initial_state(1, dtype)
    got = ost.recurrent_net(cell, x, states, params=params).states[1]
    c = 0.0
    for _ in range(steps):
        c = c / (1 + np.exp(-4 - b_f)) + np.tanh(1.0) / 2
    np.testing.assert_allclose(got.astype(jnp.float32), c, rtol=rtol)
