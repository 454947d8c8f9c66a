"""Relocation of elements, next to matrices that do the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from ostinato.ragged.primitives.relocate import Sources, relocate

ELEMENTS, PLACES = 5, 8


def places(seed):
    """Return maps from elements to places and back.

    Some places are filled by any element, some elements come to no place.
    """
    rng = np.random.default_rng(seed)
    element = rng.integers(0, ELEMENTS, PLACES)
    valid = np.zeros(PLACES, bool)
    place = np.zeros(ELEMENTS, int)
    shown = np.zeros(ELEMENTS, bool)
    for r, p in zip(
        rng.permutation(ELEMENTS)[:4], rng.permutation(PLACES), strict=False
    ):
        element[p], valid[p], place[r], shown[r] = r, True, p, True
    as_places = lambda i, v: Sources(jnp.asarray(i, jnp.int32), jnp.asarray(v))  # noqa: E731
    return as_places(element, valid), as_places(place, shown)


def matrix(to):
    """Return the matrix that `relocate` multiplies by, without constants."""
    full = np.zeros((PLACES, ELEMENTS))
    full[np.arange(PLACES), np.asarray(to.element)] = to.valid
    return full


@pytest.mark.parametrize("axis", [0, 1])
def test_values_are_tokens_and_derivatives_those_of_valid_places(axis):
    to, back = places(0)
    x = np.random.default_rng(1).standard_normal((ELEMENTS, 3))
    turned = (lambda a: a) if axis == 0 else np.transpose
    function = lambda x: relocate(x, to, back, axis)  # noqa: E731
    y, pull_back = jax.vjp(function, jnp.asarray(turned(x)))
    np.testing.assert_array_equal(turned(np.asarray(y)), x[np.asarray(to.element)])
    cotangent = np.random.default_rng(2).standard_normal((PLACES, 3))
    expected = matrix(to).T @ np.where(to.valid[:, None], cotangent, 0)
    cotangent[~np.asarray(to.valid)] = np.nan
    (got,) = pull_back(jnp.asarray(turned(cotangent)))
    np.testing.assert_allclose(turned(np.asarray(got)), expected)
    _, tangent = jax.jvp(function, (turned(x),), (turned(x),))
    np.testing.assert_allclose(turned(np.asarray(tangent)), matrix(to) @ x)


def test_it_can_be_differentiated_twice():
    to, back = places(3)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((ELEMENTS, 2)))
    # What fills a place is a constant, which no finite difference would take it for.
    only = lambda x: jnp.where(to.valid[:, None], relocate(x, to, back), 1.0)  # noqa: E731
    check_grads(lambda x: jnp.sin(only(x)) ** 2, (x,), 2)


@pytest.mark.parametrize("own_places", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_under_vmap_it_is_a_loop(own_places, axis):
    pairs = [places(seed if own_places else 7) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    given, mapped = (stacked, 0) if own_places else (pairs[0], None)
    shape = (3, ELEMENTS, 2) if axis == 0 else (3, 2, ELEMENTS)
    x = jnp.asarray(np.random.default_rng(5).standard_normal(shape))

    def loss(x, pair):
        return jnp.sum(jnp.sin(relocate(x, *pair, axis)))

    run = jax.value_and_grad(loss)
    got = jax.vmap(run, in_axes=(0, mapped))(x, given)
    expected = [run(a, pair) for a, pair in zip(x, pairs, strict=True)]
    for a, *b in zip(got, *expected, strict=True):
        np.testing.assert_allclose(a, np.stack(b), rtol=1e-12)


def test_types_without_derivatives():
    to, back = places(6)
    x = jnp.arange(ELEMENTS)
    np.testing.assert_array_equal(relocate(x, to, back), to.element)
