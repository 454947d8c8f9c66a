"""Tests of derivatives of `recurrent_net`, and of transformations around and inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from net_arguments import Arguments, B, T, arrays
from tolerance import assert_close, assert_same_bits

import ostinato as ost

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
    return arguments._replace(x=np.where(past[..., None], np.nan, arguments.x))


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


def inner(a, b):
    return sum(
        np.vdot(u, v)
        for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def assert_slopes_match_differences(function, primal, along, slopes):
    """Compare a tangent of compiled `function` with finite differences."""
    eps = 1e-5
    ahead, behind = (
        function(jax.tree.map(lambda p, v, e=e: p + e * v, primal, along))
        for e in (eps, -eps)
    )
    for got, a, b in zip(*map(jax.tree.leaves, (slopes, ahead, behind)), strict=True):
        want = (np.asarray(a) - np.asarray(b)) / (2 * eps)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_match_finite_differences(name):
    """Check both modes along one random direction."""
    primal, along = (jax.tree.map(np.asarray, arrays(seed)) for seed in range(2))
    loss, both = loss_of(OPTIONS[name]), gradient_of(name)
    slope = fast_jit(lambda p, v: jax.jvp(loss, (p,), (v,))[1])(primal, along)
    assert_slopes_match_differences(lambda p: both(p)[0], primal, along, slope)
    assert_close(inner(both(primal)[1], along), slope, terms=300)


@pytest.mark.parametrize("name", ["ragged", "recompute", "segments"])
def test_second_derivatives_match_finite_differences(name):
    primal, along = (jax.tree.map(np.asarray, arrays(seed)) for seed in range(2))
    gradient = jax.grad(loss_of(OPTIONS[name]))
    cotangent = jax.tree.map(np.cos, gradient_of(name)(primal)[1])

    @fast_jit
    def both_modes(primal, along, cotangent):
        tangent = jax.jvp(gradient, (primal,), (along,))[1]
        pulled = jax.vjp(gradient, primal)[1](cotangent)[0]
        return tangent, pulled

    tangent, pulled = both_modes(primal, along, cotangent)
    first = lambda p: gradient_of(name)(p)[1]  # noqa: E731
    assert_slopes_match_differences(first, primal, along, tangent)
    assert_close(inner(pulled, along), inner(cotangent, tangent), terms=300)


@pytest.mark.parametrize("name", [n for n in OPTIONS if "seq_lengths" in OPTIONS[n]])
def test_nan_in_the_padding_changes_no_bit(name):
    options, clean = OPTIONS[name], arrays()
    both = gradient_of(name)
    want, got = both(clean), both(poisoned(clean, options))
    jax.tree.map(assert_same_bits, got, want)
    for x, n in zip(np.asarray(got[1].x), LENGTHS, strict=True):
        assert not x[n:].any()


def test_step_with_a_pole_at_zero_has_no_nan_in_its_gradient():
    """Check that ended sequences run on valid inputs: zeros would give 0 * inf here."""
    step = lambda p, s, x, t: (s + jnp.log(x), jnp.sqrt(x))  # noqa: E731

    def loss(x):
        out = ost.recurrent_net(step, x, jnp.zeros(2), seq_lengths=[2, 1])
        return jnp.sum(out.states) + jnp.sum(out.outputs)

    x = np.array([[1.0, 4.0, 0.0], [0.25, 0.0, -1.0]])
    # Held outputs repeat the last one, so their cotangents belong to the last step.
    want = [[1 + 0.5, 1 / 4 + 2 * 0.25, 0], [4 + 3 * 1.0, 0, 0]]
    assert_close(fast_jit(jax.grad(loss))(x), np.array(want))


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

    slope = fast_jit(jax.grad(loss))
    x = np.array([[1.0, 4.0, np.nan], [0.25, 0.0, -1.0], [0.0, 0.0, 0.0]])
    left = np.array([2.0, 1.0, 0.0])
    got = slope(3.0, x, left, np.array([2, 1, 0]))
    order = (np.log(4) / 2, 0) if reverse else (0, np.log(4))
    assert_close(got, np.array(sum(order) + np.log(0.25)))
    empty = np.zeros(3, np.int32)
    assert_close(slope(3.0, x[:, :0], left, empty), np.array(0.0))


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg", "threefry2x32"])
@pytest.mark.parametrize("noisy", ["input", "state"])
def test_random_numbers_of_every_kind_of_key_equal_those_of_a_scan(noisy, kind):
    """Check draws before the loop, which JAX would map over the steps, and products."""
    key = jax.random.key(0, impl=kind)
    w, u = (np.random.default_rng(s).normal(size=(4, 4)) for s in range(2))
    x, h = (np.random.default_rng(2).normal(size=s) for s in ((2, 5, 4), (2, 4)))

    def step(p, h, x, t):
        noise = jax.random.normal(jax.random.fold_in(p["key"], t), (2, 4))
        x, h = (x * noise, h) if noisy == "input" else (x, h * noise)
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        return h, h

    def outputs(arrays, backend, length):
        params = {**arrays, "key": key}
        given = x[:, :length]
        out = ost.recurrent_net(step, given, h, params=params, backend=backend)
        return out.outputs

    def both(arrays, backend):
        found, pull = jax.vjp(lambda a: outputs(a, backend, 5), arrays)
        return found, pull(jnp.cos(found))

    @fast_jit
    def run(arrays):
        loops = [(both(arrays, b), outputs(arrays, b, 3)) for b in ("xla", None)]
        return both(arrays, "scan"), loops

    want, loops = jax.device_get(run({"w": w, "u": u}))
    for whole, short in loops:
        assert_trees_close(whole, want)
        assert_trees_close(short, want[0][:, :3])


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_zoneout_draws_from_every_kind_of_key_as_a_scan(kind):
    cell = ost.cells.Zoneout(ost.cells.LSTM(4, 8), 0.5, 0.5)
    params = fast_jit(cell.init)(jax.random.key(1))
    cell = cell.sample(jax.random.key(2, impl=kind))
    x = np.random.default_rng(2).normal(size=(2, 6, 4)).astype(np.float32)

    def run(backend):
        states = cell.initial_state(2)
        return ost.recurrent_net(cell, x, states, params=params, backend=backend)

    both = fast_jit(lambda: (run(None), run("scan")))()
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        assert_close(got, want, terms=300)


needs_native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
BACKENDS = [None, pytest.param("cpu", marks=needs_native), "xla"]


@pytest.mark.parametrize("options", [{}, {"reverse": True}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_transpose_of_a_linear_net_equals_that_of_a_scan(backend, options):
    _, closed, x, _ = arrays(0)
    w = jnp.asarray(closed)

    def net(backend, x, h):
        step = lambda w, h, x, t: (h @ w + x[:, :1], h * t.astype(h.dtype))  # noqa: E731
        out = ost.recurrent_net(step, x, h, params=w, backend=backend, **options)
        return out.outputs, out.states

    def transposed(backend):
        x_0, h_0 = jnp.asarray(x), jnp.ones((B, len(w)))
        results = jax.eval_shape(functools.partial(net, "scan"), x_0, h_0)
        ct = jax.tree.map(
            lambda a: jnp.cos(jnp.arange(a.size).reshape(a.shape)), results
        )
        return jax.linear_transpose(functools.partial(net, backend), x_0, h_0)(ct)

    for got, want in zip(transposed(backend), transposed("scan"), strict=True):
        assert_close(got, want)


@needs_native
def test_transpose_of_a_net_that_is_not_linear_is_an_error():
    def net(h):
        step = lambda w, h, x, t: (jnp.tanh(h @ w), h)  # noqa: E731
        w = jnp.eye(40)
        out = ost.recurrent_net(step, None, h, params=w, length=3, backend="cpu")
        return out.outputs

    h = jnp.ones((B, 40))
    with pytest.raises(NotImplementedError, match="tanh"):
        jax.linear_transpose(net, h)(net(h))


def test_scan_equals_unrolled():
    arguments = arrays()

    def unrolled(arguments):
        params, closed, x, states = arguments
        outputs, after = [], []
        step = jax.jit(run)  # traced once
        for t in range(T):
            one = step(arguments._replace(x=x[:, t : t + 1], states=states))
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


def test_no_gradient_crosses_a_reset():
    resets = np.zeros((B, T), bool)
    resets[0, 2] = True

    def last_output(arguments):
        return run(arguments, resets=resets).outputs[0][:, -1]

    for transform in (jax.jacrev, jax.jacfwd):
        jacobian = jax.device_get(fast_jit(transform(last_output))(arrays()))
        assert not jacobian.x[0, :, 0, :2].any() and not jacobian.states["h"][0].any()
        assert jacobian.x[1, :, 1, :2].any() and jacobian.states["h"][1].any()


def total(out):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(out.outputs))


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
    lengths = np.array([[3, 0, 5], [1, 5, 2]])
    resets = np.stack([RESETS, ~RESETS])
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
        outputs, once = [], jax.jit(body)  # traced once
        for scale in scales:
            states, out = once(states, scale)
            outputs.append(out)
        return sum(map(jnp.sum, jax.tree.leaves((states, outputs))))

    scales = jnp.array([0.5, 1.5])
    got, want = (
        fast_jit(jax.value_and_grad(f, argnums=(0, 1)))(arguments.states, scales)
        for f in (loss, loop)
    )
    assert_trees_close(got, want)


def outer_net(within, **options):
    """Return value and gradients of a net whose step calls a net over its input."""

    def step(w, h, x, t):
        def deep(w, s, v, t):
            s = ost.tag(jnp.tanh(w * s + v), "gate")
            return s, s

        h = within(deep, x, h, params=w)
        return h, ost.tag(jnp.sin(h), "sine")

    def loss(w, x):
        out = ost.recurrent_net(step, x, jnp.zeros(B), params=w, **options)
        return jnp.sum(out.outputs**2)

    both = fast_jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return both(np.float64(0.7), arrays().x)


@functools.cache
def outer_net_of_loops():
    def looped(deep, x, h, params):
        for t in range(x.shape[1]):
            h, _ = deep(params, h, x[:, t], t)
        return h

    return outer_net(looped)


@pytest.mark.parametrize("inner", [{}, {"recompute": ("gate",)}, {"segment_length": 2}])
@pytest.mark.parametrize("outer", [{}, {"recompute": ("gate",)}, {"recompute": True}])
def test_network_inside_the_step_of_another(inner, outer):
    """Check an outer net whose step runs an inner net over its input's features."""
    nested = lambda *a, **k: ost.recurrent_net(*a, **k, **inner).states  # noqa: E731
    assert_trees_close(outer_net(nested, **outer), outer_net_of_loops())


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
    # Arrays with explicit axes run in `lax.scan`, which rounds otherwise.
    assert_trees_close(jax.device_get(got), want, terms=10**6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [130, 512])
