"""Tests of batches sharded over four host devices: the same results as on one device.

The only communication between the devices is the sum of weight gradients.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, make_inputs
from closures import Primal, fast_jit, loss_of, ours, primal_of
from harness import rounded, spec_of
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles.loop64 import Spec, num_params
from test_transforms import assert_trees_close

import ostinato as ost

CASES = [
    Case("lstm", Spec("lstm", 2, 3, 2, True, proj_size=2), 4, 8, (2, 0, 4, 1) * 2),
    Case("gru", Spec("gru", 2, 3, 2), 4, 8, (2, 0, 4, 1) * 2, resets=True),
    Case("tanh-hold", Spec("rnn_tanh", 2, 3), 4, 8, (2, 0, 4, 1) * 2, padding="hold"),
    Case("heads", Spec("gru", 2, 4, num_heads=2), 4, 8, (2, 0, 4, 1) * 2),
    Case("slstm", Spec("slstm", 2, 4, 2, num_heads=2), 4, 8, (2, 0, 4, 1) * 2),
    Case("dropout", Spec("lstm", 2, 3, 2, dropout=0.5), 4, 8, time_major=True),
    # This operator runs on xla, even where the others run on cpu.
    Case("gru_before", Spec("gru", 2, 3, reset_after=False), 4, 8, (2, 0, 4, 1) * 2),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)"
    r"(?:-start)?\("
)


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices("cpu")
    assert len(devices) >= 4, "conftest.py asks for four host devices"
    return Mesh(np.array(devices[:4]), ("batch",))


def specs_of(case: Case) -> Primal:
    x, state = P(None, "batch") if case.time_major else P("batch"), P(None, "batch")
    return Primal(P(), x, state, state if case.spec.cells else None)


def out_specs(case: Case):
    state = P(None, "batch")
    return specs_of(case).x, state, state if case.spec.cells else None


def inputs_of(case: Case, mesh: Mesh | None = None) -> tuple:
    """Make primal, lengths and resets, in the layout of the case, on the mesh."""
    made, primal = rounded(make_inputs(case), "float64"), primal_of(case)
    if case.time_major:
        primal = primal._replace(x=jnp.swapaxes(primal.x, 0, 1))
    args = primal, made.seq_lengths, made.resets
    return args if mesh is None else place(args, mesh, arg_specs(case))


def arg_specs(case: Case) -> tuple:
    lengths = None if case.lengths is None else P("batch")
    return specs_of(case), lengths, P("batch") if case.resets else None


def place(tree, mesh, specs):
    return jax.tree.map(
        lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs
    )


def forward(case: Case):
    def run(primal, seq_lengths, resets):
        return ours(case, seq_lengths=seq_lengths, resets=resets)(primal)

    return run


def gradient(case: Case, **changes):
    """Return the gradient of a loss that is a sum over sequences and shards."""

    def loss(primal, seq_lengths, resets):
        options = changes | {"seq_lengths": seq_lengths, "resets": resets}
        outs = ours(case, **options)(primal)
        return sum(jnp.sum(jnp.sin(2.0 * o)) for o in outs if o is not None)

    return jax.grad(loss)


def collectives(compiled) -> list[tuple[str, str]]:
    """Return `(operation, shape)` of every collective of a program."""
    found = COLLECTIVE.findall(compiled.as_text())
    return [(operation, shape) for shape, operation in found]


def elements(shape: str) -> int:
    """Count the elements of an HLO shape, which may be a tuple."""
    sizes = re.findall(r"\w+\[([\d,]*)\]", shape)
    return sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in sizes)


def test_the_pattern_finds_a_collective(mesh):
    """Check that the pattern finds a collective, or the other tests would be empty."""
    x = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("batch")))
    compiled = jax.jit(lambda x: jnp.sum(x, 0)).lower(x).compile()
    ((operation, shape),) = collectives(compiled)
    assert operation == "all-reduce" and elements(shape) == 3


@every_case
def test_sharded_forward_needs_no_collective(case, mesh):
    run = jax.jit(forward(case))
    args = inputs_of(case, mesh)
    compiled = run.lower(*args).compile()
    assert collectives(compiled) == []
    got = compiled(*args)
    assert_trees_close(got, run(*inputs_of(case)))
    for out, spec in zip(got, out_specs(case), strict=True):
        if out is not None:
            want = NamedSharding(mesh, spec)
            assert out.sharding.is_equivalent_to(want, out.ndim), out.sharding


@every_case
def test_sharded_gradient_sums_the_weights_alone(case, mesh):
    run = jax.jit(gradient(case))
    args = inputs_of(case, mesh)
    compiled = run.lower(*args).compile()
    found = collectives(compiled)
    assert {operation for operation, _ in found} == {"all-reduce"}
    assert sum(elements(shape) for _, shape in found) == num_params(case.spec)
    native = ost.explain(spec_of(case), args[0].x).backend == "cpu"
    assert ("ostinato_rnn_bwd" in compiled.as_text()) == native
    got = compiled(*args)
    assert_trees_close(got, run(*inputs_of(case)))
    for g, spec in zip(got, specs_of(case), strict=True):
        if g is not None:
            want = NamedSharding(mesh, spec)
            assert g.sharding.is_equivalent_to(want, g.ndim), g.sharding


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: c.id)
def test_sharded_tangent_needs_no_collective(case, mesh):
    def tangent(*args):
        primal, *rest = args
        step = jax.tree.map(jnp.ones_like, primal)
        return jax.jvp(lambda p: forward(case)(p, *rest), (primal,), (step,))[1]

    args, run = inputs_of(case, mesh), fast_jit(tangent)
    compiled = run.lower(*args).compile()
    assert collectives(compiled) == []
    assert_trees_close(compiled(*args), run(*inputs_of(case)))


@pytest.mark.parametrize("axis", ["ensemble", "batch"])
def test_sharded_ensemble_needs_no_collective(axis, mesh):
    """Check vmap over weights, with the ensemble or the batch axis sharded."""
    case = CASES[0]
    primal, lengths, _ = inputs_of(case)
    members = jnp.stack([primal.weights * s for s in (1.0, 0.5, -1.0, 2.0)])

    def run(members, x, lengths):
        def one(weights):
            return forward(case)(primal._replace(weights=weights, x=x), lengths, None)

        return jax.vmap(one)(members)[0]

    args = members, primal.x, lengths
    ensemble, batch = P("batch"), P()
    if axis == "batch":
        ensemble, batch = P(), P("batch")
    placed = place(args, mesh, (ensemble, batch, batch))
    compiled = fast_jit(run).lower(*placed).compile()
    assert collectives(compiled) == []
    assert_trees_close(compiled(*placed), fast_jit(run)(*args))


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: c.id)
def test_shard_map_equals_one_device(case, mesh):
    run = jax.shard_map(
        forward(case), mesh=mesh, in_specs=arg_specs(case), out_specs=out_specs(case)
    )
    args = inputs_of(case, mesh)
    compiled = fast_jit(run).lower(*args).compile()
    assert collectives(compiled) == []
    assert_trees_close(compiled(*args), fast_jit(forward(case))(*inputs_of(case)))


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: c.id)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_inside_shard_map_equals_one_device(case, check_vma, mesh):
    def local(*args):
        grads = gradient(case)(*args)
        if check_vma:  # weights are replicated, so JAX sums their gradient
            return grads
        return grads._replace(weights=jax.lax.psum(grads.weights, "batch"))

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=arg_specs(case),
        out_specs=specs_of(case),
        check_vma=check_vma,
    )
    got = fast_jit(run)(*inputs_of(case, mesh))
    assert_trees_close(got, fast_jit(gradient(case))(*inputs_of(case)))


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: c.id)
def test_gradient_outside_shard_map_equals_one_device(case, mesh):
    run = jax.shard_map(
        forward(case), mesh=mesh, in_specs=arg_specs(case), out_specs=out_specs(case)
    )

    def loss(primal, *rest):
        outs = run(primal, *rest)
        return sum(jnp.sum(jnp.sin(2.0 * o)) for o in outs if o is not None)

    got = fast_jit(jax.grad(loss))(*inputs_of(case, mesh))
    assert_trees_close(got, fast_jit(gradient(case))(*inputs_of(case)))


def test_second_derivative_under_sharding_equals_one_device(mesh):
    case = CASES[1]

    def product(primal, *rest):
        step = jax.tree.map(jnp.ones_like, primal)
        return jax.jvp(lambda p: gradient(case)(p, *rest), (primal,), (step,))[1]

    got = fast_jit(product)(*inputs_of(case, mesh))
    assert_trees_close(got, fast_jit(product)(*inputs_of(case)), terms=1000)


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("batch", [6, 3, 8])
def test_batch_that_devices_do_not_divide_equals_one_device(batch, with_lengths, mesh):
    """Check that XLA's padding of shards does not change the gradient of weights."""
    spec = ost.RNNSpec("gru", 3, 4)
    w = ost.init_weights(jax.random.key(0), spec, dtype="float64")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((batch, 5, 3)))
    lengths = jnp.asarray(rng.integers(0, 6, batch)) if with_lengths else None
    split = NamedSharding(mesh, P("batch"))

    def loss(w, x, split=None):
        if split is not None:
            x = jax.lax.with_sharding_constraint(x, split)
        return jnp.sum(jnp.sin(ost.rnn(spec, w, x, seq_lengths=lengths).y))

    got = jax.jit(jax.grad(lambda w, x: loss(w, x, split), (0, 1)))(w, x)
    assert_trees_close(got, jax.jit(jax.grad(loss, (0, 1)))(w, x))


