"""Loops taken apart, against `lax.scan` of the same step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from random_steps import ERF_HAS_BITS
from step_programs import PROGRAMS, B, T

import ostinato as ost
from ostinato._step.scan import prepare

OPTIONS = {
    "plain": {},
    "reverse": {"reverse": True},
    "ragged": {"seq_lengths": (3, 0, 5)},
    "resets": {"resets": np.random.default_rng(1).random((T, B)) < 0.4},
    "recompute": {"recompute": True},
    "segments": {"segment_length": 2},
}


def results(step, backend, **options):
    """Return a function of params, states and inputs, to a list of all results."""

    def run(params, states, inputs):
        out = ost.recurrent_net(
            step,
            inputs,
            states,
            params=params,
            time_major=True,
            backend=backend,
            **options,
        )
        return jax.tree.leaves((out.outputs, out.states))

    return run


def net(program, backend, **options):
    """Return the function of `results`, with all of them as one vector."""
    run = results(program.step, backend, **options)

    def vector(*arguments):
        leaves = run(*arguments)
        return jnp.concatenate([jnp.ravel(a).astype(jnp.float64) for a in leaves])

    return vector


def scalar(function):
    """Return a loss with a different slope for each element."""

    def loss(*arguments):
        y = function(*arguments)
        return jnp.sum(jnp.sin(y * (1 + np.arange(y.size) / y.size)))

    return loss


def floats(tree):
    """Return a tree with None in place of arrays that have no derivatives."""
    return jax.tree.map(
        lambda a: a if jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating) else None,
        tree,
    )


def of_floats(function, arguments):
    """Return `function` of the arguments' floats alone."""

    def call(given):
        full = jax.tree.map(
            lambda a, b: a if b is None else b,
            arguments,
            given,
            is_leaf=lambda a: a is None,
        )
        return function(*full)

    return call


def assert_equal(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * scale)


def cotangent_of(a):
    """Draw odd eighths, which every type has exactly."""
    return (np.random.default_rng(a.size).integers(-8, 8, a.shape) + 0.5) / 4


def passes(step, arguments, backend, **options):
    """Return a function of the arguments' floats, to results and gradients.

    The cotangents of the results are constants: a loss is more operations to trace.
    """

    run = of_floats(results(step, backend, **options), arguments)

    def by_kind(given):
        leaves = run(given)
        found = [a for a in leaves if jnp.issubdtype(a.dtype, jnp.floating)]
        return found, [a for a in leaves if not jnp.issubdtype(a.dtype, jnp.floating)]

    def both(given):
        found, pull, others = jax.vjp(by_kind, given, has_aux=True)
        cotangents = [cotangent_of(a).astype(a.dtype) for a in found]
        return found, others, pull(cotangents)

    return both


def values_and_gradients(*args, **options):
    """Return the function of `passes`, compiled."""
    return fast_jit(passes(*args, **options))


def in_one_program(name, *backends, **options):
    """Return results and gradients on every backend, which one program computes."""
    step, arguments = PROGRAMS[name].step, arguments_of(name)
    runs = [passes(step, arguments, b, **options) for b in backends]
    return fast_jit(lambda given: [run(given) for run in runs])(floats(arguments))


def arguments_of(name):
    return PROGRAMS[name][1:]


@functools.cache
def scan_of(name):
    """Return the function of `values_and_gradients` in `lax.scan`, compiled once."""
    return values_and_gradients(PROGRAMS[name].step, arguments_of(name), "scan")


@functools.cache
def results_of_scan(name):
    return jax.device_get(scan_of(name)(floats(arguments_of(name))))


@pytest.mark.alike
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name):
    native = "cpu" if ost.backends()["cpu"] and name != "convolution" else None
    *loops, want = in_one_program(name, "xla", native, "scan")
    for got in loops:
        assert_equal(got, want)