def test_many_steps_on_xla_equal_a_scan(length, reverse):
    """Blocks of steps run in the order of the loop, and backwards in the other one."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 4)), "u": 0.3 * rng.standard_normal((4, 4))}
    x, h_0 = rng.standard_normal((length, 8, 3)), rng.standard_normal((8, 4))
    weights = rng.standard_normal((length, 8, 4))

    def step(p, h, x, t):
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        return h, h

    def net(p, x, h):
        out = ost.recurrent_net(
            step, x, h, params=p, time_major=True, reverse=reverse, backend="xla"
        )
        return out.states, out.outputs

    def plain(p, x, h):
        return lax.scan(lambda h, x: step(p, h, x, 0), h, x, reverse=reverse)

    def of(run):
        def loss(p, x, h):
            last, outputs = run(p, x, h)
            return jnp.sum(outputs * weights) + jnp.sum(jnp.sin(last))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(params, x, h_0)

    for got, want in zip(*map(jax.tree.leaves, (of(net), of(plain))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, dz: (dz * jnp.exp(-(v**2)),))


@pytest.mark.parametrize("backend", [None, "xla", "scan", "cpu"])
def test_the_second_derivative_of_a_surrogate_follows_its_rule(backend):
    """With `custom_jvp`, that of `lax.scan` does not, as the FAQ says."""
    if backend == "cpu" and not ost.backends()["cpu"]:
        pytest.skip("there is no native library")

    def step(w, z, x, t):
        v = x + z * w
        z = spike(v) * v
        return z, z

    x = np.array([[0.5, -0.2, 0.3, 0.4]])

    def of_loop(w):
        z, total = jnp.full(1, 0.3), 0.0
        for t in range(4):
            z, y = step(w, z, x[:, t], t)
            total += jnp.sum(y**2)
        return total

    def of_net(w):
        out = ost.recurrent_net(step, x, jnp.full(1, 0.3), params=w, backend=backend)
        return jnp.sum(out.outputs**2)

    got, want = (jax.grad(jax.grad(f))(0.7) for f in (of_net, of_loop))
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("backend", [None, "xla", "scan"])
def test_random_numbers_follow_the_setting_of_each_call(backend):
    """The same step draws others where JAX's bits are counted in another way."""
    key, h_0 = jax.random.key(0), np.full((2, 4), 0.5)

    def step(p, h, x, t):
        noise = jax.random.normal(jax.random.fold_in(key, t), (2, 4))
        h = jnp.tanh(h @ p + noise)
        return h, h

    w, found = np.eye(4) / 2, []
    for setting in (True, False):
        with jax.threefry_partitionable(setting):
            out = ost.recurrent_net(
                step, (), h_0, params=w, length=3, backend=backend
            ).outputs
            h = h_0
            for t in range(3):
                h, _ = step(w, h, (), t)
                np.testing.assert_allclose(out[:, t], h, rtol=1e-9)
            found.append(h)
    assert not np.allclose(*found)


