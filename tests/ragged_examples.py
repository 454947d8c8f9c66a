"""Attention over three examples, for the tests of `ragged.vmap` and its options."""

import jax
import jax.numpy as jnp
import numpy as np
from closures import fast_jit
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
