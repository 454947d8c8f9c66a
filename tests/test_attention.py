"""Attention of every kind against numpy, over memories of every length."""

import functools as ft

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    LENGTHS,
    STEPS,
    CellCase,
    assert_gradients,
    count,
    draw,
    net,
    numpy_tree,
    weigh,
)
from harness import assert_says
from oracles import cells64, net64
from tolerance import assert_close

import ostinato as ost
from ostinato import cells

KINDS = ("regular", "recurrent", "dot", "soft_coverage")
ENTRIES, FEATURES, SIZE = 4, 2, 3  # memory entries; inputs; memory features
MEMORY_LENGTHS = (4, 0, 1)
INNER = {
    "lstm": CellCase(cells.LSTM(FEATURES + SIZE, 5), cells64.lstm),
    "gru-same": CellCase(cells.GRU(FEATURES + SIZE, SIZE), cells64.gru),
    "milstm": CellCase(cells.MILSTM(FEATURES + SIZE, 5), cells64.milstm),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_inner = pytest.mark.parametrize("inner", INNER)


def make(kind, inner="lstm", memory_lengths=MEMORY_LENGTHS, dtype="float64"):
    """Cell, and params, inputs, memory, cell states; NaN in all padding."""
    rng = np.random.default_rng(5)
    attention = cells.Attention(INNER[inner].cell, kind, memory_size=SIZE)
    memory = rng.standard_normal((BATCH, ENTRIES, SIZE))
    x = rng.standard_normal((BATCH, STEPS, FEATURES))
    for b in range(BATCH):
        memory[b, memory_lengths[b] :] = np.nan
        x[b, LENGTHS[b] :] = np.nan
    params = draw(rng, attention.init(jax.random.key(0), jnp.dtype(dtype)), dtype)
    bound = attend(attention, jnp.asarray(memory, dtype), memory_lengths)
    states = draw(rng, bound.initial_state(BATCH, jnp.dtype(dtype)), dtype)
    return attention, (
        params,
        jnp.asarray(x, dtype),
        jnp.asarray(memory, dtype),
        states,
    )


def attend(attention, memory, memory_lengths=MEMORY_LENGTHS, **options):
    return attention.attend(memory, np.asarray(memory_lengths, np.int32), **options)


def run(attention, params, x, memory, states, memory_lengths=MEMORY_LENGTHS, **options):
    """`recurrent_net` over ragged inputs and memories."""
    cell = attend(attention, memory, memory_lengths)
    return net(cell, params, x, states, LENGTHS, **options)


def reference(
    kind, inner, params, x, memory, states, memory_lengths=MEMORY_LENGTHS, index=0
):
    """The same in numpy, row by row; `index` 1 gives weights instead of outputs."""
    rows = []
    for b in range(BATCH):
        entries = np.asarray(memory[b][: memory_lengths[b]], np.float64)

        def step(p, state, x_t, t, entries=entries):
            state, output = cells64.attention(
                INNER[inner].oracle, kind, p, state, x_t, entries
            )
            return state, output[index]

        def short(state, entries=entries):  # coverage of what is there alone
            if state[2] is None:
                return tuple(state)
            return (*state[:2], state[2][:, : len(entries)])

        one = jax.tree.map(lambda a, b=b: np.asarray(a[b : b + 1]), states)
        row = (
            net64.run(
                step,
                np.asarray(x[b : b + 1]),
                short(one),
                params=params,
                lengths=LENGTHS[b : b + 1],
            )
            if LENGTHS[b]
            else None
        )
        rows.append((row, one))
    return rows


def joined(rows, width):
    """Rows of `reference` as one `net64.Result` without coverage."""
    outputs, states = [], []
    for row, initial in rows:
        if row is None:
            outputs.append(np.zeros((1, STEPS, width)))
            states.append((initial[0], initial[1]))
        else:
            outputs.append(row.outputs)
            states.append(row.states[:2])
    cat = lambda *leaves: np.concatenate(leaves)  # noqa: E731
    return net64.Result(cat(*outputs), jax.tree.map(cat, *states), None)


def close(got, want, terms=200, dtype=np.float64):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, terms=terms, dtype=dtype)