def with_rules(scale, depth):
    """Return the sine with a rule of its own; `scale` is in that of its `depth`."""

    @jax.custom_vjp
    def slope(v):
        return jnp.cos(v)

    @jax.custom_vjp
    def sine(v):
        return jnp.sin(v)

    first, second = (scale, 1) if depth == 1 else (1, scale)
    slope.defvjp(lambda v: (slope(v), v), lambda v, d: (-second * jnp.sin(v) * d,))
    sine.defvjp(lambda v: (sine(v), v), lambda v, d: (first * slope(v) * d,))
    return sine


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_differ_in_the_rule_of_a_derivative_are_two(depth, backend):
    """With units enough for another loop than `lax.scan`."""
    rng = np.random.default_rng(0)
    x, h_0, w = (rng.normal(size=s) / 4 for s in ((8, 3, 16), (8, 16), (16, 16)))

    def loss(sine, by_hand):
        def step(c, z, x, t):
            z = sine(x + z @ (c * w))
            return z, z

        def total(c):
            if by_hand:
                z, found = h_0, 0.0
                for t in range(3):
                    z, y = step(c, z, x[:, t], t)
                    found += jnp.sum(y**2)
                return found
            out = ost.recurrent_net(step, x, h_0, params=c, backend=backend)
            return jnp.sum(out.outputs**2)

        slope = jax.grad(total)
        return slope if depth == 1 else jax.grad(slope)

    found = []
    for scale in (1.0, 3.0):
        sine = with_rules(scale, depth)
        found.append(loss(sine, True)(0.7))
        np.testing.assert_allclose(loss(sine, False)(0.7), found[-1], rtol=1e-9)
    assert abs(found[0] - found[1]) > 1e-3
