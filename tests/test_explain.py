"""Tests of `ostinato.explain` for step functions and cells."""

import jax.numpy as jnp
import pytest

import ostinato as ost
from ostinato import _native, cells

native = pytest.mark.skipif(
    _native.status().library is None, reason="there is no native library"
)
X, H_0, W = jnp.ones((8, 5, 4)), jnp.zeros((8, 4)), jnp.eye(4)


def step(w, h, x, t):
    h = jnp.tanh(x @ w + h @ w)
    return h, h


def sorting(w, h, x, t):
    h = jnp.sort(x @ w + h @ w)
    return h, h


@native
def test_a_step_in_the_cpu_loop_is_counted():
    told = ost.explain(step, X, H_0, params=W)
    assert told.backend == "cpu" and not told.rejected
    for words in ("1 product in a step and 1 ahead", "operations forward", "x [8, 4]"):
        assert words in told.why
    assert ost.explain(cells.MILSTM(4, 5), X).backend == "cpu"


@native
def test_what_the_cpu_loop_lacks_is_named_with_its_line():
    told = ost.explain(sorting, X, H_0, params=W)
    assert told.backend == "xla" and "`sort` at " in told.rejected["cpu"]
    assert "test_explain.py:" in told.rejected["cpu"]
    with pytest.raises(NotImplementedError, match=r"`sort` at .*test_explain.py"):
        ost.recurrent_net(sorting, X, H_0, params=W, backend="cpu")


def test_other_reasons():
    told = ost.explain(step, X, H_0, params=W, backend="scan")
    assert "lax.scan" in told.why and "'scan'" in told.rejected["cpu"]
    told = ost.explain(step, X, H_0, params=W, backend="xla")
    assert told.backend == "xla" and "before the loop" in told.why
    same = ost.explain(cells.LSTM(4, 5), X)
    assert same == ost.explain(cells.LSTM(4, 5).spec, X)
    with pytest.raises(NotImplementedError, match="no product"):
        add = lambda w, h, x, t: (h + x, h)  # noqa: E731
        ost.recurrent_net(add, X, H_0, backend="cpu")


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        ((step, X, H_0), {"lengths": 3}, "no argument lengths"),
        ((3, X), {}, "an RNNSpec, a cell or a step function"),
        ((ost.RNNSpec("gru", 4, 5), X), {"window": 2}, "no further arguments"),
    ],
    ids=["unknown option", "not a network", "options of a spec"],
)
def test_errors(arguments, options, words):
    with pytest.raises(TypeError, match=words):
        ost.explain(*arguments, **options)
