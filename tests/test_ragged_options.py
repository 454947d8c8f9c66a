"""The options of `ragged.vmap`."""

import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from ragged_examples import (
    DENSE,
    WEIGHTS,
    XS,
    X,
    attention,
    attention_alone,
    batch,
    each,
    examples,
)

from ostinato import ragged


def test_constraints_settle_comparisons():
    def function(x):
        return x * 2 if x.shape[0] > 3 else x

    longer = batch(examples((4, 5)))
    out = ragged.vmap(function, constraints=("n >= 4",))(longer)
    each(out.to_list(), [2 * x for x in examples((4, 5))])
    out = ragged.vmap(function, min_length=4)(longer)
    each(out.to_list(), [2 * x for x in examples((4, 5))])


RNN_OPTIONS = [
    {},
    {"scan": "padded"},
    {"scan": "packed"},
    *({"scan": "packed", "lanes": k} for k in (1, 2, 3, 12)),
]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("options", RNN_OPTIONS, ids=str)
def test_every_way_to_scan_gives_the_same(options, reverse):
    def rnn(x, h, w):
        step = lambda h, a: (jnp.tanh(a + h @ w), 2 * h)  # noqa: E731
        return lax.scan(step, h, x, reverse=reverse)

    run = ragged.vmap(rnn, in_axes=(0, 0, None), **options)
    states, outputs = fast_jit(run)(X, DENSE, WEIGHTS)
    want = [rnn(x, h, WEIGHTS) for x, h in zip(XS, DENSE, strict=True)]
    each(states, [w[0] for w in want])
    each(outputs.to_list(), [w[1] for w in want])


@pytest.mark.parametrize("tiers", [None, 1, 2, 3])
def test_every_number_of_tiers_gives_the_same(tiers):
    run = ragged.vmap(attention, in_axes=(0, None), tiers=tiers)
    each(fast_jit(run)(X, WEIGHTS).to_list(), [attention_alone(x, WEIGHTS) for x in XS])


def test_halves_of_an_odd_largest_size():
    """Padded to 7 tokens, of which the halves take 6."""
    arrays = [np.arange(2.0 * n).reshape(n, 2) for n in (2, 4)]
    even = ragged.RaggedArray.from_list(arrays, max_length=7)

    def halves(x):
        return (x @ x.T).reshape(x.shape[0] // 2, 2, x.shape[0]).sum(1)

    out = ragged.vmap(halves, constraints=("mod(n, 2) == 0",))(even)
    for got, x in zip(out.to_list(), arrays, strict=True):
        np.testing.assert_allclose(got, halves(x))


def test_a_reshape_of_nothing():
    none = ragged.RaggedArray.from_list([np.zeros((n, 0, 2)) for n in (2, 1)])
    out = ragged.vmap(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1))(none)
    assert out.shape == (2, 0)