@every_inner
@every_kind
def test_attention_equals_numpy(kind, inner):
    attention, args = make(kind, inner)
    got = jax.jit(ft.partial(run, attention))(*args)
    rows = reference(kind, inner, *numpy_tree(args))
    want = joined(rows, attention.output_size)
    close((got.outputs, got.states.cell, got.states.context), want[:2])
    for b, (row, initial) in enumerate(rows):
        if kind != "soft_coverage":
            assert got.states.coverage is None
            continue
        before = np.asarray(initial.coverage[0])
        there = before[: MEMORY_LENGTHS[b]] if row is None else row.states[2][0]
        close(got.states.coverage[b, : MEMORY_LENGTHS[b]], there)
        # Masked entries gather nothing.
        close(got.states.coverage[b, MEMORY_LENGTHS[b] :], before[MEMORY_LENGTHS[b] :])


@every_inner
@every_kind
def test_gradients_equal_finite_differences(kind, inner):
    attention, args = make(kind, inner)
    rng = np.random.default_rng(8)
    loss = weigh(
        rng, joined(reference(kind, inner, *numpy_tree(args)), attention.output_size)
    )

    def ours(*args):
        out = run(attention, *args)
        states = (out.states.cell, out.states.context)
        return loss(out._replace(states=states))

    def theirs(*args):
        return loss(joined(reference(kind, inner, *args), attention.output_size))

    assert_gradients(ours, theirs, args, rng)


@every_kind
def test_memory_of_length_zero_gives_zero_context_and_no_gradient(kind):
    attention, (params, x, memory, states) = make(kind)
    cell = attend(attention, memory, return_weights=True)
    got = net(cell, params, x, states).outputs
    assert not bool(got.weights[1].any())
    assert not bool(got.output[1, :, -SIZE:].any())

    def loss(memory, row):
        out = net(attend(attention, memory), params, jnp.nan_to_num(x), states)
        return jnp.sum(out.outputs[row] ** 2)

    for row in range(BATCH):
        grad = jax.grad(loss)(memory, row)
        assert bool(jnp.isfinite(grad).all())
        assert not bool(grad[row, MEMORY_LENGTHS[row] :].any())
    assert not bool(jax.grad(loss)(memory, 1).any())


@every_kind
def test_memory_without_entries_is_like_length_zero(kind):
    attention = cells.Attention(INNER["lstm"].cell, kind, memory_size=SIZE)
    params = attention.init(jax.random.key(0))
    x = jnp.ones((BATCH, STEPS, FEATURES), jnp.float32)
    outputs = []
    for entries, lengths in ((0, None), (3, [0] * BATCH)):
        memory = jnp.full((BATCH, entries, SIZE), jnp.nan, jnp.float32)
        cell = attention.attend(memory, lengths)
        outputs.append(net(cell, params, x, cell.initial_state(BATCH)).outputs)
    close(*outputs, dtype=np.float32)
    assert bool(jnp.isfinite(outputs[0]).all())


@every_kind
def test_weights_sum_to_one_and_equal_numpy(kind):
    attention, args = make(kind)
    params, x, memory, states = args
    cell = attend(attention, memory, return_weights=True)
    got = net(cell, params, x, states, LENGTHS, padding="zero").outputs
    plain = run(attention, *args, padding="zero").outputs
    close(got.output, plain)
    rows = reference(kind, "lstm", *numpy_tree(args), index=1)
    for b, (row, _) in enumerate(rows):
        n, m = LENGTHS[b], MEMORY_LENGTHS[b]
        if row is not None:
            close(got.weights[b, :n, :m], row.outputs[0, :n])
            close(jnp.sum(got.weights[b, :n], axis=-1), np.full(n, float(m > 0)))
        assert not bool(got.weights[b, :, m:].any())


def test_dot_with_equal_sizes_has_no_parameters():
    attention, (params, *_) = make("dot", "gru-same")
    assert all(field is None for field in params[1:])
    assert make("dot", "lstm")[1][0].w_query.shape == (SIZE, 5)


