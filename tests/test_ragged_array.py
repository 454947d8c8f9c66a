import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ostinato import ragged
from ostinato.ragged import RaggedArray

LENGTHS = (3, 0, 5, 1)
WIDTH = 2


def examples(lengths=LENGTHS, axis=0, make=np.asarray):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((n, WIDTH)) for n in lengths]
    return [make(np.moveaxis(a, 0, axis)) for a in arrays]


def assert_examples(batch, want):
    assert len(batch) == len(want)
    for got, expected in zip(batch.to_list(), want, strict=True):
        np.testing.assert_array_equal(got, expected, strict=True)


def with_unused(lengths=LENGTHS, extra=4):
    """Return the tokens as an array of numpy, with NaN in the unused capacity."""
    tokens = np.concatenate(examples(lengths))
    return np.concatenate([tokens, np.full((extra, WIDTH), np.nan)])


# ---------------------------------------------------------------------------------- in


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_list_there_and_back(axis, make):
    want = examples(axis=axis, make=make)
    batch = RaggedArray.from_list(want, axis=axis)
    assert_examples(batch, want)
    assert batch.axis == axis % 2
    assert batch.capacity == ragged.round_capacity(sum(LENGTHS)) == 10
    assert batch.max_length == ragged.round_length(max(LENGTHS)) == 8
    assert batch.lengths.dtype == jnp.int32
    assert batch.dim == "n"


def test_list_of_other_dtypes_and_ranks():
    assert_examples(
        RaggedArray.from_list([np.arange(n) for n in LENGTHS]),
        [np.arange(n) for n in LENGTHS],
    )
    keys = [jax.random.split(jax.random.key(n), n) for n in (2, 1)]
    got = RaggedArray.from_list(keys).to_list()
    for one, want in zip(got, keys, strict=True):
        assert (one == want).all()


def test_sizes_may_be_numbers_or_functions():
    arrays = examples()
    batch = RaggedArray.from_list(arrays, capacity=None, max_length=None)
    assert (batch.capacity, batch.max_length) == (sum(LENGTHS), max(LENGTHS))
    assert_examples(batch, arrays)
    batch = RaggedArray.from_list(arrays, capacity=20, max_length=7, dim="steps")
    assert (batch.capacity, batch.max_length, batch.dim) == (20, 7, "steps")
    assert_examples(batch, arrays)
    rounded = functools.partial(ragged.round_capacity, per_octave=2)
    batch = RaggedArray.from_list(arrays, capacity=rounded, max_length=rounded)
    assert (batch.capacity, batch.max_length) == (12, 6)
    assert_examples(batch, arrays)


def test_batches_without_tokens_and_without_examples():
    empty = RaggedArray.from_list(examples((0, 0)))
    assert (empty.capacity, empty.max_length) == (1, 1)
    assert_examples(empty, examples((0, 0)))
    assert empty.to_padded().shape == (2, 1, WIDTH)
    none = RaggedArray.from_list([])
    assert (len(none), none.to_list()) == (0, [])
    assert none.to_padded().shape == (0, 1)
    bare = RaggedArray(jnp.zeros((0, WIDTH)), [])
    assert (len(bare), bare.capacity) == (0, 0)
    assert bare.to_padded().shape == (0, 1, WIDTH)
    padded = RaggedArray.from_padded(jnp.zeros((2, 0, WIDTH)), [0, 0])
    assert_examples(padded, [np.zeros((0, WIDTH))] * 2)


def test_row_splits_and_segment_ids():
    data, want = with_unused(), examples()
    splits = RaggedArray.from_row_splits(data, [0, 3, 3, 8, 9], max_length=6)
    assert_examples(splits, want)
    assert (splits.capacity, splits.max_length) == (13, 6)
    ids = np.repeat(np.arange(5), (*LENGTHS, 4))  # the last id is the unused capacity's
    assert_examples(RaggedArray.from_segment_ids(data, ids, num_segments=4), want)
    tokens = np.concatenate(want)
    assert_examples(RaggedArray.from_segment_ids(tokens, ids[:9], dim="m"), want)
    assert len(RaggedArray.from_segment_ids(tokens[:0], ids[:0])) == 0


# ------------------------------------------------------------------ padded, transformed


