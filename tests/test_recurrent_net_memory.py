"""Tests of what `recurrent_net` stores and runs, in jaxprs and compiled programs."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import inner_jaxprs
from closures import fast_jit
from compile_options import QUICK, USUAL
from jax import lax
from jax.extend.core import jaxprs_in_params
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato._recurrent.protocol import Cell
from ostinato._segments import near_divisor

T, B, I, H = 60, 4, 5, 16  # noqa: E741


def arrays(steps=T):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.5)  # noqa: E731
    params = {"w_ih": draw(4 * H, I), "w_hh": draw(4 * H, H)}
    return params, draw(steps, B, I), (draw(B, H), draw(B, H))


def lstm(params, states, x, t):
    return after_product(params, states, x @ params["w_ih"].T)


def after_product(params, states, gx):
    h, c = states
    gates = jnp.split(gx + h @ params["w_hh"].T, 4, axis=-1)
    i, f, o = map(jax.nn.sigmoid, (gates[0], gates[1], gates[3]))
    i, f, g, o = ost.tag((i, f, jnp.tanh(gates[2]), o), "gates")
    c = ost.tag(f * c + i * g, "cell")
    h = o * jnp.tanh(c)
    return (h, c), h


@dataclasses.dataclass(frozen=True)
class LSTM(Cell):
    def precompute(self, params, inputs):
        return inputs @ params["w_ih"].T

    def step(self, params, states, inputs_t, t):
        return after_product(params, states, inputs_t)


STEPS = {"function": lstm, "cell": LSTM()}


def loss_of(step, **options):
    def loss(params, x, states):
        out = ost.recurrent_net(
            step, x, states, params=params, time_major=True, **options
        )
        return jnp.sum(out.outputs**2) + jnp.sum(jnp.sin(out.states[1]))

    return loss


@functools.cache
def compiled(kind, steps, options):
    run = jax.jit(jax.value_and_grad(loss_of(STEPS[kind], **dict(options)), (0, 1, 2)))
    # Tests that do not measure bytes compile quickly.
    level = USUAL if steps >= 60 else QUICK
    return run.lower(*arrays(steps)).compile(compiler_options=level)


def saving(kind, steps=T, **options):
    """Return value, gradients, and the program's temporary bytes per step and unit."""
    program = compiled(kind, steps, tuple(options.items()))
    units = steps * B * H * 8
    return program(*arrays(steps)), program.memory_analysis().temp_size_in_bytes / units


def assert_trees_close(got, want, terms):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, terms=terms)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(
    "options, most",
    [
        ({"recompute": ("gates",)}, 0.6),
        ({"recompute": ("gates", "cell")}, 0.5),
        ({"recompute": True}, 0.45),
        ({"segment_length": "auto"}, 0.4),
        ({"segment_length": 7}, 0.4),
        ({"segment_length": 10, "recompute": ("gates",)}, 0.35),
    ],
    ids=str,
)
def test_recompute_keeps_gradients_and_saves_bytes(kind, options, most):
    want, plain = saving(kind, 600)
    got, less = saving(kind, 600, **options)
    assert_trees_close(got, want, terms=600 * B)
    assert less <= most * plain


@pytest.mark.parametrize("recompute", [("gates",), ("cell",), True], ids=str)
def test_recompute_keeps_every_bit_of_the_value_of_a_function(recompute):
    want, _ = saving("function")
    got, _ = saving("function", recompute=recompute)
    assert_same_bits(got[0], want[0])
    assert_trees_close(got, want, terms=T)  # what is computed again is rounded again


def saved_shapes(step, **options):
    """Return the shapes of values stored for the backward loop, one slice per step."""
    params, x, states = arrays()
    jaxpr = jax.make_jaxpr(jax.grad(loss_of(step, **options)))(params, x, states)
    loops = ("scan", "ostinato_loop")
    forward = next(e for e in jaxpr.eqns if e.primitive.name in loops)
    shapes = [v.aval.shape for v in forward.outvars]
    return sorted(shape for shape in shapes if shape[:1] == (T,))


def test_recompute_stores_neither_the_named_values_nor_what_leads_to_them():
    """Check that besides outputs only h and c before each step and c after it stay."""
    per_step = (T, B, H)
    # Without `recompute`, four gates and tanh(c), which make the products unnecessary.
    assert saved_shapes(lstm) == [per_step] * 8
    # The output, and for the backward pass h, c, and the argument of tanh(c).
    assert saved_shapes(lstm, recompute=("gates",)) == [per_step] * 4
    # c is made from gates, and these from the preactivations, which are one array.
    assert saved_shapes(lstm, recompute=("cell",)) == [per_step] * 3 + [(T, B, 4 * H)]
    assert saved_shapes(lstm, recompute=True) == [per_step] * 3


def test_names_inside_jit_are_found():
    inner = jax.jit(lstm)
    assert saved_shapes(inner, recompute=("gates",)) == saved_shapes(
        lstm, recompute=("gates",)
    )


def test_what_is_the_same_at_every_step_is_not_stored():
    """Check that a matrix made from parameters in the step is not stored T times."""

    def step(params, states, x, t):
        w_hh = jnp.tanh(params["w_hh"]) * 0.5
        return lstm(params | {"w_hh": w_hh}, states, x, t)

    for options in ({"recompute": ("gates",)}, {"recompute": True}):
        assert all(shape[1] == B for shape in saved_shapes(step, **options))


