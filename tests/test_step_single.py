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