@pytest.mark.parametrize("axis", [0, 1])
def test_padding_there_and_back(axis):
    want = examples(axis=axis)
    batch = RaggedArray.from_list(want, axis=axis, capacity=13, max_length=6)
    padded = np.array(batch.to_padded(fill=-7))
    assert padded.shape == ((4, 6, WIDTH) if axis == 0 else (4, WIDTH, 6))
    tokens = np.moveaxis(padded, axis + 1, 1)
    for b, n in enumerate(LENGTHS):
        np.testing.assert_array_equal(tokens[b, :n], np.moveaxis(want[b], axis, 0))
        assert (tokens[b, n:] == -7).all()
        tokens[b, n:] = np.nan
    back = RaggedArray.from_padded(padded, LENGTHS, axis=axis)
    assert_examples(back, want)
    assert (back.capacity, back.max_length) == (10, 6)


def test_padding_under_jit_and_grad():
    batch = RaggedArray(with_unused(), LENGTHS, max_length=6)
    weights = np.random.default_rng(1).standard_normal((4, 6, WIDTH))

    @jax.jit
    def both(data, lengths):
        """Convert there, back, and there again; return the gradient, too."""

        def loss(data):
            batch = RaggedArray(data, lengths, max_length=6)
            again = RaggedArray.from_padded(batch.to_padded(), lengths)
            return jnp.sum(again.to_padded() * weights), again

        return jax.value_and_grad(loss, has_aux=True)(data)

    (value, again), gradient = both(batch.data, batch.lengths)
    assert_examples(again, examples())
    assert (again.capacity, again.max_length) == (24, 6)
    assert (np.asarray(again.data)[9:] == 0).all()
    tokens = np.concatenate([weights[b, :n] for b, n in enumerate(LENGTHS)])
    np.testing.assert_array_equal(gradient, np.pad(tokens, [(0, 4), (0, 0)]))
    assert np.isclose(value, np.sum(tokens * np.concatenate(examples())))


@pytest.mark.parametrize(
    "dtype, fill",
    [
        ("int32", -7),
        ("int32", 2.0),
        ("int32", jnp.bfloat16(2)),
        ("uint8", np.int64(255)),
        ("int64", 2**63 - 1),
        ("bool", True),
        ("bool", 1),
        ("bool", np.False_),
        ("float32", 0.1),
        ("float32", np.nan),
        ("bfloat16", jnp.float32(-np.inf)),
        ("bfloat16", jnp.bfloat16(1.5)),
        ("float16", 3),
        ("complex64", 1 - 2j),
    ],
)
def test_padding_with_numbers_that_the_dtype_holds(dtype, fill):
    batch = RaggedArray(jnp.zeros(3, dtype), [2, 1])
    want = np.zeros((2, 2), jnp.dtype(dtype))
    want[1, 1] = np.asarray(fill).astype(want.dtype)
    np.testing.assert_array_equal(batch.to_padded(fill), want, strict=True)
    np.testing.assert_array_equal(batch.to_padded(np.asarray(fill)), want, strict=True)


def test_padding_with_a_traced_number():
    padded = jax.jit(lambda batch, fill: batch.to_padded(fill))
    for dtype, fill in (("uint8", 3), ("float32", 3), ("float32", 0.5), ("bool", True)):
        found = padded(RaggedArray(jnp.ones(1, dtype), [1, 0]), fill)
        want = np.array([[1], [fill]]).astype(dtype)
        np.testing.assert_array_equal(found, want, strict=True)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_padding_of_keys(kind):
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    batch = RaggedArray.from_list([keys[:1], keys[:0], keys[1:]], max_length=4)
    padded = jax.jit(lambda batch: batch.to_padded())(batch)
    assert padded.dtype == keys.dtype and padded.shape == (3, 4)
    words = np.zeros((3, 4, jax.random.key_data(keys).shape[-1]), np.uint32)
    words[0, :1], words[2, :2] = np.split(jax.random.key_data(keys), [1])
    for found in (padded, batch.to_padded(), batch.to_padded(0)):
        np.testing.assert_array_equal(jax.random.key_data(found), words)
    back = RaggedArray.from_padded(padded, batch.lengths).to_list()
    assert (back[2] == keys[1:]).all() and len(back[1]) == 0
    empty = RaggedArray.from_list([keys[:0]], capacity=None)
    assert empty.to_padded().shape == (1, 1)


