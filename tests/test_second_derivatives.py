"""Tests of second derivatives in every mix of modes, against those of a scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_inputs
from closures import (
    BY_ID,
    CASES,
    Primal,
    direction_of,
    fast_jit,
    loss_of,
    ours,
    plain,
    primal_of,
)
from harness import rounded
from test_transforms import assert_trees_close

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)


def clean(tree):
    return jax.tree.map(jnp.nan_to_num, tree)


def forward_over_reverse(loss, primal, step):
    return jax.jvp(jax.grad(loss), (primal,), (step,))[1]


def reverse_over_forward(loss, primal, step):
    return jax.grad(lambda p: jax.jvp(loss, (p,), (step,))[1])(primal)


def reverse_over_reverse(loss, primal, step):
    def slope(p):
        pairs = zip(jax.grad(loss)(p), clean(step), strict=True)
        return sum(jnp.sum(g * d) for g, d in pairs if g is not None)

    return jax.grad(slope)(primal)


MODES = [forward_over_reverse, reverse_over_forward, reverse_over_reverse]


@every_case
def test_hessian_times_vector_matches_the_plain_scan(case):
    """Check cases with different lengths, NaN in the padding, and resets."""
    primal, step = primal_of(case), direction_of(case)
    loss, reference = loss_of(case, ours(case)), loss_of(case, plain(case))
    hvp = forward_over_reverse
    want = fast_jit(lambda p, d: hvp(reference, p, d))(primal, clean(step))
    got = fast_jit(lambda p, d: [m(loss, p, d) for m in MODES])(primal, step)
    for result in got:
        assert_trees_close(result, want, terms=1000)
    assert np.isfinite(want.x).all() and np.abs(want.weights).max() > 1e-2


@pytest.mark.parametrize("case", [BY_ID["lstm"], BY_ID["gru"]], ids=lambda c: c.id)
def test_nan_in_the_padding_of_a_cotangent_reaches_no_second_derivative(case):
    """Check that no zero is multiplied by that NaN, which would be NaN again."""
    primal, step = primal_of(case), clean(direction_of(case))
    made = rounded(make_inputs(case), "float64")
    assert np.isnan(made.dy).any()

    def second(operator, dy):
        cotangent = dy, made.dh_n, made.dc_n

        def slope(p):
            (grads,) = jax.vjp(operator, p)[1](cotangent)
            pairs = zip(grads, step, strict=True)
            return sum(jnp.sum(g * d) for g, d in pairs if g is not None)

        return fast_jit(jax.grad(slope))(primal)

    got = second(ours(case), made.dy)
    want = second(plain(case), jnp.nan_to_num(made.dy))
    assert_trees_close(got, want, terms=1000)


@pytest.mark.parametrize("case", [BY_ID["lstm"], BY_ID["gru"]], ids=lambda c: c.id)
def test_hessian_matches_the_plain_scan(case):
    primal = primal_of(case)

    def of_state(operator):
        loss = loss_of(case, operator)
        return lambda h_0: loss(primal._replace(h_0=h_0))

    got = fast_jit(jax.hessian(of_state(ours(case))))(primal.h_0)
    want = fast_jit(jax.hessian(of_state(plain(case))))(primal.h_0)
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
    primal = primal_of(case)

    def third(operator):
        loss = loss_of(case, operator)

        def of_scale(a):
            return loss(Primal(a * primal.weights, primal.x, a * primal.h_0, None))

        return fast_jit(jax.grad(jax.grad(jax.grad(of_scale))))(1.0)

    got, want = third(ours(case)), third(plain(case))
    np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.parametrize("case", [BY_ID["lstm"], BY_ID["gru"]], ids=lambda c: c.id)
def test_second_derivative_with_recompute_and_hold(case):
    """Check that recomputed gates are differentiated too, and held outputs summed."""
    primal, step = primal_of(case), direction_of(case)

    def hold(operator):  # the plain scan has padding "zero" only
        def held(p):
            y, *state = operator(p)
            lengths = jnp.asarray(case.lengths)
            last = jnp.take_along_axis(y, (lengths - 1)[:, None, None] % 4, axis=1)
            dirs = case.spec.num_directions
            first = jnp.concatenate(list(p.h_0[-dirs:]), -1)[:, None]
            last = jnp.where((lengths == 0)[:, None, None], first, last)
            past = jnp.arange(4)[None, :, None] >= lengths[:, None, None]
            return jnp.where(past, last, y), *state

        return held

    loss = loss_of(case, ours(case, recompute=True, padding="hold"))
    reference = loss_of(case, hold(plain(case)))
    hvp = forward_over_reverse
    got = fast_jit(lambda p, d: hvp(loss, p, d))(primal, step)
    want = fast_jit(lambda p, d: hvp(reference, p, d))(primal, clean(step))
    assert_trees_close(got, want, terms=1000)
