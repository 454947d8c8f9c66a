"""Tests of second derivatives in every mix of modes, against those of a scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import (
    BY_ID,
    CASES,
    Primal,
    clean,
    direction_of,
    fast_jit,
    ours,
    plain,
    primal_of,
    weighed,
    weights_of,
)
from test_transforms import assert_trees_close

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
some_cases = pytest.mark.parametrize(
    "case", [BY_ID["lstm"], BY_ID["gru"]], ids=lambda c: c.id
)


def forward_over_reverse(loss, primal, step):
    return jax.jvp(jax.grad(loss), (primal,), (step,))[1]


def reverse_over_forward(loss, primal, step):
    return jax.grad(lambda p: jax.jvp(loss, (p,), (step,))[1])(primal)


def reverse_over_reverse(loss, primal, step):
    def slope(p):
        pairs = zip(jax.grad(loss)(p), step, strict=True)
        return sum(jnp.sum(g * jnp.nan_to_num(d)) for g, d in pairs if g is not None)

    return jax.grad(slope)(primal)


MODES = [forward_over_reverse, reverse_over_forward, reverse_over_reverse]


@functools.cache
def products(case):
    """Return a function to the library's Hessian times vector, in every mode."""
    operator = ours(case)

    def run(p, step, *loss):
        return [mode(weighed(operator, *loss), p, step) for mode in MODES]

    return fast_jit(run)


@functools.cache
def product_of_scan(case):
    """Return a function to Hessian times vector, and to that with padding "hold"."""
    operator = plain(case)

    def held(p, rows):
        """Choose each output by its number among those of a sequence, and h_0 is 0."""
        y, *state = operator(p)
        first = jnp.concatenate(list(p.h_0[-case.spec.num_directions :]), -1)
        every = jnp.concatenate([first[:, None], y], 1)
        return jnp.take_along_axis(every, rows[..., None], 1), *state

    def run(p, step, rows, *loss):
        loss = weighed(lambda p: held(p, rows), *loss)
        return forward_over_reverse(loss, p, step)

    run, rows = fast_jit(run), 1 + np.tile(np.arange(case.steps), (case.batch, 1))

    def of_padding(p, step, *loss, hold=False):
        ends = np.array(case.lengths)[:, None] if hold else case.steps
        return run(p, clean(step), np.minimum(rows, ends), *clean(loss))

    return of_padding


@every_case
def test_hessian_times_vector_matches_the_plain_scan(case):
    """Check cases with different lengths, NaN in the padding, and resets."""
    primal, step, weights = primal_of(case), direction_of(case), clean(weights_of(case))
    want = product_of_scan(case)(primal, step, weights, True)
    for result in products(case)(primal, step, weights, True):
        assert_trees_close(result, want, terms=1000)
    assert np.isfinite(want.x).all() and np.abs(want.weights).max() > 1e-2


@some_cases
def test_nan_in_the_padding_of_a_cotangent_reaches_no_second_derivative(case):
    """Check that no zero is multiplied by that NaN, which would be NaN again."""
    primal, step, weights = primal_of(case), clean(direction_of(case)), weights_of(case)
    assert np.isnan(weights[0]).any()
    # In a loss that is not curved, the weights are the cotangents.
    want = product_of_scan(case)(primal, step, weights, False)
    for result in products(case)(primal, step, weights, False):
        assert_trees_close(result, want, terms=1000)


@some_cases
def test_hessian_matches_the_plain_scan(case):
    primal, weights = primal_of(case), clean(weights_of(case))

    def of_state(h_0):
        return weighed(ours(case), weights)(primal._replace(h_0=h_0))

    got = fast_jit(jax.hessian(of_state))(primal.h_0)
    column, zeros = product_of_scan(case), clean(jax.tree.map(np.zeros_like, primal))
    ends = np.eye(primal.h_0.size).reshape(-1, *primal.h_0.shape)
    steps = [zeros._replace(h_0=end) for end in ends]
    columns = [column(primal, step, weights, True).h_0 for step in steps]
    want = np.stack(columns, -1).reshape(got.shape)
    assert_trees_close(got, want, terms=1000)
    assert np.abs(want).max() > 1e-2


@pytest.mark.parametrize("case", [BY_ID["dropout"]], ids=lambda c: c.id)
def test_second_tangent_matches_the_plain_scan(case):
    """Check forward mode over forward mode."""
    primal, step = primal_of(case), direction_of(case)

    def second(operator, step):
        def first(p):
            return jax.jvp(operator, (p,), (step,))[1]

        return fast_jit(lambda p: jax.jvp(first, (p,), (step,))[1])(primal)

    got, want = second(ours(case), step), second(plain(case), clean(step))
    assert_trees_close(got, want, terms=1000)


def test_third_derivative_matches_the_plain_scan():
    case = BY_ID["gru_before"]
    primal, weights = primal_of(case), clean(weights_of(case))

    def third(operator, derive):
        def of_scale(a):
            scaled = Primal(a * primal.weights, primal.x, a * primal.h_0, None)
            return weighed(operator, weights)(scaled)

        return fast_jit(derive(derive(derive(of_scale))))(1.0)

    def slope(function):  # a scan in forward mode is less to compile
        return lambda a: jax.jvp(function, (a,), (1.0,))[1]

    got, want = third(ours(case), jax.grad), third(plain(case), slope)
    np.testing.assert_allclose(got, want, rtol=1e-10)


@some_cases
def test_second_derivative_with_recompute_and_hold(case):
    """Check that recomputed gates are differentiated too, and held outputs summed."""
    primal, step, weights = primal_of(case), direction_of(case), clean(weights_of(case))
    loss = weighed(ours(case, recompute=True, padding="hold"), weights)
    got = fast_jit(lambda p, d: forward_over_reverse(loss, p, d))(primal, step)
    want = product_of_scan(case)(primal, step, weights, True, hold=True)
    assert_trees_close(got, want, terms=1000)