def test_it_is_a_pytree():
    batch = RaggedArray.from_list(examples(), dim="t", max_length=7)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, batch)
    assert (doubled.axis, doubled.dim, doubled.max_length) == (0, "t", 7)
    np.testing.assert_array_equal(doubled.data, 2 * batch.data)
    names = [jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(batch)]
    assert names == [".data", ".lengths"]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), batch, doubled)
    padded = jax.vmap(lambda b: b.to_padded())(stacked)
    np.testing.assert_array_equal(padded[1, :, :5], doubled.to_padded()[:, :5] * 1)


def test_with_data_keeps_the_rest():
    batch = RaggedArray(with_unused(), LENGTHS, dim="t", max_length=6)
    other = batch.with_data(jnp.arange(13))
    assert (other.dim, other.max_length, other.dtype) == ("t", 6, jnp.arange(1).dtype)
    assert other[2].tolist() == [3, 4, 5, 6, 7]


# ----------------------------------------------------------------------------- the rest


def test_indexing_and_iteration():
    batch, want = RaggedArray(with_unused(), LENGTHS), examples()
    for index in (0, 1, 3, -1, -4, np.int64(2), np.uint8(2), jnp.asarray(0)):
        np.testing.assert_array_equal(batch[index], want[int(index)], strict=True)
    for got, expected in zip(batch, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"no example {index} in a batch of 4"):
            batch[index]
    with pytest.raises(TypeError, match="must be an integer, got NoneType"):
        batch[None]


def test_batches_are_equal_to_themselves_alone():
    one, other = (RaggedArray(np.arange(3.0), [1, 2]) for _ in range(2))
    assert one == one and one != other and one in [other, one]
    assert {one: 1, other: 2}[one] == 1
    assert jax.tree.all(jax.tree.map(jnp.array_equal, one, other))


def test_repr_shows_lengths():
    batch = RaggedArray(with_unused(), LENGTHS, max_length=6)
    text = "RaggedArray(float64[13, 2], n=[3, 0, 5, 1], axis=0, max_length=6)"
    assert repr(batch) == text
    long = RaggedArray(np.zeros(20), np.ones(20, int), dim="n - 1")
    assert "'n - 1'=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ... 20 in all]" in repr(long)
    seen = []
    jax.jit(lambda b: seen.append(repr(b)))(batch)
    assert "n=traced int32[4]" in seen[0]
    assert "data" not in repr(jax.tree.map(lambda _: None, batch))


def test_traced_lengths_have_no_examples_yet():
    batch = RaggedArray(with_unused(), LENGTHS)
    for use in (list, lambda b: b[0], lambda b: b.to_list()):
        with pytest.raises(TypeError, match="traced lengths"):
            jax.jit(use)(batch)
    without = jax.jit(lambda d, n: RaggedArray(d, n))(batch.data, batch.lengths)
    assert without.max_length == without.capacity == 13
    ids = np.repeat(np.arange(4), LENGTHS)
    with pytest.raises(TypeError, match="`num_segments` must be given"):
        jax.jit(lambda ids: RaggedArray.from_segment_ids(batch.data[:9], ids))(ids)


def test_padded_ragged():
    data = np.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4)
    lengths = jnp.asarray([3, 1]), jnp.asarray([0, 4])
    batch = ragged.PaddedRagged(jnp.asarray(data), lengths, ((0, "n"), (2, "m")))
    assert [e.shape for e in batch.to_list()] == [(3, 2, 0), (1, 2, 4)]
    np.testing.assert_array_equal(batch.to_list()[0], data[0, :, :, :0])
    np.testing.assert_array_equal(batch[1], data[1, :1])
    np.testing.assert_array_equal(batch[np.int64(-1)], data[1, :1])
    assert [e.shape for e in batch] == [(3, 2, 0), (1, 2, 4)]
    with pytest.raises(IndexError, match="no example 2 in a batch of 2"):
        batch[2]
    with pytest.raises(TypeError, match="must be an integer, got str"):
        batch["n"]
    with pytest.raises(TypeError, match="PaddedRagged of traced lengths"):
        jax.jit(lambda b: b.to_list())(batch)
    assert len(batch) == 2
    assert batch.dtype == jnp.int64
    assert repr(batch) == "PaddedRagged(int64[2, 3, 2, 4], n@0=[3, 1], m@2=[0, 4])"
    doubled = jax.tree.map(lambda leaf: 2 * leaf, batch)
    assert doubled.dims == batch.dims


