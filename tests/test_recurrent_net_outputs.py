"""`outputs_with_grads` of `recurrent_net`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from closures import fast_jit
from net_arguments import B, I, arrays
from tolerance import assert_same_bits

import ostinato as ost


def total(out):
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(out.outputs))


@pytest.mark.parametrize(
    "keep, names",
    [
        (None, "abc"),
        ((), ""),
        (("a",), "a"),
        (["a", "c"], "ac"),
        ({"a": True, "b": False, "c": (True, False)}, "ac"),
        (True, "abc"),
        (False, ""),
    ],
)
def test_outputs_with_grads_cuts_what_it_says(keep, names):
    def step(p, h, x, t):
        h = jnp.sin(h * p["state"]) + x
        c = (h * p["c"], h * p["c2"])
        return h, {"a": h * p["a"], "b": h * p["b"], "c": c}

    x, h_0 = arrays().x, jnp.zeros((B, I))
    params = {name: jnp.float64(1.5) for name in ("a", "b", "c", "c2", "state")}

    def loss(params, keep=keep):
        out = ost.recurrent_net(step, x, h_0, params=params, outputs_with_grads=keep)
        return total(out)

    @fast_jit
    def results(params):
        uncut = loss(params, keep=None)
        return jax.jacrev(loss)(params), jax.jacfwd(loss)(params), loss(params), uncut

    *jacobians, cut, uncut = results(params)
    want = {"a": "a" in names, "b": "b" in names, "c": "c" in names}
    want["c2"] = "c" in names and not isinstance(keep, dict)
    want["state"] = bool(names)
    for jacobian in jacobians:
        assert {name: bool(g != 0) for name, g in jacobian.items()} == want
    assert_same_bits(cut, uncut)


class Fields(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("keep", [("second",), (1,), Fields(False, True)])
def test_outputs_with_grads_knows_fields_and_indices(keep):
    step = lambda p, h, x, t: (h, Fields(x, 2 * x))  # noqa: E731
    loss = lambda x: sum(  # noqa: E731
        jnp.sum(a)
        for a in ost.recurrent_net(step, x, x[:, 0], outputs_with_grads=keep).outputs
    )
    assert (jax.grad(loss)(arrays().x) == 2).all()


def test_cut_outputs_leave_the_gradient_of_the_states():
    step = lambda p, h, x, t: (h * x, h * x)  # noqa: E731
    x, h_0 = arrays().x, jnp.ones((B, I))
    loss = lambda x, **options: jnp.sum(  # noqa: E731
        ost.recurrent_net(step, x, h_0, **options).states
    )
    assert_same_bits(
        jax.grad(lambda x: loss(x, outputs_with_grads=()))(x), jax.grad(loss)(x)
    )
