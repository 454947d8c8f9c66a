"""Tests of derivatives of `recurrent_net`, and of transformations around and inside."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato.cells.base import SizedCell

T, B, I, H = 5, 3, 2, 3  # noqa: E741
LENGTHS = (3, 0, 5)
RESETS = np.random.default_rng(3).random((B, T)) < 0.3
OPTIONS = {
    "plain": {},
    "ragged": {"seq_lengths": LENGTHS, "resets": RESETS},
    "reverse": {"seq_lengths": LENGTHS, "reverse": True, "padding": "zero"},
    "drop": {"seq_lengths": LENGTHS, "padding": "drop", "time_major": True},
    "recompute": {"seq_lengths": LENGTHS, "recompute": ("gate",)},
    "recompute-all": {"recompute": True},
    "segments": {"seq_lengths": LENGTHS, "resets": RESETS, "segment_length": 2},
    "segments-reverse": {
        "seq_lengths": LENGTHS,
        "reverse": True,
        "segment_length": 2,
        "recompute": ("gate",),
    },
}


class Arguments(NamedTuple):
    params: Any
    closed: Any
    x: Any
    states: Any


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))  # noqa: E731
    states = {"h": draw(B, H), "total": draw(B)}
    return Arguments({"w": draw(I, H)}, draw(H, H), draw(B, T, I), states)


def run(arguments, **options):
    """Run a net with parameters, closed-over arrays, two states and two outputs."""
    params, closed, x, states = arguments

    def step(params, states, x, t):
        h, total = states["h"], states["total"]
        gate = ost.tag(jax.nn.sigmoid(x @ params["w"] + h @ closed), "gate")
        h = gate * jnp.sin(h) + (1 - gate) * jnp.tanh(h @ params["w"].T @ params["w"])
        total = total * jnp.cos(0.1 * total) + h[:, 0]
        return {"h": h, "total": total}, (h, total * h[:, 1])

    x = jnp.swapaxes(x, 0, 1) if options.get("time_major") else x
    return ost.recurrent_net(
        step, x, states, params=params, return_all_states=True, **options
    )


def poisoned(arguments, options):
    """Set the inputs past the ends to NaN."""
    if "seq_lengths" not in options:
        return arguments
    past = np.arange(T) >= np.array(options["seq_lengths"])[:, None]
    return arguments._replace(x=jnp.where(past[..., None], jnp.nan, arguments.x))


def loss_of(options):
    """Return a scalar loss that is nonlinear in every result."""

    def loss(arguments):
        leaves = jax.tree.leaves(run(arguments, **options))
        return sum(jnp.sum(jnp.sin(2.0 * a) * (n + 1)) for n, a in enumerate(leaves))

    return loss


@functools.cache
def gradient_of(name):
    """Return value and gradient of the loss, compiled once for several tests."""
    return fast_jit(jax.value_and_grad(loss_of(OPTIONS[name])))


def assert_trees_close(got, want, terms=300):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype="float64", terms=terms)


def assert_derivatives_match_finite_differences(function):
    """Check both modes of `function(arguments)` along one random direction."""
    primal, along = (jax.tree.map(np.asarray, arrays(seed)) for seed in range(2))

    @fast_jit
    def both_modes(primal, along):
        value, tangent = jax.jvp(function, (primal,), (along,))
        cotangent = jax.tree.map(jnp.cos, value)
        return tangent, cotangent, jax.vjp(function, primal)[1](cotangent)[0]

    tangent, cotangent, gradient = both_modes(primal, along)
    eps, plain = 1e-5, fast_jit(function)
    ahead, behind = (
        plain(jax.tree.map(lambda p, v, e=e: p + e * v, primal, along))
        for e in (eps, -eps)
    )
    for got, a, b in zip(*map(jax.tree.leaves, (tangent, ahead, behind)), strict=True):
        want = (np.asarray(a) - np.asarray(b)) / (2 * eps)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    inner = lambda a, b: sum(  # noqa: E731
        np.vdot(u, v)
        for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    assert_close(inner(gradient, along), inner(cotangent, tangent), terms=300)


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_match_finite_differences(name):
    assert_derivatives_match_finite_differences(loss_of(OPTIONS[name]))


@pytest.mark.parametrize("name", ["ragged", "recompute", "segments"])
def test_second_derivatives_match_finite_differences(name):
    assert_derivatives_match_finite_differences(jax.grad(loss_of(OPTIONS[name])))


@pytest.mark.parametrize("name", [n for n in OPTIONS if "seq_lengths" in OPTIONS[n]])
def test_nan_in_the_padding_changes_no_bit(name):
    options, clean = OPTIONS[name], arrays()
    both = gradient_of(name)
    want, got = both(clean), both(poisoned(clean, options))
    jax.tree.map(assert_same_bits, got, want)
    for b, n in enumerate(LENGTHS):
        assert not got[1].x[b, n:].any()


def test_step_with_a_pole_at_zero_has_no_nan_in_its_gradient():
    """Check that ended sequences run on valid inputs: zeros would give 0 * inf here."""
    step = lambda p, s, x, t: (s + jnp.log(x), jnp.sqrt(x))  # noqa: E731

    def loss(x):
        out = ost.recurrent_net(step, x, jnp.zeros(2), seq_lengths=[2, 1])
        return jnp.sum(out.states) + jnp.sum(out.outputs)

    x = jnp.array([[1.0, 4.0, 0.0], [0.25, 0.0, -1.0]])
    # Held outputs repeat the last one, so their cotangents belong to the last step.
    want = [[1 + 0.5, 1 / 4 + 2 * 0.25, 0], [4 + 3 * 1.0, 0, 0]]
    assert_close(jax.grad(loss)(x), np.array(want))


@pytest.mark.parametrize("reverse", [False, True])
def test_step_with_a_pole_at_the_final_states_has_no_nan_in_its_gradient(reverse):
    """Check sequences without steps too, whose inputs and states may be poles."""

    def step(w, left, x, t):
        return left - 1, w * jnp.log(x) / left

    def loss(w, x, left, lengths):
        out = ost.recurrent_net(
            step,
            x,
            left,
            params=w,
            seq_lengths=lengths,
            reverse=reverse,
            padding="zero",
        )
        return jnp.sum(out.outputs)

    x = jnp.array([[1.0, 4.0, jnp.nan], [0.25, 0.0, -1.0], [0.0, 0.0, 0.0]])
    left = jnp.array([2.0, 1.0, 0.0])
    got = jax.grad(loss)(3.0, x, left, jnp.array([2, 1, 0]))
    order = (np.log(4) / 2, 0) if reverse else (0, np.log(4))
    assert_close(got, np.array(sum(order) + np.log(0.25)))
    empty = jnp.zeros(3, jnp.int32)
    assert_close(jax.grad(loss)(3.0, x[:, :0], left, empty), np.array(0.0))


@pytest.mark.parametrize("options", [{}, {"segment_length": 64}, {"recompute": True}])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_16_bit_weights_add_up_in_float32(dtype, options):
    """Check sums that 16-bit additions would stop at 256 (bfloat16) or 2048."""
    step = lambda w, s, x, t: (s, (w + x).astype(jnp.float32))  # noqa: E731
    x = jnp.zeros((1, 4096), dtype)

    def loss(w):
        return ost.recurrent_net(step, x, None, params=w, **options).outputs.sum()

    got = jax.grad(loss)(jnp.zeros((), dtype))
    assert got.dtype == dtype and got == 4096


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"segment_length": 2}])
def test_params_may_hold_what_is_no_array(options):
    params = {"power": 2, "name": "tanh", "w": jnp.array([2.0, 3.0])}

    def step(params, s, x, t):
        weights = params["w"][None] ** params["power"]
        y = getattr(jnp, params["name"])(s * weights + x)
        return y, y

    def loss(w, x):
        out = ost.recurrent_net(
            step, x, jnp.zeros((1, 2)), params=params | {"w": w}, **options
        )
        return jnp.sum(out.outputs)

    def loop(w, x):
        s, total = jnp.zeros((1, 2)), 0.0
        for t in range(5):
            s = jnp.tanh(s * w[None] ** 2 + x[:, t])
            total += jnp.sum(s)
        return total

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2)))
    got, want = (jax.grad(f)(params["w"], x) for f in (loss, loop))
    assert_close(got, want, terms=50)


def test_scan_equals_unrolled():
    arguments = arrays()

    def unrolled(arguments):
        params, closed, x, states = arguments
        outputs, after = [], []
        for t in range(T):
            one = run(arguments._replace(x=x[:, t : t + 1], states=states))
            states = one.states
            outputs.append(one.outputs)
            after.append(one.states)
        join = lambda *a: jnp.concatenate(a, axis=1)  # noqa: E731
        stack = lambda *a: jnp.stack(a, axis=1)  # noqa: E731
        return ost.RecurrentOutput(
            jax.tree.map(join, *outputs), states, jax.tree.map(stack, *after)
        )

    def results(function):
        out, pull = jax.vjp(function, arguments)
        return out, pull(jax.tree.map(jnp.cos, out))

    assert_trees_close(*(fast_jit(lambda f=f: results(f))() for f in (run, unrolled)))


def test_closed_over_arrays_are_differentiated_like_params():
    x, w = arrays().x, arrays().params["w"]
    h_0 = jnp.zeros((B, H))

    def closing(w):
        step = lambda p, h, x, t: (jnp.tanh(x @ w + h),) * 2  # noqa: E731
        return jnp.sum(ost.recurrent_net(step, x, h_0).outputs ** 2)

    def given(w):
        step = lambda w, h, x, t: (jnp.tanh(x @ w + h),) * 2  # noqa: E731
        return jnp.sum(ost.recurrent_net(step, x, h_0, params=w).outputs ** 2)

    for transform in (jax.grad, jax.hessian):
        assert_same_bits(*(fast_jit(transform(f))(w) for f in (closing, given)))


def test_no_gradient_crosses_a_reset():
    resets = np.zeros((B, T), bool)
    resets[0, 2] = True

    def last_output(arguments):
        return run(arguments, resets=resets).outputs[0][:, -1]

    for transform in (jax.jacrev, jax.jacfwd):
        jacobian = fast_jit(transform(last_output))(arrays())
        assert not jacobian.x[0, :, 0, :2].any() and not jacobian.states["h"][0].any()
        assert jacobian.x[1, :, 1, :2].any() and jacobian.states["h"][1].any()


def total(out):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(out.outputs))


@pytest.mark.parametrize(
    "keep, names",
    [
        (None, "abc"),
        ((), ""),
        (("a",), "a"),
        (["a", "c"], "ac"),
        ({"a": True, "b": False, "c": (True, False)}, "ac"),
        (True, "abc"),
        (False, ""),
    ],
)
def test_outputs_with_grads_cuts_what_it_says(keep, names):
    def step(p, h, x, t):
        h = jnp.sin(h * p["state"]) + x
        c = (h * p["c"], h * p["c2"])
        return h, {"a": h * p["a"], "b": h * p["b"], "c": c}

    x, h_0 = arrays().x, jnp.zeros((B, I))
    params = {name: jnp.float64(1.5) for name in ("a", "b", "c", "c2", "state")}

    def loss(params, keep=keep):
        out = ost.recurrent_net(step, x, h_0, params=params, outputs_with_grads=keep)
        return total(out)

    @fast_jit
    def results(params):
        uncut = loss(params, keep=None)
        return jax.jacrev(loss)(params), jax.jacfwd(loss)(params), loss(params), uncut

    *jacobians, cut, uncut = results(params)
    want = {"a": "a" in names, "b": "b" in names, "c": "c" in names}
    want["c2"] = "c" in names and not isinstance(keep, dict)
    want["state"] = bool(names)
    for jacobian in jacobians:
        assert {name: bool(g != 0) for name, g in jacobian.items()} == want
    assert_same_bits(cut, uncut)


class Fields(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("keep", [("second",), (1,), Fields(False, True)])
def test_outputs_with_grads_knows_fields_and_indices(keep):
    step = lambda p, h, x, t: (h, Fields(x, 2 * x))  # noqa: E731
    loss = lambda x: sum(  # noqa: E731
        jnp.sum(a)
        for a in ost.recurrent_net(step, x, x[:, 0], outputs_with_grads=keep).outputs
    )
    assert (jax.grad(loss)(arrays().x) == 2).all()


def test_cut_outputs_leave_the_gradient_of_the_states():
    step = lambda p, h, x, t: (h * x, h * x)  # noqa: E731
    x, h_0 = arrays().x, jnp.ones((B, I))
    loss = lambda x, **options: jnp.sum(  # noqa: E731
        ost.recurrent_net(step, x, h_0, **options).states
    )
    assert_same_bits(
        jax.grad(lambda x: loss(x, outputs_with_grads=()))(x), jax.grad(loss)(x)
    )


@pytest.mark.parametrize("name", ["reverse", "drop", "segments"])
def test_net_under_jit_equals_eager(name):
    arguments, options = arrays(), OPTIONS[name]
    function = functools.partial(run, **options)
    assert_trees_close(fast_jit(function)(arguments), function(arguments))


@pytest.mark.parametrize("name", ["plain", "ragged", "recompute", "segments"])
def test_vmap_of_net_and_gradient_equals_a_loop(name):
    both = jax.value_and_grad(loss_of(OPTIONS[name]))
    several = [arrays(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *a: np.stack(a), *several)
    want = jax.tree.map(lambda *a: np.stack(a), *map(gradient_of(name), several))
    assert_trees_close(fast_jit(jax.vmap(both))(stacked), want)


def test_mapped_lengths_and_resets_equal_a_loop():
    arguments = arrays()
    lengths = jnp.array([[3, 0, 5], [1, 5, 2]])
    resets = jnp.stack([RESETS, ~RESETS])
    one = lambda n, r: run(arguments, seq_lengths=n, resets=r)  # noqa: E731
    want = map(fast_jit(one), lengths, resets)
    want = jax.tree.map(lambda *a: np.stack(a), *want)
    assert_trees_close(fast_jit(jax.vmap(one))(lengths, resets), want)


@pytest.mark.parametrize("name", ["ragged", "recompute", "segments"])
def test_checkpoint_of_net_changes_nothing(name):
    loss = jax.checkpoint(loss_of(OPTIONS[name]))
    got = fast_jit(jax.value_and_grad(loss))(arrays())
    assert_trees_close(got, gradient_of(name)(arrays()))


def test_tags_serve_the_policies_of_checkpoint():
    policy = jax.checkpoint_policies.save_only_these_names("gate")
    loss = jax.checkpoint(loss_of({}), policy=policy)
    got = fast_jit(jax.value_and_grad(loss))(arrays())
    assert_trees_close(got, gradient_of("plain")(arrays()))


@pytest.mark.parametrize("name", ["ragged", "recompute", "segments"])
def test_scan_over_nets_equals_a_loop(name):
    arguments, options = arrays(), OPTIONS[name]

    def body(states, scale):
        out = run(arguments._replace(x=scale * arguments.x, states=states), **options)
        return out.states, out.outputs

    def loss(states, scales):
        return sum(map(jnp.sum, jax.tree.leaves(lax.scan(body, states, scales))))

    def loop(states, scales):
        outputs = []
        for scale in scales:
            states, out = body(states, scale)
            outputs.append(out)
        return sum(map(jnp.sum, jax.tree.leaves((states, outputs))))

    scales = jnp.array([0.5, 1.5])
    got, want = (
        fast_jit(jax.value_and_grad(f, argnums=(0, 1)))(arguments.states, scales)
        for f in (loss, loop)
    )
    assert_trees_close(got, want)


@pytest.mark.parametrize("inner", [{}, {"recompute": ("gate",)}, {"segment_length": 2}])
@pytest.mark.parametrize("outer", [{}, {"recompute": ("gate",)}, {"recompute": True}])
def test_network_inside_the_step_of_another(inner, outer):
    """Check an outer net whose step runs an inner net over its input's features."""

    def step(within):
        def one(w, h, x, t):
            def deep(w, s, v, t):
                s = ost.tag(jnp.tanh(w * s + v), "gate")
                return s, s

            h = within(deep, x, h, params=w)
            return h, ost.tag(jnp.sin(h), "sine")

        return one

    def looped(deep, x, h, params):
        for t in range(x.shape[1]):
            h, _ = deep(params, h, x[:, t], t)
        return h

    nested = step(lambda *a, **k: ost.recurrent_net(*a, **k, **inner).states)
    x, h_0 = arrays().x, jnp.zeros(B)

    def loss(one, options):
        def of(w, x):
            out = ost.recurrent_net(one, x, h_0, params=w, **options)
            return jnp.sum(out.outputs**2)

        both = jax.value_and_grad(of, argnums=(0, 1))
        return fast_jit(both)(jnp.float64(0.7), x)

    assert_trees_close(loss(nested, outer), loss(step(looped), {}))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["plain", "ragged", "recompute", "segments"])