@pytest.mark.parametrize("option", list(OPTIONS)[1:])
@pytest.mark.parametrize("name", ["lstm", "tied_weights", "read_write_memory"])
def test_options(name, option):
    if option in ("recompute", "segments"):  # these change nothing
        loops = in_one_program(name, "xla", "cpu", **OPTIONS[option])
        want = results_of_scan(name)
    else:
        *loops, want = in_one_program(name, "xla", "cpu", "scan", **OPTIONS[option])
    for got in loops:
        assert_equal(got, want)


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
def test_all_but_a_convolution_run_in_the_native_loop():
    elsewhere = []
    for name, p in PROGRAMS.items():
        arguments = p.step, p.inputs, p.states
        options = dict(params=p.params, time_major=True, backend="cpu")
        try:
            assert ost.explain(*arguments, **options).backend == "cpu"
        except NotImplementedError:
            elsewhere.append(name)
    erf = ["no_product"] if ERF_HAS_BITS else []
    assert elsewhere == [*erf, "convolution"]


FURTHER = ["lstm", "gru_reset_before", "integers_and_bools", "outputs_that_are_inputs"]


@pytest.mark.parametrize("name", FURTHER)
def test_tangents_and_second_derivatives(name):
    arguments = arguments_of(name)
    given = floats(arguments)
    direction = jax.tree.map(np.cos, given)

    def loss_in(backend):
        return of_floats(scalar(net(PROGRAMS[name], backend)), arguments)

    def along_and_curvature(loss, given, direction):
        along = jax.jvp(loss, (given,), (direction,))
        return along, jax.jvp(jax.grad(loss), (given,), (direction,))[1]

    def slope(loss, given, direction):
        products = jax.tree.map(jnp.vdot, jax.grad(loss)(given), direction)
        return sum(jax.tree.leaves(products))

    @fast_jit
    def derivatives(given, direction):
        loss = loss_in(None)
        again = jax.grad(functools.partial(slope, loss))(given, direction)
        return *along_and_curvature(loss, given, direction), again

    wanted = fast_jit(functools.partial(along_and_curvature, loss_in("scan")))
    along, curvature = wanted(given, direction)
    # The matrix of second derivatives is symmetric.
    assert_equal(derivatives(given, direction), (along, curvature, curvature))


@functools.cache
def gradient_in_scan(name):
    loss = of_floats(scalar(net(PROGRAMS[name], "scan")), arguments_of(name))
    return fast_jit(jax.grad(loss))


@pytest.mark.parametrize("mapped", ["params", "states", "inputs", "all"])
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
@pytest.mark.parametrize("name", ["lstm", "integers_and_bools"])
def test_vmap(name, mapped, order):
    arguments = arguments_of(name)
    given = jax.device_get(floats(arguments))
    chosen = [mapped in (n, "all") for n in ("params", "states", "inputs")]
    axes = (tuple(0 if c else None for c in chosen),)
    loss = of_floats(scalar(net(PROGRAMS[name], None)), arguments)

    def members(join):
        pairs = zip(given, chosen, strict=True)
        return tuple(
            jax.tree.map(lambda a: join([a, 0.5 * a]), g) if c else g for g, c in pairs
        )

    if order == "grad of vmap":
        run = jax.grad(lambda many: jax.vmap(loss, axes)(many).sum())
    else:
        run = jax.vmap(jax.grad(loss), axes)
    got = fast_jit(run)(members(np.stack))
    first, second = map(gradient_in_scan(name), (given, members(lambda pair: pair[1])))
    want = jax.tree.map(lambda *a: np.stack(a), first, second)
    if order == "grad of vmap":
        pairs = zip(want, chosen, strict=True)
        want = [w if c else jax.tree.map(lambda a: a.sum(0), w) for w, c in pairs]
    assert_equal(got, want)


