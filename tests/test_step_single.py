"""One sequence: what runs for a chunk of steps at once, and parts that are joined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit

import ostinato as ost
from benchmarks.steps import networks

pytestmark = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")


def test_one_sequence_without_its_axis():
    """What has lost the axis is turned and reshaped, and gets it back."""

    def step(p, h, x, t):
        turned = jnp.tanh(h[0].transpose(1, 0, 2).reshape(3, 2)).T
        gates = (h.reshape(1, 6) @ p).reshape(1, 2, 3, 1)
        h = jnp.tanh(x + gates + turned.reshape(1, 2, 3, 1))
        return h, h

    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.random.normal
    given = draw(keys[0], (6, 6)), draw(keys[1], (1, 7, 2, 3, 1))
    h_0 = draw(keys[2], (1, 2, 3, 1))

    def slopes(backend):
        def loss(p, x):
            out = ost.recurrent_net(step, x, h_0, params=p, backend=backend).outputs
            return jnp.sum(jnp.sin(out))

        return fast_jit(jax.value_and_grad(loss, (0, 1)))(*given)

    for a, b in zip(*map(jax.tree.leaves, map(slopes, ("cpu", "scan"))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.fixture(autouse=True)
def any_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def parts(params, states, x, t):
    """Run a step whose gates and vectors are taken apart before they are combined."""
    h, c = states
    gx = jnp.split(x @ params["w"] + params["a"], 4, -1)
    gh = jnp.split(h @ params["u"] + params["b"], 4, -1)
    scales = jnp.split(params["s"], 4)
    i, f, g, o = (s[None] * p * q + p for s, p, q in zip(scales, gx, gh, strict=True))
    last = params["s"][-h.shape[1] :]
    c = jax.nn.sigmoid(f + last * c) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def of_inputs(params, states, x, t):
    """Run a step with products and sums of what inputs decide, and of `t`."""
    h, c = states
    seen = jnp.tanh(x @ params["w"]) * jnp.cos(0.1 * t.astype(x.dtype)) + params["a"]
    size = h.shape[1]
    norm = seen / (1 + jnp.sum(seen * seen, -1, keepdims=True))
    drive = norm[:, :size] - norm[:, -size:] @ params["u"][:, :size]
    new = jnp.tanh(drive + (h * params["s"][:size]) @ params["u"][:, size : 2 * size])
    c = c + h * drive
    return (new, c), (new * c, jnp.exp(-seen))


def added_starts(params, states, x, t):
    """Run a step of two products that start from a vector each."""
    h, c = states
    gates = (x @ params["w"] + params["a"]) + (h @ params["u"] + params["b"])
    i, f, g, o = jnp.split(gates, 4, -1)
    h = jnp.tanh(i) * jax.nn.sigmoid(f + params["s"][: h.shape[1]] * c)
    return (h, jnp.sin(g * o) + c), h + c


STEPS = {f.__name__: f for f in (parts, of_inputs, added_starts)}


def arguments(steps, batch, size):
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(0.5 * rng.standard_normal(shape))  # noqa: E731
    params = {"w": draw(5, 4 * size), "u": draw(size, 4 * size)}
    params |= {name: draw(4 * size) for name in "abs"}
    return params, draw(steps, batch, 5), (draw(batch, size), draw(batch, size))


def check(step, given, **options):
    """Compare values and gradients of the native loop with those of `lax.scan`."""

    def loss(params, x, states, backend):
        out = ost.recurrent_net(
            step, x, states, params=params, time_major=True, padding="zero",
            backend=backend, **options,
        )  # fmt: skip
        leaves = jax.tree.leaves((out.outputs, out.states))
        slopes = (
            1 + jnp.arange(a.size).reshape(a.shape) / (1 + a.size) for a in leaves
        )
        total = sum(
            jnp.sum(jnp.sin(a * s)) for a, s in zip(leaves, slopes, strict=True)
        )
        return total, out

    def run(backend):
        value = lambda p, x, s: loss(p, x, s, backend)  # noqa: E731
        return fast_jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))(*given)

    got, want = run("cpu"), run("scan")
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * scale, err_msg=name)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("batch, size", [(1, 16), (1, 7), (3, 16)])
def test_results_equal_those_of_scan(name, batch, size):
    check(STEPS[name], arguments(37, batch, size))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("length", [0, 20, 37])
def test_a_sequence_that_ends_before_the_others_would(name, length):
    lengths = jnp.asarray([length])
    check(STEPS[name], arguments(37, 1, 16), seq_lengths=lengths, reverse=length == 20)


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps(steps):
    check(parts, arguments(steps, 1, 16))


def test_more_steps_than_a_chunk_has():
    check(parts, arguments(1100, 1, 64))


# ---------------------------------------------------------------- what programs have


def counts(name, cell, batch):
    """Return what `ost.explain` tells of a network of the benchmark."""
    network = networks(16)[name]
    with jax.enable_x64(False):
        params = network.init(jax.random.key(0))
        x, memory = jnp.ones((3, batch, 16)), jnp.ones((batch, 5, 16))
        step = network.cell_on(memory) if cell else network.step_on(memory)
        states = network.cell.initial_state(batch)
        told = ost.explain(
            step, x.astype(jnp.float32), states, params=params, time_major=True
        )
    return str(told)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_cell_that_splits_its_gates_takes_no_more_operations(batch):
    """Forward, the MI-LSTM of `cells` is as short as the one whose gates are joined."""
    function, cell = (counts("MI-LSTM", cell, batch) for cell in (False, True))
    operations = [told.split(" operations forward")[0] for told in (function, cell)]
    assert operations[0] == operations[1]


def test_products_that_start_from_vectors_are_added_up_in_place():
    """The peephole LSTM's product of h continues that of the input."""
    assert "16 operations forward" in counts("peephole LSTM", True, 1)