def test_step_with_custom_derivatives_loops_and_conditions_recomputes():
    @jax.custom_vjp
    def scaled(x):
        return 2 * x

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (3 * ct,))

    def step(params, h, x, t):
        x = ost.tag(jax.nn.relu(x), "relu")
        x = scaled(x) + jax.nn.softmax(x) + jax.nn.logsumexp(x, -1, keepdims=True)
        x = lax.fori_loop(0, 3, lambda n, x: jnp.sin(x), x)
        x = lax.cond(t < 9, jnp.cos, jnp.sin, x)
        key = jax.random.fold_in(jax.random.key(0), t)
        h = jnp.tanh(h * params + jax.random.normal(key, x.shape, x.dtype))
        return h, h

    x = arrays()[1]

    def loss(params, x, **options):
        out = ost.recurrent_net(
            step, x, jnp.zeros((B, I)), params=params, time_major=True, **options
        )
        return jnp.sum(out.outputs**2)

    gradient = lambda **options: fast_jit(  # noqa: E731
        jax.grad(functools.partial(loss, **options), (0, 1))
    )(jnp.float64(0.5), x)
    want = gradient()
    for options in ({"recompute": ("relu",)}, {"recompute": True}):
        assert_trees_close(gradient(**options), want, terms=T)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 131])
@pytest.mark.parametrize("kind", STEPS)
def test_any_number_of_steps_runs_in_segments(kind, steps):
    want, _ = saving(kind, steps)
    option = {"function": {"segment_length": 3}, "cell": {"recompute": ("gates",)}}
    got, _ = saving(kind, steps, **option[kind])
    assert_trees_close(got, want, terms=steps * 4 * H)


def test_segment_longer_than_the_sequence_is_one_segment():
    want, _ = saving("function")
    got, _ = saving("function", segment_length=1000)
    assert_trees_close(got, want, terms=T * H)


# ---------------------------------------------------------------------- what is run


def products(jaxpr, inside=0):
    """Return `(loops around it, shapes of the factors)` of every matrix product."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield inside, tuple(v.aval.shape for v in eqn.invars)
        for inner in inner_jaxprs(eqn):
            yield from products(inner, inside + (eqn.primitive.name == "scan"))


def test_input_products_of_a_cell_are_one_product_over_all_steps():
    function, cell = (
        list(products(jax.make_jaxpr(jax.grad(loss_of(s), (0, 1)))(*arrays()).jaxpr))
        for s in STEPS.values()
    )
    for found in function, cell:
        found = set(found)  # a product that is differentiated is traced once more
        outside = [shapes for loops, shapes in found if loops == 0]
        # Forward, and the gradients of both matrices and of the inputs.
        assert len(found) == 6 and len(outside) == 4
        assert all(any(shape[:2] == (T, B) for shape in shapes) for shapes in outside)


@pytest.mark.parametrize("options", [{}, {"seq_lengths": [2, 1]}, {"backend": "scan"}])
def test_a_second_call_outside_of_jit_compiles_nothing(options, caplog):
    w, x, h = jnp.eye(2), jnp.ones((2, 3, 2)), jnp.zeros((2, 2))

    def call():
        step = lambda _, h, x, t: (jnp.tanh(h + x @ w), h)  # noqa: E731
        return ost.recurrent_net(step, x, h, **options).outputs

    want = call()
    with jax.log_compiles():
        call()
    assert "ompil" not in caplog.text
    w = w * 2
    assert not np.array_equal(call(), want)


def test_backend_scan_runs_as_lax_scan():
    params, x, states = arrays()

    def ours(params, x, states):
        out = ost.recurrent_net(
            lstm, x, states, params=params, time_major=True, backend="scan"
        )
        return out.states, out.outputs

    def plain(params, x, states):
        body = lambda s, xt: lstm(params, s, *xt)  # noqa: E731
        return lax.scan(body, states, (x, lax.iota(jnp.int32, T)))

    def programs(function):
        loss = lambda *a: sum(map(jnp.sum, jax.tree.leaves(function(*a))))  # noqa: E731
        for f in (function, jax.grad(loss)):
            text = jax.jit(f).lower(params, x, states).as_text()
            yield [line.split("=")[-1].split()[0] for line in text.splitlines() if line]

    assert list(programs(ours)) == list(programs(plain))


def test_the_length_of_a_segment_divides_the_steps_or_is_as_asked():
    for length in range(1, 130):
        for target in (1, 3, 7, 11):
            found = [
                k
                for k in range(1, length + 1)
                if length % k == 0 and target // 2 <= k <= 2 * target
            ]
            got = near_divisor(length, target)
            if not found:
                assert got == target
            else:
                assert got in found
                assert abs(got - target) == min(abs(k - target) for k in found)


def loops(jaxpr):
    """Return how many loops of each kind stand in a jaxpr."""
    found = Counter()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += eqn.primitive.name.startswith("ostinato_loop")
        for inner in jaxprs_in_params(eqn.params):
            found += loops(inner)
    return +found


@pytest.mark.parametrize("recompute", [("gates",), True], ids=str)
def test_a_cell_that_recomputes_runs_each_loop_once(recompute):
    """Its input products are made again for each segment, but not the steps."""
    loss = loss_of(STEPS["cell"], recompute=recompute)
    gradient = jax.make_jaxpr(jax.grad(loss))(*arrays(600))
    assert loops(gradient.jaxpr) == {"ostinato_loop": 1, "ostinato_loop_bwd": 1}