@every_kind
def test_memory_products_leave_the_loop(kind):
    attention, (params, x, memory, states) = make(kind)

    def loss(params, memory):
        out = net(attention.attend(memory), params, x, states)
        return jnp.sum(out.outputs)

    jaxpr = jax.make_jaxpr(loss)(params, memory).jaxpr
    outside = count("dot_general", jaxpr) - count("dot_general", jaxpr, inside="scan")
    # Inputs, and what the kind makes of its memory.
    assert outside == {"dot": 1, "soft_coverage": 3}.get(kind, 2)
    grads = jax.make_jaxpr(jax.grad(loss))(params, memory).jaxpr
    weights = [
        eqn
        for eqn in grads.eqns
        if eqn.primitive.name == "dot_general"
        and eqn.outvars[0].aval.shape == (SIZE, SIZE)
    ]
    assert len(weights) == {"dot": 0, "soft_coverage": 2}.get(kind, 1)


@every_kind
@pytest.mark.parametrize("recompute", [("energies",), ("gates", "energies"), True])
def test_recomputation_keeps_the_gradients(kind, recompute):
    attention, args = make(kind)
    assert attention.recompute_names == ("gates", "energies")

    def loss(recompute, params, x, memory, states):
        out = run(attention, params, x, memory, states, recompute=recompute)
        return jnp.sum(out.outputs**2)

    grad = jax.grad(loss, (1, 3))
    close(grad(recompute, *args), grad((), *args))


def test_recomputed_energies_need_less_memory():
    batch, steps, entries, size = 4, 30, 40, 16
    attention = cells.Attention(cells.LSTM(size + size, size), memory_size=size)
    params = attention.init(jax.random.key(0))
    x = jnp.ones((batch, steps, size), jnp.float32)
    memory = jnp.ones((batch, entries, size), jnp.float32)

    def bytes_of(recompute):
        def loss(params, x, memory):
            cell = attention.attend(memory)
            states = cell.initial_state(batch)
            out = net(cell, params, x, states, recompute=recompute)
            return jnp.sum(out.outputs)

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(params, x, memory).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_of(("energies",)) < 0.4 * bytes_of(())


def test_any_cell_may_be_inside_and_around():
    inner = cells.Stack((cells.LSTM(FEATURES + SIZE, 5), cells.GRU(5, SIZE)))
    attention = cells.Attention(inner, "dot", memory_size=SIZE)
    key = jax.random.key(0)
    params = attention.init(key)
    x = jax.random.normal(key, (BATCH, STEPS, FEATURES), jnp.float32)
    memory = jax.random.normal(key, (BATCH, ENTRIES, SIZE), jnp.float32)
    cell = attention.attend(memory)
    out = net(cell, params, x, cell.initial_state(BATCH)).outputs

    # The stack by hand, fed with what the attention hands back.
    states, context = inner.initial_state(BATCH), jnp.zeros((BATCH, SIZE), jnp.float32)
    for t in range(STEPS):
        fed = jnp.concatenate([x[:, t], context], axis=-1)
        states, h = inner(params.cell, states, fed, t)
        weights = jax.nn.softmax(jnp.einsum("bme,be->bm", memory, h))
        context = jnp.einsum("bm,bme->be", weights, memory)
        close(out[:, t], jnp.concatenate([h, context], axis=-1), dtype=np.float32)

    above = cells.Stack((cell, cells.LSTM(2 * SIZE, 4)))
    params = above.init(key)
    out = net(above, params, x, above.initial_state(BATCH), recompute=("energies",))
    assert out.outputs.shape == (BATCH, STEPS, 4)