def test_part_of_a_sharded_batch_equals_one_device(mesh):
    spec = ost.RNNSpec("lstm", 3, 4)
    w = ost.init_weights(jax.random.key(0), spec, dtype="float64")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5, 3)))
    loss = lambda w, x: jnp.sum(ost.rnn(spec, w, x[1:]).y ** 2)  # noqa: E731
    split = jax.device_put(x, NamedSharding(mesh, P("batch")))
    gradient = jax.jit(jax.grad(loss))
    assert_trees_close(gradient(w, split), gradient(w, x))


def test_groups_and_batch_split_along_one_axis_of_the_mesh(mesh):
    spec = ost.RNNSpec("gru", 3, 4)
    w = jnp.stack([ost.init_weights(jax.random.key(k), spec) for k in range(4)])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5, 3)), jnp.float32)
    run = jax.vmap(lambda w, x: ost.rnn(spec, w, x).y, in_axes=(0, None))
    placed = jax.device_put((w, x), NamedSharding(mesh, P("batch")))
    np.testing.assert_allclose(jax.jit(run)(*placed), jax.jit(run)(w, x), atol=1e-6)


def test_loss_of_the_closures_is_used_with_lengths():
    """Check that the cases here have different lengths on every device."""
    for case in CASES[:3]:
        assert sorted(case.lengths[:2]) == [0, 2] and case.batch % 4 == 0
        assert np.isfinite(loss_of(case, ours(case))(primal_of(case)))


