"""Transformations of `linear_recurrence`, against a loop in JAX and its derivatives."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import collectives
from tolerance import assert_close

import ostinato as ost

BATCH, STEPS, UNITS = 4, 5, 2


def plain(a, b, h_0, reverse=False):
    """The same in a loop that JAX differentiates; `a` as `b`, or with matrices."""
    h, out = h_0, [None] * b.shape[1]
    for t in sorted(range(b.shape[1]), reverse=reverse):
        if a.ndim > b.ndim:
            h = jnp.einsum("...ij,...j->...i", a[:, t], h) + b[:, t]
        else:
            h = jnp.broadcast_to(a[:, t], h.shape) * h + b[:, t]
        out[t] = h
    return jnp.stack(out, 1), h


def ours(a, b, h_0, **options):
    return tuple(ost.linear_recurrence(a, b, h_0, **options))


def draw(*shape, seed=0, dtype="float64"):
    rng = np.random.default_rng([seed, *shape])
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x * 0.7, dtype)


KINDS = {
    "each": ((UNITS,), (UNITS,)),
    "shared": ((2, 1), (2, 3)),
    "matrix": ((UNITS, 2, 2), (UNITS, 2)),
}


def arrays(kind, dtype="float64", seed=0):
    factors, units = KINDS[kind]
    lead = (BATCH, STEPS)
    return (
        draw(*lead, *factors, seed=seed, dtype=dtype),
        draw(*lead, *units, seed=seed + 1, dtype=dtype),
        draw(BATCH, *units, seed=seed + 2, dtype=dtype),
    )


def assert_trees_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, terms=1000)


def loss_of(run):
    """Return a loss that is not linear in any result."""

    def loss(*args):
        h, h_n = run(*args)
        total = jnp.sum(jnp.sin(h)) + jnp.sum(jnp.cos(h_n) * h_n)
        return total.real

    return loss


every_kind = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize("reverse", [False, True])


@every_way
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, None) for kind in KINDS), ("each", "xla")]
)
def test_derivatives_of_every_order_equal_those_of_a_loop(kind, reverse, backend):
    args, dots = arrays(kind), arrays(kind, seed=5)
    run = ft.partial(ours, reverse=reverse, backend=backend)
    loop = ft.partial(plain, reverse=reverse)

    def every(run):
        loss = loss_of(run)
        grad = jax.grad(loss, (0, 1, 2))
        directional = lambda *x: jnp.vdot(  # noqa: E731
            jnp.concatenate([g.ravel() for g in grad(*x)]),
            jnp.concatenate([d.ravel() for d in dots]),
        )
        return (
            jax.jvp(run, args, dots),
            jax.jvp(lambda b: run(args[0], b, args[2]), args[1:2], dots[1:2]),
            jax.jvp(grad, args, dots),  # forward over reverse
            jax.grad(directional, (0, 1, 2))(*args),  # reverse over reverse
            jax.grad(lambda *x: jax.jvp(loss, x, dots)[1], (0, 1, 2))(*args),
        )

    assert_trees_close(fast_jit(lambda: every(run))(), fast_jit(lambda: every(loop))())


def second_derivatives(run, args, dots):
    loss = loss_of(run)
    grad = jax.grad(loss, (0, 1, 2))
    directional = lambda *x: sum(map(jnp.vdot, grad(*x), dots))  # noqa: E731
    return (
        jax.jvp(grad, args, dots)[1],
        jax.grad(directional, (0, 1, 2))(*args),
        jax.grad(lambda *x: jax.jvp(loss, x, dots)[1], (0, 1, 2))(*args),
    )


@every_way
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, None) for kind in KINDS), ("each", "xla")]
)
def test_padding_reaches_no_second_derivative(kind, reverse, backend):
    a, b, h_0 = arrays(kind)
    lengths = jnp.array([3, 0, 5, 1])
    past = np.arange(STEPS)[None] >= np.asarray(lengths)[:, None]
    run = ft.partial(ours, seq_lengths=lengths, reverse=reverse, backend=backend)

    def every(value):
        given = ((a, b, h_0), arrays(kind, seed=5))
        args, dots = (
            (a.at[past].set(value), b.at[past].set(value), h_0) for a, b, h_0 in given
        )
        return second_derivatives(run, args, dots)

    got = fast_jit(every)(jnp.nan)
    assert_trees_close(got, fast_jit(every)(0.5))
    for da, db, _ in got:
        assert not np.any(da[past])
        assert not np.any(db[past])


@every_way
@pytest.mark.parametrize("place", [0, 1, 3, 4])
@pytest.mark.parametrize(
    ("kind", "backend"), [*((kind, None) for kind in KINDS), ("each", "xla")]
)
@pytest.mark.parametrize("half", ["before", "after"])
def test_no_second_derivative_passes_a_reset(half, kind, backend, place, reverse):
    """Check that NaN on one side of a reset reaches nothing on the other."""
    a, b, h_0 = arrays(kind)
    steps = np.arange(STEPS)
    before = steps > place if reverse else steps < place
    resets = jnp.asarray(np.broadcast_to(steps == place, (BATCH, STEPS)))
    run = ft.partial(ours, resets=resets, reverse=reverse, backend=backend)
    holes = ~before if half == "after" else before

    def every(value):
        """Return the derivatives of what is on the other side."""
        start = h_0 if half == "after" else jnp.full_like(h_0, value)
        # The factor of the reset itself belongs to neither side.
        args = a.at[:, holes | (steps == place)].set(value), b.at[:, holes].set(value)
        da, *dots = arrays(kind, seed=5)
        dots = da.at[:, place].set(value), *dots
        found = second_derivatives(run, (*args, start), dots)
        other = ~holes & (steps != place)
        return [
            (da[:, other], db[:, ~holes], dh_0 if half == "after" else None)
            for da, db, dh_0 in found
        ]

    got = fast_jit(every)(jnp.nan)
    assert_trees_close(got, fast_jit(every)(0.5))


def test_third_derivative():
    a, b, h_0 = arrays("each")

    def third(run):
        loss = lambda s: loss_of(run)(a * s, b, h_0 * s)  # noqa: E731
        return jax.grad(jax.grad(jax.grad(loss)))(jnp.float64(0.9))

    assert_close(fast_jit(third, static_argnums=0)(ours), third(plain), terms=10_000)


@every_kind
def test_complex_gradients_are_those_of_jax(kind):
    args = arrays(kind, "complex128")
    got, want = (
        fast_jit(jax.grad(loss_of(run), (0, 1, 2)))(*args) for run in (ours, plain)
    )
    assert_trees_close(got, want)


def test_masks_and_constant_factors_have_second_derivatives():
    a, b, h_0 = arrays("each")
    a = a[0, 0]
    lengths = jnp.array([3, 0, 5, 1])
    resets = jnp.asarray(np.random.default_rng(0).random((BATCH, STEPS)) < 0.3)
    past = np.arange(STEPS) >= np.asarray(lengths)[:, None]
    holes = b.at[jnp.asarray(past)].set(jnp.nan)

    def masked(a, b, h_0):
        """The same, made of whole sequences: factors 0 and 1."""
        keep = jnp.where(resets[..., None], 0.0, jnp.broadcast_to(a, b.shape))
        keep = jnp.where(jnp.asarray(past)[..., None], 1.0, keep)
        h, h_n = plain(keep, jnp.where(jnp.asarray(past)[..., None], 0.0, b), h_0)
        return jnp.where(jnp.asarray(past)[..., None], 0.0, h), h_n

    def hessian(run, b):
        loss = lambda a, b, h_0: loss_of(run)(a, b, h_0)  # noqa: E731
        return jax.jacfwd(jax.grad(loss))(a, b, h_0), jax.jacrev(jax.grad(loss, 2), 0)(
            a, b, h_0
        )

    given = ft.partial(ours, seq_lengths=lengths, resets=resets)
    got = fast_jit(lambda: hessian(given, holes))()
    want = fast_jit(lambda: hessian(masked, jnp.nan_to_num(b)))()
    assert_trees_close(got, want)


# --------------------------------------------------------------------------------- vmap


@every_kind
@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (None, 1, 0), (2, None, None), (None, None, 1)]
)
def test_vmap_equals_a_loop(kind, axes):
    def many(x, axis):
        return x if axis is None else jnp.stack([x, 0.5 * x, -x], axis)

    args = [many(x, axis) for x, axis in zip(arrays(kind), axes, strict=True)]

    def one(run):
        return jax.vmap(jax.value_and_grad(loss_of(run), (0, 1, 2)), axes)(*args)

    assert_trees_close(fast_jit(lambda: one(ours))(), fast_jit(lambda: one(plain))())


def test_vmap_of_constant_factors_and_masks():
    a, b = draw(3, UNITS), draw(3, BATCH, STEPS, UNITS)
    lengths = jnp.array([[3, 0, 5, 1], [5, 5, 5, 5], [1, 2, 3, 4]])
    run = lambda a, b, n: ours(a, b, None, seq_lengths=n)  # noqa: E731
    got = jax.vmap(run)(a, b, lengths)
    want = [run(*given) for given in zip(a, b, lengths, strict=True)]
    assert_trees_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))
    assert_trees_close(
        jax.vmap(run, (0, None, None))(a, b[0], lengths[0]),
        jax.tree.map(
            lambda *x: jnp.stack(x), *[run(one, b[0], lengths[0]) for one in a]
        ),
    )
    by_time = lambda a, b, n: ours(  # noqa: E731
        a, jnp.swapaxes(b, 0, 1), None, seq_lengths=n, time_major=True
    )
    got_by_time = jax.vmap(by_time)(a, b, lengths)
    assert_trees_close(jnp.swapaxes(got_by_time[0], 1, 2), got[0])
    inner = jax.vmap(jax.vmap(run, (0, None, None)), (None, 0, 0))(a, b, lengths)
    assert inner[0].shape == (3, 3, BATCH, STEPS, UNITS)
    assert_trees_close(inner[0][1, 2], run(a[2], b[1], lengths[1])[0])


# --------------------------------------------------------------- remat, scan, transpose


def test_checkpoint_and_scan():
    args = arrays("each")
    grads = [
        fast_jit(jax.grad(loss_of(run), (0, 1, 2)))(*args)
        for run in (ours, jax.checkpoint(ours))
    ]
    assert_trees_close(*grads)

    def layers(run):
        step = lambda b, a: (jnp.tanh(run(a, b, args[2])[0]), None)  # noqa: E731
        return lambda b: jax.lax.scan(step, b, jnp.stack([args[0], args[0] / 2]))[
            0
        ].sum()

    assert_trees_close(*(jax.grad(layers(run))(args[1]) for run in (ours, plain)))


def test_the_transpose_is_the_recurrence_the_other_way_round():
    a, b, h_0 = arrays("each")
    run = lambda b, h_0: ours(a, b, h_0)  # noqa: E731
    transposed = lambda bars: jax.linear_transpose(run, b, h_0)(bars)  # noqa: E731
    (again,) = (jax.linear_transpose(lambda *x: transposed(x), b, h_0)((b, h_0)),)
    assert_trees_close(again, run(b, h_0))
    names = str(jax.make_jaxpr(transposed)((b, h_0)))
    assert "reverse=True" in names and "mul" not in names


# ------------------------------------------------------------------------------ devices


def mesh_of(explicit=False, shape=(2, 2), names=("batch", "units")):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


@every_kind
@pytest.mark.parametrize("constant", [False, True])
def test_batch_and_units_are_split_without_communication(kind, constant):
    mesh = mesh_of()
    a, b, h_0 = arrays(kind)
    a = a[0, 0] if constant else a
    specs = (
        P("units") if constant else P("batch", None, "units"),
        P("batch", None, "units"),
        P("batch", "units"),
    )
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = [place(x, spec) for x, spec in zip((a, b, h_0), specs, strict=True)]
    run = jax.jit(ours).lower(*placed).compile()
    assert collectives(run) == []
    got = run(*placed)
    assert_trees_close(got, ours(a, b, h_0))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, specs[1]), b.ndim)
    grad = jax.jit(jax.grad(loss_of(ours), (0, 1, 2)))
    assert_trees_close(grad(*placed), grad(a, b, h_0))


def test_units_that_share_a_factor_on_several_devices():
    mesh = mesh_of()
    a, b, h_0 = draw(BATCH, STEPS, 1), draw(BATCH, STEPS, 6), draw(BATCH, 6)
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    placed = place(a, "batch"), place(b, "batch", None, "units"), place(h_0, "batch")
    grad = jax.jit(jax.grad(loss_of(ours), (0, 1, 2)))
    assert_trees_close(grad(*placed), grad(a, b, h_0))


def test_explicit_sharding():
    mesh = mesh_of(explicit=True)
    a, b, h_0 = arrays("each")
    with jax.set_mesh(mesh):
        spec = P("batch")
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (a, b, h_0)]
        got = jax.jit(ours)(*placed)
        assert jax.typeof(got[0]).sharding.spec[0] == "batch"
        grads = jax.jit(jax.grad(loss_of(ours), (0, 1, 2)))(*placed)
    assert_trees_close(got, ours(a, b, h_0))
    assert_trees_close(grads, jax.grad(loss_of(ours), (0, 1, 2))(a, b, h_0))


@every_way
@pytest.mark.parametrize("kind", ["each", "matrix", "constant", "time-major"])
def test_steps_are_split_over_devices(kind, reverse):
    mesh = mesh_of(shape=(4,), names=("t",))
    major = kind == "time-major"
    factors, units = KINDS["matrix" if kind == "matrix" else "each"]
    lead = (8, 2) if major else (2, 8)
    a, b, h_0 = draw(*lead, *factors), draw(*lead, *units), draw(2, *units)
    if kind == "constant":
        a = a[0, 0]
    resets = jnp.asarray(np.random.default_rng(2).random(lead) < 0.2)
    resets = None if kind == "constant" else resets
    split = P("t") if major else P(None, "t")
    options = dict(reverse=reverse, time_major=major)

    def over(a, b, h_0, resets):
        return ost.linear_recurrence_over_devices(
            a, b, h_0, axis_name="t", resets=resets, **options
        )

    run = jax.shard_map(
        over,
        mesh=mesh,
        in_specs=(P() if kind == "constant" else split, split, P(), split),
        out_specs=ost.LinearOutput(split, P()),
    )
    alone = lambda a, b, h_0, r: ours(a, b, h_0, resets=r, **options)  # noqa: E731

    def both(run):
        loss = loss_of(lambda *x: run(*x, resets))
        return run(a, b, h_0, resets), jax.grad(loss, (0, 1, 2))(a, b, h_0)

    assert_trees_close(fast_jit(lambda: both(run))(), fast_jit(lambda: both(alone))())


@every_way
@pytest.mark.parametrize("place", ["input", "factor", "state"])
def test_nothing_passes_a_reset_between_devices(place, reverse):
    mesh, split = mesh_of(shape=(4,), names=("t",)), P(None, "t")
    run = jax.shard_map(
        lambda a, b, h_0, resets: ost.linear_recurrence_over_devices(
            a, b, h_0, axis_name="t", resets=resets, reverse=reverse
        ),
        mesh=mesh,
        in_specs=(split, split, P(), split),
        out_specs=ost.LinearOutput(split, P()),
    )
    a, b, h_0 = 0.5 * np.ones((1, 8, 1)), np.ones((1, 8, 1)), np.ones((1, 1))
    hole = 5 if reverse else 2
    if place == "state":
        h_0[:] = np.nan
    elif place == "input":
        b[0, hole] = np.nan
    else:
        a[0, hole] = np.inf
    resets = np.zeros((1, 8), bool)
    resets[0, 2 if reverse else 5] = True
    got = jax.jit(run)(a, b, h_0, resets)
    want = ours(a, b, h_0, resets=jnp.asarray(resets), reverse=reverse)
    for x, y in zip(got, want, strict=True):
        assert (np.isfinite(x) == np.isfinite(y)).all()
    behind = (0, 2) if reverse else (5, 8)
    assert_trees_close(got.h[:, slice(*behind)], want[0][:, slice(*behind)])
    assert_trees_close(got.h_n, want[1])


@every_way
@pytest.mark.parametrize("factors", [(2,), (2, 0, 2), (2, 0, 2, 2)])
def test_no_steps_are_split_over_devices(factors, reverse):
    mesh, split = mesh_of(shape=(4,), names=("t",)), P(None, "t")
    run = jax.shard_map(
        lambda a, b: ost.linear_recurrence_over_devices(
            a, b, axis_name="t", reverse=reverse
        ),
        mesh=mesh,
        in_specs=(P() if len(factors) == 1 else split, split),
        out_specs=ost.LinearOutput(split, P()),
    )
    a, b = jnp.ones(factors), jnp.ones((2, 0, 2))
    h, h_n = jax.jit(run)(a, b)
    assert h.shape == (2, 0, 2) and not h_n.any()
    loss = lambda a, b: jnp.sum(run(a, b).h_n)  # noqa: E731
    assert not jax.jit(jax.grad(loss))(a, b).any()


def test_no_shard_map_around_the_call():
    x = jnp.ones((2, 4, 3))
    with pytest.raises(ValueError, match="`axis_name` must be an axis of the mesh"):
        ost.linear_recurrence_over_devices(x, x, axis_name="t")


def test_shard_map_over_the_batch():
    mesh = mesh_of(shape=(4,), names=("batch",))
    a, b, h_0 = arrays("each")
    a = a[0, 0]  # the same on every device
    split = P("batch")
    run = jax.shard_map(
        ours, mesh=mesh, in_specs=(P(), split, split), out_specs=(split, split)
    )
    grads = [jax.jit(jax.grad(loss_of(f), (0, 1, 2)))(a, b, h_0) for f in (run, ours)]
    assert_trees_close(*grads)


# ------------------------------------------------------------------------------- export


def test_export_with_symbolic_sizes():
    sizes = jax.export.symbolic_shape("batch, steps, 3")
    x = jax.ShapeDtypeStruct(sizes, jnp.float32)
    run = jax.jit(lambda a, b: ours(a, b, None)[0])
    exported = jax.export.export(run)(x, x)
    a, b = draw(2, 7, 3, dtype="float32"), draw(2, 7, 3, seed=1, dtype="float32")
    assert_close(exported.call(a, b), run(a, b), terms=100)


def test_eager_calls_need_no_jit():
    with jax.disable_jit():
        a, b, h_0 = arrays("each")
        assert_trees_close(ours(a, b, h_0), plain(a, b, h_0))
