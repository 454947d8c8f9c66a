"""Gathers, scatters, dynamic slices."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import WORDS, D, programs


def bag_of_words(i, table):
    return jnp.tanh(table[i]).sum(0)


def scattered(x, i):
    return jnp.zeros((WORDS, D)).at[i].add(x)


def scatter_kinds(s, i):
    base = jnp.full(WORDS, 0.25)
    return (
        base.at[i].max(s),
        base.at[i].min(s),
        base.at[i].multiply(1 + 0.1 * s),
        jnp.zeros(WORDS, jnp.int32).at[i].add(1),
    )


def scatter_to_tokens(x, at_n):
    return jnp.zeros_like(x).at[at_n].add(2 * x)


def dynamic_tokens(x, one_of_n):
    return (
        lax.dynamic_slice_in_dim(x, one_of_n, 1)[0],
        lax.dynamic_index_in_dim(x, one_of_n, keepdims=False),
        lax.dynamic_update_index_in_dim(x, jnp.ones(D), one_of_n, 0),
    )


def dynamic_slice_end(x):
    """Starts past the end are moved back to it."""
    return lax.dynamic_slice_in_dim(x, 99, 2)


def grown_table(x, table):
    return lax.dynamic_slice_in_dim(table, x.shape[0] // 3, 2) * x.sum()


def pointers(x, y, to_n):
    return x[to_n] * y


def best_token(x, w):
    return x[jnp.argmax((x @ w).sum(-1))]


def out_of_range(x, at_n):
    far = at_n + 2
    clipped = x.at[far].get(mode="clip")
    filled = x.at[far].get(mode="fill", fill_value=7.0)
    return clipped, filled, x.at[far].add(1.0, mode="drop")


def only_column(s):
    """Out of range along an axis of size 1 that is written as a whole."""
    x = s[:, None]
    dropped = x.at[0, 3].set(9.0, mode="drop"), x.at[0, 1].add(s[0], mode="drop")
    return dropped, x.at[0, 0].set(9.0, mode="drop"), x.at[0, 3].set(9.0, mode="clip")


def negative_indices(x, at_n):
    return x[-1 - at_n]


def unmasked(s):
    """Places of the positive elements, then zeros."""
    return jnp.nonzero(s > 0, size=s.shape[0])


def applied(x, at_n):
    """A function of the elements in one place, in a window, and in many places."""
    return (
        x.at[0].apply(jnp.exp),
        x.at[-1].apply(lambda a: a * a + 1),
        x.at[1:].apply(jnp.cos),
        x.at[:, 1].apply(jnp.exp),
        x.at[at_n].apply(jnp.sign),
        (x @ x.T).at[0].apply(jnp.exp),
    )


def added_to_the_beginning(x):
    """To the last columns of all tokens but the last one."""
    dims = lax.ScatterDimensionNumbers((0, 1), (), (1,))
    return lax.scatter_add(x, jnp.array([1]), 2 * x[1:, :2], dims)


def in_a_larger_array(x, d):
    """One window of the example's size, in an array that has the same size for all."""
    n = x.shape[0]
    table = jnp.broadcast_to(d[None], (9, D))
    return (
        table.at[:n].set(x),
        table.at[1 : n + 1].add(x),
        table.at[:n, 1].multiply(x[:, 0]),
    )


def windows_of_a_table(x, wide, e):
    """Windows of the example's size, some of them moved back into the table."""
    n, column = x.shape[0], wide[:, 0, 0] + e
    start = jnp.where(e > 0, 7, 1)
    each = jax.vmap(lambda i: lax.dynamic_slice_in_dim(column, i, n))
    return (
        wide[-n:, :, 0] * x,
        lax.dynamic_slice_in_dim(wide, start, n),
        (column[:, None] * column[None])[-n:, -n:],
        each(jnp.array([1, 6, 9])),
        (x[:, :1] * column[None])[0, -n:],
        (x[:, :1] * column[None])[:, -n:],
    )


def pairs_by_index(x):
    i, j = jnp.triu_indices(x.shape[0], 1)
    below = jnp.tril_indices(x.shape[0], -1)
    return jnp.sum(x[i] * x[j], 1), x[below[0], 0]