def parts_of_an_input(params, states, x, t):
    """Multiply parts of one input, of equal and of different sizes, by matrices."""
    h, c = states
    first = x[:, :2] @ params["a"] + x[:, 3:] @ params["b"]
    more = x[:, 1:3] @ params["c"] + x[:, 1:] @ params["d"]
    h = jnp.tanh(first + h @ params["u"][:, : h.shape[1]])
    return (h, c + more), h * more


@pytest.mark.parametrize("batch", [1, 3])
def test_products_of_parts_of_an_input_have_gradients_of_their_own(batch):
    params, x, states = arguments(9, batch, 7)
    sizes = {"a": 2, "b": 2, "c": 2, "d": 4}
    parts = {name: params["w"][:k, 7 * n : 7 * n + 7]
             for n, (name, k) in enumerate(sizes.items())}  # fmt: skip
    check(parts_of_an_input, ({"u": params["u"], **parts}, x, states))


N, T = 16, 5  # whole vectors, so that instructions are joined


def draw(seed, *shape):
    return 0.5 * np.random.default_rng(seed).standard_normal(shape)


W, X, U = draw(0, N, N), draw(1, T, 3, N), draw(2, N, 2 * N)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_recomputed_product_that_is_added_to_and_multiplied(batch):
    """The gradient of `v` is that of the product alone, without the vector."""
    params = {"w": W, "u": draw(3, N, N), "v": draw(4, N, N), "b": draw(5, N)}
    x, h_0 = jnp.asarray(X[:, :batch]), jnp.asarray(draw(6, batch, N))

    def step(p, h, x, t):
        product = x @ p["w"]
        h = jnp.tanh(h @ p["u"] + (product + p["b"])) + product @ p["v"]
        return h, h

    def native(p):
        out = ost.recurrent_net(
            step, x, h_0, params=p, time_major=True, backend="cpu", recompute=True
        )
        return jnp.sum(jnp.sin(out.outputs))

    def scanned(p):
        run = lambda h, x: step(p, h, x, None)  # noqa: E731
        return jnp.sum(jnp.sin(jax.lax.scan(run, h_0, x)[1]))

    got, want = (fast_jit(jax.grad(loss))(params) for loss in (native, scanned))
    for name, slope in want.items():
        np.testing.assert_allclose(got[name], slope, rtol=1e-9, atol=1e-9)


def values(step, params, states, batch):
    """Return what the native loop makes of a step, and what a loop in NumPy does."""
    run = lambda p, s, x, t: step(p, s, x, jnp)  # noqa: E731
    states = [a[:batch] for a in states]
    out = ost.recurrent_net(
        run, X[:, :batch], [jnp.asarray(a) for a in states], params=params,
        time_major=True, backend="cpu",
    )  # fmt: skip
    outputs = []
    for t in range(T):
        states, y = step(params, states, X[t, :batch], np)
        outputs.append(y)
    return (out.states, out.outputs), (states, np.stack(outputs))


def check_values(step, params, states, batch):
    """Compare the native loop with a loop in NumPy."""
    got, want = values(step, params, states, batch)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