STEPS = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,  # a function with a derivative of its own
    "checkpoint": jax.checkpoint(lambda h: jnp.sin(jnp.tanh(h))),
    "loop": lambda h: jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h), h),
}


@pytest.mark.parametrize("some", [False, True], ids=["all axes", "some axes"])
@pytest.mark.parametrize("size", [4, 24], ids=["small", "large"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_a_user_in_shard_map_equal_one_device(name, size, some):
    """Initial states do not vary over devices; all after them do."""
    devices = np.array(jax.devices("cpu")[:4])
    mesh = Mesh(devices.reshape(2, 2), ("batch", "other"))
    if not some:
        mesh = Mesh(devices, ("batch",))

    def step(p, h, x, t):
        h = STEPS[name](x + h @ jax.nn.relu(p)) + jnp.sort(jax.nn.relu(x @ p), axis=1)
        return h, h

    def net(p, x):
        return ost.recurrent_net(step, x, jnp.zeros((len(x), size)), params=p).outputs

    local = jax.shard_map(
        net,
        mesh=mesh,
        axis_names={"batch"},
        in_specs=(P(), P("batch")),
        out_specs=P("batch"),
    )
    rng = np.random.default_rng(0)
    p, x = rng.normal(size=(size, size)) / 9, rng.normal(size=(8, 3, size))
    found = []
    for function in (local, net):

        def loss(p, x, function=function):
            y = function(p, x)
            return jnp.sum(jnp.sin(y)), y

        found.append(fast_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p, x))
    assert_trees_close(*found)


@pytest.mark.parametrize("name", STEPS)
def test_derivatives_of_derivatives_of_steps_in_shard_map_equal_one_device(name, mesh):
    def step(p, h, x, t):
        h = STEPS[name](x @ p + h @ p) - h / 2
        return h, h * h

    def net(p, x, lengths):
        h = jnp.zeros((len(x), 9))
        out = ost.recurrent_net(step, x, h, params=p, seq_lengths=lengths)
        return jnp.sum(jnp.sin(out.outputs))[None]

    specs = P(), P("batch"), P("batch")
    local = jax.shard_map(net, mesh=mesh, in_specs=specs, out_specs=P("batch"))
    rng = np.random.default_rng(0)
    p, x = rng.normal(size=(9, 9)) / 3, rng.normal(size=(8, 4, 9))
    lengths = jnp.array([4, 0, 3, 1, 2, 4, 4, 1])
    found = []
    for function in (local, net):
        loss = lambda p, f=function: jnp.sum(f(p, x, lengths))  # noqa: E731
        total = lambda p, f=loss: jnp.sum(jnp.cos(jax.grad(f)(p)))  # noqa: E731
        along = lambda v, f=loss: jax.jvp(jax.grad(f), (p,), (v,))[1]  # noqa: E731
        of_all = fast_jit(
            lambda p, total=total, along=along, f=loss: (
                jax.grad(total)(p),
                jax.vmap(along)(jnp.stack([p, 2 * p])),
                jax.grad(lambda p: jax.jvp(f, (p,), (p,))[1])(p),
                jax.grad(lambda p: jnp.sum(jax.grad(total)(p)))(p),
            )
        )
        found.append(of_all(p))
    assert_trees_close(*found)


@pytest.mark.parametrize("batch", [6, 8])
def test_a_batch_over_two_axes_of_a_mesh_equals_one_device(batch):
    """Check one that the first axis of the mesh divides, and both do not."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("first", "second"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P(("first", "second")))
    spec = ost.RNNSpec("gru", 3, 4)
    w = ost.init_weights(jax.random.key(0), spec, dtype="float64")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((batch, 5, 3)))

    def loss(w, x, split=None):
        if split is not None:
            x = jax.lax.with_sharding_constraint(x, split)
        return jnp.sum(jnp.sin(ost.rnn(spec, w, x).y))

    got = jax.jit(jax.grad(lambda w, x: loss(w, x, split), (0, 1)))(w, x)
    assert_trees_close(got, jax.jit(jax.grad(loss, (0, 1)))(w, x))


def inner_scan(a):
    return jax.lax.scan(lambda s, _: (jnp.tanh(s + a), None), a, length=3)[0]


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("function", [jax.nn.softplus, jax.nn.relu, inner_scan])
def test_a_step_in_shard_map_closes_over_what_devices_have(function, backend):
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    x, h_0, w, own = (
        rng.normal(size=s) for s in ((8, 3, 16), (8, 16), (16, 16), (4, 16))
    )

    def step_with(own):
        def step(w, h, x, t):
            h = jnp.tanh(x + function(h * own) @ w)
            return h, h

        return step

    def split(w, own):
        def local(w, x, h, own):
            step = step_with(own)
            return ost.recurrent_net(step, x, h, params=w, backend=backend).outputs

        specs = P(), P("b"), P("b"), P("b")
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("b"))
        return run(w, x, h_0, own)

    def by_hand(w, own):
        step, h, found = step_with(jnp.repeat(own, 2, axis=0)), h_0, []
        for t in range(3):
            h, _ = step(w, h, x[:, t], t)
            found.append(h)
        return jnp.stack(found, 1)

    def slopes(run):
        loss = lambda w, own: jnp.sum(jnp.sin(run(w, own)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(w, own)

    for a, b in zip(*map(jax.tree.leaves, map(slopes, (split, by_hand))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("function", [jax.nn.softplus, jax.nn.relu])
def test_a_step_in_shard_map_orders_what_a_function_makes_of_inputs(function, backend):
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    x, h_0, w = (rng.normal(size=s) for s in ((8, 3, 16), (8, 16), (16, 16)))

    def local(w, x, h):
        def step(w, h, x, t):
            h = jnp.tanh(jnp.sort(function(x), -1) + h @ w)
            return h, h

        return ost.recurrent_net(step, x, h, params=w, backend=backend).outputs

    specs = P(), P("b"), P("b")
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("b"))
    found = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1)))(w, x, h_0)
        for f in (split, local)
    ]
    assert_trees_close(*found)


def test_integers_of_steps_in_shard_map_have_no_derivatives(mesh):
    """Neither states nor outputs that are integers, before or among the floats."""

    def step(p, states, x, t):
        count, h = states
        h = jnp.tanh(x + h @ p)
        count = count + (h[:, 0] > 0).astype(jnp.int32)
        return (count, h), (count, h * h)

    def net(p, x):
        states = jnp.zeros(len(x), jnp.int32), jnp.zeros((len(x), 3))
        out = ost.recurrent_net(step, x, states, params=p, backend="cpu")
        counts, outputs = out.outputs
        return jnp.sum(jnp.sin(outputs))[None], counts

    local = jax.shard_map(
        net, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch")
    )
    rng = np.random.default_rng(0)
    p, x = rng.normal(size=(3, 3)), rng.normal(size=(4, 2, 3))
    found, all_counts = [], []
    for function in (local, net):

        def loss(p, function=function):
            total, counts = function(p, x)
            return jnp.sum(total), counts

        slope = jax.grad(loss, has_aux=True)
        along = lambda p, f=slope: jax.jvp(f, (p,), (p,))  # noqa: E731
        (gradient, counts), (second, _) = fast_jit(along)(p)
        found.append((gradient, second))
        all_counts.append(counts)
    assert_trees_close(*found)
    np.testing.assert_array_equal(*all_counts)