def calls_of(function, *arguments):
    """Return how often a program calls the native loop."""
    text = jax.jit(function).lower(*arguments).as_text()
    return text.count("custom_call @ostinato_step(")


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("mapped", ["inputs", "params"])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_of_each_example_run_in_the_native_loop(mapped, ragged):
    program = PROGRAMS["lstm"]
    p, states, x = program.params, program.states, program.inputs
    options = {"seq_lengths": jnp.asarray([3, 0, 5])} if ragged else {}
    run = scalar(net(program, None, **options))
    if mapped == "params":
        p = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), p)
        one = lambda p, x: jax.grad(run)(p, states, x)  # noqa: E731
        each = jax.vmap(one, in_axes=(0, None))
    else:
        x = jnp.stack([x, 0.5 * x])
        each = jax.vmap(lambda x: jax.grad(run)(p, states, x))
        each = lambda p, x, each=each: each(x)  # noqa: E731
    assert calls_of(each, p, x) == 2


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("name", ["lstm", "attention"])
def test_sequences_split_over_devices_run_in_the_native_loop(name):
    mesh = Mesh(np.array(jax.devices()[:4]), ("b",))
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(0.5 * rng.standard_normal(shape))  # noqa: E731
    x, h, memory = draw(T, 8, 2), draw(8, 4), draw(8, 6, 4)
    lengths = jnp.asarray([5, 0, 3, 5, 2, 1, 4, 5])
    params = {"w": draw(2, 4), "u": draw(4, 4), "memory": memory}

    def step(p, h, x, t):
        read = h
        if name == "attention":
            scores = jnp.einsum("bh,bmh->bm", h, p["memory"])
            read = jnp.einsum("bm,bmh->bh", jax.nn.softmax(scores), p["memory"])
        h = jnp.tanh(x @ p["w"] + read @ p["u"])
        return h, h

    def loss(p, h, x, lengths, backend):
        out = ost.recurrent_net(
            step,
            x,
            h,
            params=p,
            time_major=True,
            seq_lengths=lengths,
            backend=backend,
        )
        return jnp.sum(jnp.sin(out.outputs)) + jnp.vdot(out.states, out.states)

    def place(a, *axes):
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes)))

    split = {k: place(a, *["b"] * (k == "memory")) for k, a in params.items()}
    given = split, place(h, "b"), place(x, None, "b"), place(lengths, "b")
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=4)
    compiled = run.lower(*given, None).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="ostinato_step"') == 2
    assert "all-gather" not in text
    assert_equal(compiled(*given), run(params, h, x, lengths, "scan"))


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
def test_large_integers_are_exact():
    """XLA runs the loop where floats cannot stand for them, with the same results."""

    def step(p, states, x, t):
        h, count = states
        count = count + t
        return (jnp.tanh(h @ p + x), count), (h, count % 1000)

    x, h = np.ones((B, T, 4), np.float32) / 3, np.ones((B, 4), np.float32)
    p = np.eye(4, dtype=np.float32)

    @fast_jit
    def both(x, h, p, count):
        return [
            ost.recurrent_net(step, x, (h, count), params=p, backend=b)
            for b in ("cpu", "scan")
        ]

    for first in (0, 2**30):
        got, want = both(x, h, p, np.int32(first) + np.arange(B, dtype=np.int32))
        np.testing.assert_array_equal(got.states[1], want.states[1])
        np.testing.assert_array_equal(got.outputs[1], want.outputs[1])
        np.testing.assert_allclose(got.outputs[0], want.outputs[0], rtol=1e-6)


def test_a_second_trace_compiles_nothing():
    def step_with(scale):
        def step(p, h, x, t):
            h = jax.nn.softplus(x @ p + jax.nn.relu(h @ p))
            return jnp.where(t % 2 == 0, scale * h, h), h

        x, h, p = jnp.ones((3, 2, 4)), jnp.ones((2, 4)), jnp.eye(4)
        body = lambda p, h, x: step(p, h, *x)  # noqa: E731
        return prepare(body, p, h, (x, jnp.arange(3, dtype=jnp.int32)), None).step

    assert step_with(2.0) is step_with(2.0)
    assert step_with(2.0) is not step_with(3.0)


