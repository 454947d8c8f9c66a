"""Tests of every kind of attention against numpy, over memories of every length."""

import functools as ft

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ENTRIES, FEATURES, INNER, MEMORY_LENGTHS, SIZE, attend, make
from cell_cases import (
    BATCH,
    LENGTHS,
    STEPS,
    assert_gradients,
    compiled_net,
    count,
    draw,
    net,
    numpy_tree,
    put,
    shapes_of,
    weigh,
)
from closures import fast_jit
from compile_options import usual_jit
from oracles import cells64, net64
from tolerance import assert_close

import ostinato as ost
from ostinato import cells

KINDS = ("regular", "recurrent", "dot", "soft_coverage")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_inner = pytest.mark.parametrize("inner", INNER)


def run(attention, params, x, memory, states, memory_lengths=MEMORY_LENGTHS, **options):
    """Run `recurrent_net` over inputs and memories of different lengths."""
    cell = attend(attention, memory, memory_lengths)
    return net(cell, params, x, states, LENGTHS, **options)


def reference(
    kind, inner, params, x, memory, states, memory_lengths=MEMORY_LENGTHS, index=0
):
    """Compute the same in numpy, by sequence; `index` 1 selects the weights."""
    rows = []
    for b in range(BATCH):
        entries = np.asarray(memory[b][: memory_lengths[b]], np.float64)

        def step(p, state, x_t, t, entries=entries):
            state, output = cells64.attention(
                INNER[inner].oracle, kind, p, state, x_t, entries
            )
            return state, output[index]

        def short(state, entries=entries):  # without the coverage of padding
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
    """Join the results of `reference` into one `net64.Result` without coverage."""
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
    got = jax.device_get(fast_jit(ft.partial(run, attention))(*args))
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
        # Masked entries have no coverage.
        close(got.states.coverage[b, MEMORY_LENGTHS[b] :], before[MEMORY_LENGTHS[b] :])


@pytest.mark.parametrize(
    ("kind", "inner"),
    [(kind, "lstm") for kind in KINDS]
    + [("dot", "gru-same"), ("soft_coverage", "milstm")],
)
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
    x = np.nan_to_num(x)

    def outputs(memory):
        cell = attend(attention, memory, return_weights=True)
        out = net(cell, params, x, states).outputs
        return jnp.sum(out.output**2, axis=(1, 2)), out

    @fast_jit
    def gradients_of_rows(memory):
        _, pull, out = jax.vjp(outputs, memory, has_aux=True)
        return jax.vmap(pull)(jnp.eye(BATCH))[0], out

    grads, got = jax.tree.map(np.asarray, gradients_of_rows(memory))
    assert not got.weights[1].any() and not got.output[1, :, -SIZE:].any()
    assert np.isfinite(grads).all() and grads[0, 0].any()
    for row, length in enumerate(MEMORY_LENGTHS):
        assert not grads[row, row, length:].any()
        assert not np.delete(grads[row], row, axis=0).any()


@every_kind
def test_memory_without_entries_is_like_length_zero(kind):
    attention = cells.Attention(INNER["lstm"].cell, kind, memory_size=SIZE)
    x = jax.device_put(np.ones((BATCH, STEPS, FEATURES), np.float32))
    outputs = []
    for entries, lengths in ((0, None), (3, [0] * BATCH)):
        memory = np.full((BATCH, entries, SIZE), np.nan, np.float32)
        cell = attention.attend(jax.device_put(memory), lengths)
        rng = np.random.default_rng(0)
        params = draw(rng, shapes_of(cell, "float32")[0], "float32")
        states = cell.initial_state(BATCH)
        outputs.append(compiled_net(cell, params, x, states).outputs)
    close(*outputs, dtype=np.float32)
    assert np.isfinite(outputs[0]).all()


@every_kind
def test_weights_sum_to_one_and_equal_numpy(kind):
    attention, args = make(kind)
    params, x, memory, states = args
    cell = attend(attention, memory, return_weights=True)
    got = compiled_net(cell, params, x, states, LENGTHS, padding="zero").outputs
    got = jax.tree.map(np.asarray, got)
    plain = fast_jit(ft.partial(run, attention, padding="zero"))(*args)
    close(got.output, plain.outputs)
    rows = reference(kind, "lstm", *numpy_tree(args), index=1)
    for b, (row, _) in enumerate(rows):
        n, m = LENGTHS[b], MEMORY_LENGTHS[b]
        if row is not None:
            close(got.weights[b, :n, :m], row.outputs[0, :n])
            close(np.sum(got.weights[b, :n], axis=-1), np.full(n, float(m > 0)))
        assert not got.weights[b, :, m:].any()


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
    # What the kind computes from its memory; products of inputs run with the steps.
    assert outside == {"dot": 0, "soft_coverage": 2}.get(kind, 1)
    grads = jax.make_jaxpr(jax.grad(loss))(params, memory).jaxpr
    weights = [
        eqn
        for eqn in grads.eqns
        if eqn.primitive.name == "dot_general"
        and eqn.outvars[0].aval.shape == (SIZE, SIZE)
    ]
    assert len(weights) == {"dot": 0, "soft_coverage": 2}.get(kind, 1)