def test_net_over_a_sharded_batch_equals_one_device(name, kind):
    axis_type = jax.sharding.AxisType[kind]
    mesh = jax.make_mesh((B,), ("rows",), axis_types=(axis_type,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    whole, arguments = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        arrays(),
    )
    options = OPTIONS[name]
    want = gradient_of(name)(arguments)
    with jax.set_mesh(mesh):
        # On explicit axes resets are sharded as the batch.
        placed = {
            key: jax.device_put(jnp.asarray(value), rows) if key == "resets" else value
            for key, value in options.items()
        }
        split = Arguments(
            *jax.device_put(arguments[:2], whole), *jax.device_put(arguments[2:], rows)
        )
        got = fast_jit(jax.value_and_grad(loss_of(placed)))(split)
    assert_trees_close(jax.device_get(got), want)


# ---------------------------------------------------------------------------- complex


@dataclasses.dataclass(frozen=True)
class ComplexCell(SizedCell):
    """A cell with complex products, states and parameters."""

    input_size: int = 3
    output_size: int = 3

    def initial_state(self, batch, dtype=jnp.complex128):
        return jnp.zeros((batch, 3), dtype)

    def step(self, params, states, inputs_t, t):
        total = ost.tag(states @ params + inputs_t, "total")
        turned = total * lax.complex(jnp.cos(total.real), jnp.sin(total.real))
        states = turned + jnp.fft.fft(inputs_t)
        return states, jnp.abs(states) ** 2


def of_complex_states(step, **options):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(  # noqa: E731
        rng.standard_normal((*shape, 2)).view(np.complex128)[..., 0] * 0.4
    )
    arguments = draw(3, 3), draw(2, 5, 3), draw(2, 3)

    def loss(params, x, states):
        out = ost.recurrent_net(step, x, states, params=params, **options)
        return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states).imag

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"recompute": ("total",)},
        {"segment_length": 2},
        {"segment_length": 2, "recompute": True, "reverse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["function", "cell"])
def test_complex_states_may_be_computed_again(kind, options):
    cell = ComplexCell()
    step = cell if kind == "cell" else lambda *a: cell.step(*a)
    want = of_complex_states(
        lambda *a: cell.step(*a), reverse=options.get("reverse", False)
    )
    got = of_complex_states(step, **options)
    jax.tree.map(lambda g, w: assert_close(g, w, terms=100), got, want)


def test_a_complex_cell_stores_no_complex_results():
    want = of_complex_states(lambda *a: ComplexCell().step(*a))
    got = of_complex_states(ComplexCell())
    jax.tree.map(lambda g, w: assert_close(g, w, terms=100), got, want)
