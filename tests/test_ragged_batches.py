"""Batches made of batches: slices, concatenation, maps of tokens; gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import ragged
from ostinato.ragged import RaggedArray

WIDTH = 2


def tokens(lengths, axis=0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        np.moveaxis(rng.standard_normal((n, WIDTH)).astype(np.float32), 0, axis)
        for n in lengths
    ]


def unused_is_nan(lengths, axis=0, extra=3):
    """Return a batch with NaN in the unused capacity."""
    data = np.concatenate([*tokens(lengths, axis), np.zeros((WIDTH, 0)).T], axis)
    pad = [(0, 0), (0, 0)]
    pad[axis] = (0, extra)
    data = np.pad(data.astype(np.float32), pad, constant_values=np.nan)
    return RaggedArray(data, list(lengths), axis=axis)


def assert_batch(batch, want, like=None):
    assert isinstance(batch, RaggedArray)
    assert len(batch) == len(want)
    for got, expected in zip(batch, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    used = int(batch.lengths.sum())
    unused = jax.lax.slice_in_dim(batch.data, used, batch.capacity, axis=batch.axis)
    assert not unused.any()
    if like is not None:
        assert (batch.axis, batch.dim, batch.max_length) == (
            like.axis,
            like.dim,
            like.max_length,
        )


INDICES = [
    slice(1, 3),
    slice(None, None, -1),
    slice(4, 2),
    [0, 2],
    [3, 3, -1, 0],
    [],
    np.array([2, 1]),
    jnp.array([1, -4]),
    np.array([True, False, True, True]),
    [False, True, False, False],
]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_index_of_several(index, axis):
    lengths = (3, 0, 5, 1)
    examples = np.empty(4, object)
    examples[:] = tokens(lengths, axis)
    if axis == 0:
        batch = unused_is_nan(lengths)
    else:
        batch = RaggedArray(np.concatenate([*examples], 1), lengths, axis=1)
    key = index if isinstance(index, slice) else np.asarray(index)
    key = key if isinstance(key, slice) or key.size else np.zeros(0, int)
    assert_batch(batch[index], list(examples[key]), like=batch)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_minibatches(data):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    batch = RaggedArray.from_list(tokens(lengths))
    index = data.draw(
        st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=8)
    )
    examples = tokens(lengths)
    assert_batch(batch[index], [examples[i] for i in index], like=batch)


def test_minibatches_under_jit_and_grad():
    lengths = np.array([3, 0, 5, 1])
    batch = unused_is_nan(lengths)

    @jax.jit
    def sliced(batch, index):
        return batch[1:3], batch[index]

    part, chosen = sliced(batch, jnp.array([2, 2, -1]))
    examples = tokens(lengths)
    assert_batch(part, examples[1:3], like=batch)
    assert_batch(chosen, [examples[2], examples[2], examples[3]], like=batch)
    assert part.capacity == min(2 * batch.max_length, batch.capacity)

    some = batch[[2, 0, 2]].data.shape[0]
    weights = np.random.default_rng(5).standard_normal((some, WIDTH))
    weights = weights.astype(np.float32)
    got = ragged.grad(lambda b: (b[[2, 0, 2]].data * weights).sum())(batch)
    want = np.zeros((batch.capacity, WIDTH), np.float32)
    want[3:8] = weights[:5] + weights[8:13]
    want[:3] = weights[5:8]
    np.testing.assert_allclose(got.data, want, rtol=1e-6)
    np.testing.assert_array_equal(got.lengths, batch.lengths)


def test_bad_indices():
    batch = unused_is_nan((3, 0, 5, 1))
    with pytest.raises(IndexError, match="no example 4 in a batch of 4"):
        batch[[0, 4]]
    with pytest.raises(TypeError, match="vector of integers or bools, got float64"):
        batch[np.array([0.0])]
    with pytest.raises(TypeError, match="vector of integers or bools, got tuple"):
        batch[0, 1]
    with pytest.raises(ValueError, match=r"`index` must have shape \(batch\) = \(4,\)"):
        batch[[True]]
    with pytest.raises(TypeError, match="must hold integers under jit"):
        jax.jit(lambda b, i: b[i])(batch, np.array([True, False, True, True]))
    with pytest.raises(TypeError, match="index of an example must be an integer"):
        batch["a"]


def test_concatenate():
    first, second = unused_is_nan((3, 0)), unused_is_nan((0, 7, 1), extra=0)
    want = [*tokens((3, 0)), *tokens((0, 7, 1))]
    joined = ragged.concatenate([first, second])
    assert_batch(joined, want)
    assert joined.max_length == 7
    assert joined.capacity == ragged.round_capacity(11)
    traced = jax.jit(lambda a, b: ragged.concatenate([a, b], capacity=None))
    assert_batch(traced(first, second), want)
    assert ragged.concatenate([first, second], capacity=40).capacity == 40
    alone = ragged.concatenate([first])
    assert_batch(alone, want[:2])


def test_concatenate_refuses():
    batch = unused_is_nan((3, 0))
    with pytest.raises(ValueError, match="at least one RaggedArray, got none"):
        ragged.concatenate([])
    with pytest.raises(TypeError, match="must be a sequence of RaggedArrays, got one"):
        ragged.concatenate(batch)
    with pytest.raises(TypeError, match=r"`batches\[1\]` must be a RaggedArray, got"):
        ragged.concatenate([batch, batch.data])
    other = RaggedArray(batch.data, batch.lengths, dim="m")
    with pytest.raises(
        ValueError, match=r"`batches\[1\]` must have the dim of .*n, go"
    ):
        ragged.concatenate([batch, other])
    with pytest.raises(TypeError, match=r"the dtype of .*float32, got int32"):
        ragged.concatenate([batch, batch.with_data(batch.data.astype(jnp.int32))])
    with pytest.raises(ValueError, match=r"\[None, 2\], got \[None, 1\]"):
        ragged.concatenate([batch, batch.with_data(batch.data[:, :1])])
    with pytest.raises(ValueError, match="`capacity` must hold all 3 tokens, got 2"):
        ragged.concatenate([batch], capacity=2)


def test_stack_is_from_list():
    want = tokens((3, 0, 5))
    assert_batch(ragged.stack(want), want, like=RaggedArray.from_list(want))
    assert ragged.stack(want, dim="t", capacity=20, max_length=9).max_length == 9


def test_map_tokens():
    batch = unused_is_nan((3, 0, 5, 1))
    matrix = np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)
    want = [a @ matrix.T for a in tokens((3, 0, 5, 1))]
    got = batch.map(lambda token: matrix @ token)
    for one, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(one, expected, rtol=2e-6)
    assert_batch(batch.map(lambda t: t.sum()), [b.sum(-1) for b in batch.to_list()])
    across = RaggedArray(np.arange(6.0).reshape(2, 3), [1, 2], axis=1)
    assert across.map(lambda t: t[0]).axis == 0
    assert across.map(lambda t: 2 * t).axis == 1
    with pytest.raises(TypeError, match="`function` must return one array"):
        batch.map(lambda t: (t, t))


@pytest.mark.parametrize("lengths", [(3, 2), (0, 0)])
def test_map_keeps_unused_capacity_out_of_gradients(lengths):
    data = np.abs(unused_is_nan(lengths).data) + 0.5
    batch = RaggedArray(data, list(lengths))

    def loss(scale, batch):
        return batch.map(lambda t: jnp.log(scale * t)).data.sum()

    grad_scale, grad_batch = ragged.grad(loss, (0, np.int64(1)))(2.0, batch)
    used = sum(lengths) * WIDTH
    np.testing.assert_allclose(grad_scale, used / 2, rtol=1e-6)
    want = np.where(np.isnan(data), 0, 1 / data)
    np.testing.assert_allclose(grad_batch.data, want, rtol=1e-6)


def test_grad_of_pytrees_and_aux():
    batch = ragged.stack(tokens((3, 1)))

    def loss(params, x):
        value = ragged.vmap(lambda a: jnp.sum(a**2))(x["x"]).sum() * params
        return value, x["x"]

    (value, aux), grads = ragged.value_and_grad(loss, 1, has_aux=True)(
        3.0, {"x": batch}
    )
    assert_batch(aux, tokens((3, 1)))
    np.testing.assert_allclose(value, 3 * (batch.data**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(grads["x"].data, 6 * batch.data, rtol=1e-6)
    grads, _ = ragged.grad(loss, np.int64(1), has_aux=True)(3.0, {"x": batch})
    np.testing.assert_allclose(grads["x"].data, 6 * batch.data, rtol=1e-6)
    with pytest.raises(TypeError, match="requires real- or complex-valued"):
        ragged.grad(lambda i: 0.0)(jnp.arange(3))


def test_shape_and_errors_that_name_it():
    batch = RaggedArray(np.zeros((2, 6, 3), np.float32), [2, 4], axis=1)
    assert batch.shape == (2, 2, None, 3)
    assert batch.ndim == 4
    with pytest.raises(TypeError, match=r"`capacity` must be an integer"):
        ragged.concatenate([batch], capacity="all")


class Frame:
    """A stand-in for a table or a column of pandas."""

    def to_numpy(self):
        return np.zeros(3)


def test_tables_lists_and_float_lengths_are_named():
    with pytest.raises(TypeError, match=r"got a Frame; take \[group"):
        RaggedArray.from_list(Frame())
    with pytest.raises(TypeError, match=r"`arrays\[0\]` .* a key and a Frame, as grou"):
        RaggedArray.from_list([("a", Frame())])
    with pytest.raises(TypeError, match=r"its to_numpy\(\) is one"):
        RaggedArray.from_list([Frame()])
    with pytest.raises(TypeError, match=r"got float64\[2\]; convert with .astype"):
        RaggedArray(np.zeros(3), np.array([1.0, 2.0]))
    with pytest.raises(AttributeError) as caught:
        ragged.vmap(lambda x: x.sum())([np.zeros(2), np.zeros(2)])
    assert "from_list makes one of a list" in caught.value.__notes__[-1]
    with pytest.raises(
        ValueError, match=r"make it a batch by ragged.RaggedArray.from_li"
    ):
        ragged.vmap(lambda x: x[0])([np.zeros(2), np.zeros(3)])
