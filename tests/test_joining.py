"""The primitives that gather matrices into the flat vector, against numpy."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ostinato import _native, ragged
from ostinato._rnn import joining

RNG = np.random.default_rng(0)
DTYPES = ("float32", "float64", "bfloat16", "float16", "float8_e5m2")


def draw(*shape, dtype="float64"):
    return jnp.asarray(RNG.standard_normal(shape)).astype(dtype)


def gathered(a, b, bias):
    """Join two matrices by column, one of them with its thirds reordered."""
    return joining.join(
        [joining.transposed(a).reorder((2, 0, 1)), joining.transposed(b, b + b), bias]
    )


def expected(a, b, bias):
    third = a.shape[-1] // 3
    a = np.concatenate([a[..., 2 * third :], a[..., : 2 * third]], -1)
    rows = [np.swapaxes(m, -1, -2) for m in (a, b, b + b)]
    lead = bias.shape[:-1]
    return np.concatenate([m.reshape(*lead, -1) for m in (*rows, bias)], -1)


def arrays(dtype="float64", lead=(), size=5):
    return (
        draw(*lead, size, 3 * size + 6, dtype=dtype),
        draw(*lead, 2, 7, dtype=dtype),
        draw(*lead, 9, dtype=dtype),
    )


def as_numpy(values):
    return [np.asarray(v, np.float64) for v in values]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 17])
def test_elements_lie_as_in_numpy(dtype, size):
    values = arrays("float32", size=size)
    a, b, bias = (v.astype(dtype) for v in values)
    joined = jax.jit(
        lambda a, b, bias: joining.join(
            [joining.transposed(a, a), bias, joining.transposed(b), b]
        )
    )(a, b, bias)
    assert joined.dtype == a.dtype
    a, b, bias = as_numpy((a, b, bias))
    want = [a.T, a.T, bias, b.T, b]
    want = np.concatenate([m.reshape(-1) for m in want])
    np.testing.assert_array_equal(np.asarray(joined, np.float64), want)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_large_matrices_go_there_and_back(dtype):
    values = (draw(130, 1041, dtype=dtype), draw(65, 3, dtype=dtype))

    def join(a, b):
        return joining.join([joining.transposed(a), joining.transposed(b), b])

    flat, pullback = jax.vjp(join, *values)
    a, b = as_numpy(values)
    want = np.concatenate([a.T.reshape(-1), b.T.reshape(-1), b.reshape(-1)])
    np.testing.assert_array_equal(np.asarray(flat, np.float64), want)
    back_a, back_b = pullback(flat)
    np.testing.assert_array_equal(back_a, values[0])
    np.testing.assert_array_equal(back_b, values[1] + values[1])


def test_reordered_parts_keep_their_rows():
    a, b = draw(2, 4), draw(2, 8)  # parts of 3 rows, across the two
    rows = joining.transposed(a, b).reorder((3, 1, 0, 2)).reorder((1, 0))
    want = np.concatenate([a.T, b.T]).reshape(4, 3, 2)[[3, 1, 0, 2]].reshape(2, 6, 2)
    assert rows.shape == (12, 2)
    np.testing.assert_array_equal(
        joining.join([rows]).reshape(12, 2), want[[1, 0]].reshape(12, 2)
    )


def test_the_native_library_runs_where_there_is_one():
    text = jax.jit(gathered).lower(*arrays()).as_text()
    assert ("custom_call @ostinato_join" in text) == (
        _native.status().library is not None
    )


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 1, 0)])
def test_vmap_equals_each_member(mapped):
    values = [
        np.moveaxis(draw(*v.shape, 3), -1, axis) if axis is not None else v
        for v, axis in zip(arrays(), mapped, strict=True)
    ]
    got = jax.jit(jax.vmap(gathered, mapped))(*values)
    whole = [
        np.broadcast_to(v, (3, *v.shape)) if axis is None else np.moveaxis(v, axis, 0)
        for v, axis in zip(values, mapped, strict=True)
    ]
    np.testing.assert_array_equal(got, expected(*whole))


def test_nested_vmap_equals_numpy():
    values = arrays(lead=(2, 3))
    got = jax.vmap(jax.vmap(gathered))(*values)
    np.testing.assert_array_equal(got, expected(*map(np.asarray, values)))


def test_gradients_are_the_elements_in_their_places():
    values, bar = arrays(), draw(5 * 21 + 28 + 9)
    pullback = jax.jit(lambda *v: jax.vjp(gathered, *v)[1](bar))
    numbers = [np.arange(v.size, dtype=float).reshape(v.shape) for v in values]
    tangent = jax.jvp(gathered, values, tuple(map(jnp.asarray, numbers)))[1]
    np.testing.assert_array_equal(tangent, expected(*numbers))
    inner = sum(np.vdot(g, n) for g, n in zip(pullback(*values), numbers, strict=True))
    np.testing.assert_allclose(inner, np.vdot(bar, expected(*numbers)))


def test_second_derivatives_under_vmap():
    values = arrays(lead=(2,))

    def loss(*v):
        return jnp.sum(jnp.sin(gathered(*v)) ** 3)

    def plain(*v):
        a, b, bias = v
        rows = [jnp.roll(a, 7, 1).T, b.T, (b + b).T, bias]
        return jnp.sum(jnp.sin(jnp.concatenate([r.reshape(-1) for r in rows])) ** 3)

    def of(f):
        return jax.vmap(jax.grad(lambda *v: jnp.sum(jax.grad(f)(*v) ** 2)))(*values)

    np.testing.assert_allclose(of(loss), of(plain), rtol=1e-12)


def test_frozen_matrices_get_no_gradient():
    a, b, bias = arrays()
    grad = jax.grad(lambda b: jnp.sum(gathered(a, b, bias) ** 2))(b)
    np.testing.assert_allclose(grad, 10 * b)


def test_exported_programs_need_no_library():
    values = arrays()
    program = jax.export.export(jax.jit(gathered), platforms=("cpu", "tpu"))(*values)
    assert "custom_call @ostinato" not in program.mlir_module()
    again = jax.export.deserialize(program.serialize())
    np.testing.assert_array_equal(again.call(*values), expected(*as_numpy(values)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_members_on_several_devices(kind):
    mesh = jax.make_mesh((2,), ("e",), axis_types=(kind,))
    values = arrays(lead=(4,))
    put = [jax.device_put(v, NamedSharding(mesh, P("e"))) for v in values]
    with jax.set_mesh(mesh):
        got = jax.jit(jax.vmap(gathered))(*put)
        grad = jax.jit(jax.grad(lambda *v: jnp.sum(jax.vmap(gathered)(*v) ** 2)))(*put)
    np.testing.assert_array_equal(got, expected(*as_numpy(values)))
    np.testing.assert_allclose(grad, 2 * values[0])


def test_shard_map_with_a_shared_matrix():
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,))
    a, b, bias = arrays()
    several = draw(2, *b.shape)

    def total(a, several, bias):
        def one(a, b, bias):
            return gathered(a, b[0], bias)[None]

        specs = (P(), P("e"), P())
        run = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("e"))
        return run(a, several, bias)

    got = jax.jit(total)(a, several, bias)
    for row, one in zip(got, several, strict=True):
        np.testing.assert_array_equal(row, expected(*as_numpy((a, one, bias))))
    grad = jax.jit(jax.grad(lambda *v: jnp.sum(total(*v) ** 2)))(a, several, bias)
    np.testing.assert_allclose(grad, 4 * a)


def test_ragged_vmap_with_shared_and_with_own_matrices():
    a, b, bias = arrays()
    several = draw(3, *b.shape)
    x = ragged.RaggedArray.from_list([draw(n) for n in (2, 1, 4)])

    def one(b, x):
        return jnp.sum(x) + gathered(a, b, bias)

    sums = [np.sum(np.asarray(part)) for part in x.to_list()]
    shared = ragged.vmap(lambda x: one(b, x))(x)
    own = ragged.vmap(one)(several, x)
    for n, total in enumerate(sums):
        want = total + expected(*as_numpy((a, b, bias)))
        np.testing.assert_allclose(shared[n], want)
        want = total + expected(*as_numpy((a, several[n], bias)))
        np.testing.assert_allclose(own[n], want)


def test_gradients_on_other_platforms_have_the_rows_in_their_places():
    """Check what XLA runs in place of the native library, for reordered rows."""
    values, bar = arrays(), draw(5 * 21 + 28 + 9)
    pull = jax.jit(lambda bar, *v: jax.vjp(gathered, *v)[1](bar))
    program = jax.export.export(pull, platforms=("cpu", "tpu"))(bar, *values)
    got = program.call(bar, *values)
    # Each element of the vector has the gradient of the one element it comes from.
    number = iter(np.asarray(bar))
    first = np.stack([[next(number) for _ in range(5)] for _ in range(21)], 1)
    b = np.stack([[next(number) for _ in range(2)] for _ in range(7)], 1)
    double = np.stack([[next(number) for _ in range(2)] for _ in range(7)], 1)
    np.testing.assert_array_equal(got[0], np.roll(first, -7, 1))
    np.testing.assert_allclose(got[1], b + 2 * double, rtol=1e-12)
    np.testing.assert_array_equal(got[2], list(number))


@pytest.mark.parametrize("shapes", [[(2, 3)], [(1, 3)], [(2, 3), (2, 1)]], ids=str)
def test_one_matrix_alone_is_read_by_column(shapes):
    """A network without biases that skips its inputs has no other one."""
    rng = np.random.default_rng(0)
    matrices = [rng.random(shape) for shape in shapes]
    want = [row for m in matrices for row in m.T.tolist()]
    got = joining.join([joining.transposed(*matrices)])
    np.testing.assert_array_equal(got, np.concatenate(want))
