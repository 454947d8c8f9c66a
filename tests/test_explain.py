"""Tests of `ostinato.explain` for step functions and cells."""

import re
from collections.abc import Callable

import jax.numpy as jnp
import pytest
from jax import lax

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
    words = (
        r"cpu loop: \d operations forward, \d+ backward, 1 product a step, 1 hoisted; "
    )
    assert re.fullmatch(words + r"stored \d x \[8, 4\]", str(told))
    assert ost.explain(cells.MILSTM(4, 5), X).backend == "cpu"


@native
def test_what_the_cpu_loop_lacks_is_named_with_its_line():
    told = ost.explain(sorting, X, H_0, params=W)
    assert told.backend == "xla"
    assert re.match(r"xla: `sort` at \S*test_explain.py:\d+ \(sorting\)\n", str(told))
    with pytest.raises(NotImplementedError, match=r"`sort` at .*test_explain.py"):
        ost.recurrent_net(sorting, X, H_0, params=W, backend="cpu")


LACKING: dict[str, tuple[Callable, str]] = {
    "a convolution of the state": (
        lambda h: lax.conv_general_dilated(h[:, None], W[:1, None], (1,), "SAME")[:, 0],
        r"`conv_general_dilated` at",
    ),
    "an element chosen by the state": (
        lambda h: h * W[jnp.argmax(h, axis=1), jnp.argmin(h, axis=1)][:, None],
        r"`gather` at .*: it indexes several axes",
    ),
    "a loop of unknown length": (
        lambda h: lax.while_loop(lambda a: a.sum() > 9, lambda a: a / 2, h),
        r"`while` at",
    ),
    "many iterations": (
        lambda h: lax.fori_loop(0, 99, lambda i, a: jnp.sin(a), h),
        r"`scan` at .*: it has a long `scan`",
    ),
    "a branch that leaves out work": (
        lambda h: lax.cond(
            W[0, 0] > 0,
            lambda a: jnp.tile(a, (1, 5000)) @ jnp.tile(W, (5000, 1)),
            jnp.sin,
            h,
        ),
        r"`cond` at .*: .* leaves out much work",
    ),
    "a mean over sequences": (
        lambda h: h - h.mean(axis=0, keepdims=True),
        r"at .*: it combines different sequences",
    ),
    "bits of integers": (
        lambda h: h * ((h > 0).astype(jnp.int32) ^ 3).astype(h.dtype),
        r"`xor` at .*: it has bits of integers",
    ),
    "a float cut to an integer": (
        lambda h: h * h.astype(jnp.int32).astype(h.dtype),
        r"`convert_element_type` at .*: it converts to integers",
    ),
}


@native
@pytest.mark.parametrize("name", LACKING)
def test_every_fallback_says_why_and_where(name):
    function, words = LACKING[name]

    def step(w, h, x, t):
        h = jnp.tanh(x @ w + function(h) @ w)
        return h, h

    told = ost.explain(step, X, H_0, params=W)
    assert told.backend == "xla"
    assert re.search(words, told.rejected["cpu"])
    assert "test_explain.py:" in told.rejected["cpu"]


def test_other_reasons():
    told = ost.explain(step, X, H_0, params=W, backend="scan")
    assert "lax.scan" in told.why and "'scan'" in told.rejected["cpu"]
    told = ost.explain(step, X, H_0, params=W, backend="xla")
    assert told.backend == "xla" and "before the loop" in told.why
    same = ost.explain(cells.LSTM(4, 5), X)
    assert same == ost.explain(cells.LSTM(4, 5).spec, X)


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
