"""Tiers: how they are chosen, and that results do not depend on them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import CountedJit, fast_jit
from jaxprs import equations_in
from tolerance import assert_close, assert_same_bits

from ostinato import ragged
from ostinato.ragged.schedule import tiers

D, LONGEST, CAPACITY = 3, 7, 16
rng = np.random.default_rng(11)
W = jnp.asarray(rng.standard_normal((D, D)))


def attention(x, w):
    return jax.nn.softmax(x @ w @ x.T, -1) @ x


def examples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((n, D))) for n in lengths]


def batch(arrays, dim="n", capacity=CAPACITY):
    """Return a batch with NaN in the unused capacity."""
    tokens = np.concatenate([*arrays, np.full((capacity, D), np.nan)])[:capacity]
    lengths = np.array([len(a) for a in arrays], np.int32)
    return ragged.RaggedArray(tokens, lengths, dim=dim, max_length=LONGEST)


@functools.cache
def alone(wrt_tokens):
    """Return result and gradient of one example."""

    def total(x, w):
        y = attention(x, w)
        return (y**2).sum(), y

    return fast_jit(jax.grad(total, 0 if wrt_tokens else 1, has_aux=True))


@functools.cache
def together(given, min_length=1):
    mapped = ragged.vmap(attention, (0, None), tiers=given, min_length=min_length)

    def total(data, w, x):
        y = mapped(x.with_data(data), w)
        return (y.data**2).sum(), y

    run = CountedJit(jax.grad(total, (0, 1), has_aux=True))
    return lambda x: run(x.data, W, x), run


GIVEN = ((1, 7), (2, 4), (1, 2))


@pytest.mark.parametrize("given", [GIVEN, "auto", 1, 2, 4], ids=str)
def test_results_and_gradients_do_not_depend_on_tiers(given):
    """Also where lengths do not fit them: the last ones do not fit `GIVEN`."""
    run, compiled = together(given)
    for lengths in ((2, 7, 3, 4), (1, 1, 1, 1), (4, 4, 4, 4), (7, 5, 1, 3)):
        xs = examples(lengths)
        gradients, y = run(batch(xs))
        each = [alone(True)(x, W) for x in xs]
        for a, out in zip(y.to_list(), each, strict=True):
            assert_close(a, out[1], terms=100)
        unused = np.zeros((CAPACITY - sum(lengths), D))
        tokens = np.concatenate([*(out[0] for out in each), unused])
        assert_close(gradients[0], tokens, terms=100)
        want = sum(alone(False)(x, W)[0] for x in xs)
        assert_close(gradients[1], want, terms=100)
    assert compiled.traces == 1


def test_tiers_as_an_array():
    """As `length_tiers` gives them, or from a file."""
    x = batch(examples((2, 7, 3, 4)))
    for given in (np.array(GIVEN), list(map(np.array, GIVEN))):
        y = ragged.vmap(attention, (0, None), tiers=given)(x, W)
        assert_same_bits(
            y.data, ragged.vmap(attention, (0, None), tiers=GIVEN)(x, W).data
        )
    with pytest.raises(TypeError, match="`tiers` must hold pairs"):
        ragged.vmap(attention, (0, None), tiers=np.array([3, 7]))(x, W)


@pytest.mark.parametrize("given", [GIVEN, 3], ids=str)
def test_empty_examples(given):
    run, _ = together(given, min_length=0)
    for lengths in ((0, 5, 0, 2), (0, 0, 0, 0)):
        xs = examples(lengths)
        gradients, y = run(batch(xs))
        for a, x in zip(y.to_list(), xs, strict=True):
            assert_close(a, alone(True)(x, W)[1], terms=100)
        want = sum(alone(False)(x, W)[0] for x in xs)
        assert_close(gradients[1], want, terms=100)


def test_batch_without_examples():
    mapped = fast_jit(ragged.vmap(attention, (0, None), tiers="auto"))
    assert mapped(batch([]), W).to_list() == []


def cross(x, y):
    return jax.nn.softmax(x @ y.T, -1) @ y


def test_several_dims_have_tiers_by_name():
    xs, ys = examples((3, 6, 1)), examples((5, 2, 2), seed=1)
    x, y = batch(xs), batch(ys, "m")
    want = [fast_jit(cross)(*pair) for pair in zip(xs, ys, strict=True)]
    two = np.int64(2)
    several = {"n": two, "m": "auto"}, {"n": 2, "m": None}, {"n": None, "m": None}
    for given in ({"m": ((1, 5), (2, 2))}, *several, "auto", two):
        mapped = fast_jit(ragged.vmap(cross, tiers=given))
        for got, one in zip(mapped(x, y), want, strict=True):
            assert_close(got, one, terms=100)


def sizes_in(jaxpr):
    """Return the sizes of the results of all equations, with those of inner jaxprs."""
    for eqn in equations_in(jaxpr):
        yield from (v.aval.size for v in eqn.outvars)


def test_nothing_as_large_as_all_pairs_of_a_padded_batch_is_made():
    """One sequence of 64 and 31 of up to 8: 64**2 + 31 * 8**2 scores."""
    lengths = np.array([64, *[8] * 31], np.int32)
    x = ragged.RaggedArray(np.ones((400, D)), lengths, max_length=64)

    def largest(given):
        def total(data):
            mapped = ragged.vmap(attention, (0, None), tiers=given)
            return mapped(x.with_data(data), W).data.sum()

        return max(sizes_in(jax.make_jaxpr(jax.grad(total))(x.data).jaxpr))

    assert largest(None) == 32 * 64**2
    # All lengths of 400 tokens fit: the i-th longest has no more than 400 / i of them.
    assert largest(8) < 32 * 64**2 / 4


# ------------------------------------------------------------------------ their choice


def cost(chosen):
    return sum(count * most**2 for count, most in chosen)


@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_length_tiers_are_the_cheapest_that_fit(number):
    lengths = np.random.default_rng(number).integers(0, 30, 9)
    got = ragged.length_tiers(lengths, number, multiple=1)
    descending = np.maximum(np.sort(lengths)[::-1], 1)
    splits = [
        np.split(descending, places)
        for k in range(number)
        for places in itertools.combinations(range(1, 9), k)
    ]
    assert cost(got) == min(cost([(len(p), p[0]) for p in s]) for s in splits)
    assert len(got) <= number
    most = np.repeat([size for _, size in got], [count for count, _ in got])
    assert (most >= descending).all()


def test_length_tiers_have_sizes_of_a_multiple():
    got = ragged.length_tiers([50, 33, 9, 1], 4)
    assert got == ((1, 50), (1, 40), (1, 16), (1, 8))


@pytest.mark.parametrize("number", [1, 3, 8])
def test_tiers_of_a_number_fit_all_lengths(number):
    rng = np.random.default_rng(number)
    for _ in range(30):
        members, longest = rng.integers(1, 40), rng.integers(1, 20)
        lengths = rng.integers(0, longest + 1, members)
        capacity = int(lengths.sum()) + 1
        chosen = tiers.fitting_tiers(members, capacity, longest, number)
        assert sum(count for count, _ in chosen) == members
        most = np.repeat([size for _, size in chosen], [count for count, _ in chosen])
        assert (most >= np.sort(lengths)[::-1]).all()
        assert tiers.always_fit(chosen, capacity, longest)


WRONG = {
    "a name": ("two", ValueError, "`tiers` must be 'auto', a number.* got 'two'"),
    "no pair": (((3, 7, 1),), TypeError, r"`tiers` must hold pairs \(count, max\)"),
    "a count of 0": (((0, 7), (4, 1)), ValueError, "`tiers` must be at least 1"),
    "a fraction": (1.5, TypeError, "`tiers` must be an integer"),
    "the shortest first": (
        ((3, 2), (1, 7)),
        ValueError,
        r"longest.*got sizes \[2, 7\]",
    ),
    "another batch": (((1, 7), (2, 2)), ValueError, "as the batch, 4, got 3"),
    "another dim": ({"m": 2}, ValueError, "names 'm', which is no dim.*have 'n'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tiers(name):
    given, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        ragged.vmap(attention, (0, None), tiers=given)(batch(examples((1,) * 4)), W)


def test_wrong_tiers_of_several_dims():
    x, y = batch(examples((1, 2))), batch(examples((1, 2)), "m")
    with pytest.raises(ValueError, match="must be a dict.*'n', 'm'"):
        ragged.vmap(cross, tiers=((2, 7),))(x, y)


def test_length_tiers_want_concrete_lengths():
    with pytest.raises(TypeError, match="`lengths` must be concrete"):
        jax.jit(ragged.length_tiers)(np.ones(3, np.int32))
    with pytest.raises(ValueError, match="at least one length"):
        ragged.length_tiers([])


@pytest.mark.parametrize("lengths", [(2, 7, 3, 4), (4, 4, 4, 4)])
def test_lengths_that_are_known_need_no_other_program(lengths):
    """Those that fit run in tiers alone, others as a whole."""
    x = batch(examples(lengths))
    mapped = ragged.vmap(attention, (0, None), tiers=GIVEN)
    jaxpr = jax.make_jaxpr(lambda data: mapped(x.with_data(data), W).data)(x.data)
    assert "cond[" not in str(jaxpr)
    assert ("4,7,7]" in str(jaxpr)) != (lengths == (2, 7, 3, 4))
    for y, a in zip(mapped(x, W).to_list(), examples(lengths), strict=True):
        assert_close(y, alone(True)(a, W)[1], terms=100)