@pytest.mark.parametrize("name", ["lstm", "recurrent_state_space"])
def test_checkpoint_around_it(name):
    arguments = arguments_of(name)
    loss = of_floats(scalar(net(PROGRAMS[name], None)), arguments)
    run, given = fast_jit(jax.grad(jax.checkpoint(loss))), floats(arguments)
    assert_equal(run(given), gradient_in_scan(name)(given))


def test_matrices_inside_of_the_loop_have_their_gradients_after_it():
    """No step of the backward loop adds up the gradient of a matrix."""
    program = PROGRAMS["lstm"]
    gradient = jax.grad(scalar(net(program, "xla")))
    text = str(jax.make_jaxpr(gradient)(program.params, program.states, program.inputs))
    assert "ostinato_loop_bwd" in text and " scan[" not in text


def test_what_cannot_be_taken_apart_runs_as_scan():
    def show(p, h, x, t):
        jax.debug.callback(lambda: None)
        return h @ p, h

    def keys(p, states, x, t):
        h, data = states
        split = jax.vmap(jax.random.split)(jax.random.wrap_key_data(data))
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(split[:, 0])
        return (h @ p + noise, jax.random.key_data(split[:, 1])), h

    h, u, x = jnp.ones((2, 3)), jnp.eye(3), jnp.ones((2, 4, 1))
    run = functools.partial(ost.recurrent_net, inputs=x, params=u)
    np.testing.assert_array_equal(run(show, initial_states=h).outputs, 1.0)
    start = h, jax.random.key_data(jax.random.split(jax.random.key(0), 2))
    steps = jnp.arange(4)
    want = jax.lax.scan(lambda s, t: keys(u, s, x[:, 0], t), start, steps)[1]
    got = run(keys, initial_states=start).outputs
    np.testing.assert_allclose(got, jnp.swapaxes(want, 0, 1), rtol=1e-12)
    complex_h = h.astype(complex)
    out = run(lambda p, h, x, t: (h @ p.astype(complex), h), initial_states=complex_h)
    np.testing.assert_array_equal(out.states, complex_h)


def test_backend_is_checked():
    with pytest.raises(
        ValueError, match="`backend` must be one of 'xla', 'cpu', 'cuda', 'scan'"
    ):
        ost.recurrent_net(
            lambda p, h, x, t: (h, h),
            jnp.ones((1, 2, 3)),
            jnp.ones((1, 3)),
            backend="c",
        )


OF_ALL = {
    "a matrix with a row for each": lambda m, h, t: (h @ m + h * m, h),
    "an output of all": lambda m, h, t: (h @ m, jnp.cos(m[0] * t)),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_what_sequences_share_is_not_split_over_devices(name):
    """There are as many sequences as features, so that shapes do not tell."""
    mesh, size = Mesh(np.array(jax.devices()[:4]), ("b",)), 8
    rng = np.random.default_rng(0)
    x, h, m = (rng.normal(size=s) for s in ((size, 5, size), *[(size, size)] * 2))

    def step(m, h, x, t):
        read, more = OF_ALL[name](m, h, jnp.asarray(t, h.dtype))
        h = jnp.tanh(x + read)
        return h, (h, more)

    def net(m, x, h):
        return ost.recurrent_net(step, x, h, params=m).outputs

    def by_hand(m, x, h):
        found = []
        for t in range(5):
            h, y = step(m, h, x[:, t], t)
            found.append(y)
        return jax.tree.map(lambda *a: jnp.stack(a, 1), *found)

    def passes(run):
        def loss(*given):
            y = run(*given)
            return jnp.sum(jnp.sin(y[0])) + jnp.sum(y[1] ** 2), y

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    place = lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec("b")))  # noqa: E731
    got, want = passes(net)(*map(place, (m, x, h))), passes(by_hand)(m, x, h)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