@every_kind
def test_recomputation_keeps_the_gradients(kind):
    attention, args = make(kind)
    assert attention.recompute_names == ("gates", "energies")

    def loss(recompute, params, x, memory, states):
        out = run(attention, params, x, memory, states, recompute=recompute)
        return jnp.sum(out.outputs**2)

    def gradients(*args):
        every = (), ("energies",), ("gates", "energies")
        return [jax.grad(ft.partial(loss, names), (0, 2))(*args) for names in every]

    want, *others = fast_jit(gradients)(*args)
    for got in others:
        close(got, want)


def test_energies_are_not_stored():
    """Check that the cell stores weights, and with `recompute` not even these."""
    batch, steps, entries, size = 4, 30, 200, 16
    attention = cells.Attention(cells.LSTM(size + size, size), memory_size=size)
    params = jax.eval_shape(attention.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((steps, batch, size), jnp.float32)
    memory = jax.ShapeDtypeStruct((batch, entries, size), jnp.float32)

    def bytes_of(outputs):
        def loss(params, x, memory):
            cell = attention.attend(memory)
            return jnp.sum(outputs(cell, params, x, cell.initial_state(batch)))

        run = usual_jit(jax.grad(loss, (0, 1, 2)))
        analysis = run.lower(params, x, memory).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    def ours(cell, params, x, states, recompute=()):
        options = {"time_major": True, "recompute": recompute}
        return ost.recurrent_net(cell, x, states, params=params, **options).outputs

    def scan(cell, params, x, states):
        step = lambda s, xt: cell(params, s, xt, 0)  # noqa: E731
        return jax.lax.scan(step, states, x)[1]

    energies = steps * batch * entries * size * 4  # bytes of a tanh per entry
    assert bytes_of(scan) > energies
    stored = bytes_of(ours)
    assert stored < 0.4 * energies
    named = ft.partial(ours, recompute=("energies",))
    weights = steps * batch * entries * 4
    # With names, other values are stored: products, not what the gates make of them.
    assert bytes_of(named) < stored - 0.4 * weights


ANY = {
    "stack": cells.Stack((cells.LSTM(FEATURES + SIZE, 5), cells.GRU(5, SIZE))),
    "min-gru": cells.MinGRU(FEATURES + SIZE, SIZE),
    "rg-lru": cells.RGLRU(FEATURES + SIZE),
}


@pytest.mark.parametrize("name", ANY)
def test_any_cell_may_be_inside_and_around(name):
    inner = ANY[name]
    attention = cells.Attention(inner, "dot", memory_size=SIZE)
    rng = np.random.default_rng(0)
    shapes = (BATCH, STEPS, FEATURES), (BATCH, ENTRIES, SIZE)
    x, memory = (put(rng.standard_normal(shape), "float32") for shape in shapes)
    cell = attention.attend(memory)
    params = draw(rng, shapes_of(cell, "float32")[0], "float32")
    out = compiled_net(cell, params, x, cell.initial_state(BATCH)).outputs

    @fast_jit
    def by_hand(states, context, x):
        """Run one step of the stack, given the states and context of the attention."""
        fed = jnp.concatenate([x, context], axis=-1)
        states, h = inner(params.cell, states, fed, 0)
        query = h
        if params.w_query is not None:
            bias = jnp.broadcast_to(params.b_query, (BATCH, SIZE))
            query = h @ params.w_query.T + bias
        weights = jax.nn.softmax(jnp.einsum("bme,be->bm", memory, query))
        context = jnp.einsum("bm,bme->be", weights, memory)
        return states, context, jnp.concatenate([h, context], axis=-1)

    states, context = inner.initial_state(BATCH), jnp.zeros((BATCH, SIZE), jnp.float32)
    out, x = np.asarray(out), np.asarray(x)
    for t in range(STEPS):
        states, context, want = by_hand(states, context, x[:, t])
        close(out[:, t], want, dtype=np.float32)

    above = cells.Stack((cell, cells.LSTM(cell.output_size, 4)))
    params, states = (draw(rng, a, "float32") for a in shapes_of(above, "float32"))
    out = compiled_net(above, params, x, states, recompute=("energies",))
    assert out.outputs.shape == (BATCH, STEPS, 4)


def test_attention_under_vmap_of_memories_equals_a_loop():
    attention, (params, x, memory, states) = make("regular")
    x, memory = np.nan_to_num(x), np.nan_to_num(memory)

    @fast_jit
    def outputs(memory):
        return net(attention.attend(memory), params, x, states).outputs

    both = np.stack([memory, -memory])
    mapped = fast_jit(jax.vmap(outputs.__wrapped__))(both)
    close(mapped, np.stack([outputs(m) for m in both]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_kind
def test_dtype_is_kept(kind, dtype):
    attention, args = make(kind, dtype=dtype)
    got = fast_jit(ft.partial(run, attention))(*args)
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    want = joined(reference(kind, "lstm", *numpy_tree(args)), attention.output_size)
    if dtype == "float32":
        close(got.outputs, want.outputs, dtype=dtype)
    else:  # states are rounded at every step
        np.testing.assert_allclose(
            np.asarray(got.outputs, np.float64), want.outputs, atol=0.05
        )


def test_16_bit_sums_over_many_steps_are_right():
    """Check sums of coverage, and of the gradients of memory and parameters."""
    attention = cells.Attention(cells.GRU(3, 2), "soft_coverage", memory_size=2)

    @jax.jit
    def drawn(key):
        memory = jax.random.normal(jax.random.fold_in(key, 1), (1, 2, 2), jnp.float32)
        return attention.init(key), memory

    def loss(dtype, params, memory):
        params, memory = jax.tree.map(lambda a: a.astype(dtype), (params, memory))
        cell = attention.attend(memory)
        x, states = jnp.full((1, 2048, 1), 0.1, dtype), cell.initial_state(1, dtype)
        out = ost.recurrent_net(cell, x, states, params=params)
        return out.outputs.astype(jnp.float32).sum(), out.states.coverage

    gradient = jax.jit(jax.grad(loss, (1, 2), has_aux=True), static_argnums=0)
    given = drawn(jax.random.key(0))
    (got, coverage), (want, _) = (
        jax.tree.map(lambda a: np.asarray(a, np.float64), gradient(dtype, *given))
        for dtype in ("bfloat16", "float32")
    )
    np.testing.assert_allclose(coverage.sum(), 2048, rtol=0.01)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() < 0.1 * max(np.abs(b).max(), 20)


# --------------------------------------------------------------------------- bad input


def test_attention_may_be_one_step():
    attention, (params, x, memory, states) = make("recurrent")
    cell = attend(attention, memory)
    x = np.nan_to_num(x)
    want = compiled_net(cell, params, jax.device_put(x[:, :1]), states)
    state, output = fast_jit(cell)(params, states, x[:, 0], 0)
    close((output, state), (np.asarray(want.outputs)[:, 0], want.states))


class Doubled(cells.LSTM):
    """An LSTM of a user, which reads twice its inputs."""

    def precompute(self, params, inputs):
        return super().precompute(params, 2 * inputs)


def test_a_cell_with_a_precompute_of_its_own_may_be_inside():
    rng = np.random.default_rng(0)
    cell = Doubled(3 + SIZE, 4)
    attention = cells.Attention(cell, "dot", SIZE)
    memory = jnp.asarray(rng.standard_normal((2, 5, SIZE)))
    x = jnp.asarray(rng.standard_normal((2, 6, 3)))
    params = attention.init(jax.random.key(0), jnp.float64)
    attending = attention.attend(memory)
    states = attending.initial_state(2, jnp.float64)
    got = ost.recurrent_net(attending, x, states, params=params).outputs
    inner, context = states.cell, states.context
    for t in range(x.shape[1]):
        seen = jnp.concatenate([x[:, t], context], -1)
        inner, h = cells.LSTM(3 + SIZE, 4)(params.cell, inner, 2 * seen, t)
        query = h @ params.w_query.T + params.b_query[None]
        weights = jax.nn.softmax(jnp.einsum("bme,be->bm", memory, query))
        context = jnp.einsum("bm,bme->be", weights, memory)
        assert_close(got[:, t], jnp.concatenate([h, context], -1), terms=100)
