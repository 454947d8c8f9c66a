"""Steps that read and write rows of memories, against `lax.scan` and loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from test_transforms import assert_trees_close

import ostinato as ost
from ostinato._step import loop_programs
from ostinato._step.jaxprs import flat
from ostinato._step.own_rows import with_own_rows

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
T, B, M, H = 6, 4, 5, 3
LENGTHS = [6, 0, 3, 1]


def along(axis):
    """Return functions that read, write and add to a place along an axis."""
    index = (slice(None),) * axis

    def read(m, i):
        return m[(*index, i)]

    def write(m, i, row):
        return m.at[(*index, i)].set(row)

    def add(m, i, row):
        return m.at[(*index, i)].add(row)

    return read, write, add


def mapped(axis):
    return [jax.vmap(f) for f in along(axis)]


def by_pairs():
    rows = lambda m: jnp.arange(m.shape[0])  # noqa: E731
    return [
        lambda m, i: m[rows(m), i],
        lambda m, i, row: m.at[rows(m), i].set(row),
        lambda m, i, row: m.at[rows(m), i].add(row, mode="drop"),
    ]


def dynamic():
    return [
        jax.vmap(lambda m, i: lax.dynamic_index_in_dim(m, i, 0, keepdims=False)),
        jax.vmap(lambda m, i, row: lax.dynamic_update_index_in_dim(m, row, i, 0)),
        jax.vmap(lambda m, i, row: m.at[i].add(row)),
    ]


def by_axes():
    wide = lambda i: i[:, None, None]  # noqa: E731
    return [
        lambda m, i: jnp.take_along_axis(m, wide(i), 1)[:, 0],
        by_pairs()[1],
        lambda m, i, row: m.at[jnp.arange(B), i].add(row),
    ]


def of_grid(axis=0, mode=None):
    """Return functions for a place along two axes next to each other."""
    at = lambda i: (slice(None),) * axis + (i % 2, i // 2)  # noqa: E731
    return [
        jax.vmap(lambda m, i: m.at[at(i)].get(mode=mode)),
        jax.vmap(lambda m, i, row: m.at[at(i)].set(row, mode=mode)),
        jax.vmap(lambda m, i, row: m.at[at(i)].add(row)),
    ]


def by_triples():
    at = lambda i: (jnp.arange(B), i % 2, i // 2)  # noqa: E731
    return [
        lambda m, i: m[at(i)],
        lambda m, i, row: m.at[at(i)].set(row),
        lambda m, i, row: m.at[at(i)].add(row),
    ]


def of_window(axis, size=2):
    """Return functions for several elements from a place on."""
    read = lambda m, i: lax.dynamic_slice_in_dim(m, i, size, axis)  # noqa: E731
    write = lambda m, i, row: lax.dynamic_update_slice_in_dim(m, row, i, axis)  # noqa: E731
    return [
        jax.vmap(read),
        jax.vmap(write),
        jax.vmap(lambda m, i, row: write(m, i, read(m, i) + row)),
    ]


def of_slices():
    """Return functions for a slice of size 1 along two axes."""

    def read(m, i):
        return lax.dynamic_slice(m, [i % 2, i // 2, 0 * i], [1, 1, H])

    def write(m, i, row):
        return lax.dynamic_update_slice(m, row, [i % 2, i // 2, 0 * i])

    return [
        jax.vmap(read),
        jax.vmap(write),
        jax.vmap(lambda m, i, row: write(m, i, read(m, i) + row)),
    ]


FORMS = {
    "grid": (of_grid(), (2, 3, H)),
    "grid, last": (of_grid(1), (H, 2, 3)),
    "grid, clip": (of_grid(mode="clip"), (2, 3, H)),
    "grid, numbers": (of_grid(), (2, 3)),
    "grid, one column": (of_grid(), (6, 1, H)),
    "grid, one column, clip": (of_grid(mode="clip"), (6, 1, H)),
    "grid, slices": (of_slices(), (2, 3, H)),
    "triples": (by_triples(), (2, 3, H)),
    "window": (of_window(0), (M, H)),
    "window, last": (of_window(1), (H, M)),
    "window, middle": (of_window(1, 3), (2, M, H)),
    "window, numbers": (of_window(0, 3), (M,)),
    "window, nearly all": (of_window(0, 4), (M, H)),
    "vmap": (mapped(0), (M, H)),
    "vmap, last": (mapped(1), (H, M)),
    "vmap, middle": (mapped(1), (2, M, H)),
    "vmap, numbers": (mapped(0), (M,)),
    "one entry": (mapped(0), (1, H)),
    "pairs": (by_pairs(), (M, H)),
    "dynamic": (dynamic(), (M, H)),
    "along axes": (by_axes(), (M, H)),
}


def chosen(form, h):
    """Return an index of each sequence, from its features."""
    shape = FORMS[form][1]
    count = shape["last" in form or "middle" in form]
    if form.startswith(("grid", "triples")):
        count = int(np.prod(shape)) // (H if len(shape) == 3 else 1)
    return jnp.asarray(jnp.argmax(h, -1) * 2 % count, jnp.int32)


def memory_step(form):
    (read, write, add), shape = FORMS[form]

    def step(p, states, x, t):
        h, memory = states
        at = chosen(form, h)
        old = read(memory, at)
        parts = old.reshape(B, -1)[:, : h.shape[-1]]
        h = jnp.tanh(x + h @ p["u"] + 0.5 * parts)
        row = jnp.broadcast_to(jnp.sin(h[:, :1] * p["v"]), (B, old[0].size))
        memory = write(memory, at, row.reshape(old.shape))
        memory = add(memory, jnp.minimum(at + 1, 1), 0.1 * old)
        return (h, memory), h + memory.reshape(B, -1).sum(-1, keepdims=True)

    return step, shape


def arguments(shape, dtype=np.float64):
    rng = np.random.default_rng(7)
    p = {"u": rng.standard_normal((H, H)), "v": rng.standard_normal()}
    states = rng.standard_normal((B, H)), rng.standard_normal((B, *shape))
    given = p, states, rng.standard_normal((T, B, H))
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), given)


def run(step, backend, p, states, x, **options):
    out = ost.recurrent_net(
        step, x, states, params=p, time_major=True, backend=backend, **options
    )
    return out.outputs, out.states


def both(step, given, backend, **options):
    """Return values, and gradients of a sum of all."""

    def loss(p, states, x):
        results = run(step, backend, p, states, x, **options)
        total = 0.0
        for n, a in enumerate(jax.tree.leaves(results)):
            if jnp.issubdtype(a.dtype, jnp.floating):
                weights = jnp.cos(n + jnp.arange(a.size, dtype=float))
                total += jnp.vdot(weights, a.astype(float).ravel())
        return total, results

    def gradients(p, states, x):
        leaves, tree = jax.tree.flatten(states)
        floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in leaves]

        def of_floats(p, given, x):
            given = iter(given)
            pairs = zip(leaves, floats, strict=True)
            states = [next(given) if f else a for a, f in pairs]
            return loss(p, jax.tree.unflatten(tree, states), x)

        given = [a for a, f in zip(leaves, floats, strict=True) if f]
        return jax.grad(of_floats, argnums=(0, 1, 2), has_aux=True)(p, given, x)

    as_floats = lambda tree: jax.tree.map(lambda a: a.astype(float), tree)  # noqa: E731
    return as_floats(fast_jit(gradients)(*given))


OPTIONS = [
    {},
    {"seq_lengths": LENGTHS, "padding": "zero"},
    {"seq_lengths": LENGTHS, "padding": "zero", "reverse": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "lengths", "reverse"])
@pytest.mark.parametrize("form", FORMS)
def test_memories_of_each_sequence(form, options):
    step, shape = memory_step(form)
    given = arguments(shape)
    found = [both(step, given, backend, **options) for backend in ("cpu", "scan")]
    assert_trees_close(*found, terms=1000)


def test_values_are_those_of_a_loop():
    step, shape = memory_step("pairs")
    p, (h, memory), x = jax.tree.map(np.array, arguments(shape))
    outputs = []
    for t in range(T):
        at = np.argmax(h, -1) * 2 % M
        old = memory[np.arange(B), at]
        h = np.tanh(x[t] + h @ p["u"] + 0.5 * old)
        for b in range(B):
            memory[b, at[b]] = np.sin(h[b, 0] * p["v"])
            memory[b, min(at[b] + 1, 1)] += 0.1 * old[b]
        outputs.append(h + memory.sum((1, 2))[:, None])
    y, last = run(step, "cpu", *arguments(shape))
    np.testing.assert_allclose(y, outputs, atol=1e-12)
    np.testing.assert_allclose(last[1], memory, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types(dtype):
    step, shape = memory_step("vmap")
    given = arguments(shape, dtype)
    tolerance = 1e-5
    if dtype == "bfloat16":  # in which an index may be another one
        step, tolerance = read_after, 0.1
    got, want = (both(step, given, backend)[1] for backend in ("cpu", "scan"))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def test_integers_in_a_memory():
    """Such as the places of a stack, or words that were seen."""

    def step(p, states, x, t):
        h, words = states
        read = words[:, t % M]
        h = jnp.tanh(x + h + read[:, None].astype(x.dtype) / 9)
        found = jnp.argmax(h, -1).astype(words.dtype) - 4
        return (h, words.at[:, t % M].set(found)), h

    p, (h, _), x = arguments((M,))
    given = p, (h, jnp.arange(B * M, dtype=jnp.int32).reshape(B, M) % 7), x
    assert_trees_close(both(step, given, "cpu"), both(step, given, "scan"))


def test_counts_that_may_grow_too_large_are_not_kept_as_floats():
    """Of two steps that add to integers, one may reach 2^24, where floats round."""

    def step(p, states, x, t):
        h, counts = states
        at = jnp.asarray(jnp.argmax(h @ p["u"], -1), jnp.int32)
        counts = jax.vmap(lambda c, i: c.at[i].add(more))(counts, at)
        return (jnp.tanh(h + x), counts), h

    p, (first, _), x = arguments((M,))
    for more, backend in ((1, "cpu"), (2**22 - 1, "xla")):
        states = first, jnp.full((B, M), 3, jnp.int32)
        told = ost.explain(step, x, states, params=p, time_major=True)
        assert told.backend == backend
        got = run(step, None, p, states, x)[1][1]
        h, counts = first, np.full((B, M), 3)
        for t in range(T):
            counts[np.arange(B), np.argmax(h @ p["u"], -1)] += more
            h = np.tanh(h + x[t])
        np.testing.assert_array_equal(got, counts)


# ---------------------------------------------------------------- what is in the way


def push(m, t, row):
    return m.at[:, t % M].set(row)


def read_after(p, states, x, t):
    h, m = states
    new = push(m, t, jnp.tanh(x + h))
    return (h + m.sum(1) - new.sum(1), new), new


def swapped(p, states, x, t):
    a, b = states
    return (push(b, t, jnp.sin(x)), push(a, t + 1, x * b[:, t % M])), a[:, 0]


def one_is_the_other(p, states, x, t):
    a, b = states
    return (push(a, t, jnp.sin(x + b[:, t % M])), a), b[:, 1]


def rotated(p, states, x, t):
    h, m = states
    return (h, push(m, t, m[:, (t + 1) % M] + x)), m


def unchanged(p, states, x, t):
    h, m = states
    return (jnp.tanh(h + x + m[:, t % M]), m), h


def written_twice(p, states, x, t):
    h, m = states
    m = push(push(m, t, x), t + 1, m[:, t % M])
    return (h, m.at[:, (t + 2) % M].add(h)), m[:, 0]


def also_output(p, states, x, t):
    h, m = states
    m = push(m, t, jnp.sin(x * h))
    return (h, m), {"all": m, "twice": 2 * m}


def forked(p, states, x, t):
    """Two values come from one array."""
    h, m = states
    a, b = push(m, t, x), push(m, t + 1, 2 * x)
    return (h + a[:, 0], b), a


def never_read(p, states, x, t):
    h, m = states
    return (h + 1, push(m, t, x + h)), h


def all_of_a_row(p, states, x, t):
    """Attention over the whole memory, before and after it is written."""
    h, m = states
    weights = jax.nn.softmax(jnp.einsum("bmh,bh->bm", m, h))
    h = jnp.tanh(x + jnp.einsum("bm,bmh->bh", weights, m))
    m = push(m, t, h)
    return (h, m), jax.nn.softmax(jnp.einsum("bmh,bh->bm", m, h))


def reshaped(p, states, x, t):
    """The gradient of a read has another shape than that of the write."""
    h, m = states
    flat = m.reshape(m.shape[0], -1)
    turned = jnp.swapaxes(m[:, :H], 1, 2)
    h = jnp.tanh(h + x + flat[:, t][:, None] + turned[:, t % H] + flat[:, 2 * t, None])
    return (h, push(m, t, h)), h


def read_flat(p, states, x, t):
    h, m = states
    h = jnp.tanh(h + x + m.reshape(m.shape[0], -1)[:, t][:, None])
    return (h, push(m, t, h)), jnp.sin(m)


def moved(p, states, x, t):
    """The axis of sequences is not the first one of what is indexed."""
    h, m = states
    at = jnp.asarray(jnp.argmax(h, -1), jnp.int32)
    turned = jnp.moveaxis(m, 1, 0)
    old = jax.vmap(lambda m, i: m[i], (1, 0))(turned, at)
    h = jnp.tanh(h + x + old)
    turned = jax.vmap(lambda m, i, h: m.at[i].set(h), (1, 0, 0), 1)(turned, at, h)
    turned = jax.vmap(lambda m, i, h: m.at[i].add(h), (1, 0, 0), 1)(turned, at + 1, h)
    return (h, jnp.moveaxis(turned, 0, 1)), h


def on_a_grid(p, states, x, t):
    """All sequences are at the same place of two axes, and at places of a table."""
    h, m = states
    at = t % 2, t * 2 % H
    table = jnp.broadcast_to(p["u"][:, :, None], (H, H, H))
    mine = jnp.asarray(jnp.argmax(h, -1), jnp.int32)
    h = jnp.tanh(h + x + m[(slice(None), *at, None)] + table[mine, mine])
    m = (
        m.at[(slice(None), *at)]
        .set(h[:, 0])
        .at[(slice(None), at[1], at[0])]
        .add(h[:, 1])
    )
    return (h, m), m[:, 1]


def in_windows(p, states, x, t):
    """A window is read and written from a place on that all share."""
    h, m = states
    old = lax.dynamic_slice_in_dim(m, t % 4, 2, 1)
    across = lax.dynamic_slice(m, [0 * t, t % 3, t % 2], [m.shape[0], 3, 2])
    h = jnp.tanh(x + h * old.sum(1) + across.sum((1, 2))[:, None])
    m = lax.dynamic_update_slice_in_dim(m, jnp.stack([h, old[:, 0]], 1), t - 1, 1)
    turned = jnp.swapaxes(jnp.stack([h, x], 2), 1, 2)[:, :, ::-1]
    return (h, lax.dynamic_update_slice_in_dim(m, turned, t + 1, 1)), h


def read_where_it_was_written(p, states, x, t):
    """What is read of the old memory depends on the new one."""
    h, m = states
    new = push(m, t, jnp.tanh(x + h))
    at = jnp.asarray(jnp.argmax(new[:, (t + 1) % M], -1), jnp.int32)
    return (h + m[jnp.arange(B), at], new), h


def in_a_branch(p, states, x, t):
    """Each sequence writes its place at some steps, and reads two in a loop."""
    h, m = states
    rows, at = jnp.arange(B), jnp.asarray(jnp.argmax(h, -1), jnp.int32)
    write = lambda m: m.at[rows, at].set(jnp.sin(h))  # noqa: E731
    m = lax.cond(t % 3 == 0, write, lambda m: m, m)
    turn = lambda i, h: jnp.tanh(h + m[rows, (at + i) % M])  # noqa: E731
    return (lax.fori_loop(0, 2, turn, h + x), m), h


STEPS = [
    in_a_branch, read_where_it_was_written, on_a_grid, in_windows, reshaped,
    read_flat, moved, read_after, swapped, one_is_the_other, rotated, unchanged,
    written_twice, also_output, forked, never_read, all_of_a_row,
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "lengths", "reverse"])
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_values_that_are_needed_before_and_after(step, options):
    p, (h, m), x = arguments((M, H))
    states = (2 * m, m) if step in (swapped, one_is_the_other) else (h, m)
    given = p, states, x
    assert_trees_close(
        both(step, given, "cpu", **options), both(step, given, "scan", **options)
    )


IN_PLACE = {
    unchanged: 1, written_twice: 1, never_read: 1, all_of_a_row: 1,
    on_a_grid: 1, in_windows: 1, forked: 1, read_after: 1, swapped: 0,
    one_is_the_other: 0, rotated: 1, read_where_it_was_written: 0,
}  # fmt: skip


@pytest.mark.parametrize("step", IN_PLACE, ids=lambda s: s.__name__)
def test_memories_change_in_place_where_nothing_needs_them(step, monkeypatch):
    found = []
    lower = loop_programs.lower

    def watched(*args, **options):
        lowered = lower(*args, **options)
        buffers = {i.result.buffer for i in lowered.program.instructions}
        buffers |= {v.buffer for i in lowered.program.instructions for v in i.operands}
        states = {b.state if b.state is not None else b for b in buffers}
        found.append(sum(b.in_place for b in states))
        return lowered

    monkeypatch.setattr(loop_programs, "lower", watched)
    loop_programs.lower_forward.cache_clear()
    p, (h, m), x = arguments((M, H))
    states = (2 * m, m) if step in (swapped, one_is_the_other) else (h, m)
    jax.eval_shape(lambda *given: run(step, "cpu", *given), p, states, x)
    assert found[0] == IN_PLACE[step]


# ------------------------------------------------------------------------- the rest


ROWS = jnp.arange(B, dtype=jnp.int32)
PAIRS = {
    "read": (lambda m, i, r: m[jnp.arange(B), i], True),
    "fill": (lambda m, i, r: m.at[jnp.arange(B), i].get(mode="fill"), True),
    "set": (lambda m, i, r: m.at[jnp.arange(B), i].set(r), True),
    "add": (lambda m, i, r: m.at[jnp.arange(B), i].add(r), True),
    "an entry": (lambda m, i, r: m.at[jnp.arange(B), i, 1].add(r[:, 0]), True),
    "clip": (lambda m, i, r: m.at[jnp.arange(B), i].set(r, mode="clip"), True),
    "other rows": (lambda m, i, r: m.at[jnp.arange(B) + 1, i].set(r), False),
    "one row": (lambda m, i, r: m.at[jnp.zeros(B, int), i].add(r), False),
    "chosen rows": (lambda m, i, r: m.at[i - 3, i].add(r), False),
    "fewer rows": (lambda m, i, r: m[jnp.arange(B - 1), i[1:]], False),
    "all pairs": (lambda m, i, r: m[jnp.arange(B)[:, None], i[None]], False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_with_the_number_of_a_row(name):
    function, is_own = PAIRS[name]
    rng = np.random.default_rng(1)
    memory, rows = rng.standard_normal((B, M, H)), rng.standard_normal((B, H))
    given = jnp.asarray(memory), ROWS + 1, jnp.asarray(rows)
    jaxpr = flat(jax.make_jaxpr(function)(*given).jaxpr)
    found = with_own_rows(jaxpr)
    text = str(found)
    assert ("batching_dims=(0,)" in text) == is_own and (found is jaxpr) != is_own
    (got,) = jax.jit(jaxpr_as_fun(ClosedJaxpr(found, [])))(*given)
    np.testing.assert_array_equal(got, function(*given))


@pytest.mark.parametrize("mode", ["clip", "drop", "fill", "promise_in_bounds"])
def test_indices_of_each_sequence_out_of_bounds(mode):
    def step(p, states, x, t):
        h, m, at = states  # from -4 to 10, of 5 entries
        if mode == "promise_in_bounds":
            at = jnp.clip(at, 0, M - 1)
        read = "fill" if mode == "drop" else mode
        old = jax.vmap(lambda m, i: m.at[i].get(mode=read, fill_value=0.5))(m, at)
        h = jnp.tanh(x + old)
        m = jax.vmap(lambda m, i, r: m.at[i].set(r, mode=mode))(m, at, h)
        return (h, m, states[2] + 1), h

    p, (h, m), x = arguments((M, H))
    given = p, (h, m, jnp.arange(B, dtype=jnp.int32) * 3 - 4), x
    assert_trees_close(both(step, given, "cpu"), both(step, given, "scan"))


@pytest.mark.parametrize("mode", ["clip", "drop", "fill", "promise_in_bounds"])
def test_places_on_a_grid_out_of_bounds(mode):
    """One number out of bounds leaves out all, or counts as the nearest one."""

    def step(p, states, x, t):
        h, m, at = states  # from -4 to 10, of 2 and 3 entries
        i, j = at, 3 - at // 2
        if mode == "promise_in_bounds":
            i, j = jnp.clip(i, 0, 1), jnp.clip(j, 0, 2)
        read = "fill" if mode == "drop" else mode
        old = jax.vmap(lambda m, i, j: m.at[i, j].get(mode=read, fill_value=0.5))
        h = jnp.tanh(x + old(m, i, j))
        write = jax.vmap(lambda m, i, j, r: m.at[i, j].set(r, mode=mode))
        return (h, write(m, i, j, h), at + 1), h

    p, (h, m), x = arguments((2, 3, H))
    given = p, (h, m, jnp.arange(B, dtype=jnp.int32) * 2 - 4), x
    assert_trees_close(both(step, given, "cpu"), both(step, given, "scan"))


ALONE = {
    "table": lambda m, p, h, i: p["u"][None][0, i],
    "table, sum": lambda m, p, h, i: p["u"][None][0, i].sum(-1)[:, None],
    "table, last": lambda m, p, h, i: p["u"][:, None][i, 0],
    "memory": lambda m, p, h, i: m[:, None][jnp.arange(B), 0, i],
    "memory, last": lambda m, p, h, i: m[:, :, None][jnp.arange(B), i, 0],
    "vmap": lambda m, p, h, i: jax.vmap(
        lambda m, i: m.at[jnp.array([0]), i].get(mode="clip")[0]
    )(m[:, None], i),
    "write": lambda m, p, h, i: (
        m[:, None].at[:, 0, 1].set(h, mode="clip").sum(2)[:, 0]
        + m[:, None].at[jnp.arange(B), 0, i].add(h).sum(2)[:, 0]
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_further_axis_with_one_place(name):
    def step(p, states, x, t):
        h, m = states
        at = jnp.asarray(jnp.argmax(h, -1), jnp.int32)
        h = jnp.tanh(x + h + ALONE[name](m, p, h, at))
        return (h, m.at[:, t % M].set(h)), h

    given = arguments((M, H))
    assert_trees_close(both(step, given, "cpu"), both(step, given, "scan"))


def test_places_of_axes_that_are_apart_are_left_to_xla():
    def step(p, states, x, t):
        h, m = states
        old = jax.vmap(lambda m, i: m[i, :, i])(m, chosen("vmap", h) % 2)
        return (jnp.tanh(x + h + old), m), old

    given = arguments((2, H, 2))
    with pytest.raises(NotImplementedError, match="axes that are apart"):
        run(step, "cpu", *given)
    assert_trees_close(both(step, given, "xla"), both(step, given, "scan"))


@pytest.mark.parametrize("form", ["grid", "window", "window, last", "vmap"])
def test_a_memory_of_the_only_sequence(form):
    (read, write, _), shape = FORMS[form]
    p, (h, m), x = arguments(shape)

    def of_one(p, states, x, t):
        h, m = states
        at = jnp.asarray(jnp.argmax(h, -1) % 2, jnp.int32)
        old = read(m, at)
        h = jnp.tanh(x + h + old.reshape(1, -1)[:, :1])
        return (h, write(m, at, jnp.sin(1 + old))), h

    given = p, (h[:1], m[:1]), x[:, :1]
    assert_trees_close(both(of_one, given, "cpu"), both(of_one, given, "scan"))


def test_places_outside_are_true_where_jax_says_so():
    def step(p, states, x, t):
        m, at = states
        found = jax.vmap(lambda m, i: m.at[i].get(mode="fill"))(m, at)
        return (m, at + 2), (~found, found & (t > 3), jnp.sin(x))

    p, _, x = arguments((M,))
    states = jnp.zeros((B, M), bool), jnp.zeros(B, jnp.int32)
    got, want = (run(step, backend, p, states, x)[0] for backend in ("cpu", "scan"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b)
    assert not got[0][3:].any() and got[1][4:].all()


def test_places_outside_are_nan_where_jax_says_so():
    def step(p, states, x, t):
        m, at = states
        y = jnp.take_along_axis(m, at[:, None, None], 1)[:, 0]
        return (m, at + 4), jnp.where(jnp.isnan(y), y, x)

    p, (_, m), x = arguments((M, H))
    y, _ = run(step, "cpu", p, (m, jnp.zeros(B, jnp.int32)), x)
    assert np.isnan(y[2:]).all() and not np.isnan(y[:2]).any()


def test_a_large_table_is_read_by_words_that_the_step_chose():
    """A greedy decoder: each word is embedded at the next step."""
    rng = np.random.default_rng(3)
    table, u = rng.standard_normal((3000, 16)), 0.3 * rng.standard_normal((16, 16))

    def step(p, states, x, t):
        h, word = states
        h = jnp.tanh(x + p["table"][word] + h @ p["u"])
        word = jnp.argmax(h @ p["table"].T, -1).astype(jnp.int32)
        return (h, word), word

    x, h = rng.standard_normal((7, 3, 16)), np.zeros((3, 16))
    words, want = np.zeros(3, int), []
    y, _ = run(
        step, "cpu", {"table": jnp.asarray(table), "u": jnp.asarray(u)},
        (jnp.asarray(h), jnp.zeros(3, jnp.int32)), jnp.asarray(x),
    )  # fmt: skip
    for t in range(7):
        h = np.tanh(x[t] + table[words] + h @ u)
        words = np.argmax(h @ table.T, -1)
        want.append(words)
    np.testing.assert_array_equal(y, want)


def test_a_nan_among_features_reads_no_memory_of_others():
    """A comparison of NaN may give any index: none is outside of the memory."""
    step, shape = memory_step("vmap")
    p, (h, m), x = arguments(shape)
    y, _ = run(step, "cpu", p, (h.at[1].set(jnp.nan), m), x)
    clean, _ = run(step, "cpu", p, (h, m), x)
    keep = np.array([0, 2, 3])
    np.testing.assert_array_equal(y[:, keep], clean[:, keep])
    assert np.isnan(y[:, 1]).all()


def gathered(m, i, offset, collapsed, axes):
    """Return what `lax.gather` reads at pairs of the number of a row and an index."""
    pairs = jnp.concatenate([jnp.arange(B)[:, None], i[:, None].astype(int)], 1)
    numbers = lax.GatherDimensionNumbers(offset, collapsed, axes)
    return lax.gather(m, pairs, numbers, (1, 1, H))


OTHER_PAIRS = {
    "columns first": lambda m, i: gathered(m, i, (1,), (0, 1), (1, 0)),
    "axes are kept": lambda m, i: gathered(m, i, (1, 2, 3), (), (0, 1)),
}


@pytest.mark.parametrize("name", OTHER_PAIRS)
def test_pairs_that_name_other_axes_are_no_own_rows(name):
    """The first number is that of another axis, or its axis stays."""
    rng = np.random.default_rng(1)
    given = jnp.asarray(rng.standard_normal((B, M, H))), (ROWS + 1) % B
    jaxpr = flat(jax.make_jaxpr(OTHER_PAIRS[name])(*given).jaxpr)
    found = with_own_rows(jaxpr)
    assert found is jaxpr
    memory, i = map(np.asarray, given)
    rows = np.arange(B)
    want = (
        memory[i, rows] if name == "columns first" else memory[rows, i][:, None, None]
    )
    (got,) = jaxpr_as_fun(ClosedJaxpr(found, []))(*given)
    np.testing.assert_array_equal(got, want)