def test_rounded_capacities():
    rounded = functools.partial(ragged.round_capacity, per_octave=16)
    sizes = np.array([rounded(n) for n in range(5000)])
    wanted = np.maximum(np.arange(5000), 1)
    assert (sizes >= wanted).all()
    assert (sizes - wanted <= wanted / 16).all()
    assert (np.diff(sizes) >= 0).all()
    assert len(np.unique(sizes)) <= 16 * 13
    powers = [ragged.round_capacity(n, per_octave=1) for n in (1, 2, 3, 5, 17)]
    assert powers == [1, 2, 4, 8, 32]
    assert [ragged.round_length(n) for n in (0, 1, 2, 3, 5, 17)] == [1, *powers]


def random_batches(size=16, count=256, epochs=2):
    """Yield examples of lognormal length, 5 to 200, in another order every epoch."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.3, 0.7, size * count), 5, 200).astype(int)
    for _ in range(epochs):
        for drawn in rng.permutation(lengths).reshape(count, size):
            yield [np.zeros((n, 1), np.float32) for n in drawn]


SHAPES_OF_512_BATCHES = {
    "the plain call": (RaggedArray.from_list, 20),
    "the longest is known": (
        lambda arrays: RaggedArray.from_list(arrays, max_length=200),
        10,
    ),
}


@pytest.mark.parametrize("name", SHAPES_OF_512_BATCHES)
def test_random_batches_have_few_shapes(name):
    """Of 512, nearly all would be compiled for without rounding."""
    make, most = SHAPES_OF_512_BATCHES[name]
    exact, shapes = set(), set()
    for arrays in random_batches():
        batch = make(arrays)
        tokens, longest = sum(map(len, arrays)), max(map(len, arrays))
        exact.add((tokens, longest))
        shapes.add((batch.capacity, batch.max_length))
        assert tokens <= batch.capacity <= 1.25 * tokens
        assert longest <= batch.max_length
    assert len(exact) > 400
    assert 1 < len(shapes) <= most


@contextlib.contextmanager
def compilations():
    """Yield a list, to which the duration of every compilation is added."""
    found = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_joining_and_splitting_arrays_of_numpy_compiles_once():
    """Nothing for other lengths, if the capacity is the same."""

    def there_and_back(*lengths):
        arrays = [np.zeros((n, 97)) for n in lengths]
        batch = RaggedArray.from_list(arrays, capacity=16, max_length=8)
        assert_examples(batch, arrays)

    with compilations() as first:
        there_and_back(3, 4)
    with compilations() as later:
        for lengths in ((4, 3), (3, 3), (4, 5), (0, 8)):
            there_and_back(*lengths)
    assert first and not later


@pytest.mark.parametrize(
    "function, most",
    [
        (lambda batch: batch.to_padded(), 2),
        (ragged.vmap(lambda x: jnp.sum(x)), 9),
        (ragged.vmap(lambda x: jnp.cumsum(x)), 9),
    ],
    ids=["to_padded", "sum", "cumsum"],
)
def test_calls_without_jit_compile_few_programs(function, most):
    """Not one for each operation: a first call would take seconds."""
    sizes = (3, 1, 4, 2, 2 * most)  # of no other test, nor of the other cases
    batch = RaggedArray.from_list([np.zeros(n) for n in sizes], max_length=23)
    with compilations() as compiled:
        jax.block_until_ready(function(batch))
    assert 1 <= len(compiled) <= most


def test_a_list_is_on_the_device_of_its_batch_and_differentiable():
    lengths = [7, 0, 4, 1]
    data = np.arange(36.0).reshape(12, 3)
    batch = ragged.RaggedArray(jnp.asarray(data), jnp.asarray(lengths))
    padded = ragged.PaddedRagged(batch.data[None], (jnp.asarray([5]),), ((0, "n"),))
    on_other = jax.device_put(batch, jax.devices()[1])
    with compilations() as compiled:
        examples, (first,) = batch.to_list(), padded.to_list()
        elsewhere = on_other.to_list()
    assert not compiled
    wanted = np.split(data, np.cumsum(lengths)[:-1])
    for got, want in zip(examples, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(first, data[:5])
    assert {x.device for x in elsewhere} == {jax.devices()[1]}
    assert [x.committed for x in (*examples, *elsewhere)] == [False] * 4 + [True] * 4
    grad = jax.grad(lambda d: jnp.sum(batch.with_data(d).to_list()[2] ** 2))(batch.data)
    np.testing.assert_array_equal(grad[7:11], 2 * data[7:11])
