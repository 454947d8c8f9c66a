"""The options of `ragged.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from tolerance import assert_close

from ostinato import ragged

D = 3


LENGTHS = (3, 1, 4)


CAPACITY, MAX_LENGTH = 12, 5


rng = np.random.default_rng(5)


WEIGHTS = jnp.asarray(rng.standard_normal((D, D)))


DENSE = jnp.asarray(rng.standard_normal((len(LENGTHS), D)))


def examples(lengths=LENGTHS, shape=(D,), seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((n, *shape))) for n in lengths]


def batch(arrays, dim="n", capacity=CAPACITY, max_length=MAX_LENGTH):
    """Return a batch with NaN in the unused capacity."""
    x = ragged.RaggedArray.from_list(
        arrays, dim=dim, capacity=capacity, max_length=max_length
    )
    tokens = np.arange(capacity) < int(x.lengths.sum())
    tokens = tokens.reshape(-1, *[1] * (x.data.ndim - 1))
    return x.with_data(jnp.where(tokens, x.data, jnp.nan))


def attention(x, w):
    return jax.nn.softmax(x @ w @ x.T) @ x


def score(x, w):
    return jnp.tanh(attention(x, w) @ w).sum()


attention_alone, score_alone = fast_jit(attention), fast_jit(score)


def each(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, terms=100)


XS, X = examples(), batch(examples())


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
