"""Loops under `vmap` over weights: native loops of the members, in one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ostinato as ost
from ostinato import cells, ragged
from ostinato._step.native import can_run
from ostinato._step.split import Step
from ostinato._step.xla import Loop

MEMBERS, ROWS, T, H = 3, 5, 6, 4
native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


def assert_trees_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def draw(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return jax.device_put(0.5 * rng.standard_normal(shape))


def leaky(p, h, x, t):
    h = 0.9 * h + 0.1 * jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"][None])
    return h, h


def leaky_params(*lead):
    return {"w": draw(*lead, 2, H), "u": draw(*lead, H, H), "b": draw(*lead, H)}


def attending(p, h, x, t):
    scores = jnp.einsum("bsh,bh->bs", p["memory"] @ p["w"], h)
    context = jnp.einsum("bs,bsh->bh", jax.nn.softmax(scores), p["memory"])
    h = jnp.tanh(x @ p["v"] + jnp.concatenate([h, context], 1) @ p["u"])
    return h, h


def attending_params(*lead):
    memory = draw(*lead, ROWS, 7, H)
    maps = {"w": draw(*lead, H, H), "v": draw(*lead, 2, H), "u": draw(*lead, 2 * H, H)}
    return maps | {"memory": memory}


STEPS = {"leaky": (leaky, leaky_params), "attending": (attending, attending_params)}


def loss_of(step, **options):
    """Return a loss of parameters, inputs and initial states of one member."""

    def loss(p, x, h, lengths=None):
        out = ost.recurrent_net(step, x, h, params=p, seq_lengths=lengths, **options)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states**2)

    return loss


def member(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def loop(function, arguments, axes):
    """Call a function, which is traced once, for each member; stack the results."""
    pairs = list(zip(jax.device_get(arguments), axes, strict=True))
    run = function if hasattr(function, "lower") else fast_jit(function)
    own = [
        run(*(a if axis is None else member(a, i) for a, axis in pairs))
        for i in range(MEMBERS)
    ]
    return stack(own)


def stack(trees):
    return jax.tree.map(lambda *a: np.stack(a), *trees)


def rows_of_calls(function, *arguments):
    """Return the numbers of sequences of all calls of the native loop."""
    text = jax.jit(function).lower(*arguments).as_text()
    lines = [
        line for line in text.splitlines() if "custom_call @ostinato_step(" in line
    ]
    return [int(line.split("batch = ")[1].split()[0]) for line in lines]


WHICH = 0, 1, 2


@functools.cache
def one_of(name, reverse):
    """Return value and gradients of the loss of one member, compiled once."""
    loss = loss_of(STEPS[name][0], reverse=reverse)
    return fast_jit(jax.value_and_grad(loss, WHICH))


@pytest.mark.parametrize("order", ["values", "grad of vmap", "vmap of grad"])
@pytest.mark.parametrize("shared", ["nothing", "inputs", "states", "lengths"])
@pytest.mark.parametrize("name", STEPS)
def test_members_equal_a_loop(name, shared, order):
    step, params = STEPS[name]
    loss = loss_of(step, reverse=shared == "states")
    arguments = [params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)]
    axes: list[int | None] = [0, 0, 0]
    if shared in ("inputs", "states"):
        place = ["inputs", "states"].index(shared) + 1
        arguments[place], axes[place] = arguments[place][0], None
    else:
        lengths = jnp.array([[6, 0, 3, 6, 1], [1, 2, 0, 6, 5], [0, 0, 6, 4, 4]])
        arguments.append(lengths[0] if shared == "lengths" else lengths)
        axes.append(None if shared == "lengths" else 0)
    one = one_of(name, shared == "states")
    values, gradients = loop(one, arguments, axes)
    every = jax.vmap(loss, tuple(axes))
    if order == "values":
        run, want = every, values
    elif order == "vmap of grad":
        run, want = jax.vmap(jax.grad(loss, WHICH), tuple(axes)), gradients
    else:
        run = jax.grad(lambda *given: jnp.sum(every(*given)), WHICH)
        sums = [axis is None for axis in axes[:3]]  # of what the members share
        want = tuple(
            jax.tree.map(lambda a: a.sum(0), g) if s else g
            for g, s in zip(gradients, sums, strict=True)
        )
    assert_trees_close(fast_jit(run)(*arguments), want)


@native
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
def test_each_member_runs_in_the_native_loop(name, order):
    step, params = STEPS[name]
    loss = loss_of(step)
    arguments = params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)
    if order == "vmap of grad":
        run = jax.vmap(jax.grad(loss, (0, 1)))
    else:
        run = jax.grad(lambda *a: jnp.sum(jax.vmap(loss)(*a)))
    # One call forward and one back, of the sequences of one member.
    assert rows_of_calls(run, *arguments) == [ROWS, ROWS]
    assert "stablehlo.while" not in jax.jit(run).lower(*arguments).as_text()


@native
def test_few_sequences_of_small_members_run_side_by_side():
    run = jax.vmap(loss_of(leaky))
    x, h = draw(MEMBERS, 2, T, 2), draw(MEMBERS, 2, H)
    assert rows_of_calls(run, leaky_params(MEMBERS), x, h) == [MEMBERS]


@native
def test_a_number_of_each_sequence_beside_the_state_makes_members_no_smaller():
    def step(p, states, x, t):
        count, h = states
        h = jnp.tanh(x + h @ p)
        return (count + 1.0, h), h

    def run(p, x, h):
        states = jnp.zeros(len(h)), h
        return ost.recurrent_net(step, x, states, params=p).outputs

    given = draw(MEMBERS, H, H), draw(MEMBERS, ROWS, T, H), draw(MEMBERS, ROWS, H)
    assert rows_of_calls(jax.vmap(run), *given) == [ROWS]


@native
def test_large_members_run_by_themselves():
    size = 640

    def step(p, h, x, t):
        h = jnp.tanh(x + h @ p)
        return h, h

    run = jax.vmap(lambda p, x, h: ost.recurrent_net(step, x, h, params=p).states)
    given = [
        jax.ShapeDtypeStruct((MEMBERS, *shape), jnp.float32)
        for shape in ((size, size), (1, T, size), (1, size))
    ]
    assert rows_of_calls(run, *given) == [1]


def test_derivatives_of_higher_order_equal_a_loop():
    loss = loss_of(leaky)
    p, x, h = leaky_params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)

    def curvature(p, x, h):
        total = lambda b: loss(p | {"b": b}, x, h)  # noqa: E731
        return jax.hessian(total)(p["b"]), jax.jacfwd(total)(p["b"])

    got = jax.jit(jax.vmap(curvature))(p, x, h)
    assert_trees_close(got, loop(curvature, (p, x, h), (0, 0, 0)))

    def along(run):
        f = lambda p: jnp.sum(run(p, x, h) ** 2)  # noqa: E731
        return jax.jvp(jax.grad(f), (p,), (jax.tree.map(jnp.cos, p),))

    def each(p, x, h):
        run = jax.jit(loss)  # traced once
        given = [member((p, x, h), i) for i in range(MEMBERS)]
        return jnp.stack([run(*one) for one in given])

    runs = jax.vmap(loss), each
    assert_trees_close(*(fast_jit(lambda run=run: along(run))() for run in runs))


def test_members_of_members_equal_a_loop():
    loss = loss_of(leaky)
    p, h = leaky_params(MEMBERS), draw(MEMBERS, ROWS, H)
    x = draw(2, MEMBERS, ROWS, T, 2)
    grad = jax.grad(loss, (0, 1))
    one = fast_jit(grad)
    got = fast_jit(jax.vmap(jax.vmap(grad), (None, 0, None)))(p, x, h)
    want = [loop(one, (p, x[i], h), (0, 0, 0)) for i in range(2)]
    assert_trees_close(got, stack(want))

    many, x = jax.tree.map(lambda a: np.stack([a, 0.5 * a]), p), x[0, 0]
    run = fast_jit(jax.vmap(jax.vmap(grad, (0, None, 0)), (0, None, None)))
    want = [loop(one, (member(many, i), x, h), (0, None, 0)) for i in range(2)]
    assert_trees_close(run(many, x, h), stack(want))


def test_a_step_that_the_native_loop_does_not_have_equals_a_loop():
    def step(p, h, x, t):
        h = jnp.tanh(x @ p["w"] + jnp.sort(h, axis=1) @ p["u"])
        return h, h

    one = jax.grad(loss_of(step))
    given = leaky_params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)
    got = fast_jit(jax.vmap(one))(*given)
    assert_trees_close(got, loop(one, given, (0, 0, 0)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_narrow_types_equal_a_loop(dtype):
    cell = cells.MILSTM(2, H)
    params = [cell.init(jax.random.key(i), dtype) for i in range(MEMBERS)]
    params = jax.tree.map(lambda *a: jnp.stack(a), *params)
    x = draw(MEMBERS, ROWS, T, 2).astype(dtype)

    def loss(p, x):
        out = ost.recurrent_net(cell, x, cell.initial_state(ROWS, dtype), params=p)
        return jnp.sum(out.outputs.astype(jnp.float32) ** 2)

    # The same calls of the native loop: the same bits.
    got = jax.jit(jax.vmap(jax.grad(loss)))(params, x)
    want = loop(jax.jit(jax.grad(loss)), (params, x), (0, 0))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@native
@pytest.mark.parametrize("shared", ["inputs", "lengths", None])
def test_many_members_are_shared_among_threads(configure, shared):
    """Compare with calls of one member each, and with the equations in float64."""
    count, units = 12, 32
    maps = [draw(count, n, units).astype("float32") for n in (2, units, 1)]
    p = dict(zip("wub", maps, strict=True))
    p["b"] = p["b"][:, 0]
    x = draw(count, ROWS, 40, 2).astype("float32")
    h = draw(count, ROWS, units).astype("float32")
    lengths = jnp.asarray(np.random.default_rng(1).integers(0, 41, (count, ROWS)))
    axes = [0, 0, 0, 0]
    if shared == "inputs":
        x, axes[1] = x[0], None
    elif shared == "lengths":
        lengths, axes[3] = lengths[0], None
    value = jax.value_and_grad(loss_of(leaky), WHICH)
    many, alone = jax.jit(jax.vmap(value, axes)), jax.jit(value)
    given = p, x, h, lengths
    configure("avx512_amx", 2)
    got = jax.device_get(many(*given))
    configure("avx512_amx", 1)
    jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(many(*given)))
    pairs = list(zip(given, axes, strict=True))
    for i in range(count):
        own = [a if axis is None else member(a, i) for a, axis in pairs]
        jax.tree.map(np.testing.assert_array_equal, member(got, i), alone(*own))
        if i in (0, 7):
            wide = [jax.tree.map(lambda a: a.astype("float64"), a) for a in own[:3]]
            want = by_numpy(*wide, own[3])
            np.testing.assert_allclose(got[0][i], want, rtol=2e-5)


def by_numpy(p, x, h, lengths):
    """Return the loss of `leaky` by a loop over sequences and steps."""
    p, x, h = jax.device_get((p, x, h))
    total = 0.0
    for row, length in enumerate(np.asarray(lengths)):
        state = h[row]
        for t in range(length):
            inner = np.tanh(x[row, t] @ p["w"] + state @ p["u"] + p["b"])
            state = 0.9 * state + 0.1 * inner
            total += np.sin(state).sum()
        held = x.shape[1] - length if length else 0
        total += held * np.sin(state).sum() + (state**2).sum()
    return total


@pytest.mark.parametrize("segment", [None, 2])
@pytest.mark.parametrize("own", [{"w", "u", "b"}, {"w", "u"}, {"u", "b"}])
def test_gradients_of_two_levels_of_members(own, segment):
    units, lengths = 8, jnp.array([6, 0, 3, 6, 1])
    p = {"w": draw(3, 2, units), "u": draw(3, units, units), "b": draw(3)}
    p = {name: a if name in own else a[0] for name, a in p.items()}
    x, h = draw(ROWS, T, 2), draw(ROWS, units)
    axes = {name: 0 if name in own else None for name in p}

    loss = loss_of(leaky, segment_length=segment)

    def scalar(p, x, h):
        return loss(p | {"b": jnp.full(units, p["b"])}, x, h, lengths)

    slope = jax.grad(scalar)
    inner = jax.vmap(slope, (axes, None, None))
    outer = {"w": None, "u": -1, "b": None}
    given = p | {"u": jnp.stack([p["u"], 2 * p["u"]], -1)}
    got = fast_jit(jax.vmap(inner, (outer, None, None)))(given, x, h)
    for i, j in ((0, 0), (1, 2)):
        one = {name: a[j] if name in own else a for name, a in p.items()}
        want = fast_jit(slope)(one | {"u": (1 + i) * one["u"]}, x, h)
        assert_trees_close({k: a[i, j] for k, a in got.items()}, want)


@native
def test_loops_with_sums_among_their_states_are_not_native():
    """Check a loop as those of members of members are, backwards."""
    step = jax.make_jaxpr(lambda h, total: (jnp.tanh(h), 2 * total))
    loops = [
        Loop(Step(step(draw(ROWS, H), total), 0, 0, 2), T, T, False, None, False, None)
        for total in (draw(), draw(ROWS))
    ]
    assert [can_run(loop) for loop in loops] == [False, True]


def test_no_members():
    net = jax.vmap(loss_of(leaky), (0, None, None))
    given = leaky_params(0), draw(ROWS, T, 2), draw(ROWS, H)
    assert jax.jit(net)(*given).shape == (0,)
    slopes = jax.jit(jax.grad(lambda *a: jnp.sum(net(*a)), WHICH))(*given)
    assert slopes[0]["u"].shape == (0, H, H)
    np.testing.assert_array_equal(slopes[1], 0 * given[1])


@native
def test_integers_of_each_member_are_exact():
    """Check large integers, which floats cannot hold, in one member of several."""

    def step(p, h, x, t):
        n, s = h
        s = jnp.tanh(s @ p)
        return (n + x, s), (n % 1000, s)

    def run(p, n, s, x):
        return ost.recurrent_net(step, x, (n, s), params=p)

    units = 8
    p = draw(MEMBERS, units, units)
    s = draw(MEMBERS, ROWS, units)
    n = jnp.array([[5] * ROWS, [2**30 + 1] * ROWS, [7] * ROWS], jnp.int32)
    x = jnp.ones((MEMBERS, ROWS, T), jnp.int32)
    got = jax.jit(jax.vmap(run))(p, n, s, x)
    count = np.asarray(n)[..., None] + np.arange(T)
    np.testing.assert_array_equal(got.outputs[0], count % 1000)
    np.testing.assert_array_equal(got.states[0], np.asarray(n) + T)


def test_members_over_devices_equal_a_loop():
    mesh = jax.make_mesh((3,), ("member",), axis_types=(AxisType.Auto,))
    grad = jax.grad(loss_of(leaky), (0, 1))
    given = leaky_params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)
    want = loop(grad, given, (0, 0, 0))
    own = NamedSharding(mesh, PartitionSpec("member"))
    run = jax.jit(jax.vmap(grad))
    shared = jax.device_put(given, own)
    compiled = run.lower(*shared).compile()
    assert_trees_close(compiled(*shared), want)
    text = compiled.as_text()
    assert text is not None and "all-gather" not in text
    spec = PartitionSpec("member")
    local = jax.shard_map(jax.vmap(grad), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_trees_close(jax.jit(local)(*shared), want)


def test_ragged_batches_of_members_equal_a_loop():
    lengths = [3, 1, 6, 2, 4]
    batch = ragged.RaggedArray.from_list([draw(n, 2) for n in lengths])

    def loss(p):
        def one(x):
            out = ost.recurrent_net(leaky, x[None], jnp.zeros((1, H)), params=p)
            return jnp.sum(jnp.sin(out.outputs))

        return jnp.sum(ragged.vmap(one)(batch))

    p = leaky_params(MEMBERS)
    got = jax.jit(jax.vmap(jax.grad(loss)))(p)
    assert_trees_close(got, loop(jax.grad(loss), (p,), (0,)))


def test_exported_members_equal_a_loop():
    one = jax.grad(loss_of(leaky))
    given = leaky_params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)
    exported = jax.export.export(jax.jit(jax.vmap(one)), platforms=["cpu", "tpu"])
    assert_trees_close(exported(*given).call(*given), loop(one, given, (0, 0, 0)))


@pytest.mark.parametrize("shared", ["inputs", "states", "parameters"])
def test_tangents_of_what_members_share_equal_a_loop(shared):
    def net(p, x, h):
        return ost.recurrent_net(leaky, x, h, params=p).outputs

    def by_hand(p, x, h):
        body = lambda h, x: leaky(p, h, x, None)  # noqa: E731
        return jnp.swapaxes(lax.scan(body, h, jnp.swapaxes(x, 0, 1))[1], 0, 1)

    p, x, h = leaky_params(MEMBERS), draw(MEMBERS, ROWS, T, 2), draw(MEMBERS, ROWS, H)
    axes = {"w": 0, "u": 0, "b": 0}, 0, 0
    if shared == "inputs":
        x, axes = x[0], (axes[0], None, 0)
        along = (p, x, h), (jax.tree.map(jnp.zeros_like, p), jnp.cos(x), 0 * h)
    elif shared == "states":
        h, axes = h[0], (axes[0], 0, None)
        along = (p, x, h), (jax.tree.map(jnp.zeros_like, p), 0 * x, jnp.cos(h))
    else:
        p, axes = p | {"b": p["b"][0]}, (axes[0] | {"b": None}, 0, 0)
        along = (p, x, h), (jax.tree.map(jnp.cos, p), 0 * x, 0 * h)

    def tangent(given, slopes):
        return jax.jvp(jax.vmap(net, axes), given, slopes)[1]

    def one(p, x, h, *slopes):
        return jax.jvp(by_hand, (p, x, h), slopes)[1]

    got = fast_jit(tangent)(*along)
    want = jax.vmap(one, (*axes, *axes))(*along[0], *along[1])
    assert_trees_close(got, want)