def starts_of_64_bits(x, e, one_of_n):
    """Slices from positions that would be those of tokens in 32 bits."""
    start = one_of_n.astype(int) + jnp.where(e > 0, 2**32, -(2**33))
    return (
        lax.dynamic_slice_in_dim(x, start, 1),
        lax.dynamic_slice_in_dim(x @ x.T, start, 1, 1),
        lax.dynamic_update_slice_in_dim(x, x[:1] + e, start, 0),
        lax.dynamic_update_slice_in_dim(x @ x.T, x[None, :, 0], start, 0),
    )


def relative_shift(x, wide):
    """Scores by distance, as Music Transformer moves them to pairs of places."""
    n = x.shape[0]
    scores = x @ wide[:n, :, 0].T
    return jnp.pad(scores, ((0, 0), (1, 0))).reshape(n + 1, n)[1:]


def keys_by_index(key, at_n, pick):
    """Keys of the example's own, some of them out of range."""
    own, few = jax.random.split(key, at_n.shape[0]), jax.random.split(key, D)
    taken = own[at_n], jnp.take(own, at_n), own.at[at_n + 2].get(mode="fill")
    taken += (jax.random.clone(own),)
    draw = jax.vmap(lambda k: jax.random.normal(k, (2,), float))
    return tuple(map(jax.random.key_data, taken)), draw(few[pick]), draw(own[at_n[:1]])


EMPTY = programs(
    {
        "embed": lambda i, table: table[i],
        "embed_own": lambda i, own_table: own_table[i],
        "take": lambda i, table: jnp.take(table, i, axis=0, mode="clip"),
        "bag_of_words": bag_of_words,
        "scattered": scattered,
        "segment_sum": lambda x, i: jax.ops.segment_sum(x, i, WORDS),
        "segment_max": lambda x, i: jax.ops.segment_max(x, i, WORDS),
        "histogram": lambda i: jnp.bincount(i, length=WORDS),
        "buckets": lambda s, b: jnp.searchsorted(jnp.sort(b), s),
        "shared_columns": lambda x, ids, to_words: (x @ to_words)[:, ids],
    },
    at_least=0,
)
NO_GRADIENT = programs({"scatter_kinds": scatter_kinds}, gradients=False)
APPLIED = programs(
    {"applied": applied, "keys_by_index": keys_by_index}, gradients=False
)
FILLED = programs(
    {
        "take_features": lambda x, pick: jnp.take_along_axis(x, pick[:, None], axis=1),
        "gather_tokens": lambda x, at_n: x[at_n],
        "gather_twice": lambda x, at_n: x[at_n][at_n],
        "gather_pairs": lambda x, at_n: (x @ x.T)[at_n],
        "gather_columns": lambda x, at_n: (x @ x.T)[:, at_n],
        "gather_elements": lambda x, at_n, pick: x[at_n, pick],
        "own_token": lambda x, one_of_n: x[one_of_n],
        "negative_indices": negative_indices,
        "out_of_range": out_of_range,
        "scatter_to_tokens": scatter_to_tokens,
        "segment_sum_tokens": lambda x, at_n: jax.ops.segment_sum(x, at_n, x.shape[0]),
        "only_column": only_column,
        "set_own_token": lambda x, d, one_of_n: x.at[one_of_n].set(d),
        "dynamic_tokens": dynamic_tokens,
        "grown_table": grown_table,
        "pointers": pointers,
        "best_token": best_token,
        "unmasked": unmasked,
        "in_a_larger_array": in_a_larger_array,
        "windows_of_a_table": windows_of_a_table,
        "starts_of_64_bits": starts_of_64_bits,
        "relative_shift": relative_shift,
        "diagonal": lambda x: jnp.diagonal(x @ x.T),
        "order_of_time": lambda x, s: x[jnp.argsort(s)],
    }
)
LONG = programs(
    {
        "dynamic_slice_end": dynamic_slice_end,
        "added_to_the_beginning": added_to_the_beginning,
        "pairs_by_index": pairs_by_index,
    },
    at_least=2,
)
PROGRAMS = EMPTY + NO_GRADIENT + APPLIED + FILLED + LONG
