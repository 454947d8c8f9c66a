"""Tests of meshes with explicit axes, which are part of an array's type."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerance import tolerance

import ostinato as ost
from ostinato import cells, ragged

SPECS = {
    "lstm": ost.RNNSpec("lstm", 3, 4, 2, bidirectional=True, dropout=0.3),
    "gru": ost.RNNSpec("gru", 3, 4, reset_after=False),
}
COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(-start)?\("
)
BATCH, STEPS = 8, 5


@pytest.fixture(scope="module")
def mesh():
    explicit = (jax.sharding.AxisType.Explicit,)
    return jax.make_mesh((4,), ("batch",), axis_types=explicit)


def draw(spec):
    weights = ost.init_weights(jax.random.key(0), spec, jnp.float64)
    x = jax.random.normal(jax.random.key(1), (BATCH, STEPS, 3), jnp.float64)
    return weights, x, jnp.array([5, 0, 3, 1, 2, 5, 4, 0], jnp.int32)


def run(spec):
    return lambda w, x, n: ost.rnn(
        spec, w, x, seq_lengths=n, key=jax.random.key(2), padding="hold"
    )


def loss(spec):
    return lambda w, x, n: jnp.sum(jnp.sin(run(spec)(w, x, n).y))


def place(mesh, *pairs):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]


def assert_same(got, want):
    tol = tolerance(np.float64, terms=BATCH * STEPS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            jax.device_get(a), jax.device_get(b), rtol=tol, atol=tol
        ),
        got,
        want,
    )


every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_spec
def test_outputs_keep_the_batch_axis_in_their_type(spec, mesh):
    args = draw(spec)
    w, x, n = place(mesh, *zip(args, (P(), P("batch"), P("batch")), strict=True))
    lowered = jax.jit(run(spec)).lower(w, x, n)
    compiled = lowered.compile()
    assert not COLLECTIVE.findall(compiled.as_text())
    out = compiled(w, x, n)
    assert jax.typeof(out.y).sharding.spec == P("batch", None, None)
    assert_same(out, run(spec)(*args))


@every_spec
def test_gradient_equals_one_device(spec, mesh):
    args = draw(spec)
    w, x, n = place(mesh, *zip(args, (P(), P("batch"), P("batch")), strict=True))
    got = jax.jit(jax.grad(loss(spec), (0, 1)))(w, x, n)
    assert jax.typeof(got[1]).sharding.spec == P("batch", None, None)
    assert_same(got, jax.grad(loss(spec), (0, 1))(*args))


def test_second_derivative_equals_one_device(mesh):
    spec = SPECS["lstm"]
    args = draw(spec)

    def product(w, x, n):
        return jax.jvp(lambda w: jax.grad(loss(spec))(w, x, n), (w,), (w,))[1]

    w, x, n = place(mesh, *zip(args, (P(), P("batch"), P("batch")), strict=True))
    assert_same(jax.jit(product)(w, x, n), jax.jit(product)(*args))


@pytest.mark.parametrize("padding", ["zero", "hold"])
def test_explicit_passes_equal_one_device(padding, mesh):
    spec = SPECS["lstm"]
    args = draw(spec)

    def both(w, x, n):
        out, reserve = ost.rnn_forward(spec, w, x, seq_lengths=n, padding=padding)
        return ost.rnn_backward(spec, w, reserve, jnp.cos(out.y))

    w, x, n = place(mesh, *zip(args, (P(), P("batch"), P("batch")), strict=True))
    assert_same(jax.jit(both)(w, x, n), jax.jit(both)(*args))


WAYS = ["data", "weights", "gradients", "gradient by data", "gradient by weights"]


@pytest.mark.parametrize("over", WAYS)
def test_vmap_over_the_sharded_axis_equals_one_device(over, mesh):
    spec = SPECS["lstm"]
    weights, x, _ = draw(spec)

    def total(w, x):
        return jnp.sum(jnp.sin(ost.rnn(spec, w, x).y))

    args, specs, axes = (weights, x), (P(), P("batch")), (None, 0)
    if "weights" in over:
        args = jnp.stack([weights * k for k in range(1, 5)]), x
        specs, axes = (P("batch"), P()), (0, None)
    if over == "data":
        mapped = jax.vmap(lambda w, x: ost.rnn(spec, w, x).y, axes)
    elif "by" in over:
        mapped = jax.grad(
            lambda *args: jnp.sum(jax.vmap(total, axes)(*args)), axes.index(0)
        )
    else:
        mapped = jax.vmap(jax.grad(total), axes)
    placed = place(mesh, *zip(args, specs, strict=True))
    got = jax.jit(mapped)(*placed)
    assert jax.typeof(got).sharding.spec[0] == "batch"
    assert_same(got, jax.jit(mapped)(*args))


def recurrence(x):
    return ost.linear_recurrence(x[..., None], x[..., None]).h[..., 0]


def advantages(x):
    return ost.gae(x, jnp.sin(x), x[..., 0], discounts=0.9, lambda_=0.8).advantages


def returns(x):
    return ost.lambda_returns(x, 0.9, jnp.sin(x), 0.8)


LINEAR = {
    "linear_recurrence": recurrence,
    "lfilter": lambda x: ost.lfilter([0.5, 0.2], [1.0, -0.5], x),
    "sosfilt": lambda x: ost.sosfilt([[0.5, 0.2, 0, 1, -0.5, 0.1]] * 2, x),
    "gae": advantages,
    "lambda_returns": returns,
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("mapped", [False, True])
def test_linear_recurrences_keep_the_batch_axis_in_their_type(name, mapped, mesh):
    one = LINEAR[name]
    run = jax.vmap(one) if mapped else one

    def both(x):
        y, pull = jax.vjp(run, x)
        return y, *pull(jnp.cos(y))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, STEPS)))
    (split,) = place(mesh, (x, P("batch")))
    got = fast_jit(both)(split)
    assert [jax.typeof(a).sharding.spec[0] for a in got] == ["batch", "batch"]
    assert_same(got, fast_jit(both)(x))


# ------------------------------------------------------- loops of `recurrent_net`

KEY = jax.random.key(3)


def tanh_step(w, h, x, t):
    h = jnp.tanh(x @ w["x"] + h @ w["h"])
    return h, h


NETS = {
    "step": tanh_step,
    "zoneout": cells.Zoneout(cells.GRU(3, 4), 0.5).sample(KEY),
    "stack": cells.Stack((cells.MILSTM(3, 4), cells.GRU(4, 4))),
    "directions": cells.Bidirectional(cells.LayerNormGRU(3, 4)),
}
RESETS = np.arange(BATCH * STEPS).reshape(BATCH, STEPS) % 3 == 0
NET_OPTIONS = {
    "plain": {},
    "lengths": {"seq_lengths": np.array([5, 0, 3, 1, 2, 5, 4, 0], np.int32)},
    "resets": {"resets": RESETS},
    "segments": {"segment_length": 2},
}


NET_CASES = [
    (name, option)
    for name in NETS
    for option in NET_OPTIONS
    if (name, option) != ("directions", "resets")  # which are for one direction
]


@pytest.mark.alike
@pytest.mark.parametrize("name, option", NET_CASES)
def test_states_that_are_not_split_are_split_as_the_batch(name, option, mesh):
    """Check initial states that are made inside of `jit`, without a sharding."""
    net, options = NETS[name], NET_OPTIONS[option]
    if net is tanh_step:
        params = {"x": jnp.ones((3, 4)) / 3, "h": jnp.eye(4)}
        state = jnp.zeros((BATCH, 4))
    else:
        params, state = net.init(KEY, jnp.float64), net.initial_state(BATCH, float)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, STEPS, 3)))

    def outputs(params, x):
        zeros = jax.tree.map(jnp.zeros_like, state)
        return ost.recurrent_net(net, x, zeros, params=params, **options).outputs

    def both(params, x):
        y, pull = jax.vjp(outputs, params, x)
        return y, pull(jnp.cos(y))

    want = fast_jit(both)(params, x)
    with jax.set_mesh(mesh):
        (split,) = place(mesh, (x, P("batch")))
        got = fast_jit(both)(params, split)
        assert got[0].sharding.spec[0] == "batch"
        assert_same(got, want)


@pytest.mark.parametrize("what", ["rnn", "linear_recurrence"])
def test_ragged_models_run_while_a_mesh_is_set(what, mesh):
    """Nothing is split; see also `ragged.shard`."""
    x = [jnp.ones((n, 3)) * n for n in (3, 1)]
    spec = ost.RNNSpec("gru", 3, 4)
    w = ost.init_weights(jax.random.key(0), spec, x[0].dtype)

    def model(x):
        if what == "rnn":
            return ost.rnn(spec, w, x).y.max(0)
        return ost.linear_recurrence(jnp.full(3, 0.5), x[None]).h[0].max(0)

    with jax.set_mesh(mesh):
        got = ragged.vmap(model)(ragged.RaggedArray.from_list(x))
    np.testing.assert_allclose(got, jnp.stack([model(a) for a in x]), rtol=1e-6)


def test_tokens_that_are_split_are_an_error(mesh):
    (tokens,) = place(mesh, (jnp.arange(24.0).reshape(8, 3), P("batch")))
    batch = ragged.RaggedArray(tokens, jnp.array([3, 1, 2, 2]), max_length=3)
    run = ragged.vmap(lambda x: x.sum(0))
    with pytest.raises(ValueError, match="split over the axis 'batch'.*ragged.shard"):
        run(batch)
    with jax.set_mesh(mesh):
        whole = batch.with_data(jax.reshard(tokens, P()))
    np.testing.assert_array_equal(run(whole)[0], [9, 12, 15])


def test_a_state_that_is_split_along_its_features_stays_so(mesh):
    """The axis of the mesh that the batch has is taken there."""
    rng = np.random.default_rng(0)
    x, h, w = (jnp.asarray(rng.normal(size=s)) for s in ((8, 5, 4), (8, 4), (4, 4)))

    def step(w, h, x, t):
        new = jnp.tanh(x @ w)
        return h, new

    def net(x, h, w):
        return ost.recurrent_net(step, x, h, params=w).states

    want = h
    with jax.set_mesh(mesh):
        split = place(mesh, (x, P("batch")), (h, P(None, "batch")), (w, P()))
        assert_same(fast_jit(net)(*split), want)


@pytest.mark.parametrize("time_major", [False, True])
def test_lengths_without_inputs_are_split_as_the_states(time_major, mesh):
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s)) for s in ((8, 4), (4, 4)))
    lengths = np.array([5, 0, 3, 1, 2, 5, 4, 0], np.int32)

    def step(w, h, x, t):
        h = jnp.tanh(h @ w)
        return h, h

    def net(h, w):
        zeros = h, jnp.zeros((8, 4))
        both = lambda w, s, x, t: ((step(w, s[0], x, t)[0], s[1] + s[0]), s[1])  # noqa: E731
        out = ost.recurrent_net(
            both, (), zeros, params=w, length=5, seq_lengths=lengths,
            time_major=time_major,
        )  # fmt: skip
        return out.states

    want = np.array(h), np.zeros((8, 4))
    for t in range(5):
        own = lengths[:, None] > t
        new = np.tanh(want[0] @ np.asarray(w)), want[1] + want[0]
        want = tuple(np.where(own, a, b) for a, b in zip(new, want, strict=True))
    with jax.set_mesh(mesh):
        split = place(mesh, (h, P("batch")), (w, P()))
        assert_same(fast_jit(net)(*split), want)
