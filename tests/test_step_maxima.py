"""Gradients of maxima and of signs where XLA computes their operands more than once.

Only optimised code rounds a product and a sum together: programs are compiled as usual.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from compile_options import usual_jit
from jax.sharding import PartitionSpec as P

import ostinato as ost
from ostinato._step.maxima import once

N, T, H = 5, 3, 8


def pairs(v):
    return v[:, :, None] - v[:, None, :]


def between_0_and_1(a):
    return jax.lax.clamp(a.dtype.type(0), a, a.dtype.type(1))


def of_sums(v, w, x):
    """Return sums over maxima of pairs that are sums of products."""
    m = jnp.maximum(
        v[:, :, None] * 0.7 + w[:, None, :] * 0.9, x[:, :, None] * w[:, None, :] + 0.1
    )
    return m.sum(1) * x + (m * m).max(1)


# Pairs have equal elements, whose difference is 0.
PARTS = {
    "maximum of pairs": lambda v, w, x: pairs(v).max(2),
    "least distance": lambda v, w, x: jnp.abs(pairs(v)).min(1) * x,
    "maximum of two": lambda v, w, x: jnp.maximum(pairs(v), 0).sum(2) * x,
    "maximum of two sums": of_sums,
    "sign": lambda v, w, x: (pairs(v) * jnp.sign(pairs(v))).sum(2) * x,
    "checkpoint": lambda v, w, x: jax.checkpoint(lambda v: pairs(v).max(2))(v) * x,
    "of a choice": lambda v, w, x: (
        jnp.abs(jnp.where(w[:, :, None] > 0, pairs(v), 0)).sum(2) * x
    ),
    "another shape": lambda v, w, x: (
        jnp.maximum(pairs(v).reshape(N, -1), 0).reshape(N, H, H).sum(2) * x
    ),
    "a difference under checkpoint": lambda v, w, x: (
        jnp.maximum(jax.checkpoint(pairs)(v), 0).sum(2) * x
    ),
    "clamp": lambda v, w, x: between_0_and_1(pairs(v)).sum(2) * x,
    "leaky relu": lambda v, w, x: jax.nn.leaky_relu(pairs(v)).sum(2) * x,
}
WAYS = {
    "xla": {"backend": "xla"},
    "recompute": {"backend": "xla", "recompute": True},
    "segments": {"backend": "xla", "segment_length": 2},
    "scan": {"backend": "scan", "recompute": True},
    "scan in segments": {"backend": "scan", "segment_length": 2},
}


def step_of(parts):
    """Return a step; what reads its values decides how XLA fuses operations."""

    def step(params, h, x, t):
        s, c, w = params
        v, u = (h + x) * s, (h - x) * c
        outputs = [PARTS[part](v, u, x) for part in parts]
        if parts != ["least distance"]:  # wrong only where nothing else reads `v`
            outputs.append(jnp.tanh((v * c) @ w))
        return jnp.tanh(h * 0.5 + 0.1 * (v @ w)), outputs

    return step


def loss_of(step, run):
    """Return a loss whose gradient at each element of the outputs is different."""
    weights = np.random.default_rng(1).normal(size=(len(PARTS) + 1, N, T, H))

    def loss(params, x, h):
        outputs = run(step, params, x, h)
        pairs = zip(outputs, weights[: len(outputs)], strict=True)
        return sum((a * w.astype(a.dtype)).sum() for a, w in pairs)

    return loss


def one_by_one(step, params, x, h):
    """Run a loop operation by operation, so that XLA fuses none."""
    rows = []
    for t in range(T):
        h, outputs = step(params, h, x[:, t], t)
        rows.append(outputs)
    return [jnp.stack(a, 1) for a in zip(*rows, strict=True)]


def draw(dtype):
    g = np.random.default_rng(0)
    sizes = [(), (1, H), (H, H), (N, T, H), (N, H)]
    *params, x, h = (jnp.asarray(g.normal(size=s) * 0.6, dtype) for s in sizes)
    return params, x, h


def by_loop(way):
    return lambda step, params, x, h: (
        ost.recurrent_net(step, x, h, params=params, **WAYS[way]).outputs
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", PARTS)
def test_gradients_are_those_of_operations_one_by_one(part, way):
    step, arguments = step_of([part]), draw(jnp.float32)
    gradient = lambda run: jax.grad(loss_of(step, run), (0, 1, 2))  # noqa: E731
    want = gradient(one_by_one)(*arguments)
    got = usual_jit(gradient(by_loop(way)))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_maxima_of_parameters_alone(backend):
    def step(params, h, x, t):
        a = (params[1] + params[0]) * params[0]
        both = jnp.maximum(pairs(a), 0).sum(2) + pairs(a).max(2)
        return jnp.tanh(h * 0.5 + x), (jnp.tanh(h + both) @ params[2],)

    def run(step, params, x, h):
        return ost.recurrent_net(step, x, h, params=params, backend=backend).outputs

    arguments = draw(jnp.float32)
    got = usual_jit(jax.grad(loss_of(step, run)))(*arguments)
    want = jax.grad(loss_of(step, one_by_one))(*arguments)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["xla", "scan"])
def test_tangents_and_second_derivatives(way):
    step, arguments = step_of(PARTS), draw(jnp.float64)
    tangents = jax.tree.map(jnp.cos, arguments)

    def derivatives(run):
        loss = loss_of(step, run)
        gradient = jax.grad(loss, (0, 1, 2))
        return lambda *a: (
            jax.jvp(loss, a, tangents)[1],
            jax.jvp(gradient, a, tangents)[1],
        )

    want = derivatives(one_by_one)(*arguments)
    got = fast_jit(derivatives(by_loop(way)))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_a_step_makes_vary_in_a_shard_map(way):
    def step(params, states, x, t):
        h, _ = states
        zeros = jax.lax.pcast(jnp.zeros(h.shape, h.dtype), "d", to="varying")
        return (jnp.tanh(h * params + x), zeros), h

    def run(params, x, h):
        result = ost.recurrent_net(step, x, (h, h), params=params, **WAYS[way])
        return result.outputs

    mesh = jax.make_mesh(
        (2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    specs = P(), P("d"), P("d")
    arguments = jnp.asarray(0.5), jnp.ones((4, T, H)), jnp.zeros((4, H))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("d"))
    got = fast_jit(mapped)(*arguments)
    h = np.zeros((4, H))
    for t in range(T):
        np.testing.assert_allclose(got[:, t], h, rtol=1e-12)
        h = np.tanh(h * 0.5 + 1)


def test_a_callback_without_results_in_a_step_that_is_recomputed():
    seen = []

    def step(params, h, x, t):
        jax.debug.callback(lambda t: seen.append(int(t)), t)
        return jnp.tanh(h * params), h

    _, x, h = draw(jnp.float32)
    total = lambda p: (  # noqa: E731
        ost.recurrent_net(step, x, h, params=p, recompute=True).outputs.sum()
    )
    jax.block_until_ready(jax.grad(total)(0.5))
    jax.effects_barrier()
    assert set(seen) == {*range(T)}


@pytest.mark.parametrize("backend", ["xla", "scan"])
def test_equal_elements_share_the_gradient_as_in_jax(backend):
    def step(params, h, x, t):
        return h, (x.max(1), jnp.minimum(x, h), jnp.maximum(x, 1.0))

    x = jnp.asarray([1.0, 2, 2, 1, 3, 2]).reshape(1, 2, 3)
    h = jnp.asarray([[1.0, 2, 3]])

    def total(outputs):
        return sum(a.sum() for a in outputs)

    got = jax.grad(
        lambda x: total(
            ost.recurrent_net(step, x, h, backend=backend, recompute=True).outputs
        )
    )(x)
    want = jax.grad(lambda x: total(jax.vmap(lambda x: step(None, h, x, 0)[1])(x)))
    np.testing.assert_array_equal(got[0], want(x[0][:, None])[:, 0])


RAGGED = {
    "maximum of pairs": lambda v, x: (pairs(v).max(2) * x).sum(0),
    "least distance": lambda v, x: (jnp.abs(pairs(v)).min(1) * x).sum(0),
    "sum of distances": lambda v, x: (jnp.abs(pairs(v)).sum(2) * x).sum(0),
    "of two ragged axes": lambda v, x: (
        (v[:, None] - v[None]).max(1) * x + jnp.abs(v[:, None] - v[None]).min(0)
    ).sum(0),
    "maximum of two": lambda v, x: (jnp.maximum(pairs(v), 0).sum(2) * x).sum(0),
    "over the ragged axis": lambda v, x: pairs(v).max(0)[0] + pairs(v).min((0, 1)),
}


@pytest.mark.parametrize("part", RAGGED)
def test_gradients_in_ragged_vmap(part):
    def program(params, x):
        s, c, w = params
        v = (x + jnp.tanh(x)) * s
        return jnp.tanh((v * c) @ w).sum(0) + RAGGED[part](v, x)

    params, x, _ = draw(jnp.float32)
    x = jnp.concatenate([x, x[:, :2] * 2], 1)
    examples = [x[0, :4], x[1, :1], x[2], x[3, :2]]
    weights = jnp.arange(1.0, 4 * H + 1, dtype=jnp.float32).reshape(4, H)

    def loss(params, examples):
        y = ost.ragged.vmap(program, in_axes=(None, 0))(params, examples)
        return (y * weights).sum()

    def one_by_one(params, examples):
        pairs = zip(examples, weights, strict=True)
        return sum((program(params, a) * w).sum() for a, w in pairs)

    ragged = ost.ragged.RaggedArray.from_list(examples)
    got = usual_jit(jax.grad(loss))(params, ragged)
    want = jax.grad(one_by_one)(params, examples)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_gradients_inside_of_a_program_of_ragged_vmap():
    step = step_of(["maximum of pairs", "least distance"])

    def program(params, x):
        def loss(params):
            h = jnp.zeros((1, H), x.dtype)
            result = ost.recurrent_net(
                step, x[None], h, params=params, recompute=True, backend="scan"
            )
            return sum(a.sum() for a in result.outputs)

        return jax.grad(loss)(params)

    params, x, _ = draw(jnp.float32)
    examples = [x[0, :2], x[1, :1], x[2]]
    ragged = ost.ragged.RaggedArray.from_list(examples)
    got = usual_jit(ost.ragged.vmap(program, in_axes=(None, 0)))(params, ragged)
    want = [program(params, a) for a in examples]
    for a, b in zip(got, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(a, jnp.stack(b), rtol=1e-3, atol=1e-3)


def test_what_is_stored_in_a_program_of_ragged_vmap():
    examples = [jnp.ones((2, 3)), jnp.full((1, 3), 2.0)]
    ragged = ost.ragged.RaggedArray.from_list(examples)
    got = ost.ragged.vmap(lambda x: once(x) * 2)(ragged).to_list()
    for a, b in zip(got, examples, strict=True):
        np.testing.assert_array_equal(a, b * 2)