PARTS = {
    "one element for all": lambda y, np: np.broadcast_to(y[:, :1], y.shape),
    "first half": lambda y, np: y[:, : N // 2],
    "first half twice": lambda y, np: np.tile(y[:, : N // 2], (1, 2)),
    "in reverse": lambda y, np: y[:, ::-1],
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_product_of_an_input_as_an_output(part, batch):
    def step(p, s, x, np):
        return [np.tanh(s[0] + x)], PARTS[part](x @ p, np)

    check_values(step, W, [draw(7, 3, N)], batch)


def halves_change_places(p, s, x, np):
    gates = s[0] @ p
    both = [np.tanh(gates[:, N:]), np.tanh(gates[:, :N])]
    both = np.concatenate(both, -1)
    return [np.tanh(s[0] + x * s[1][:, :N]), both], both


def halves_of_a_state_change_places(p, s, x, np):
    gates = s[0] @ p
    both = [np.tanh(gates[:, N:]), np.tanh(gates[:, :N])]
    h = np.tanh(s[0] + x * s[1][:, :N])
    return [h, np.concatenate(both, -1)], h


def halves_times_numbers(p, s, x, np):
    """Multiply each half by a number of its own."""
    gates, scales = s[0] @ p, np.tanh(x[:, :2])
    h = np.tanh(gates[:, :N] * scales[:, :1] - gates[:, N:] * scales[:, 1:])
    return [h, s[1] * 0.5], h


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "step",
    [halves_change_places, halves_of_a_state_change_places, halves_times_numbers],
)
def test_halves_that_are_no_whole(step, batch):
    states = [draw(7, 3, N), draw(8, 3, 2 * N)]
    check_values(step, U, states, batch)
    states = tuple(jnp.asarray(a[:batch]) for a in states)

    def run(p, s, x, t):
        states, y = step(p, s, x, jnp)
        return tuple(states), y

    check(run, (jnp.asarray(U), jnp.asarray(X[:, :batch]), states))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_state_that_all_sequences_have_alike(batch):
    params, states = draw(9, N), [jnp.asarray(a) for a in draw(8, 2, batch, N)]

    def step(p, s, x, t):
        k = jnp.broadcast_to(jnp.tanh(p * t.astype(x.dtype)), x.shape)
        h = jnp.tanh(s[0] + x * s[1])
        return [h, k], h

    out = ost.recurrent_net(
        step, X[:, :batch], states, params=params, time_major=True, backend="cpu"
    )
    h, k = states
    for t in range(T):
        h, k = np.tanh(h + X[t, :batch] * k), np.tanh(params * t)
        np.testing.assert_allclose(out.outputs[t], h, rtol=1e-10)
    np.testing.assert_allclose(out.states[1], np.tile(k, (batch, 1)), rtol=1e-10)


@pytest.mark.parametrize("batch", [1, 3])
def test_products_that_start_from_two_vectors(batch):
    params = {"w": draw(3, N, N), "u": draw(4, N, N), "a": draw(5, N), "b": draw(6, N)}

    def step(p, s, x, np):
        h = np.tanh((x @ p["w"] + p["a"]) + (s[0] @ p["u"] + p["b"]))
        return [h], h

    check_values(step, params, [draw(7, 3, N)], batch)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("step", [parts, of_inputs])
def test_inputs_past_the_end_of_the_only_sequence_are_not_read(step, reverse):
    params, x, states = arguments(21, 1, N)
    x = x.at[12:].set(jnp.nan)

    def native(p, length):
        out = ost.recurrent_net(
            step, x, states, params=p, time_major=True, padding="zero",
            reverse=reverse, seq_lengths=length, backend="cpu",
        )  # fmt: skip
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out.outputs))

    def scanned(p, _):
        run = lambda s, at: step(p, s, *at)  # noqa: E731
        steps = x[:12], jnp.arange(12)
        outputs = jax.lax.scan(run, states, steps, reverse=reverse)[1]
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(outputs))

    slopes = [fast_jit(jax.grad(loss)) for loss in (native, scanned)]
    slopes[0](params, jnp.array([21]))  # leaves NaN in memory that is used again
    got, want = (slope(params, jnp.array([12])) for slope in slopes)
    for name, slope in want.items():
        np.testing.assert_allclose(got[name], slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("part", [np.s_[:N], np.s_[N:], np.s_[3 : N + 3]])
def test_products_of_parts_of_rows(part, batch):
    """Each sequence has three rows, which are apart by more than what is read."""

    def step(p, s, x, np):
        rows = np.tanh(s[0][:, :, part] @ p + x[:, None])
        return [0.5 * s[0] + np.concatenate([rows, -rows], -1)], rows

    check_values(step, W, [draw(7, 3, 3, 2 * N)], batch)


def test_a_vector_of_each_sequence_that_is_added_to_a_product():
    def step(p, s, x, np):
        return [np.tanh(s[0] @ p["u"] + p["own"]) + x], s[0]

    params = {"u": draw(3, N, N), "own": draw(4, 3, N)}
    check_values(step, params, [draw(7, 3, N)], 3)