def test_attention_under_vmap_of_memories_equals_a_loop():
    attention, (params, x, memory, states) = make("regular")
    x, memory = jnp.nan_to_num(x), jnp.nan_to_num(memory)

    def outputs(memory):
        return net(attention.attend(memory), params, x, states).outputs

    both = jnp.stack([memory, -memory])
    close(jax.vmap(outputs)(both), jnp.stack([outputs(m) for m in both]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_kind
def test_dtype_is_kept(kind, dtype):
    attention, args = make(kind, dtype=dtype)
    got = run(attention, *args)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    want = joined(reference(kind, "lstm", *numpy_tree(args)), attention.output_size)
    if dtype == "float32":
        close(got.outputs, want.outputs, dtype=dtype)
    else:  # states are rounded in every step
        np.testing.assert_allclose(
            np.asarray(got.outputs, np.float64), want.outputs, atol=0.05
        )


# --------------------------------------------------------------------------- bad input


LSTM = cells.LSTM(FEATURES + SIZE, 5)


@pytest.mark.parametrize(
    ("make_it", "error", "words"),
    [
        (lambda: cells.Attention(len, memory_size=2), TypeError, "`cell` SizedCell"),
        (
            lambda: cells.Attention(LSTM, "cosine", memory_size=2),
            ValueError,
            "`kind` 'regular' 'dot' 'cosine'",
        ),
        (
            lambda: cells.Attention(LSTM, memory_size=5),
            ValueError,
            "`cell` input_size=5 memory_size=5",
        ),
        (
            lambda: cells.Attention(LSTM, memory_size=0),
            ValueError,
            "`memory_size` at least 1",
        ),
    ],
)
def test_bad_attention_is_refused(make_it, error, words):
    with pytest.raises(error) as info:
        make_it()
    assert_says(info, words)


@pytest.mark.parametrize(
    ("memory", "lengths", "error", "words"),
    [
        (np.zeros((3, 4)), None, ValueError, "`memory` [B, M, E]"),
        (np.zeros((3, 4, 5)), None, ValueError, "`memory` (3, 4, 3) (3, 4, 5)"),
        (np.zeros((3, 4, 3), int), None, TypeError, "`memory` float32 int64"),
        ([[1.0]], None, TypeError, "`memory` array"),
        (np.zeros((3, 4, 3)), [1, 2], ValueError, "`memory_lengths` (3,) (2,)"),
        (np.zeros((3, 4, 3)), [1, 2, 5], ValueError, "`memory_lengths` 0..M 0..4 5"),
        (np.zeros((3, 4, 3)), [1, 2, -1], ValueError, "`memory_lengths` -1"),
        (np.zeros((3, 4, 3)), [1.0, 2, 3], TypeError, "`memory_lengths` integers"),
    ],
)
def test_bad_memory_is_refused(memory, lengths, error, words):
    attention = cells.Attention(LSTM, memory_size=SIZE)
    with pytest.raises(error) as info:
        attention.attend(memory, lengths)
    assert_says(info, words)


def test_attention_without_memory_says_what_to_do():
    attention, (params, x, memory, states) = make("soft_coverage")
    with pytest.raises(ValueError, match=r"has no memory.*attend\(memory"):
        net(attention, params, x, states)
    with pytest.raises(ValueError, match=r"has no memory"):
        attention.initial_state(3)


def test_memory_of_other_rows_or_dtype_is_refused():
    attention, (params, x, memory, states) = make("regular")
    with pytest.raises(ValueError, match=r"`states.context` must have shape"):
        net(attention.attend(memory[:2]), params, x, states)
    with pytest.raises(TypeError, match=r"`params` must have the dtype of `memory`"):
        net(attention.attend(memory.astype("float32")), params, x, states)
    with pytest.raises(TypeError, match=r"`states` must be an AttentionState"):
        net(attention.attend(memory), params, x, tuple(states)[:2])
    with pytest.raises(TypeError, match=r"`params` of Attention must be Attention"):
        net(attention.attend(memory), params.cell, x, states)


def test_attention_may_be_one_step():
    attention, (params, x, memory, states) = make("recurrent")
    cell = attend(attention, memory)
    x = jnp.nan_to_num(x)
    want = ost.recurrent_net(cell, x[:, :1], states, params=params)
    state, output = cell(params, states, x[:, 0], 0)
    close((output, state), (want.outputs[:, 0], want.states))
